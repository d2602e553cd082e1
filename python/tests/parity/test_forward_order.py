"""Training along a plan gives the bits of training in memory, whatever else is asked meanwhile."""

from __future__ import annotations

import filecmp
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tierbed as tb
from tierbed.data import BatchOrder
from tierbed.testing import random_bags

OPTIMIZERS = {
    "sgd": tb.SGD(lr=0.05),
    "adagrad": tb.Adagrad(lr=0.05),
    "row_wise_adagrad": tb.RowWiseAdagrad(lr=0.05),
    "adam": tb.Adam(lr=0.01, weight_decay=0.01),
    "partial_row_wise_adam": tb.PartialRowWiseAdam(lr=0.01),
}
# Every width the papers use and the odd ones; two features share a table, one is a mean.
DIMS = {"a": 9, "b": 36, "c": 1, "d": 100, "e": 18, "f": 64}
ROWS = {"a": 6000, "b": 2500, "c": 97, "d": 800, "e": 4000, "f": 300}
FEATURES = {**ROWS, "a2": ROWS["a"]}
BATCHES, BATCH = 24, 16
BUDGET = "4MiB"

OpenStore = Callable[..., tb.Store]


def tables() -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=dim,
            pooling="mean" if name in ("b", "e") else "sum",
            feature_names=["a", "a2"] if name == "a" else [name],
        )
        for name, dim in DIMS.items()
    ]


class Known:
    """A loader that tells its order: seeded batches, from batch ``start`` on, for ``epochs``."""

    def __init__(self, seed: int = 0, start: int = 0, epochs: int = 1) -> None:
        self.seed, self.start, self.epochs = seed, start, epochs

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        for at in range(BATCHES):
            yield random_bags(FEATURES, BATCH, seed=1000 * self.seed + at, is_weighted=True)

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        for epoch in range(self.epochs):
            for at, batch in enumerate(self.epoch()):
                if epoch or at >= self.start:
                    yield batch

    def known_order(self) -> BatchOrder:
        return BatchOrder(f"known {self.seed}", self.epoch, self.start, BATCHES)


def itself(batch: Any) -> Any:
    return batch


class Training:
    """A small model whose loss needs every feature, every weight and the dense part."""

    def __init__(self, store: tb.Store, optimizer: Any) -> None:
        torch.manual_seed(3)
        self.store = store
        self.emb = tb.EmbeddingBagCollection(
            tables(), store=store, optimizer=optimizer, is_weighted=True
        )
        self.dense = torch.nn.Linear(sum(DIMS.values()) + DIMS["a"], 1)
        self.dense_optimizer = torch.optim.Adam(self.dense.parameters(), lr=0.01)

    def step(self, batch: tb.KeyedJaggedTensor) -> torch.Tensor:
        weights = batch.weights_or_none()
        assert weights is not None
        weights = weights.detach().requires_grad_()
        bags = tb.KeyedJaggedTensor(
            batch.keys(), batch.values(), weights, lengths=batch.lengths(), stride=batch.stride()
        )
        pooled = self.emb(bags).values()
        loss = (self.dense(pooled).squeeze(1) - 1.0).square().mean()
        self.dense_optimizer.zero_grad()
        loss.backward()
        self.dense_optimizer.step()
        assert weights.grad is not None
        return torch.cat([pooled.detach().flatten(), weights.grad])

    def run(self, loader: Any, window: int = 8, **options: Any) -> list[torch.Tensor]:
        batches = tb.lookahead(loader, self.emb, window=window, key=itself, **options)
        return [self.step(batch) for batch in batches]

    def save(self, name: str = "saved") -> None:
        extra = {"d": self.dense.state_dict(), "o": self.dense_optimizer.state_dict()}
        self.store.checkpoint(name, extra=extra)

    def load(self) -> None:
        extra = self.store.load_extra()
        assert extra is not None
        self.dense.load_state_dict(extra["d"])
        self.dense_optimizer.load_state_dict(extra["o"])


def assert_same_rows(one: tb.Store, other: tb.Store) -> None:
    for name, rows in ROWS.items():
        ours, theirs = (store.read_rows_and_state(name, 0, rows) for store in (one, other))
        assert torch.equal(ours[0], theirs[0]), f"rows of {name}"
        assert torch.equal(ours[1], theirs[1]), f"state of {name}"
        uses = one.use_counts(name, 0, rows)
        assert torch.equal(uses, other.use_counts(name, 0, rows)), f"uses of {name}"


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for step, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(ours, theirs), f"outputs of step {step}"


def memory_training(open_store: OpenStore, kind: str = "adagrad") -> Training:
    return Training(open_store("memory", seed=5), OPTIMIZERS[kind])


def forward_training(open_store: OpenStore, kind: str = "adagrad", **options: Any) -> Training:
    options = {"dram_budget": BUDGET, "order": "forward", "seed": 5, **options}
    return Training(open_store(None, **options), OPTIMIZERS[kind])


@pytest.fixture(params=[False, True], ids=["one_thread", "storage_thread"])
def threads(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Options of a store: who moves its rows."""
    return {"storage_thread": request.param}


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("sgd", 1),
        ("adagrad", 3),
        ("row_wise_adagrad", 16),
        ("adam", 512),
        ("partial_row_wise_adam", 7),
    ],
)
def test_two_epochs_give_the_bits_of_memory(
    open_store: OpenStore, threads: dict[str, bool], kind: str, window: int
) -> None:
    ours, theirs = forward_training(open_store, kind, **threads), memory_training(open_store, kind)
    assert_same(ours.run(Known(epochs=2), window=window), theirs.run(Known(epochs=2), window=0))
    assert_same_rows(ours.store, theirs.store)
    order = ours.store.order()
    assert (order["kind"], order["epoch"], order["batch"]) == ("forward", 2, 0)
    budget = ours.store.stats()["budget"]
    assert budget["peak_bytes"] <= budget["limit_bytes"] == 4 << 20
    assert ("storage thread" in budget["parts"]) == threads["storage_thread"]


def test_one_processor_and_little_memory_have_no_storage_thread(open_store: OpenStore) -> None:
    def has_thread(budget: str) -> bool:
        training = forward_training(open_store, dram_budget=budget, name=f"store-{budget}")
        training.run(Known(), window=4)
        return "storage thread" in training.store.stats()["budget"]["parts"]

    assert not has_thread("15MiB")
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        assert not has_thread("16MiB")
    finally:
        os.sched_setaffinity(0, processors)


def test_one_lookahead_serves_several_epochs(open_store: OpenStore) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    ahead = tb.lookahead(Known(), ours.emb, window=4, key=itself)
    found = [ours.step(batch) for _ in range(3) for batch in ahead]
    assert_same(found, theirs.run(Known(epochs=3), window=0))
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.order()["epoch"] == 3


def test_the_least_budget_that_is_named_is_enough(open_store: OpenStore) -> None:
    theirs = memory_training(open_store)
    wanted = theirs.run(Known(epochs=2))
    least, found, attempts = 600 << 10, None, 0
    while found is None and attempts < 8:
        attempts += 1
        ours = forward_training(open_store, dram_budget=least, name=f"least-{attempts}")
        try:
            found = ours.run(Known(epochs=2), window=1)
        except tb.InvalidError as refused:
            # Each refusal names the least for the parts known by then, so following them ends.
            least = int(refused.context["minimum_bytes"])
    assert found is not None
    assert_same(found, wanted)
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.stats()["store"]["rows_flushed"] > 0, "the budget was never tight"


def test_restarts_in_the_middle_of_an_epoch(
    open_store: OpenStore, threads: dict[str, bool]
) -> None:
    theirs = memory_training(open_store, "adam")
    wanted = theirs.run(Known())
    ours = forward_training(open_store, "adam", **threads)
    outputs: list[torch.Tensor] = []
    for stop in (5, 11, BATCHES):
        if outputs:
            ours = forward_training(open_store, "adam", **threads)
            ours.load()
        done = len(outputs)
        for batch in tb.lookahead(Known(start=done), ours.emb, window=4, key=itself):
            outputs.append(ours.step(batch))
            if len(outputs) == stop:
                ours.save()
            if len(outputs) == min(stop + 2, BATCHES):
                break  # steps behind the checkpoint are lost, as if the process had died
        del outputs[stop:]
        if stop < BATCHES:
            ours.store.close()
    assert_same(outputs, wanted)
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.last_checkpoint() == (3, "saved")


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import tierbed as tb
from test_forward_order import *

store = tb.Store.open({path!r}, dram_budget=BUDGET, order="forward", seed=5)
training = Training(store, OPTIMIZERS["adagrad"])
done = 0
if store.last_checkpoint():
    training.load()
    done = store.order()["batch"]
for batch in tb.lookahead(Known(start=done), training.emb, window=4, key=itself):
    training.step(batch)
    done += 1
    if done % 3 == 0:
        training.save()
        print("saved", done, flush=True)
"""


def test_killed_processes_resume_with_the_same_bits(open_store: OpenStore, tmp_path: Path) -> None:
    code = CHILD.format(tests=str(Path(__file__).parent), path=str(tmp_path / "store"))
    for saves in (1, 3):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(saves):
                assert child.stdout.readline().startswith("saved")
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
    resumed = forward_training(open_store)
    resumed.load()
    done = resumed.store.order()["batch"]
    assert done >= 12
    resumed.run(Known(start=done), window=4)
    theirs = memory_training(open_store)
    theirs.run(Known())
    assert_same_rows(resumed.store, theirs.store)


# ---------------------------------------------------------------- what is not planned


def test_a_batch_that_is_not_planned_is_refused_and_changes_nothing(
    open_store: OpenStore,
) -> None:
    ours = forward_training(open_store)
    batches = tb.lookahead(Known(), ours.emb, window=4, key=itself)
    ours.step(next(batches))
    other = random_bags(FEATURES, BATCH, seed=77, is_weighted=True)
    before = ours.store.read_rows("a", 0, ROWS["a"])
    with pytest.raises(tb.InvalidError, match="not the planned one") as refused:
        ours.step(other)
    assert refused.value.context["epoch"] == "0"
    assert refused.value.context["batch"] == "1"
    assert "remedy" in refused.value.context
    assert torch.equal(ours.store.read_rows("a", 0, ROWS["a"]), before)
    for batch in batches:
        ours.step(batch)
    theirs = memory_training(open_store)
    theirs.run(Known())
    assert_same_rows(ours.store, theirs.store)


@pytest.mark.parametrize("on_mismatch", ["fallback", "fallback_cold"])
def test_fallback_moves_all_rows_once_and_goes_on_with_the_same_bits(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, on_mismatch: str
) -> None:
    options = {"order": "auto", "on_mismatch": on_mismatch}
    ours = forward_training(open_store, "adam", **options)
    theirs = memory_training(open_store, "adam")
    other = random_bags(FEATURES, BATCH, seed=77, is_weighted=True)

    def run(training: Training) -> Iterator[torch.Tensor]:
        for at, batch in enumerate(tb.lookahead(Known(), training.emb, window=4, key=itself)):
            yield training.step(batch)
            if at == 6:
                training.save("before")
            if at == 9:
                yield training.step(other)

    assert_same(list(run(ours)), list(run(theirs)))
    order = ours.store.order()
    assert (order["kind"], order["fallback_count"]) == ("window", 1)
    assert "not the planned one" in order["reason"]
    assert order["rows_moved"] > 0
    assert "left the forward order" in caplog.text
    assert ours.store.last_checkpoint() == (1, "before")
    assert ours.store.load_extra() is not None
    assert_same_rows(ours.store, theirs.store)
    # Not checkpointed since: a new process stands at the checkpoint along the plan.
    ours.store.close()
    again = forward_training(open_store, "adam", **options)
    assert again.store.order()["kind"] == "forward"
    again.load()
    again.run(Known(start=7))
    # Now the move is checkpointed.
    again.step(other)
    again.save("moved")
    whole = again.store.read_rows("d", 0, ROWS["d"])
    again.store.close()
    moved = forward_training(open_store, "adam", **options)
    assert moved.store.order()["kind"] == "window"
    last = moved.store.last_checkpoint()
    assert last is not None
    assert last[1] == "moved"
    assert torch.equal(moved.store.read_rows("d", 0, ROWS["d"]), whole)
    manifests = list(Path(str(moved.store.path), "window").glob("commit-*.manifest"))
    backend = b'"cold"' if on_mismatch == "fallback_cold" else b'"file"'
    assert manifests
    assert all(backend in manifest.read_bytes() for manifest in manifests)


def test_a_start_where_the_store_does_not_stand_is_refused(open_store: OpenStore) -> None:
    ours = forward_training(open_store)
    for at, batch in enumerate(tb.lookahead(Known(), ours.emb, window=4, key=itself)):
        ours.step(batch)
        if at == 4:
            break
    with pytest.raises(tb.InvalidError, match="batch 5 of epoch 0"):
        ours.run(Known(), start=6)
    rest = ours.run(Known(), start=5)
    assert len(rest) == BATCHES - 5
    theirs = memory_training(open_store)
    theirs.run(Known())
    assert_same_rows(ours.store, theirs.store)


def test_another_order_follows_a_checkpoint(open_store: OpenStore) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    ours.run(Known())
    theirs.run(Known())
    with pytest.raises(tb.InvalidError, match="checkpoint"):
        ours.run(Known(seed=1))
    ours.save("first")
    assert_same(ours.run(Known(seed=1)), theirs.run(Known(seed=1)))
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.order()["replan_count"] == 1
    ours.save("second")
    ours.store.close()
    again = forward_training(open_store)
    assert_same_rows(again.store, theirs.store)
    assert len(list(Path(again.store.path or "").glob("*.plan"))) == 1, "old plans are removed"


def test_unplanned_and_planned_evaluation(open_store: OpenStore) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    held_out = [random_bags(FEATURES, BATCH, seed=500 + at, is_weighted=True) for at in range(5)]
    for training in (ours, theirs):
        seen = []
        for at, batch in enumerate(tb.lookahead(Known(), training.emb, window=4, key=itself)):
            if at % 5 == 2:
                # Planned, looked at and not trained on.
                with torch.no_grad():
                    seen.append(training.emb(batch).values())
                continue
            training.step(batch)
            if at == 9:
                training.emb.eval()
                for unplanned in tb.lookahead(held_out, training.emb, window=2, key=itself):
                    seen.append(training.emb(unplanned).values().detach())
                seen.append(training.emb(held_out[0]).values().detach())
                training.emb.train()
        if training is ours:
            ours_seen = seen
    assert_same(ours_seen, seen)
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.order()["unplanned_scan_count"] >= 3


def test_an_unplanned_batch_larger_than_the_memory_aside_is_looked_up_by_halves(
    open_store: OpenStore,
) -> None:
    # An evaluation batch of a real log did not fit the twelfth of 16 MiB, and was refused.
    ours, theirs = forward_training(open_store), memory_training(open_store)
    large = random_bags(FEATURES, 4000, seed=900, is_weighted=True)
    seen = []
    for training in (ours, theirs):
        training.run(Known())
        training.emb.eval()
        seen.append([training.emb(large).values().detach()])
    assert ours.store.order()["unplanned_scan_count"] > 1
    assert_same(*seen)


def test_publishing_gives_the_same_bytes(open_store: OpenStore, tmp_path: Path) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    ours.run(Known(epochs=2))
    theirs.run(Known(epochs=2))
    for training, name in ((ours, "ours"), (theirs, "theirs")):
        training.store.publish(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    same, different, broken = filecmp.cmpfiles(
        tmp_path / "ours", tmp_path / "theirs", names, shallow=False
    )
    assert sorted(same) == names
    assert different == broken == []


def test_rows_by_number_and_scan_agree_with_memory(open_store: OpenStore) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    for training in (ours, theirs):
        training.run(Known())
    for name, rows in ROWS.items():
        first, count = rows // 3, min(40, rows // 2)
        assert torch.equal(
            ours.store.read_rows(name, first, count), theirs.store.read_rows(name, first, count)
        )
        some = torch.tensor([0, rows - 1, rows // 2, 0])
        assert torch.equal(ours.store.gather_rows(name, some), theirs.store.gather_rows(name, some))
        for store in (ours.store, theirs.store):
            with pytest.raises(tb.InvalidError):
                store.read_rows(name, rows - 1, 2)
            with pytest.raises(tb.InvalidError):
                store.gather_rows(name, torch.tensor([rows]))

    def scanned(store: tb.Store) -> dict[tuple[str, int], tuple[list[float], list[float], int]]:
        found = {}

        def visit(
            name: str, rows: torch.Tensor, weights: torch.Tensor, state: torch.Tensor, n: Any
        ) -> None:
            parts = zip(rows.tolist(), weights.tolist(), state.tolist(), n.tolist(), strict=True)
            for row, own, own_state, uses in parts:
                assert (name, row) not in found, "a row was visited twice"
                found[name, row] = (own, own_state, uses)

        store.scan(visit, chunk_rows=100)
        return found

    assert scanned(ours.store) == scanned(theirs.store)
    with pytest.raises(tb.InvalidError, match="not written by number"):
        ours.store.write_rows("c", 0, torch.zeros(1, 1))
    with pytest.raises(tb.InvalidError, match="tables"):
        ours.store.add_table(
            tb.EmbeddingBagConfig(name="new", num_embeddings=3, embedding_dim=2), tb.SGD()
        )
    assert ours.store.verify() >= 0


# ---------------------------------------------------------------- loaders


class Clicks(Dataset[torch.Tensor]):
    """A map-style dataset of 200 samples."""

    def __init__(self, is_random: bool = False) -> None:
        self.is_random = is_random

    def __len__(self) -> int:
        return 200

    def __getitem__(self, at: int) -> torch.Tensor:
        drawn = torch.randint(0, 50, (len(FEATURES),)) if self.is_random else None
        made = (torch.arange(len(FEATURES)) + 1) * (at + 7) % 90
        return made if drawn is None else drawn


def collate(samples: list[torch.Tensor]) -> tb.KeyedJaggedTensor:
    values = torch.stack(samples).t().reshape(-1)
    return tb.KeyedJaggedTensor(
        list(FEATURES),
        values,
        torch.ones(values.numel()),
        lengths=torch.ones(values.numel(), dtype=torch.int64),
    )


def loader(seed: int | None = None, **options: Any) -> DataLoader[torch.Tensor]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    dataset = options.pop("dataset", Clicks())
    return DataLoader(dataset, 16, collate_fn=collate, generator=generator, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seeded_dataloader_is_followed(open_store: OpenStore, workers: int) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    mine = loader(7, shuffle=True, num_workers=workers)
    torch.manual_seed(4)
    found = ours.run(mine)
    drawn = torch.rand(3)
    torch.manual_seed(4)
    plain = loader(7, shuffle=True, num_workers=workers)
    assert_same(found, theirs.run(plain))
    assert torch.equal(torch.rand(3), drawn), "the pre-pass moved the global generator"
    # The next epoch is shuffled otherwise: another plan, behind a checkpoint.
    ours.save()
    assert_same(ours.run(mine), theirs.run(plain))
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.order()["replan_count"] == 1


def test_an_order_that_cannot_be_known_is_told(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = {
        "no seed": loader(shuffle=True),
        "does not tell": iter(list(Known())),
        "draws ids at random": loader(7, dataset=Clicks(is_random=True)),
        "IterableDataset": DataLoader(_Stream(), batch_size=None),
    }
    for number, (reason, given) in enumerate(unknown.items()):
        caplog.clear()
        auto = forward_training(open_store, order="auto", name=f"auto-{number}")
        auto.run(given)
        order = auto.store.order()
        assert order["kind"] == "window"
        assert reason in order["reason"]
        assert caplog.text.count("not in forward order") == 1
        strict = forward_training(open_store, name=f"strict-{number}")
        with pytest.raises(tb.InvalidError, match=reason):
            strict.run(given)


class _Stream(torch.utils.data.IterableDataset[tb.KeyedJaggedTensor]):
    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return iter(Known())


def test_a_compiled_step_follows_the_plan(open_store: OpenStore) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)

    def outputs(training: Training) -> list[torch.Tensor]:
        @torch.compile(fullgraph=True, backend="aot_eager")
        def pooled(bags: tb.KeyedJaggedTensor) -> torch.Tensor:
            return training.emb(bags).values() * 2.0

        found = []
        for batch in tb.lookahead(Known(), training.emb, window=8, key=itself):
            out = pooled(batch)
            out.sum().backward()
            found.append(out.detach())
        return found

    assert_same(outputs(ours), outputs(theirs))
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.order()["kind"] == "forward"


class _Asked:
    """A native store that counts how often it is asked where training stands."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def position(self) -> tuple[int, int] | None:
        self.count += 1
        return self.native.position()


@pytest.mark.parametrize("shards", [None, 2])
def test_ids_are_checked_and_the_position_is_known_once_a_step(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, shards: int | None
) -> None:
    training = forward_training(open_store, dram_budget="24MiB", shards=shards)
    asked = _Asked(training.store.native)
    monkeypatch.setattr(training.store, "_native", asked)
    training.run(Known(epochs=1))
    ids = sum(batch.values().numel() for batch in Known())
    assert training.store.stats()["store"]["ids_checked"] == ids
    assert asked.count <= 2, "once as the epoch begins, and once for the scans"
    assert training.store.order()["epoch"] == 1


@pytest.mark.parametrize("answer", ["skip", "error"])
@pytest.mark.parametrize("shards", [None, 2])
def test_a_batch_whose_gradient_is_not_finite_is_refused_or_passed(
    open_store: OpenStore, shards: int | None, answer: str
) -> None:
    memory = open_store("memory", seed=5)
    forward = open_store(None, dram_budget="24MiB", order="forward", seed=5, shards=shards)
    outputs = []
    for store in (memory, forward):
        emb = tb.EmbeddingBagCollection(
            tables(), store=store, optimizer=tb.Adagrad(lr=0.05), on_nonfinite=answer
        )
        for at, batch in enumerate(tb.lookahead(Known(), emb, window=4, key=itself)):
            pooled = emb(batch).values()
            outputs.append(pooled.detach().clone())
            grad = torch.ones_like(pooled)
            if at != 3:
                pooled.backward(grad)
                continue
            # In the columns of one table alone: other shards would step theirs.
            grad[0, -1] = float("nan")
            if answer == "skip":
                pooled.backward(grad)
            else:
                with pytest.raises(tb.InvalidError, match="no row was changed"):
                    pooled.backward(grad)
        assert emb.skipped_steps == (1 if answer == "skip" else 0)
        assert store.steps_done("f") == BATCHES - 1
    assert_same(outputs[:BATCHES], outputs[BATCHES:])
    assert_same_rows(forward, memory)
    assert forward.order()["kind"] == "forward"


def test_a_plan_that_is_refused_is_the_error_of_the_block(tmp_path: Path, caplog: Any) -> None:
    """The store cannot tell its last state then; that must not hide why."""
    tables = [tb.EmbeddingBagConfig(30_000, 8, "t")]

    def batches(rows: int) -> Any:
        ids = torch.arange(rows)
        batch = tb.KeyedJaggedTensor(["t"], ids, lengths=torch.ones(rows, dtype=torch.int64))

        class Batches:
            def __iter__(self) -> Any:
                return iter([batch] * 4)

            def known_order(self) -> tb.data.BatchOrder:
                return tb.data.BatchOrder(str(rows), lambda: iter(self), batch_count=4)

        return Batches()

    def run() -> None:
        with tb.Store.open(tmp_path / "store", dram_budget="2MiB", order="forward") as store:
            emb = tb.EmbeddingBagCollection(tables, store=store)
            for batch in tb.lookahead(batches(100), emb, key=itself):
                emb(batch).values().sum().backward()
            store.checkpoint("small")
            next(tb.lookahead(batches(30_000), emb, key=itself))

    with pytest.raises(tb.InvalidError, match="budget is too small"):
        run()
    assert "closing the store failed, too" in caplog.text
