"""Training fed by the workers of a DataLoader gives the bits of training without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb

SAMPLES, BATCH, ROWS, DIM = 240, 20, 500, 8

OpenStore = Callable[..., tb.Store]


def collate(samples: list[int]) -> tb.KeyedJaggedTensor:
    ids = torch.tensor(samples).repeat_interleave(2) * 7 % ROWS
    return tb.KeyedJaggedTensor(
        keys=["item"], values=ids, lengths=torch.full((len(samples),), 2, dtype=torch.int64)
    )


def itself(batch: Any) -> Any:
    return batch


def seeded_loader(seed: int = 7, **options: Any) -> DataLoader[int]:
    generator = torch.Generator().manual_seed(seed)
    samples: Any = list(range(SAMPLES))
    return DataLoader(
        samples, BATCH, shuffle=True, generator=generator, collate_fn=collate, **options
    )


def shuffled_loader(**options: Any) -> DataLoader[int]:
    """The most usual line of all: a shuffle that is seeded by the global generator alone."""
    samples: Any = list(range(SAMPLES))
    return DataLoader(samples, BATCH, shuffle=True, collate_fn=collate, **options)


def forked_twin(is_seeded: bool) -> DataLoader[int]:
    workers = with_workers("fork", persistent=True)
    return seeded_loader(**workers) if is_seeded else shuffled_loader(**workers)


def with_workers(method: str, *, persistent: bool) -> dict[str, Any]:
    return {
        "num_workers": 2,
        "multiprocessing_context": method,
        "persistent_workers": persistent,
    }


METHODS = ["fork", "spawn", "forkserver"]
# Where rows live and which order is asked for; a backend trains by window.
STORES = [
    *[(None, order) for order in ("auto", "forward", "window")],
    *[
        (backend, "auto")
        for backend in ("file", "cold", "lsm", "lsm_plain", "memory", "hashdb", "mmap", "rocksdb")
    ],
]
QUICK = [(None, "auto"), ("mmap", "auto")]


def item_bags(store: tb.Store) -> tb.EmbeddingBagCollection:
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM)
    return tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))


def opened(path: Path, backend: str | None, order: str, io_engine: str) -> tb.Store:
    try:
        return tb.Store.open(
            path,
            backend=backend,
            order=order,
            io=tb.IoOptions(engine=io_engine),
            dram_budget="16MiB",
        )
    except tb.UnsupportedError as error:
        pytest.skip(f"{backend} is not here: {error}")


def check(path: Path, store: tuple[str | None, str], io_engine: str, **workers: Any) -> None:
    """Trains with workers, in a new store that is opened again, and without any in memory."""
    kinds = [True] if store == (None, "forward") else [True, False]
    for number, is_seeded in enumerate(kinds):
        where = path / str(number)
        loader, plain = (
            seeded_loader(**options) if is_seeded else shuffled_loader(**options)
            for options in (workers, {})
        )
        with opened(where, *store, io_engine) as ours:
            torch.manual_seed(5)
            found = train(ours, loader)
            kind = ours.order()["kind"]
        # The loader may keep its workers, which live.
        with opened(where, *store, io_engine) as again:
            item_bags(again)
            last = again.last_checkpoint()
            assert last is not None
            assert last[1] == "epoch-1"
            rows = again.read_rows("item", 0, ROWS)
        follows = is_seeded and store[0] is None and store[1] != "window"
        assert kind == ("forward" if follows else "window")
        with tb.Store.open(backend="memory", dram_budget="16MiB") as theirs:
            torch.manual_seed(5)
            # Kept workers draw their seed once; the order of the epochs behind is then another.
            if workers.get("persistent_workers"):
                plain = forked_twin(is_seeded)
            assert_same(found, train(theirs, plain))
            assert torch.equal(rows, theirs.read_rows("item", 0, ROWS))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("store", QUICK)
def test_workers_change_no_number(
    tmp_path: Path, store: tuple[str | None, str], persistent: bool
) -> None:
    check(tmp_path, store, "auto", **with_workers("fork", persistent=persistent))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("io_engine", ["auto", "pread"])
@pytest.mark.parametrize("store", STORES)
def test_no_start_of_workers_changes_a_number_anywhere(
    tmp_path: Path, store: tuple[str | None, str], io_engine: str, method: str, persistent: bool
) -> None:
    check(tmp_path, store, io_engine, **with_workers(method, persistent=persistent))


@pytest.mark.slow
@pytest.mark.parametrize("io_engine", ["auto", "pread"])
@pytest.mark.parametrize("store", STORES)
def test_no_workers_change_no_number_either(
    tmp_path: Path, store: tuple[str | None, str], io_engine: str
) -> None:
    check(tmp_path, store, io_engine)


def train(store: tb.Store, loader: Any, *, epochs: int = 2) -> list[torch.Tensor]:
    """Trains, with a checkpoint behind every epoch; returns what every step looked up."""
    emb = item_bags(store)
    ahead = tb.lookahead(loader, emb, window=4, key=itself)
    outputs = []
    for epoch in range(epochs):
        for batch in ahead:
            pooled = emb(batch).values()
            (pooled - 1.0).square().sum().backward()
            outputs.append(pooled.detach())
        store.checkpoint(f"epoch-{epoch}")
    return outputs


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) == 2 * SAMPLES // BATCH
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"outputs of step {step}"


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_seeded_shuffle_is_followed_with_workers_too(
    open_store: OpenStore, method: str, persistent: bool
) -> None:
    options = with_workers(method, persistent=persistent)
    ours = open_store(None, order="forward", dram_budget="8MiB")
    theirs = open_store("memory")
    # What a bare loader yields is trained on, however its workers start.
    bare = seeded_loader(**with_workers("fork", persistent=persistent))
    bare_epochs = [list(bare) for _ in range(2)]
    found = train(ours, seeded_loader(**options))
    emb = item_bags(theirs)
    wanted = []
    for epoch in bare_epochs:
        for batch in epoch:
            pooled = emb(batch).values()
            (pooled - 1.0).square().sum().backward()
            wanted.append(pooled.detach())
    assert_same(found, wanted)
    order = ours.order()
    assert (order["kind"], order["replan_count"], order["fallback_count"]) == ("forward", 1, 0)


def test_a_restart_goes_on_with_a_shuffle_drawn_by_kept_workers(open_store: OpenStore) -> None:
    loader = seeded_loader(**with_workers("fork", persistent=True))
    ours = open_store(None, order="forward", dram_budget="8MiB")
    train(ours, loader)
    generator = loader.generator.get_state()
    ours.close()
    # A new process has a new loader, which draws a seed for its workers: another order, another
    # plan, and no mismatch.
    again = seeded_loader(**with_workers("fork", persistent=True))
    again.generator.set_state(generator)
    resumed = open_store(None, order="forward", dram_budget="8MiB")
    train(resumed, again, epochs=1)
    assert resumed.order()["kind"] == "forward"
