"""Open vocabularies over ranks, against one process: the same rows for the same ids, the same bits.

Ids are any 64-bit numbers. Blocks of rows are short here, so that all ranks hold some.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import join, run_ranks

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist import sharding
from tierbed.dist.dcp import table_states

STEPS = 5
SAMPLES = [5, 0, 7, 2]
AGED = tb.CountTimestampMixedEvictionPolicy(2.5, eviction_ttl_mins=0, decay_rate=0.9)
TABLES = [
    tb.EmbeddingBagConfig(None, 8, "a", ["x", "y"], virtual_table_eviction_policy=AGED),
    tb.EmbeddingBagConfig(40, 4, "b", ["z"], pooling="mean"),
    tb.EmbeddingBagConfig(
        None, 8, "c", ["w"], pooling="mean", admission_strategy=tb.FrequencyAdmissionStrategy(2)
    ),
]
FEATURES = ["x", "y", "z", "w"]
OPEN = ["a", "c"]

SHARDINGS: dict[str, Callable[[int], Any]] = {
    "table-wise": lambda ranks: {
        "a": tbd.TableWise(ranks - 1),
        "b": tbd.TableWise(0),
        "c": tbd.TableWise(0),
    },
    "row-wise": lambda ranks: {name: tbd.RowWise() for name in "abc"},
    "mirrored": lambda ranks: {name: tbd.Mirrored() for name in "abc"},
    "mixed": lambda ranks: {"a": tbd.RowWise(), "b": tbd.ColumnWise(), "c": tbd.Mirrored()},
}
# Ranks, and nodes of them.
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "OPEN_BLOCK_ROWS", 4)


def draw(seed: int, samples: int, is_weighted: bool = False) -> tb.KeyedJaggedTensor:
    """Ids far apart, some of them often; of the dense table numbers of rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES), samples), generator=generator)
    values = []
    for name, of_feature in zip(FEATURES, lengths, strict=True):
        count = int(of_feature.sum())
        numbers = torch.randint(0, 6 + seed % 50, (count,), generator=generator)
        values.append(numbers % 40 if name == "z" else (numbers - 3) * 0x1234_5678_9ABC_DEF1)
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if is_weighted else None
    return tb.KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths.view(-1), stride=samples)


def batches_of(count: int, steps: int = STEPS, is_weighted: bool = False) -> list[list[Any]]:
    """Batches of each rank; joined they are the same for every number of ranks."""
    whole = [
        [draw(10 * step + part, SAMPLES[(part + step) % 4], is_weighted) for part in range(4)]
        for step in range(steps)
    ]
    ends = [rank * 4 // count for rank in range(count + 1)]
    return [[join(parts[first:end]) for parts in whole] for first, end in itertools.pairwise(ends)]


def step(collection: Any, batch: tb.KeyedJaggedTensor, parts: int = 0) -> tuple[Any, Any]:
    """Trains a batch; returns the output, and the gradients of weights."""
    weights = batch.weights_or_none()
    if weights is not None:
        weights.requires_grad_()
    if parts:
        out = torch.cat([one.values() for one in collection.forward_parts(batch, parts)])
    else:
        out = collection(batch).values()
    # A gradient that depends on the output: any difference spreads.
    (out * (out.detach() * 0.3 + 0.1)).sum().backward()
    if weights is None:
        return out.detach().clone(), None
    counts = batch.lengths().view(len(FEATURES), -1).sum(1).tolist()
    return out.detach().clone(), weights.grad.split(counts)


def look(collection: Any, batch: tb.KeyedJaggedTensor) -> torch.Tensor:
    collection.eval()
    with torch.no_grad():
        out: torch.Tensor = collection(batch).values().clone()
    collection.train()
    return out


def make(rank: Any, store: tb.Store, name: str, **options: Any) -> Any:
    plan = tbd.ShardingPlan(rank.count, SHARDINGS[name](rank.count))
    return tbd.ShardedEmbeddingBagCollection(TABLES, store=store, plan=plan, ranks=rank, **options)


def memory() -> tb.Store:
    return tb.Store.open(backend="memory", dram_budget="16MiB")


def check_ids(stores: list[tb.Store], whole: tb.Store, plan: tbd.ShardingPlan) -> None:
    """The index has the ids of one process, and each rank the rows that it holds."""
    for number, config in enumerate(one for one in TABLES if one.name in OPEN):
        keeper = stores[plan.index_rank(config, number)]
        for one, other in zip(keeper.ids(config.name), whole.ids(config.name), strict=True):
            assert torch.equal(one, other)
        known = keeper.vocabularies()[config.name]
        assert known == whole.vocabularies()[config.name]
        rows, state = whole.read_rows_and_state(config.name, 0, known["next_row"])
        numbers = torch.arange(known["next_row"])
        for rank, store in enumerate(stores):
            if all(table["name"] != config.name for table in store.tables()):
                continue
            found, found_state = store.read_rows_and_state(config.name, 0, known["next_row"])
            blocks = plan.blocks_of(config, rank)
            held = numbers >= 0
            if blocks is not None:
                held = (numbers // blocks[2]) % blocks[1] == rank
            assert torch.equal(found[held], rows[held])
            assert torch.equal(found_state[held], state[held])


def optimizers() -> list[Any]:
    return [tb.RowWiseAdagrad(lr=0.1), tb.Adam(lr=0.05), tb.SGD(lr=0.2), tb.Adagrad(lr=0.1)]


def usable(name: str) -> list[Any]:
    """Columns keep state of elements only."""
    return [
        one for one in optimizers() if name != "mixed" or not isinstance(one, tb.RowWiseAdagrad)
    ]


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize(("count", "nodes"), LAYOUTS)
def test_ranks_give_the_rows_and_have_the_bits_of_one_process(
    name: str, count: int, nodes: int
) -> None:
    for number, optimizer in enumerate(usable(name)):
        is_weighted = number % 2 == 1 and name != "mixed"
        options = {"optimizer": optimizer, "is_weighted": is_weighted}
        whole = memory()
        one = tb.EmbeddingBagCollection(TABLES, store=whole, **options)
        (joined,) = batches_of(1, is_weighted=is_weighted)
        own = batches_of(count, is_weighted=is_weighted)
        expected = []
        for at, batch in enumerate(joined):
            expected.append((look(one, batch), *step(one, batch)))
            if at == 2:
                whole.evict(now_mins=1 << 31)

        def work(rank: Any, options: Any = options, own: Any = own) -> Any:
            store = memory()
            with make(rank, store, name, **options) as rows:
                seen = []
                for at, batch in enumerate(own[rank.rank]):
                    parts = 3 if at == 1 else 0
                    seen.append((look(rows, batch), *step(rows, batch, parts)))
                    if at == 2:
                        rows.evict(now_mins=1 << 31)
            return store, seen

        found = run_ranks(count, work, nodes=nodes)
        for at, (looked, out, grads) in enumerate(expected):
            of_ranks = [seen[at] for _, seen in found]
            assert torch.equal(torch.cat([one[0] for one in of_ranks]), looked), at
            assert torch.equal(torch.cat([one[1] for one in of_ranks]), out), at
            for feature in range(len(FEATURES)) if grads is not None else ():
                assert torch.equal(torch.cat([one[2][feature] for one in of_ranks]), grads[feature])
        plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
        check_ids([store for store, _ in found], whole, plan)


def test_evictions_tell_all_ranks_what_was_taken() -> None:
    def work(rank: Any) -> Any:
        with make(rank, memory(), "row-wise") as rows:
            for batch in batches_of(2)[rank.rank]:
                step(rows, batch)
            return rows.evict(now_mins=1 << 31)

    one, other = run_ranks(2, work)
    assert one == other
    assert one["a"].id_count > 0
    assert one["c"].id_count == 0, "nothing of that table is evicted"


@pytest.mark.parametrize("name", ["table-wise", "row-wise"])
@pytest.mark.parametrize(("count", "nodes"), [(2, 1), (4, 2)])
def test_look_ahead_gives_the_same_rows(tmp_path: Path, name: str, count: int, nodes: int) -> None:
    whole = memory()
    one = tb.EmbeddingBagCollection(TABLES, store=whole)
    (joined,) = batches_of(1, 8)
    expected = [step(one, batch)[0] for batch in joined * 2]

    def work(rank: Any) -> Any:
        store = tb.Store.open(tmp_path / f"rank-{rank.rank}", dram_budget="16MiB")
        own = batches_of(count, 8)[rank.rank]
        with make(rank, store, name) as rows:
            seen = []
            for _ in range(2):
                for batch in tb.lookahead(own, rows, window=3):
                    seen.append(step(rows, batch)[0])
            left = rows._exchange._exchange.announced()
        return store, seen, left

    found = run_ranks(count, work, nodes=nodes)
    for at, out in enumerate(expected):
        assert torch.equal(torch.cat([seen[at] for _, seen, _ in found]), out), at
    check_ids([one[0] for one in found], whole, tbd.ShardingPlan(count, SHARDINGS[name](count)))
    for store, _, left in found:
        assert left == (0, 0), "no batch waits that was looked up"
        store.close()


def test_a_known_order_is_trained_by_window_and_says_why(tmp_path: Path) -> None:
    def work(rank: Any) -> Any:
        store = tb.Store.open(tmp_path / f"rank-{rank.rank}", dram_budget="16MiB")
        own = batches_of(2)[rank.rank]
        data = torch.utils.data.DataLoader(own, batch_size=None)
        with make(rank, store, "table-wise") as rows:
            for batch in tb.lookahead(data, rows, window=2):
                step(rows, batch)
            order = store.order()
        store.close()
        return order

    for order in run_ranks(2, work):
        assert order["kind"] == "window"
        assert "open vocabulary" in order["reason"]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["row-wise", "mirrored", "table-wise"])
def test_checkpoints_go_on_with_other_ranks(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    whole = memory()
    one = tb.EmbeddingBagCollection(TABLES, store=whole)
    (joined,) = batches_of(1)
    expected = []
    for at, batch in enumerate(joined):
        expected.append(step(one, batch)[0])
        if at in (1, 3):
            whole.evict(now_mins=1 << 31)

    def first(rank: Any) -> None:
        with make(rank, memory(), name) as rows:
            for at, batch in enumerate(batches_of(before)[rank.rank][:3]):
                step(rows, batch)
                if at == 1:
                    rows.evict(now_mins=1 << 31)
            rows.save(tmp_path / "c", {"at": 3})

    run_ranks(before, first)

    def second(rank: Any) -> Any:
        store = memory()
        with make(rank, store, name) as rows:
            assert rows.load(tmp_path / "c") == {"at": 3}
            seen = []
            for at, batch in enumerate(batches_of(after)[rank.rank][3:], 3):
                seen.append(step(rows, batch)[0])
                if at == 3:
                    rows.evict(now_mins=1 << 31)
        return store, seen

    found = run_ranks(after, second)
    for at, out in enumerate(expected[3:]):
        assert torch.equal(torch.cat([seen[at] for _, seen in found]), out), at
    plan = tbd.ShardingPlan(after, SHARDINGS[name](after))
    check_ids([store for store, _ in found], whole, plan)


def test_saves_beside_training_have_the_index_of_their_step(tmp_path: Path) -> None:
    def first(rank: Any) -> Any:
        store = tb.Store.open(tmp_path / f"rank-{rank.rank}", dram_budget="16MiB")
        own = batches_of(2)[rank.rank]
        with make(rank, store, "row-wise") as rows:
            for batch in own[:3]:
                step(rows, batch)
            saved = rows.async_save(tmp_path / "c")
            seen = [step(rows, batch)[0] for batch in own[3:]]
            saved.result()
        store.close()
        return seen

    def second(rank: Any) -> Any:
        with make(rank, memory(), "row-wise") as rows:
            rows.load(tmp_path / "c")
            return [step(rows, batch)[0] for batch in batches_of(2)[rank.rank][3:]]

    for one, other in zip(run_ranks(2, first), run_ranks(2, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_stores_go_on_at_their_checkpoints(tmp_path: Path) -> None:
    whole = memory()
    one = tb.EmbeddingBagCollection(TABLES, store=whole)
    (joined,) = batches_of(1)
    expected = [step(one, batch)[0] for batch in joined]

    def work(rank: Any, steps: slice) -> Any:
        store = tb.Store.open(tmp_path / f"rank-{rank.rank}", dram_budget="16MiB")
        with make(rank, store, "row-wise") as rows:
            seen = [step(rows, batch)[0] for batch in batches_of(2)[rank.rank][steps]]
            store.checkpoint("c")
        store.close()
        return seen

    found = run_ranks(2, lambda rank: work(rank, slice(0, 2)))
    later = run_ranks(2, lambda rank: work(rank, slice(2, None)))
    for at, out in enumerate(expected):
        assert torch.equal(
            torch.cat([(one + two)[at] for one, two in zip(found, later, strict=True)]), out
        )


def test_sequences_have_open_vocabularies() -> None:
    tables = [tb.EmbeddingConfig(None, 8, "a", ["x", "y"]), tb.EmbeddingConfig(None, 8, "c", ["w"])]
    names = ["x", "y", "w"]
    whole = memory()
    one = tb.EmbeddingCollection(tables, store=whole)
    own = batches_of(2)
    (joined,) = batches_of(1)

    def train(rows: Any, batch: Any) -> dict[str, torch.Tensor]:
        out = rows(batch.select(names))
        sum((of.values() * 0.5).sum() for of in out.values()).backward()
        return {name: of.values().detach().clone() for name, of in out.items()}

    expected = [train(one, batch) for batch in joined]

    def work(rank: Any) -> Any:
        with tbd.ShardedEmbeddingCollection(tables, store=memory(), ranks=rank) as rows:
            return [train(rows, batch) for batch in own[rank.rank]]

    found = run_ranks(2, work)
    for at, of_step in enumerate(expected):
        for name in names:
            assert torch.equal(torch.cat([of_rank[at][name] for of_rank in found]), of_step[name])


def test_the_default_plan_divides_open_tables_by_rows() -> None:
    plan = tbd.ShardingPlan.balanced(TABLES, 2)
    assert {name: type(plan.tables[name]) for name in OPEN} == dict.fromkeys(OPEN, tbd.RowWise)
    assert tbd.ShardingPlan.balanced(TABLES, 1).tables["a"] == tbd.TableWise(0)


@pytest.fixture
def alone() -> Iterator[tb.Store]:
    with memory() as store:
        yield store


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (tbd.ColumnWise(), "divided by columns"),
        (tbd.RowWise((0, 10)), "no bounds"),
    ],
)
def test_shardings_that_cannot_grow_are_refused(alone: tb.Store, way: Any, message: str) -> None:
    (rank,) = tbd.local_ranks(1)
    plan = tbd.ShardingPlan(1, {"a": way, "b": tbd.Mirrored(), "c": tbd.Mirrored()})
    with pytest.raises(tb.TierbedError, match=message):
        tbd.ShardedEmbeddingBagCollection(TABLES, store=alone, plan=plan, ranks=rank)
    (rank,) = tbd.local_ranks(1)
    for better in (tbd.RowWise(), tbd.TableWise(0)):
        plan = tbd.ShardingPlan(1, {**plan.tables, "a": better})
        with tbd.ShardedEmbeddingBagCollection(TABLES, store=alone, plan=plan, ranks=rank) as rows:
            step(rows, batches_of(1)[0][0])


def test_stores_without_an_index_are_refused() -> None:
    (rank,) = tbd.local_ranks(1)
    with pytest.raises(tb.UnsupportedError, match="CodedStore has not"):
        tbd.ShardedEmbeddingBagCollection(TABLES, store=tb.CodedStore(), ranks=rank)
    dense = [tb.EmbeddingBagConfig(40, 8, "a", ["x", "y"])]
    with tbd.ShardedEmbeddingBagCollection(dense, store=tb.CodedStore(), ranks=rank) as rows:
        rows.eval()
    with tbd.ShardedEmbeddingBagCollection(TABLES, store=memory(), ranks=rank) as rows:
        step(rows, batches_of(1)[0][0])


def test_a_store_alone_does_not_evict_what_others_hold() -> None:
    def work(rank: Any) -> Any:
        store = memory()
        with make(rank, store, "row-wise") as rows:
            step(rows, batches_of(2)[rank.rank][0])
            with pytest.raises(tb.InvalidError, match="call evict\\(\\) of its collection"):
                store.evict()
            return rows.evict(now_mins=1 << 31)

    for taken in run_ranks(2, work):
        assert taken["a"].id_count > 0


def test_a_bad_batch_may_be_mended() -> None:
    def work(rank: Any) -> Any:
        with make(rank, memory(), "row-wise") as rows:
            batch = batches_of(2)[rank.rank][0]
            if rank.rank == 1:
                bad = tb.KeyedJaggedTensor(
                    FEATURES, torch.full((4,), 1 << 40), lengths=torch.ones(4, dtype=torch.int64)
                )
                with pytest.raises(tb.InvalidError):
                    rows(bad)
            return step(rows, batch)[0]

    whole = tb.EmbeddingBagCollection(TABLES, store=memory())
    assert torch.equal(torch.cat(run_ranks(2, work)), step(whole, batches_of(1)[0][0])[0])


def test_ranks_that_train_and_ranks_that_look_are_told() -> None:
    def work(rank: Any) -> Any:
        with make(rank, memory(), "row-wise") as rows:
            batch = batches_of(2)[rank.rank][0]
            rows.train(rank.rank == 0)
            with pytest.raises(tb.InvalidError, match="call train\\(\\) or eval\\(\\) on all"):
                rows(batch)
            rows.train()
            return step(rows, batch)[0]

    whole = tb.EmbeddingBagCollection(TABLES, store=memory())
    assert torch.equal(torch.cat(run_ranks(2, work)), step(whole, batches_of(1)[0][0])[0])


def test_a_store_that_knows_ids_loads_no_others(tmp_path: Path) -> None:
    def work(rank: Any) -> None:
        with make(rank, memory(), "row-wise") as rows:
            step(rows, batches_of(1)[0][0])
            rows.save(tmp_path / "c")
        used = memory()
        rows = make(rank, used, "row-wise")
        rows.eval()
        # An id that is looked up gets no row; one that was trained on does, and its row is used.
        used.native.translate_ids(used.table_id("a"), torch.tensor([5]), 0)
        with pytest.raises(tb.InvalidError, match="load into a new store"):
            rows.load(tmp_path / "c")
        with make(rank, memory(), "row-wise") as rows:
            rows.load(tmp_path / "c")

    run_ranks(1, work)


def test_checkpoints_of_torch_refuse_open_vocabularies() -> None:
    def work(rank: Any) -> None:
        with (
            make(rank, memory(), "row-wise") as rows,
            pytest.raises(tb.UnsupportedError, match="use save of the collection"),
        ):
            table_states(rows)

    run_ranks(2, work)
