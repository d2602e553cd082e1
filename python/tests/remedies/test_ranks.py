"""Remedies of the exchange between ranks, which run as threads."""

# ruff: noqa: SIM117 - what is open stands apart from what is refused.

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed import dist as tbd
from tierbed.data.order import BatchOrder

from .kit import bags, opened, refused, table

WHOLE = {"item": tbd.TableWise(0)}
ROWS = {"item": tbd.RowWise()}


def sharded(rank: tbd.LocalRank, ways: Any = WHOLE, **options: Any) -> Any:
    store = options.pop("store", None) or opened(None, backend="memory", dram_budget="16MiB")
    plan = tbd.ShardingPlan(rank.count, ways)
    options.setdefault("optimizer", tb.SGD(lr=0.1))
    tables = options.pop("tables", [table()])
    return tbd.ShardedEmbeddingBagCollection(tables, store=store, plan=plan, ranks=rank, **options)


def both(work: Callable[[Any], Any]) -> list[Any]:
    """Runs ``work`` of two ranks, a thread each; returns what it returned or raised."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(work, rank) for rank in tbd.local_ranks(2)]
        return [future.exception() or future.result() for future in futures]


def told(found: list[Any], remedy: str) -> None:
    """Some rank's error names the remedy."""
    assert any(remedy in str(one) for one in found), found


def looked_up(rank: Any, *ids: int, **options: Any) -> tuple[int, ...]:
    with sharded(rank, **options) as emb:
        return tuple(emb(bags(*ids)).values().shape)


def stepped(rank: tbd.LocalRank) -> Any:
    with sharded(rank) as emb:
        emb(bags(1, 2)).values().sum().backward()
        return emb


def test_ranks_have_the_same_tables_plan_and_limits() -> None:
    def work(others: bool) -> Callable[[Any], Any]:
        ways = [WHOLE, {"item": tbd.TableWise(1)}]
        return lambda rank: looked_up(rank, 1, 2, ways=ways[rank.rank if others else 0])

    told(both(work(others=True)), "give all ranks the same tables, plan and limits")
    assert both(work(others=False)) == [(2, 8), (2, 8)]


def test_a_batch_fits_the_limits_of_all_ranks() -> None:
    def work(limit: int) -> Callable[[Any], Any]:
        how = tbd.ExchangeOptions(samples_max=limit, indices_max=limit)
        return lambda rank: looked_up(rank, 1, 2, 3, exchange=how)

    told(both(work(2)), "raise samples_max or indices_max on all ranks")
    assert both(work(3)) == [(3, 8), (3, 8)]


def test_ranks_divide_a_batch_into_equally_many_parts() -> None:
    def work(parts: list[int]) -> Callable[[Any], Any]:
        def run(rank: tbd.LocalRank) -> int:
            with sharded(rank) as emb:
                return sum(1 for _ in emb.forward_parts(bags(1, 2, 3, 4), parts[rank.rank]))

        return run

    told(both(work([2, 4])), "all ranks divide a batch into equally many parts")
    assert both(work([2, 2])) == [2, 2]


def test_outputs_that_are_copied_come_whole() -> None:
    (rank,) = tbd.local_ranks(1)
    with sharded(rank, exchange=tbd.ExchangeOptions(copies_outputs=True)) as emb:
        with refused(tb.UnsupportedError, "copy parts yourself"):
            emb.forward_parts(bags(1, 2), 2)
    with sharded(rank) as emb:
        parts = [part.values().clone() for part in emb.forward_parts(bags(1, 2), 2)]
    assert len(parts) == 2


def test_a_lookup_that_is_to_train_is_made_in_training() -> None:
    (rank,) = tbd.local_ranks(1)
    with sharded(rank) as emb:
        layer = torch.nn.Linear(8, 1)
        emb.eval()
        out = emb(bags(1)).values()
        out.requires_grad_()
        with refused(tb.InvalidError, "call train() first"):
            layer(out).sum().backward()
        emb.train()
        layer(emb(bags(1)).values()).sum().backward()


def test_weighted_tables_are_divided_by_rows_or_whole() -> None:
    (rank,) = tbd.local_ranks(1)

    def train(ways: Any) -> Any:
        weights = torch.ones(2, requires_grad=True)
        lengths = torch.ones(2, dtype=torch.int64)
        batch = tb.KeyedJaggedTensor(["item"], torch.tensor([1, 2]), weights, lengths=lengths)
        with sharded(rank, ways, is_weighted=True) as emb:
            emb(batch).values().sum().backward()
        return weights.grad

    remedy = "divide weighted tables by rows, or hold them whole"
    with refused(tb.UnsupportedError, remedy):
        train({"item": tbd.ColumnWise()})
    assert torch.equal(train(ROWS), train(WHOLE))


def test_rows_that_were_trained_are_loaded_into_a_new_store(tmp_path: Path) -> None:
    (rank,) = tbd.local_ranks(1)
    with sharded(rank) as emb:
        emb(bags(1, 2)).values().sum().backward()
        expected = emb(bags(1, 2)).values().clone()
        emb.save(tmp_path / "saved")
        with refused(tb.InvalidError, "load into a new store"):
            emb.load(tmp_path / "saved")
    with sharded(rank) as emb:
        emb.load(tmp_path / "saved")
        assert torch.equal(emb(bags(1, 2)).values(), expected)


def test_ranks_start_again_after_one_failed() -> None:
    def failing(rank: tbd.LocalRank) -> Any:
        if rank.rank == 1:
            # It goes without leaving together with the others.
            emb = sharded(rank)
            del emb
            gc.collect()
            return "left"
        return looked_up(rank, 1)

    told(both(failing), "look at that rank's error, then start all ranks again")
    assert both(lambda rank: looked_up(rank, 1)) == [(1, 8), (1, 8)]


def test_ranks_start_again_after_one_was_silent() -> None:
    waiting: list[Any] = []

    def silent(rank: tbd.LocalRank) -> Any:
        emb = sharded(rank, exchange=tbd.ExchangeOptions(timeout_s=0.2))
        if rank.rank == 1:
            waiting.append(emb)
            return "silent"
        return emb(bags(1)).values().shape

    remedy = "that rank was killed, or needs a longer time-out; restart all ranks"
    told(both(silent), remedy)
    assert both(lambda rank: looked_up(rank, 1, exchange=tbd.ExchangeOptions(timeout_s=60))) == [
        (1, 8),
        (1, 8),
    ]


def test_ranks_of_processes_begin_with_a_group(tmp_path: Path) -> None:
    with refused(tb.InvalidError, "call torch.distributed.init_process_group") as caught:
        tbd.ProcessRank()
    assert 'init_process_group("gloo") first' in str(caught.value)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        rank = tbd.ProcessRank()
        assert looked_up(rank, 1) == (1, 8)
        assert looked_up(rank, 1, ways=ROWS, exchange="collective") == (1, 8)
        assert looked_up(rank, 1, ways=ROWS, exchange="one_sided") == (1, 8)
        assert looked_up(rank, 1, exchange="collective") == (1, 8)
    finally:
        torch.distributed.destroy_process_group()


class Ordered:
    """Batches that tell their order."""

    def __init__(self, *ids: int) -> None:
        self.batches = [bags(one, one + 1) for one in ids]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def known_order(self) -> BatchOrder:
        return BatchOrder("ordered", lambda: self.batches, 0, len(self))


def trained(rank: Any, folder: Path, loader: Ordered, until: int = 99, **options: Any) -> int:
    """Trains batches along a plan, keeping a checkpoint behind each; returns how many."""
    done = 0
    store = opened(folder / str(rank.rank), **options)
    with store, sharded(rank, ROWS, store=store) as emb:
        for batch in tb.lookahead(loader, emb, window=2):
            emb(batch).values().sum().backward()
            done += 1
            store.checkpoint(f"batch-{done}", keep=True)
            if done == until:
                break
    return done


def test_ranks_have_equally_many_batches(tmp_path: Path) -> None:
    remedy = "give all ranks equally many batches, as a DistributedSampler or drop_last=True does"
    told(both(lambda rank: trained(rank, tmp_path, Ordered(*range(2 + rank.rank)))), remedy)
    assert both(lambda rank: trained(rank, tmp_path, Ordered(0, 1))) == [2, 2]


def test_stores_of_ranks_are_opened_at_one_step(tmp_path: Path) -> None:
    loader = Ordered(0, 4, 8)
    assert both(lambda rank: trained(rank, tmp_path, loader, until=2)) == [2, 2]

    def rest(rank: Any, *checkpoints: str | None) -> int:
        store = opened(tmp_path / str(rank.rank), checkpoint=checkpoints[rank.rank])
        with store, sharded(rank, ROWS, store=store) as emb:
            return len(list(tb.lookahead(loader, emb, window=2, start=1)))

    found = both(lambda rank: rest(rank, None, "batch-1"))
    told(found, "open all at checkpoints of one step")
    assert both(lambda rank: rest(rank, "batch-1", "batch-1")) == [2, 2]
