"""Ranks that follow plans of their batches, against one process: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import (
    SHARDINGS,
    TABLES,
    check_rows,
    draw,
    join,
    optimizers,
    run_ranks,
    train,
)

import tierbed as tb
from tierbed import dist as tbd
from tierbed.data.order import BatchOrder

BATCHES = 6
SAMPLES = [5, 0, 7, 2]
# Column-wise rows are written by number when they are made, which no plan knows.
PLANNED = [name for name in SHARDINGS if name != "column-wise"]
# Ranks, and nodes of them.
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]


class Batches:
    """Batches of one rank that tells their order."""

    def __init__(self, batches: list[tb.KeyedJaggedTensor], name: str = "batches") -> None:
        self.batches = batches
        self.name = name

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def known_order(self) -> BatchOrder:
        return BatchOrder(self.name, lambda: self.batches, 0, len(self.batches))


def batches_of(rank: int, is_weighted: bool = False, count: int = BATCHES) -> list[Any]:
    return [draw(100 * at + rank, SAMPLES[(rank + at) % 4], is_weighted) for at in range(count)]


def open_store(folder: Path, rank: int, **options: Any) -> tb.Store:
    return tb.Store.open(folder / f"rank-{rank}", dram_budget="16MiB", **options)


def make(rank: tbd.LocalRank, store: tb.Store, name: str, **options: Any) -> Any:
    plan = tbd.ShardingPlan(rank.count, SHARDINGS[name](rank.count))
    return tbd.ShardedEmbeddingBagCollection(TABLES, store=store, plan=plan, ranks=rank, **options)


def one_process(joined: list[Any], **options: Any) -> tuple[tb.Store, Any]:
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    return store, tb.EmbeddingBagCollection(TABLES, store=store, **options)


def whole_batches(count: int, is_weighted: bool = False, batches: int = BATCHES) -> list[Any]:
    own = [batches_of(rank, is_weighted, batches) for rank in range(count)]
    return [join([of_rank[at] for of_rank in own]) for at in range(batches)]


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize(("count", "nodes"), LAYOUTS)
def test_plans_of_ranks_have_the_bits_of_one_process(
    tmp_path: Path, name: str, count: int, nodes: int
) -> None:
    for number, optimizer in enumerate(optimizers(name)):
        options = {"optimizer": optimizer, "is_weighted": number % 2 == 1}
        joined = whole_batches(count, options["is_weighted"])
        whole, one = one_process(joined, **options)
        expected, expected_grads = [], []
        for _ in range(2):
            outputs, grads = train(one, joined)
            expected += outputs
            expected_grads += grads
        folder = tmp_path / str(number)

        def work(rank: tbd.LocalRank, options: Any = options, folder: Path = folder) -> Any:
            store = open_store(folder, rank.rank)
            loader = Batches(batches_of(rank.rank, options["is_weighted"]))
            seen: tuple[list[Any], list[Any]] = ([], [])
            with make(rank, store, name, **options) as rows:
                for _ in range(2):
                    outputs, grads = train(rows, tb.lookahead(loader, rows, window=2))
                    seen[0].extend(outputs)
                    seen[1].extend(grads)
                order = store.order()
                holds = bool(rows.table_names())
            return seen, order, store, holds

        found = run_ranks(count, work, nodes=nodes)
        for _, order, _, holds in found:
            assert not holds or order["kind"] == "forward", order
        for step in range(2 * BATCHES):
            outputs = torch.cat([seen[0][step] for seen, _, _, _ in found])
            assert torch.equal(outputs, expected[step]), (optimizer, step)
            for feature in expected_grads[step] if options["is_weighted"] else []:
                grads = torch.cat([seen[1][step][feature] for seen, _, _, _ in found])
                assert torch.equal(grads, expected_grads[step][feature]), (feature, step)
        plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
        for rank, (_, _, store, _) in enumerate(found):
            check_rows(store, whole, plan, rank)
            store.close()


def test_ranks_go_on_at_their_checkpoints_along_the_same_plans(tmp_path: Path) -> None:
    joined = whole_batches(2)
    whole, one = one_process(joined)
    train(one, joined)
    train(one, joined)

    def work(rank: tbd.LocalRank, is_first: bool) -> Any:
        store = open_store(tmp_path, rank.rank)
        loader = Batches(batches_of(rank.rank))
        with make(rank, store, "mixed") as rows:
            if is_first:
                ahead = tb.lookahead(loader, rows, window=2)
                for at, batch in enumerate(ahead):
                    step(rows, batch, at)
                    if at == 3:
                        store.checkpoint("c")
                    if at == 4:
                        break
                ahead.close()
            else:
                for at, batch in enumerate(tb.lookahead(loader, rows, window=2, start=4), 4):
                    step(rows, batch, at)
                train(rows, tb.lookahead(loader, rows, window=2))
            order = store.order()
        if is_first:
            store.close()
        return store, order

    run_ranks(2, lambda rank: work(rank, True))
    found = run_ranks(2, lambda rank: work(rank, False))
    plan = tbd.ShardingPlan(2, SHARDINGS["mixed"](2))
    for rank, (store, order) in enumerate(found):
        assert order["kind"] == "forward", order
        check_rows(store, whole, plan, rank)


def step(rows: Any, batch: Any, at: int) -> None:
    """The step number ``at`` of :func:`train`."""
    out = rows(batch).values()
    (out * (out.detach() * 0.3 + 0.1 * at)).sum().backward()


class Told(Batches):
    """Batches whose order depends on the number of the epoch."""

    def __init__(self, batches: list[tb.KeyedJaggedTensor]) -> None:
        super().__init__(batches)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _ordered(self) -> list[tb.KeyedJaggedTensor]:
        return self.batches[self.epoch :] + self.batches[: self.epoch]

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return iter(self._ordered())

    def known_order(self) -> BatchOrder:
        batches = self._ordered()
        return BatchOrder(f"from {self.epoch}", lambda: batches, 0, len(batches))


def test_ranks_share_plans_of_several_epochs(tmp_path: Path) -> None:
    joined = whole_batches(2)
    whole, one = one_process(joined)
    expected = [*train(one, joined)[0], *train(one, joined[1:] + joined[:1])[0]]

    def work(rank: tbd.LocalRank) -> Any:
        store = open_store(tmp_path, rank.rank)
        loader = Told(batches_of(rank.rank))
        with make(rank, store, "row-wise") as rows:
            ahead = tb.lookahead(loader, rows, window=2, epochs=2)
            return [*train(rows, ahead)[0], *train(rows, ahead)[0]], store.order(), store

    found = run_ranks(2, work)
    for step, wanted in enumerate(expected):
        assert torch.equal(torch.cat([seen[step] for seen, _, _ in found]), wanted), step
    plan = tbd.ShardingPlan(2, SHARDINGS["row-wise"](2))
    for rank, (_, order, store) in enumerate(found):
        assert (order["kind"], order["replan_count"]) == ("forward", 0)
        assert order["plan"]["batch_count"] == 2 * BATCHES
        check_rows(store, whole, plan, rank)
        store.close()


def test_evaluation_and_parts_in_between_change_no_bit(tmp_path: Path) -> None:
    joined = whole_batches(2)
    other = whole_batches(2, batches=BATCHES + 2)[BATCHES:]
    whole, one = one_process(joined)
    expected = []
    for at, batch in enumerate(joined):
        step(one, batch, at)
        with torch.no_grad():
            expected.append(one(other[at % 2]).values().clone())

    def work(rank: tbd.LocalRank) -> Any:
        store = open_store(tmp_path, rank.rank)
        own = batches_of(rank.rank, count=BATCHES + 2)
        seen = []
        with make(rank, store, "mixed") as rows:
            loader = Batches(own[:BATCHES])
            for at, batch in enumerate(tb.lookahead(loader, rows, window=2)):
                out = torch.cat([part.values() for part in rows.forward_parts(batch, 3)])
                (out * (out.detach() * 0.3 + 0.1 * at)).sum().backward()
                del out
                rows.eval()
                with torch.no_grad():
                    seen.append(rows(own[BATCHES + at % 2]).values().clone())
                rows.train()
            assert store.order()["kind"] == "forward"
        return store, seen

    found = run_ranks(2, work)
    plan = tbd.ShardingPlan(2, SHARDINGS["mixed"](2))
    for at in range(BATCHES):
        assert torch.equal(torch.cat([seen[at] for _, seen in found]), expected[at]), at
    for rank, (store, _) in enumerate(found):
        check_rows(store, whole, plan, rank)


def test_a_batch_that_nobody_steps_is_passed(tmp_path: Path) -> None:
    joined = whole_batches(2)
    whole, one = one_process(joined)
    for at, batch in enumerate(joined):
        if at != 2:
            step(one, batch, at)

    def work(rank: tbd.LocalRank) -> Any:
        store = open_store(tmp_path, rank.rank)
        with make(rank, store, "mixed") as rows:
            loader = Batches(batches_of(rank.rank))
            for at, batch in enumerate(tb.lookahead(loader, rows, window=2)):
                if at != 2:
                    step(rows, batch, at)
            assert store.order()["kind"] == "forward"
        return store

    plan = tbd.ShardingPlan(2, SHARDINGS["mixed"](2))
    for rank, store in enumerate(run_ranks(2, work)):
        check_rows(store, whole, plan, rank)


def test_other_batches_than_the_planned_ones_go_on_by_window(tmp_path: Path) -> None:
    joined = whole_batches(2, batches=BATCHES + 1)
    joined = [joined[0], joined[1], joined[BATCHES], *joined[3:BATCHES]]
    whole, one = one_process(joined)
    for at, batch in enumerate(joined):
        step(one, batch, at)

    def work(rank: tbd.LocalRank) -> Any:
        store = open_store(tmp_path, rank.rank)
        own = batches_of(rank.rank, count=BATCHES + 1)
        with make(rank, store, "mixed") as rows:
            loader = Batches(own[:BATCHES])
            for at, batch in enumerate(tb.lookahead(loader, rows, window=2)):
                step(rows, own[BATCHES] if at == 2 else batch, at)
            assert store.order()["kind"] == "window"
            # The next epoch is one of all ranks, by window.
            assert len(list(tb.lookahead(loader, rows, window=2))) == BATCHES
        return store

    plan = tbd.ShardingPlan(2, SHARDINGS["mixed"](2))
    for rank, store in enumerate(run_ranks(2, work)):
        check_rows(store, whole, plan, rank)


def test_a_store_that_insists_on_its_plan_refuses_others_on_all_ranks(tmp_path: Path) -> None:
    def work(rank: tbd.LocalRank) -> Any:
        store = open_store(tmp_path, rank.rank, order="forward")
        own = batches_of(rank.rank, count=BATCHES + 1)
        rows = make(rank, store, "mixed", exchange=tbd.ExchangeOptions(timeout_s=5))
        loader = Batches(own[:BATCHES])

        def epoch() -> None:
            for at, batch in enumerate(tb.lookahead(loader, rows, window=2)):
                step(rows, own[BATCHES] if at == 2 else batch, at)

        with pytest.raises(tb.TierbedError) as caught:
            epoch()
        return str(caught.value)

    told = run_ranks(2, work)
    assert any("batch is not the planned one" in one for one in told), told


def refused(rank: tbd.LocalRank, folder: Path, options: dict[str, Any], loader: Any) -> str:
    """Trains an epoch, which may not follow a plan; returns why, as the store tells it."""
    store = open_store(folder, rank.rank, **options)
    with make(rank, store, "mixed") as rows:
        train(rows, tb.lookahead(loader, rows, window=2))
        order = store.order()
    assert order["kind"] == "window", order
    return str(order["reason"])


@pytest.mark.parametrize("case", ["order", "store"])
def test_where_one_rank_cannot_follow_all_train_by_window(tmp_path: Path, case: str) -> None:
    def work(rank: tbd.LocalRank) -> str:
        batches = batches_of(rank.rank)
        is_other = rank.rank == 1
        options = {"order": "window"} if case == "store" and is_other else {}
        loader: Any = batches if case == "order" and is_other else Batches(batches)
        return refused(rank, tmp_path, options, loader)

    assert "rank 1" in run_ranks(2, work)[0]


def test_unequal_numbers_of_batches_are_refused(tmp_path: Path) -> None:
    def work(rank: tbd.LocalRank) -> None:
        store = open_store(tmp_path, rank.rank)
        with make(rank, store, "mixed") as rows:
            loader = Batches(batches_of(rank.rank)[: BATCHES - rank.rank])
            with pytest.raises(tb.InvalidError, match="unequal batches"):
                next(iter(tb.lookahead(loader, rows, window=2)))

    run_ranks(2, work)


def test_stores_at_other_batches_are_refused(tmp_path: Path) -> None:
    def work(rank: tbd.LocalRank, is_first: bool) -> None:
        store = open_store(tmp_path, rank.rank)
        with make(rank, store, "mixed") as rows:
            ahead = tb.lookahead(Batches(batches_of(rank.rank)), rows, window=2)
            if is_first:
                for at, batch in enumerate(ahead):
                    step(rows, batch, at)
                    if at == 1 + rank.rank:
                        store.checkpoint("c")
            else:
                with pytest.raises(tb.InvalidError, match="checkpoints of one step"):
                    next(iter(ahead))
        store.close()

    run_ranks(2, lambda rank: work(rank, True))
    run_ranks(2, lambda rank: work(rank, False))
