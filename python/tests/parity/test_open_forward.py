"""Ids of open tables train along a plan to the bits of training in memory, and of the window order.

The plan is made before the first step and gives rows to all ids that it finds, in the order in
which training sees them: the same rows as without a plan.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.data import BatchOrder
from tierbed.results import EvictedIds
from tierbed.tables import export_tables

OpenStore = Callable[..., tb.Store]
BATCHES, BATCH = 24, 16
BUDGET = "6MiB"
# Far apart, and of both signs; a prime keeps different ids different.
STRIDE = 2**40 + 15
EXTREMES = [0, -1, 2**63 - 1, -(2**63)]
TABLES = {"item": 8, "user": 12}
DENSE_ROWS = 500


class Known:
    """Batches of raw ids in a known order: each epoch of ``seed`` is the same."""

    def __init__(self, seed: int = 0, start: int = 0, new_ids: int = 400) -> None:
        self.seed, self.start, self.new_ids = seed, start, new_ids

    def batch(self, at: int) -> tb.KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + at)
        lengths = torch.randint(0, 4, (4 * BATCH,), generator=generator)
        counts = lengths.view(4, BATCH).sum(dim=1).tolist()
        raw = []
        for feature, count in enumerate(counts):
            ids = torch.randint(0, self.new_ids, (count,), generator=generator)
            if feature == 3:
                raw.append(ids % DENSE_ROWS)
                continue
            # What later batches see is mostly new.
            ids = (ids + 40 * at - 300) * STRIDE
            extreme = torch.randint(0, 30, (count,), generator=generator)
            for place, value in enumerate(EXTREMES):
                ids[extreme == place] = value
            raw.append(ids)
        return tb.KeyedJaggedTensor(["a", "b", "u", "d"], torch.cat(raw), lengths=lengths)

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (self.batch(at) for at in range(BATCHES))

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (self.batch(at) for at in range(self.start, BATCHES))

    def known_order(self) -> BatchOrder:
        return BatchOrder(f"raw ids {self.seed} {self.new_ids}", self.epoch, self.start, BATCHES)


class Fixed:
    """Given batches in their order."""

    def __init__(self, batches: list[tb.KeyedJaggedTensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return iter(self.batches)

    def known_order(self) -> BatchOrder:
        name = f"fixed {self.batches[0].values()[0]}"
        return BatchOrder(name, lambda: iter(self.batches), 0, len(self.batches))


def tables(**more: Any) -> list[tb.EmbeddingBagConfig]:
    """Two open tables, one with two features, around a dense one."""
    return [
        tb.EmbeddingBagConfig(None, 8, "item", ["a", "b"], init=tb.Uniform(-0.5, 0.5), **more),
        tb.EmbeddingBagConfig(DENSE_ROWS, 4, "dense", ["d"]),
        tb.EmbeddingBagConfig(None, 12, "user", ["u"], pooling="mean"),
    ]


def collection(store: tb.Store, **more: Any) -> tb.EmbeddingBagCollection:
    return tb.EmbeddingBagCollection(tables(**more), store=store, optimizer=tb.Adam(lr=0.05))


def step(emb: tb.EmbeddingBagCollection, batch: tb.KeyedJaggedTensor) -> torch.Tensor:
    output = emb(batch).values()
    (output * torch.linspace(0.1, 1.0, output.shape[1])).square().sum().backward()
    return output.detach().clone()


def run(emb: tb.EmbeddingBagCollection, loader: Any, **options: Any) -> list[torch.Tensor]:
    batches = tb.lookahead(loader, emb, window=5, key=lambda batch: batch, **options)
    return [step(emb, batch) for batch in batches]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for at, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(ours, theirs), f"outputs of step {at}"


def assert_same_rows(one: tb.Store, other: tb.Store) -> None:
    """Both have the same rows for the same ids, and the same dense rows."""
    for table in TABLES:
        ours, theirs = (store.ids(table) for store in (one, other))
        order = [found[0].sort() for found in (ours, theirs)]
        assert torch.equal(order[0].values, order[1].values), f"ids of {table}"
        rows = [found[1][at.indices] for found, at in zip((ours, theirs), order, strict=True)]
        assert torch.equal(*rows), f"rows of the ids of {table}"
        # The shared row, too.
        count = int(rows[0].max()) + 1
        for read in ("read_rows", "use_counts"):
            values = [getattr(store, read)(table, 0, count) for store in (one, other)]
            assert torch.equal(*values), f"{read} of {table}"
    assert torch.equal(*(store.read_rows("dense", 0, DENSE_ROWS) for store in (one, other)))


def forward(path: Path, **options: Any) -> tb.Store:
    options = {"dram_budget": BUDGET, "order": "forward", "seed": 5, **options}
    return tb.Store.open(path, **options)


def ten_steps(path: Path) -> list[torch.Tensor]:
    """Trains to a checkpoint behind ten batches, and a step further, which is lost."""
    with forward(path) as store:
        emb = collection(store)
        batches = iter(tb.lookahead(Known(), emb, window=5, key=lambda batch: batch))
        outputs = [step(emb, next(batches)) for _ in range(10)]
        store.checkpoint("ten")
        step(emb, next(batches))
    return outputs


@pytest.fixture
def oracle(open_store: OpenStore) -> tb.EmbeddingBagCollection:
    """The same tables in memory."""
    return collection(open_store("memory", seed=5))


def test_two_epochs_give_the_bits_of_memory(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        for _ in range(2):
            assert_same(run(emb, Known()), run(oracle, list(Known())))
        assert store.order()["kind"] == "forward"
        assert_same_rows(store, oracle.store)
        counted = store.vocabularies()["item"]
        assert counted == oracle.store.vocabularies()["item"]
        assert store.stats()["vocabularies"]["tables"][0] == counted
        budget = store.stats()["budget"]
        held = sum(part["used_bytes"] for part in budget["parts"].values())
        assert held == budget["used_bytes"] <= budget["limit_bytes"] <= 6 << 20
        # The index takes an eighth; its wide pages take nothing from the rows.
        assert budget["parts"]["batch scratch"]["used_bytes"] < (6 << 20) / 6


def test_training_goes_on_after_a_restart(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    expected = run(oracle, list(Known()))
    found = ten_steps(tmp_path / "s")
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        assert store.order()["batch"] == 10
        found += run(emb, Known(start=10))
        assert_same(found, expected)
        assert_same_rows(store, oracle.store)
        store.checkpoint("all")
        assert store.verify() > 0


def test_another_order_brings_new_ids(tmp_path: Path, oracle: tb.EmbeddingBagCollection) -> None:
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        for seed in (1, 2, 3):
            loader = Known(seed, new_ids=400 * seed)
            assert_same(run(emb, loader), run(oracle, list(loader)))
            store.checkpoint(f"epoch {seed}")
        assert store.order()["replan_count"] == 2
        assert_same_rows(store, oracle.store)


def test_the_least_budget_that_is_named_is_enough_for_many_ids(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    names, count = ["a", "b", "u", "d"], 4096
    batches = []
    for _ in range(6):
        ids = torch.randint(-(2**62), 2**62, (4 * count,), generator=generator)
        ids[3 * count :] %= DENSE_ROWS
        lengths = torch.ones(4 * count, dtype=torch.int64)
        batches.append(tb.KeyedJaggedTensor(names, ids, lengths=lengths))
    least, is_done, attempts = 1 << 20, False, 0
    while not is_done and attempts < 10:
        attempts += 1
        with forward(tmp_path / f"s{attempts}", dram_budget=least) as store:
            try:
                emb = collection(store)
                for order in (batches, batches[::-1]):
                    run(emb, Fixed(order))
                    store.checkpoint("order")
                is_done = True
            except tb.InvalidError as refused:
                # Without room for any index the reason says how much is missing, in words.
                named = int(refused.context.get("minimum_bytes", 2 * least))
        if not is_done:
            assert named > least, "a remedy that does not help"
            least = named
    assert is_done, least


def test_a_plan_that_nobody_followed_leaves_no_ids(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    # The process ends when its plan is whole: nothing was trained along it.
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        next(iter(tb.lookahead(Known(7), emb, window=5, key=lambda batch: batch)))
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        assert store.vocabularies()["item"]["id_count"] == 0
        assert_same(run(emb, Known(8)), run(oracle, list(Known(8))))
        assert_same_rows(store, oracle.store)
    # The plan of the same batches is found again.
    with forward(tmp_path / "t") as store:
        emb = collection(store)
        next(iter(tb.lookahead(Known(8), emb, window=5, key=lambda batch: batch)))
    plan = next(iter((tmp_path / "t").glob("order-*.plan")))
    before = plan.stat().st_mtime_ns
    with forward(tmp_path / "t") as store:
        emb = collection(store)
        run(emb, Known(8))
        assert plan.stat().st_mtime_ns == before
        assert_same_rows(store, oracle.store)


def test_evaluation_gives_no_rows_and_reads_those_of_the_plan(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    unknown = tb.KeyedJaggedTensor(
        ["a", "b", "u", "d"], torch.tensor([STRIDE - 1, 1]), lengths=torch.tensor([1, 0, 0, 1])
    )
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        for one in (emb, oracle):
            one.eval()
        # Nobody has decided the order yet, and looking does not.
        assert torch.equal(emb(unknown).values(), oracle(unknown).values())
        for one in (emb, oracle):
            one.train()
        assert_same(run(emb, Known()), run(oracle, list(Known())))
        for one in (emb, oracle):
            one.eval()
        for batch in (unknown, Known().batch(3), Known().batch(20)):
            assert torch.equal(emb(batch).values(), oracle(batch).values())
        # The batch that the plan has next, looked up and not stepped.
        assert torch.equal(emb(Known().batch(0)).values(), oracle(Known().batch(0)).values())
        assert store.translate("item", torch.tensor([STRIDE - 1])).tolist() == [0]
        for one in (emb, oracle):
            one.train()
        assert_same(run(emb, Known()), run(oracle, list(Known())))
        assert store.order()["kind"] == "forward"


def test_ids_that_training_has_not_come_to_count_for_unknown_ones(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    later = Known().batch(20)
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        batches = iter(tb.lookahead(Known(), emb, window=5, key=lambda batch: batch))
        for at in range(4):
            assert torch.equal(step(emb, next(batches)), step(oracle, Known().batch(at)))
            for one in (emb, oracle):
                one.eval()
            assert torch.equal(emb(later).values(), oracle(later).values())
            for one in (emb, oracle):
                one.train()
            rows = [one.translate("item", later["a"].values()) for one in (store, oracle.store)]
            assert torch.equal(*rows)
            assert int(rows[0].min()) == 0
        assert store.vocabularies() == oracle.store.vocabularies()
        assert_same_rows(store, oracle.store)
        store.checkpoint("four")
    with forward(tmp_path / "s") as store:
        collection(store)
        assert store.vocabularies() == oracle.store.vocabularies()


class HeldOut(Known):
    """Every third batch is only looked up."""

    def is_stepped(self, at: int) -> bool:
        return at % 3 != 1

    def known_order(self) -> BatchOrder:
        order = super().known_order()
        return dataclasses.replace(order, is_stepped=self.is_stepped)


@pytest.mark.parametrize("epochs", [1, 2])
def test_batches_that_are_held_out_give_no_rows(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection, epochs: int
) -> None:
    loader = HeldOut()
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        # A second epoch along the same plan knows ids that the first one did not.
        for _ in range(epochs):
            ahead = tb.lookahead(loader, emb, window=5, key=lambda batch: batch)
            for at, batch in enumerate(ahead):
                for one in (emb, oracle):
                    one.train(loader.is_stepped(at))
                if loader.is_stepped(at):
                    assert torch.equal(step(emb, batch), step(oracle, batch)), f"step {at}"
                else:
                    assert torch.equal(emb(batch).values(), oracle(batch).values()), f"batch {at}"
        assert store.order()["kind"] == "forward"
        assert (store.order()["unplanned_scan_count"] == 0) == (epochs == 1)
        assert store.vocabularies() == oracle.store.vocabularies()
        assert_same_rows(store, oracle.store)


def test_a_batch_that_was_not_planned_moves_rows_and_ids(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    other = Known(9).batch(0)
    expected = [step(oracle, Known().batch(at)) for at in range(7)] + [step(oracle, other)]
    with tb.Store.open(tmp_path / "s", dram_budget=BUDGET, seed=5) as store:
        emb = collection(store)
        batches = iter(tb.lookahead(Known(), emb, window=5, key=lambda batch: batch))
        found = [step(emb, next(batches)) for _ in range(7)]
        store.checkpoint("seven")
        found.append(step(emb, other))
        assert store.order()["kind"] == "window"
        assert_same(found, expected)
        assert_same_rows(store, oracle.store)
        store.checkpoint("moved")
    with tb.Store.open(tmp_path / "s", dram_budget=BUDGET, seed=5) as store:
        emb = collection(store)
        # Ids that the plan had rows for get them in the order of training, as anywhere.
        assert_same(run(emb, Known()), run(oracle, list(Known())))
        assert_same_rows(store, oracle.store)
        assert not list((tmp_path / "s").glob("vocabulary.*"))
        assert store.verify() > 0


def test_an_order_that_is_insisted_on_refuses_other_ids(tmp_path: Path) -> None:
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        batches = iter(tb.lookahead(Known(), emb, window=5, key=lambda batch: batch))
        step(emb, next(batches))
        with pytest.raises(tb.InvalidError, match="not the planned one"):
            emb(Known(9).batch(0))
        with pytest.raises(tb.InvalidError, match='order="auto", which leaves the plan'):
            store.assign_ids("item", torch.tensor([12345]))
        step(emb, next(batches))
        assert store.order()["kind"] == "forward"
        store.checkpoint("two")
    with forward(tmp_path / "s", order="auto") as store:
        collection(store)
        assert int(store.assign_ids("item", torch.tensor([12345]))[0]) > 0
        assert store.order()["kind"] == "window"


@pytest.mark.parametrize(
    "policy",
    [
        {"admission_strategy": tb.FrequencyAdmissionStrategy(threshold=2)},
        {"virtual_table_eviction_policy": tb.TimestampBasedEvictionPolicy(eviction_ttl_mins=10)},
    ],
)
def test_ids_that_wait_or_leave_train_by_window(tmp_path: Path, policy: Any) -> None:
    with tb.Store.open(tmp_path / "s", dram_budget=BUDGET) as store:
        emb = collection(store, **policy)
        run(emb, Known())
        assert store.order()["kind"] == "window"
        assert "ids of table item" in store.order()["reason"]
    with forward(tmp_path / "t") as store:
        emb = collection(store, **policy)
        with pytest.raises(tb.InvalidError, match="ids of table item"):
            run(emb, Known())


def test_a_budget_without_room_for_an_index_trains_by_window(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    with tb.Store.open(tmp_path / "s", dram_budget="1MiB", seed=5) as store:
        emb = collection(store)
        assert_same(run(emb, Known()), run(oracle, list(Known())))
        assert store.order()["kind"] == "window"
        reason = store.order()["reason"]
    assert "no room for an index of ids beside a plan: raise it above" in reason


def test_nothing_is_evicted_where_no_policy_says_so(tmp_path: Path) -> None:
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        run(emb, Known())
        assert store.evict("item") == {"item": EvictedIds(id_count=0, waiting_count=0)}
        assert store.order()["kind"] == "forward"


def test_a_snapshot_and_a_delta_answer_raw_ids(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    # Notes of changed rows take memory that is kept aside, a twelfth.
    with forward(tmp_path / "s", dram_budget="32MiB") as store:
        emb = collection(store)
        run(emb, Known(1))
        store.publish(tmp_path / "base")
        store.checkpoint("one")
        run(emb, Known(2))
        store.publish(tmp_path / "delta", base=tmp_path / "base")
        store.publish(tmp_path / "whole")
        made = store.stats()["changes"]
        assert made["deltas_tracked"] == 1
        for seed in (1, 2):
            run(oracle, list(Known(seed)))
        oracle.eval()
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "applied")
    for name in ("applied", "whole"):
        with tb.Snapshot.open(tmp_path / name, dram_budget="8MiB") as snapshot:
            served = tb.EmbeddingBagCollection(tables(), store=snapshot)
            for batch in (Known(1).batch(2), Known(2).batch(5)):
                assert torch.equal(served(batch).values(), oracle(batch).values()), name


def test_an_export_and_a_kept_checkpoint_have_the_ids(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with forward(tmp_path / "s") as store:
        emb = collection(store)
        run(emb, Known(1))
        store.checkpoint("one", keep=True)
        ids, rows = store.ids("item")
        values = store.gather_rows("item", rows)
        export_tables(store, tmp_path / "item.safetensors", "item")
        run(emb, Known(2))
        store.checkpoint("two")
    loaded = load_file(tmp_path / "item.safetensors")
    at, known = loaded["item.ids"].sort().indices, ids.sort().indices
    assert torch.equal(loaded["item.ids"][at], ids[known])
    assert torch.equal(loaded["item.weight"][at], values[known])
    kept = {"dram_budget": BUDGET, "checkpoint": "one"}
    with tb.Store.open(tmp_path / "s", read_only=True, **kept) as store:
        assert torch.equal(store.ids("item")[0].sort().values, ids.sort().values)
        assert torch.equal(store.gather_rows("item", store.translate("item", ids)), values)
    with tb.Store.open(tmp_path / "s", dram_budget=BUDGET, read_only=True) as store:
        assert len(store.ids("item")[0]) > len(ids)
    with forward(tmp_path / "s", checkpoint="one") as store:
        assert torch.equal(store.gather_rows("item", store.translate("item", ids)), values)


KILLED = """
import os
import sys
sys.path.insert(0, {here!r})
from test_open_forward import *
from pathlib import Path
store = forward(Path({path!r}))
emb = collection(store)
step_number = 0
for epoch in range(3):
    loader = Known(epoch, start=0)
    for batch in tb.lookahead(loader, emb, window=5, key=lambda batch: batch):
        step(emb, batch)
        step_number += 1
        if step_number == {dies_at}:
            os.kill(os.getpid(), signal.SIGKILL)
    store.checkpoint("epoch " + str(epoch))
"""


@pytest.mark.parametrize("dies_at", [3, BATCHES + 2, 2 * BATCHES + 1])
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection, dies_at: int
) -> None:
    path = tmp_path / "s"
    text = KILLED.format(here=str(Path(__file__).parent), path=str(path), dies_at=dies_at)
    ended = subprocess.run([sys.executable, "-c", text], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    with forward(path) as store:
        emb = collection(store)
        last = store.last_checkpoint()
        done = 0 if last is None else int(last[1].split()[1]) + 1
        assert done == dies_at // BATCHES
        for epoch in range(done, 3):
            run(emb, Known(epoch))
            store.checkpoint(f"epoch {epoch}")
        for epoch in range(3):
            run(oracle, list(Known(epoch)))
        assert_same_rows(store, oracle.store)


def test_a_missing_index_is_told(tmp_path: Path) -> None:
    with forward(tmp_path / "s") as store:
        run(collection(store), Known())
        store.checkpoint("one")
    pointer = tmp_path / "s" / "vocabulary.CURRENT"
    pointer.rename(tmp_path / "away")
    with pytest.raises(tb.CorruptionError, match="names begin with vocabulary"):
        forward(tmp_path / "s")
    (tmp_path / "away").rename(pointer)
    with forward(tmp_path / "s") as store:
        assert store.vocabularies()["item"]["id_count"] > 0


def test_a_damaged_plan_is_made_again_with_the_same_rows(
    tmp_path: Path, oracle: tb.EmbeddingBagCollection
) -> None:
    expected = run(oracle, list(Known()))
    found = ten_steps(tmp_path / "s")
    plan = next(iter((tmp_path / "s").glob("order-*.plan")))
    bytes_ = bytearray(plan.read_bytes())
    for at in range(4096, len(bytes_), 4096):
        bytes_[at + 100] ^= 1
    plan.write_bytes(bytes_)
    with forward(tmp_path / "s") as store:
        emb = collection(store)
        found += run(emb, Known(start=10))
        assert_same(found, expected)
        assert_same_rows(store, oracle.store)
