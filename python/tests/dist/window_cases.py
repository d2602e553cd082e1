"""Windows on a device that is interpreted: rows, losses and weights have the bits of the host."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_cases import fork, run_cases
from streams_kit import Broken, SimulatedStreams

import tierbed as tb
from tierbed.data import BatchOrder
from tierbed.ops.links import Link
from tierbed.ops.windows import device as windows
from tierbed.testing import random_bags

DEVICE = "cuda" if len(sys.argv) > 2 and sys.argv[2] == "cuda" else "cpu"
ROWS, DIMS, BATCH, BATCHES = {"a": 60, "b": 40, "c": 30}, {"a": 8, "b": 5, "c": 8}, 5, 5
FEATURES = {"a": 60, "a2": 60, "b": 40, "c": 30}
EPOCHS = 2


def tables(**pooling: str) -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIMS[name],
            feature_names=["a", "a2"] if name == "a" else [name],
            pooling=pooling.get(name, "sum"),
        )
        for name in ROWS
    ]


class Known:
    """Batches that tell their order."""

    def __init__(self, is_weighted: bool = False) -> None:
        self._is_weighted = is_weighted

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        for seed in range(BATCHES):
            yield random_bags(FEATURES, BATCH, seed=seed, is_weighted=self._is_weighted)

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return itertools.chain.from_iterable(self.epoch() for _ in range(EPOCHS))

    def known_order(self) -> BatchOrder:
        return BatchOrder("known", self.epoch, 0, BATCHES)


class Training:
    """A collection in forward order, and a dense part whose gradients need each other's steps."""

    def __init__(self, folder: str, device: str | None, **options: Any) -> None:
        torch.manual_seed(3)
        store_options = options.pop("store", {})
        self.is_weighted = options.get("is_weighted", False)
        self.store = tb.Store.open(
            folder, seed=1, dram_budget="8MiB", order="forward", device=device, **store_options
        )
        options.setdefault("optimizer", tb.RowWiseAdagrad(lr=0.1))
        configs = options.pop("tables", None) or tables(b="mean")
        self.emb = tb.EmbeddingBagCollection(configs, store=self.store, **options)
        self.dense = torch.nn.Linear(3 * DIMS["a"] + DIMS["b"], 1).to(self.emb.device)
        self.optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.05)

    def batches(self, window: int = 3) -> Iterator[tb.KeyedJaggedTensor]:
        known = Known(self.is_weighted)
        yield from tb.lookahead(known, self.emb, window=window, key=lambda bags: bags)

    def loss(self, bags: tb.KeyedJaggedTensor) -> torch.Tensor:
        scores: torch.Tensor = self.dense(self.emb(bags).values())
        return (scores.squeeze(1) - 1.0).square().mean()

    def step(self, bags: tb.KeyedJaggedTensor) -> torch.Tensor:
        loss = self.loss(bags)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach().cpu()

    def step_all(self, batches: Any) -> list[torch.Tensor]:
        return [self.step(bags) for bags in batches]

    def rows(self) -> list[torch.Tensor]:
        read = self.store.read_rows_and_state
        parts = [part for name, rows in ROWS.items() for part in read(name, 0, rows)]
        counts = [self.store.use_counts(name, 0, rows) for name, rows in ROWS.items()]
        return [*parts, *counts]


def both(run: Any) -> None:
    """Checks that ``run(folder, device)`` gives the same bits on the host and on the device."""
    with tempfile.TemporaryDirectory() as folder:
        host = run(f"{folder}/host", None)
        device = run(f"{folder}/device", DEVICE)
    assert len(host) == len(device) > 0
    for at, pair in enumerate(zip(host, device, strict=True)):
        assert torch.equal(*(tensor.cpu() for tensor in pair)), (at, pair)


def steps_on_device(training: Training) -> int:
    serving = training.emb._binding.windows
    return 0 if serving is None else serving.begun_count


def bits() -> None:
    """Every optimizer that the kernels know, weights, decay, and rates that change."""
    for optimizer, is_weighted in [
        (tb.RowWiseAdagrad(lr=0.1, weight_decay=0.01), True),
        (tb.Adagrad(lr=0.1), False),
        (tb.SGD(lr=0.1), True),
    ]:

        def run(
            folder: str,
            device: str | None,
            optimizer: Any = optimizer,
            is_weighted: bool = is_weighted,
        ) -> list[torch.Tensor]:
            training = Training(folder, device, optimizer=optimizer, is_weighted=is_weighted)
            told = []
            for at, bags in enumerate(training.batches()):
                if is_weighted:
                    bags.weights_or_none().requires_grad_()
                told.append(training.step(bags))
                if is_weighted:
                    told.append(bags.weights_or_none().grad)
                if at == 3:
                    training.store.set_learning_rate(0.05, ["b"])
                if at == 5:
                    told += training.rows()
            assert training.store.order()["kind"] == "forward"
            windows_begun = training.store.stats()["store"]["window_count"]
            assert windows_begun >= 3
            if device is not None:
                assert steps_on_device(training) >= windows_begun, "rows were on the host"
            told += training.rows()
            # Rows that a device steps are counted when they come back.
            told.append(torch.tensor(training.store.stats()["store"]["row_update_count"]))
            return told

        both(run)


def default_dtype() -> None:
    """Rows, counts and gradients of weights have 32 bits, whatever torch makes by default."""

    def run(folder: str, device: str | None) -> list[torch.Tensor]:
        torch.set_default_dtype(torch.float64)
        try:
            training = Training(folder, device, is_weighted=True)
            training.dense.float()
            told = []
            for planned in training.batches():
                weights = planned.weights_or_none().float().requires_grad_()
                ids, lengths = planned.values(), planned.lengths()
                bags = tb.KeyedJaggedTensor(
                    planned.keys(), ids, weights, lengths=lengths, stride=BATCH
                )
                told += [training.step(bags), weights.grad]
            return [*told, *training.rows()]
        finally:
            torch.set_default_dtype(torch.float32)

    both(run)


def restarts() -> None:
    """A checkpoint in the middle of a window; the store goes on here or there."""
    for first, second in itertools.product([None, DEVICE], repeat=2):
        if first == second is None:
            continue

        def run(
            folder: str, device: str | None, first: Any = first, second: Any = second
        ) -> list[torch.Tensor]:
            places = (first, second) if device is not None else (None, None)
            training = Training(folder, places[0])
            told = []
            for bags in itertools.islice(training.batches(), 4):
                told.append(training.step(bags))
                if len(told) == 2:
                    training.store.checkpoint("two", extra={"dense": training.dense.state_dict()})
            training.store.close()
            training = Training(folder, places[1])
            extra = training.store.load_extra()
            training.dense.load_state_dict(extra["dense"])
            start = training.store.order()["batch"]
            known = Known()
            ahead = tb.lookahead(known, training.emb, window=3, key=lambda bags: bags, start=start)
            told += training.step_all(ahead)
            return [*told, *training.rows()]

        both(run)


def sequences() -> None:
    """Ids without bags, of tables that are stepped alike and that are not."""
    for kind in (tb.Adagrad(lr=0.1), tb.RowWiseAdagrad(lr=0.1)):

        def run(folder: str, device: str | None, kind: Any = kind) -> list[torch.Tensor]:
            store = tb.Store.open(
                folder, seed=1, dram_budget="8MiB", order="forward", device=device
            )
            configs = [
                tb.EmbeddingConfig(ROWS[name], 8, name, feature_names=features)
                for name, features in [("a", ["a", "a2"]), ("c", ["c"])]
            ]
            emb = tb.EmbeddingCollection(configs, store=store, optimizer=kind)
            picked = [bags.select(["a", "a2", "c"]) for bags in Known().epoch()]
            order = BatchOrder("picked", lambda: iter(picked), 0, len(picked))
            told = []
            for at, bags in enumerate(tb.lookahead(Ordered(picked, order), emb, window=3)):
                found = emb(bags)
                values = torch.cat([found[name].values() for name in ("a", "a2", "c")])
                told.append(values.detach())
                values.square().sum().backward()
                if at == 4:
                    store.set_learning_rate(0.03, ["c"])
            return [*told, *(store.read_rows(name, 0, ROWS[name]) for name in ("a", "c"))]

        both(run)


class Ordered:
    """Two epochs of batches in a list."""

    def __init__(self, batches: list[tb.KeyedJaggedTensor], order: BatchOrder) -> None:
        self._batches, self._order = batches, order

    def __iter__(self) -> Iterator[Any]:
        for _ in range(EPOCHS):
            yield from self._batches

    def known_order(self) -> BatchOrder:
        return self._order


def evaluation() -> None:
    """Lookups that are not stepped, planned and not, between those that are."""

    def run(folder: str, device: str | None) -> list[torch.Tensor]:
        training = Training(folder, device)
        told = []
        for at, bags in enumerate(training.batches()):
            with torch.no_grad():
                # The planned batch; then one that is not, whose rows come from everywhere.
                told.append(training.emb(bags).values())
                if at % 4 == 1:
                    other = random_bags(FEATURES, 3, seed=90 + at)
                    training.emb.eval()
                    told.append(training.emb(other).values())
                    training.emb.train()
            if at % 3 != 2:
                told.append(training.step(bags))
        return [*told, *training.rows()]

    both(run)


def other_steps() -> None:
    """Collected gradients are stepped by the host; those of a compiled model are not."""
    for kind in ("row_optimizer", "compiled"):

        def run(folder: str, device: str | None, kind: str = kind) -> list[torch.Tensor]:
            training = Training(folder, device)
            optimizer = tb.RowOptimizer(training.store) if kind == "row_optimizer" else None
            look_up = training.emb
            if kind == "compiled":
                look_up = torch.compile(training.emb, backend="aot_eager")
            told = []
            for bags in training.batches():
                values = look_up(bags).values()
                loss = training.dense(values).square().mean()
                loss.backward()
                told.append(loss.detach())
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
            return [*told, *training.rows()]

        both(run)


def infinite(training: Training) -> Iterator[tb.KeyedJaggedTensor]:
    """Makes a step, then one of a gradient with inf; returns the batches after them."""
    batches = training.batches(window=2)
    training.step(next(batches))
    before = training.rows()
    (training.emb(next(batches)).values() * torch.inf).sum().backward()
    if training.emb._binding.guard.skips_nonfinite:
        after = training.rows()
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return batches


def nonfinite() -> None:
    """A gradient with inf steps nothing; it is told, or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(folder, DEVICE)
        batches = infinite(training)
        with pytest.raises(tb.TierbedError, match="not finite"):
            training.step_all(batches)
        training.store.close()
        # The last checkpoint is the beginning.
        training = Training(folder, DEVICE, on_nonfinite="skip")
        infinite(training)
        assert training.emb.skipped_steps == 1
    with tempfile.TemporaryDirectory() as folder:
        training = Training(folder, DEVICE, on_nonfinite="skip")
        batches = infinite(training)
        assert training.emb.skipped_steps == 1
        losses = training.step_all(batches)
        assert len(losses) == EPOCHS * BATCHES - 2
        assert all(loss.isfinite() for loss in losses)


def late_copies() -> None:
    """Copies that run late and in odd orders; without their order, rows are not the same."""

    def run(folder: str, device: str | None) -> list[torch.Tensor]:
        training = Training(folder, device)
        told = [*training.step_all(training.batches()), *training.rows()]
        training.store.close()
        return told

    def check(seed: int, broken: Broken) -> None:
        streams = SimulatedStreams(seed, broken=broken)
        windows.link_of = lambda _device: Link(streams)
        both(run)
        assert streams.copies > 40
        assert not streams.registered, "memory that was freed is registered"

    for seed in range(2):
        check(seed, None)
    # Kernels that are launched too early read places that are none.
    child = fork(lambda: check(0, "wait"))
    assert os.waitpid(child, 0)[1] != 0, "copies need no order"


def refusals() -> None:
    """What does not fit, or cannot be, is told with its remedy."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(f"{folder}/small", DEVICE, store={"hbm_budget": "1MiB"})
        with pytest.raises(tb.InvalidError, match="hbm_budget"):
            next(training.batches())
        training.store.close()
        training = Training(f"{folder}/small", DEVICE, store={"hbm_budget": "256MiB"})
        training.step(next(training.batches()))
        with pytest.raises(tb.UnsupportedError, match="one shard"):
            tb.Store.open(f"{folder}/two", device=DEVICE, shards=2)
        with pytest.raises(tb.UnsupportedError, match="leave storage_thread out"):
            tb.Store.open(f"{folder}/two", device=DEVICE, storage_thread=True)
        tb.Store.open(f"{folder}/two", device=DEVICE, shards=1).close()
        with pytest.raises(tb.InvalidError, match="give device"):
            tb.Store.open(f"{folder}/none", hbm_budget="1GiB")
        tb.Store.open(f"{folder}/none", hbm_budget="1GiB", device=DEVICE).close()


def failed_launch() -> None:
    """A step that the engine has counted and the device has not made is in no checkpoint."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory left on the device")

    with tempfile.TemporaryDirectory() as folder:
        training = Training(folder, DEVICE)
        batches = training.batches()
        training.step(next(batches))
        training.store.checkpoint("one")
        before = training.rows()
        launches = training.emb._binding._batches_of_windows
        launches._allow = fail
        with pytest.raises(RuntimeError, match="no memory left"):
            training.step(next(batches))
        for call in (lambda: training.store.checkpoint("two"), training.rows):
            with pytest.raises(tb.TierbedError, match="a step on the device failed"):
                call()
        training.store.close()
        training = Training(folder, DEVICE)
        assert training.store.last_checkpoint() == (1, "one")
        after = training.rows()
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def host_only() -> None:
    """An optimizer that the kernels do not know, and batches that leave the plan."""

    def run(folder: str, device: str | None) -> list[torch.Tensor]:
        training = Training(folder, device, optimizer=tb.Adam(lr=0.01))
        told = training.step_all(training.batches())
        return [*told, *training.rows()]

    both(run)

    def leave(folder: str, device: str | None) -> list[torch.Tensor]:
        training = Training(folder, device, store={"on_mismatch": "fallback"})
        batches = training.batches()
        told = [training.step(next(batches)) for _ in range(4)]
        told += [training.step(random_bags(FEATURES, BATCH, seed=50 + at)) for at in range(4)]
        assert training.store.order()["kind"] == "window"
        return [*told, *training.rows()]

    both(leave)


def moved_plans() -> None:
    """Another order of batches gets a plan of its own; rows move to it."""

    def run(folder: str, device: str | None) -> list[torch.Tensor]:
        training = Training(folder, device)
        told = training.step_all(training.batches())
        training.store.checkpoint("first")
        picked = list(reversed([*Known().epoch()]))
        order = BatchOrder("reversed", lambda: iter(picked), 0, len(picked))
        ahead = tb.lookahead(Ordered(picked, order), training.emb, window=2, key=lambda bags: bags)
        told += training.step_all(ahead)
        assert training.store.order()["kind"] == "forward"
        return [*told, *training.rows()]

    both(run)


if __name__ == "__main__":
    run_cases(sys.argv[1], globals())
