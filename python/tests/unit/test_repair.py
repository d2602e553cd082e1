"""A damaged folder loses nothing that is whole: refusing, repairing, going back, importing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.train import checkpoints as repair

CONFIG = tb.EmbeddingBagConfig(num_embeddings=2000, embedding_dim=16, name="t")
BACKENDS = ("file", "cold", "lsm", "memory", "hashdb", "mmap")


def opened(path: Path, **options: object) -> tuple[tb.Store, tb.EmbeddingBagCollection]:
    store = tb.Store.open(path, dram_budget="8MiB", **options)  # type: ignore[arg-type]
    emb = tb.EmbeddingBagCollection([CONFIG], store=store, optimizer=tb.Adagrad(lr=0.1))
    return store, emb


def step(emb: tb.EmbeddingBagCollection, at: int) -> None:
    ids = torch.arange(at * 50, at * 50 + 400)
    lengths = torch.full((100,), 4)
    batch = tb.KeyedJaggedTensor(keys=["t"], values=ids, lengths=lengths)
    emb(batch).values().square().sum().backward()


def trained(path: Path, backend: str) -> torch.Tensor:
    """Makes a store that keeps ``old`` and is at ``new``; returns its rows."""
    store, emb = opened(path, backend=backend)
    with store:
        step(emb, 0)
        store.checkpoint("old", extra={"step": 1}, keep=True)
        step(emb, 1)
        store.checkpoint("new", extra={"step": 2})
        return store.read_rows("t", 0, 2000)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_without_its_pointer_is_refused_and_repaired(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "store"
    rows = trained(path, backend)
    os.unlink(path / "CURRENT")
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "LOCK"}
    for options in ({"backend": backend}, {"backend": "file"}, {}, {"shards": 2}):
        with pytest.raises(tb.CorruptionError, match="tierbed repair"):
            opened(path, **options)
    out = tmp_path / "out.json"
    assert main(["repair", str(path), "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert (told["whole"], told["damaged"], told["in_force"]) == (2, 0, None)
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "LOCK"}
    assert before == after, "listing changes nothing"
    whole = [found for found in repair.find_commits(path) if not found.is_kept]
    assert [(found.name, found.is_whole) for found in whole] == [("new", True)]
    assert [table.steps for table in whole[0].tables] == [2]
    assert "extra.pt" in whole[0].attachments
    assert main(["repair", str(path), "--commit", str(whole[0].number)]) == 0
    store, _ = opened(path, backend=backend)
    with store:
        assert torch.equal(store.read_rows("t", 0, 2000), rows)
        assert store.load_extra() == {"step": 2}
        with pytest.raises(tb.ClosedError):
            repair.find_commits(path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_reads_kept_checkpoints(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "store"
    rows = trained(path, backend)
    assert main(["verify", str(path)]) == 0
    for kept in sorted(path.glob("kept.old.*")):
        whole = kept.read_bytes()
        written = [at for at, byte in enumerate(whole) if byte]
        damaged = bytearray(whole)
        damaged[written[len(written) // 2]] ^= 1
        kept.unlink()  # it may be shared with the store
        kept.write_bytes(damaged)
        assert main(["verify", str(path)]) == 1, kept.name
        with pytest.raises(tb.CorruptionError, match="old"):
            opened(path, backend=backend, checkpoint="old")
        store, _ = opened(path, backend=backend)
        with store:
            assert torch.equal(store.read_rows("t", 0, 2000), rows), kept.name
        kept.write_bytes(whole)
    assert main(["verify", str(path)]) == 0


def test_a_kept_checkpoint_of_an_open_store_is_not_dropped_by_others(tmp_path: Path) -> None:
    path = tmp_path / "store"
    trained(path, "file")
    store, _ = opened(path)
    with store:
        assert main(["checkpoints", str(path), "--drop", "old"]) == 2
        assert [kept.name for kept in store.checkpoints()] == ["old"]
        store.drop_checkpoint("old")
        assert store.checkpoints() == []


def test_importing_a_table_keeps_what_the_last_checkpoint_holds(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store, emb = opened(path)
    with store:
        torch.manual_seed(7)
        step(emb, 0)
        store.checkpoint("c", extra={"step": 1}, attachments={"mine": b"abc"})
        wanted = torch.rand(3)
        state = store.read_rows_and_state("t", 0, 2000)
    np.save(tmp_path / "new.npy", np.ones((50, 8), dtype="f4"))
    arguments = ["import", "--store", str(path), "--table", "new", "--create"]
    arguments += ["--optimizer", "sgd"]
    assert main([*arguments, "--file", str(tmp_path / "new.npy")]) == 0
    store, _ = opened(path)
    with store:
        torch.manual_seed(1)
        assert store.restore_rng()
        assert torch.equal(torch.rand(3), wanted), "the random state of the run"
        assert store.attachment("mine") == b"abc"
        assert store.load_extra() == {"step": 1}
        again = store.read_rows_and_state("t", 0, 2000)
        assert torch.equal(state[0], again[0])
        assert torch.equal(state[1], again[1])
        assert torch.equal(store.read_rows("new", 0, 50), torch.ones(50, 8))


def test_a_partial_copy_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "store", "file")
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "store" / "t.rows", tmp_path / "copy")
    with pytest.raises(tb.CorruptionError, match="CURRENT"):
        opened(tmp_path / "copy")
    assert (tmp_path / "copy" / "t.rows").stat().st_size > 0
    assert main(["repair", str(tmp_path / "copy")]) == 2


def listed(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_is_looked_at_without_a_byte_written(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "store"
    rows = trained(path, backend)
    (path / "LOCK").unlink()
    before = listed(path)
    assert main(["verify", str(path)]) == 0
    assert main(["inspect", str(path)]) == 0
    with tb.Store.open(path, dram_budget="8MiB", read_only=True) as store:
        assert torch.equal(store.read_rows("t", 0, 2000), rows)
        assert store.load_extra() == {"step": 2}
        emb = tb.EmbeddingBagCollection([CONFIG], store=store, optimizer=tb.Adagrad(lr=0.1))
        with pytest.raises(tb.UnsupportedError, match="read only"):
            step(emb, 0)
        with pytest.raises(tb.UnsupportedError, match="read only"):
            store.checkpoint("never")
        with pytest.raises(tb.UnsupportedError, match="read only"):
            store.checkpoint("never", keep=True)
        with pytest.raises(tb.UnsupportedError, match="read only"):
            store.drop_checkpoint("old")
        with pytest.raises(tb.UnsupportedError, match="read only"):
            store.write_rows("t", 0, torch.zeros(1, 16))
    if backend != "mmap":
        assert listed(path) == before
    other = tmp_path / "none"
    other.mkdir()
    with pytest.raises(tb.InvalidError, match="no store with a checkpoint"):
        tb.Store.open(other, dram_budget="8MiB", read_only=True)
    assert not list(other.iterdir())
    with tb.Store.open(path, dram_budget="8MiB", read_only=True, checkpoint="old") as store:
        assert store.load_extra() == {"step": 1}
    with pytest.raises(tb.InvalidError, match="no kept checkpoint of that name"):
        tb.Store.open(path, dram_budget="8MiB", read_only=True, checkpoint="never")


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "mmap"])
def test_a_running_training_is_verified_and_inspected(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "store"
    store, emb = opened(path, backend=backend)
    with store:
        step(emb, 0)
        store.checkpoint("one", extra={"step": 1})
        rows = store.read_rows("t", 0, 2000)
        step(emb, 1)
        with tb.Store.open(path, dram_budget="8MiB", read_only=True) as looked:
            assert torch.equal(looked.read_rows("t", 0, 2000), rows), "the last checkpoint"
            for at in range(4):
                step(emb, at)
                store.checkpoint(f"more-{at}", extra={"step": at})
                assert looked.verify() >= 0, "begun again behind a commit"
        assert main(["verify", str(path)]) == 0
        assert main(["inspect", str(path)]) == 0
        store.checkpoint("last", extra={"step": 9})
    with tb.Store.open(path, dram_budget="8MiB", read_only=True) as looked:
        assert looked.load_extra() == {"step": 9}


def test_a_mapped_store_is_not_looked_at_while_it_trains(tmp_path: Path) -> None:
    store, emb = opened(tmp_path / "store", backend="mmap")
    with store:
        step(emb, 0)
        store.checkpoint("one")
        with pytest.raises(tb.ClosedError):
            tb.Store.open(tmp_path / "store", dram_budget="8MiB", read_only=True)
