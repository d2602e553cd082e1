"""Rows on the host and a dense part on a device train with the bits of both on the host.

No device is at hand here: its streams are simulated, and run copies late and in odd orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from streams_kit import SimulatedStreams
from torch._subclasses.fake_tensor import FakeTensorMode

import tierbed as tb
from tierbed.data import BatchOrder
from tierbed.errors import InvalidError
from tierbed.ops import binding
from tierbed.ops.links import Link
from tierbed.testing import random_bags

ROWS, DIMS, BATCH = {"a": 60, "b": 40}, {"a": 8, "b": 5}, 12
FEATURES = {"a": 60, "a2": 60, "b": 40}
STEPS = 12

OpenStore = Callable[..., tb.Store]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimulatedStreams:
    """Has every collection with ``device="cpu"`` copy by simulated streams."""
    simulated = SimulatedStreams(seed=5, delay_s=0.004)
    link = Link(simulated)
    monkeypatch.setattr(binding, "link_of", lambda device: link)
    return simulated


def tables(**more: Any) -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(
            name=name,
            num_embeddings=more.get("num_embeddings", ROWS[name]),
            embedding_dim=DIMS[name],
            feature_names=["a", "a2"] if name == "a" else ["b"],
            pooling="mean" if name == "b" else "sum",
        )
        for name in ROWS
    ]


def batch(seed: int, is_weighted: bool = False) -> tb.KeyedJaggedTensor:
    return random_bags(FEATURES, BATCH, seed=seed, is_weighted=is_weighted)


class Training:
    """A collection and a dense part whose gradients need each other's steps."""

    def __init__(self, store: tb.Store, device: str | None, **options: Any) -> None:
        torch.manual_seed(3)
        self.store = store
        options.setdefault("optimizer", tb.Adagrad(lr=0.1))
        configs = options.pop("tables", None) or tables()
        self.emb = tb.EmbeddingBagCollection(configs, store=store, device=device, **options)
        self.dense = torch.nn.Linear(2 * DIMS["a"] + DIMS["b"], 1)
        self.dense_optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.05)

    def loss(self, bags: tb.KeyedJaggedTensor) -> torch.Tensor:
        scores: torch.Tensor = self.dense(self.emb(bags).values())
        return (scores.squeeze(1) - 1.0).square().mean()

    def step(self, bags: tb.KeyedJaggedTensor) -> float:
        loss = self.loss(bags)
        self.dense_optimizer.zero_grad()
        loss.backward()
        self.dense_optimizer.step()
        return loss.item()

    def rows(self) -> list[torch.Tensor]:
        return [self.store.read_rows(name, 0, rows) for name, rows in ROWS.items()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_run_has_the_bits_of_the_host(
    open_store: OpenStore, streams: SimulatedStreams, is_weighted: bool
) -> None:
    def run(device: str | None) -> tuple[list[float], list[torch.Tensor]]:
        training = Training(open_store(seed=1), device, is_weighted=is_weighted)
        losses = [training.step(batch(seed, is_weighted)) for seed in range(STEPS)]
        return losses, training.rows()

    host, device = run(None), run("cpu")
    assert streams.copies == 2 * STEPS
    assert host[0] == device[0]
    assert_equal(host[1], device[1])


def test_gradients_of_weights_come_back_within_the_backward(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    def run(device: str | None) -> list[torch.Tensor]:
        training = Training(open_store(seed=1), device, is_weighted=True)
        grads = []
        for seed in range(STEPS):
            bags = batch(seed, is_weighted=True)
            bags.weights_or_none().requires_grad_()
            training.step(bags)
            grads.append(bags.weights_or_none().grad)
        return [*grads, *training.rows()]

    assert_equal(run(None), run("cpu"))
    assert streams.copies == 2 * STEPS


def test_sequences_have_the_bits_of_the_host(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    def run(device: str | None) -> list[torch.Tensor]:
        store = open_store(seed=1)
        config = tb.EmbeddingConfig(name="a", num_embeddings=60, embedding_dim=8)
        emb = tb.EmbeddingCollection([config], store=store, device=device)
        for seed in range(STEPS):
            emb(batch(seed).select(["a"]))["a"].values().square().sum().backward()
        return [store.read_rows("a", 0, 60)]

    assert_equal(run(None), run("cpu"))
    assert streams.copies == 2 * STEPS


@pytest.mark.parametrize("kind", ["frozen", "row_optimizer", "open"])
def test_other_ways_to_step_have_the_bits_of_the_host(
    open_store: OpenStore, streams: SimulatedStreams, kind: str
) -> None:
    def run(device: str | None) -> list[torch.Tensor]:
        store = open_store(seed=1)
        configs = tables(num_embeddings=None) if kind == "open" else None
        training = Training(store, device, tables=configs)
        optimizer = tb.RowOptimizer(store) if kind == "row_optimizer" else None
        if kind == "frozen":
            training.emb.requires_grad_(False, ["b"])
        for seed in range(STEPS):
            training.step(batch(seed))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        if kind != "open":
            return training.rows()
        return [part for name in ROWS for part in store.ids(name)] + [
            rows for _, _, rows in training.emb.iter_full_state()
        ]

    assert_equal(run(None), run("cpu"))


class Known:
    """Batches that tell their order."""

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (batch(seed) for seed in range(STEPS))

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return itertools.chain(self.epoch(), self.epoch())

    def known_order(self) -> BatchOrder:
        return BatchOrder("known", self.epoch, 0, STEPS)


def test_forward_order_has_the_bits_of_the_host(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    def run(device: str | None) -> list[torch.Tensor]:
        store = open_store(None, name=f"on-{device}", seed=1, order="forward")
        training = Training(store, device)
        loader = tb.lookahead(Known(), training.emb, window=4, key=lambda bags: bags)
        steps = [training.step(bags) for bags in loader]
        assert store.order()["kind"] == "forward"
        return [torch.tensor(steps), *training.rows()]

    assert_equal(run(None), run("cpu"))


def test_what_is_asked_behind_a_backward_sees_its_step(
    open_store: OpenStore, streams: SimulatedStreams, tmp_path: Path
) -> None:
    def run(device: str | None) -> list[torch.Tensor]:
        store = open_store("file", name=f"asked-{device}", seed=1)
        training = Training(store, device)
        found = []
        for seed in range(4):
            training.step(batch(seed))
            found.append(store.gather_rows("a", torch.arange(60)))
            training.step(batch(seed + 10))
            found.append(torch.tensor(store.steps_done("a")))
            training.step(batch(seed + 20))
            store.checkpoint(f"at-{seed}")
            training.step(batch(seed + 30))
            store.publish(tmp_path / f"{device}-{seed}")
            with tb.Snapshot.open(tmp_path / f"{device}-{seed}") as snapshot:
                found.append(snapshot.lookup(batch(1), tables=["a", "a", "b"]).values())
        training.step(batch(50))
        store.close()
        with tb.Store.open(tmp_path / f"asked-{device}", dram_budget="64MiB") as again:
            # Nothing behind the last checkpoint is kept.
            return [*found, *(again.read_rows(name, 0, rows) for name, rows in ROWS.items())]

    assert_equal(run(None), run("cpu"))


def test_a_program_may_write_its_ids_again_behind_the_backward(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    def run(device: str | None) -> list[torch.Tensor]:
        training = Training(open_store(seed=1), device)
        for seed in range(STEPS):
            bags = batch(seed)
            training.step(bags)
            bags.values().zero_()
            bags.offsets().zero_()
        return training.rows()

    assert_equal(run(None), run("cpu"))


def backward_of_inf(training: Training, seed: int = 0) -> None:
    (training.emb(batch(seed)).values() * torch.inf).sum().backward()


def test_the_next_call_raises_why_a_step_failed(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    training = Training(open_store(seed=1), "cpu")
    before = training.rows()
    backward_of_inf(training)
    with pytest.raises(InvalidError, match="inf"):
        training.store.stats()
    # It is told once, no row was changed, and training goes on.
    assert_equal(training.rows(), before)
    training.step(batch(1))
    assert not torch.equal(training.rows()[0], before[0])


def test_a_failed_step_is_not_lost_by_another_backward_or_by_close(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    training = Training(open_store(seed=1), "cpu")
    outputs = [training.emb(batch(seed)).values() * torch.inf for seed in range(2)]
    outputs[0].sum().backward()
    with pytest.raises(InvalidError, match="inf"):
        outputs[1].sum().backward()
    backward_of_inf(training)
    with pytest.raises(InvalidError, match="inf"):
        training.store.close()
    with pytest.raises(tb.ClosedError):
        training.rows()


def test_skipped_steps_are_counted(open_store: OpenStore, streams: SimulatedStreams) -> None:
    training = Training(open_store(seed=1), "cpu", on_nonfinite="skip")
    before = training.rows()
    for seed in range(3):
        backward_of_inf(training, seed)
    assert training.emb.skipped_steps == 3
    assert_equal(training.rows(), before)


def test_rows_that_do_not_train_refuse_within_the_backward(streams: SimulatedStreams) -> None:
    table = tb.EmbeddingBagConfig(60, 8, "a", data_type="int8")
    emb = tb.EmbeddingBagCollection([table], store=tb.CodedStore(), device="cpu")
    loss = emb(batch(0).select(["a"])).values().sum()
    with pytest.raises(tb.UnsupportedError):
        loss.backward()


class Scaler:
    """A scaler whose scale changes with every step."""

    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


def test_a_step_is_unscaled_by_the_scale_of_its_backward(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    def run(device: str | None, is_scaled: bool) -> list[torch.Tensor]:
        training = Training(open_store(seed=1), device)
        scaler = Scaler()
        training.emb.set_grad_scaler(scaler if is_scaled else None)
        for seed in range(STEPS):
            loss = training.loss(batch(seed))
            (loss * scaler.scale if is_scaled else loss).backward()
            scaler.scale *= 0.5
        return training.rows()

    plain = run(None, is_scaled=False)
    # Powers of two: not a bit is lost.
    assert_equal(plain, run(None, is_scaled=True))
    assert_equal(plain, run("cpu", is_scaled=True))


def test_warnings_of_loops_come_from_the_backward(
    open_store: OpenStore, streams: SimulatedStreams
) -> None:
    training = Training(open_store(seed=1), "cpu")
    with pytest.warns(UserWarning, match="more than"):
        (training.loss(batch(0)) + training.loss(batch(1))).backward()
    training.rows()


def test_a_model_moves_to_a_device_as_any_module(open_store: OpenStore) -> None:
    # Fake tensors know their device and have no memory: no GPU is needed to see two meet.
    sizes = {"a": 60, "b": 40}
    bags = random_bags(sizes, BATCH, seed=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for kind in tb.nn.MODELS:
            config = {"kind": kind, "dense_count": 3, "table_sizes": sizes, "embedding_dim": 8}
            with torch.device("cuda"):
                model = tb.nn.build_model(config, open_store(name=kind), tb.SGD(lr=0.1))
            assert model.embeddings.device.type == "cuda"
            logits = model(torch.zeros(BATCH, 3, device="cuda"), bags)
            assert logits.device.type == "cuda"


def test_sequences_and_ngrams_meet_a_device(open_store: OpenStore) -> None:
    # Lengths are read, which fake tensors have none of; those of this device have a device only.
    meta = torch.device("meta")
    ngrams = tb.nn.NgramHash(rows=50, orders=(2, 3), heads=2)
    with meta:
        memory = tb.nn.NgramMemory(16, ngrams, embedding_dim=4, store=open_store())
    hidden = torch.zeros(2, 5, 16, device=meta)
    tokens = torch.ones(2, 5, dtype=torch.int64)
    assert memory(hidden, ngrams(tokens)).device == meta
    config = tb.EmbeddingConfig(name="a", num_embeddings=60, embedding_dim=8)
    emb = tb.EmbeddingCollection([config], store=open_store(), device="meta").eval()
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            found = emb(batch(0).select(["a"]))["a"]
        assert found.values().device == found.lengths().device == meta
    item = tb.Embedding(60, 8, padding_idx=0, store=open_store(), name="item", device="meta")
    assert item(torch.tensor([[3, 0, 5]])).device == meta


def test_to_tells_where_outputs_go(open_store: OpenStore) -> None:
    training = Training(open_store(), None)
    emb = training.emb
    assert emb.device == torch.device("cpu")
    emb.to(torch.float16)
    assert emb.device == torch.device("cpu")
    assert emb(batch(0)).values().dtype == torch.float32
    # Moves to the device without memory are for parameters that are loaded later.
    emb.to("meta")
    assert emb.device == torch.device("cpu")
    bags = batch(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        emb.cuda()
        assert emb.device.type == "cuda"
        assert emb(bags).values().device.type == "cuda"
        emb.cpu()
    assert emb.device == torch.device("cpu")
    training.step(batch(0))


def test_a_default_device_leaves_rows_and_ids_where_they_are(
    tmp_path: Path, streams: SimulatedStreams
) -> None:
    def run(name: str) -> list[torch.Tensor]:
        with tb.Store.open(tmp_path / name, dram_budget="16MiB", seed=1) as store:
            training = Training(store, "cpu")
            optimizer = tb.RowOptimizer(store)
            for bags in tb.lookahead([batch(seed) for seed in range(4)], training.emb, window=2):
                training.emb(bags).values().square().sum().backward()
                optimizer.step()
            store.checkpoint("done")
            store.publish(tmp_path / f"{name}-published")
            with tb.Snapshot.open(tmp_path / f"{name}-published") as snapshot:
                found = snapshot.lookup(batch(1), tables=["a", "a", "b"]).values()
            return [found, *training.rows()]

    batches = [batch(seed) for seed in range(4)]
    wanted = run("plain")
    with torch.device("meta"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{__name__}.batch", lambda seed: batches[seed])
        found = run("default")
    assert_equal(found, wanted)
