"""Kept checkpoints of a store that belong to the files of a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.train.file_checkpoints import (
    Record,
    check_at,
    drop_checkpoints,
    drop_unnamed,
    keep_checkpoint,
)


def opened(tmp_path: Path, **options: Any) -> tuple[tb.Store, tb.EmbeddingBagCollection]:
    store = tb.Store.open(tmp_path / "store", dram_budget="16MiB", **options)
    table = tb.EmbeddingBagConfig(10, 4, "item")
    return store, tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=1.0))


def step(emb: tb.EmbeddingBagCollection) -> None:
    ids, one = torch.tensor([3]), torch.ones(1, dtype=torch.int64)
    emb(tb.KeyedJaggedTensor(["item"], ids, lengths=one)).values().sum().backward()


def test_a_store_goes_back_to_where_a_file_was_saved(tmp_path: Path) -> None:
    store, emb = opened(tmp_path)
    step(emb)
    record = keep_checkpoint(store, tmp_path / "a file.ckpt")
    check_at(store, record.as_dict(), "a file.ckpt")
    rows = store.read_rows("item", 0, 10)
    step(emb)
    for where in ("stepped", "checkpointed"):
        with pytest.raises(tb.InvalidError, match=r"open it with open_store and this file"):
            check_at(store, record.as_dict(), where)
        store.checkpoint("another")
    store.close()
    saved = Record.of(record.as_dict())
    assert saved == record
    store, _ = opened(tmp_path, checkpoint=saved.name)
    check_at(store, record.as_dict(), "a file.ckpt")
    assert torch.equal(store.read_rows("item", 0, 10), rows)
    with pytest.raises(tb.InvalidError, match="other was saved without the store; save it with"):
        check_at(store, None, "other")
    store.close()


def test_checkpoints_are_dropped_with_their_files_only(tmp_path: Path) -> None:
    store, emb = opened(tmp_path)
    names = {}
    for at, file in enumerate(("last.ckpt", "step=1.ckpt", "step=2.ckpt", "last.ckpt")):
        step(emb)
        names[at] = keep_checkpoint(store, tmp_path / "files" / file).name
    store.checkpoint("mine", keep=True)
    far = keep_checkpoint(store, tmp_path / "last.ckpt").name
    drop_checkpoints(store, tmp_path / "files" / "last.ckpt", but=names[3])
    drop_checkpoints(store, tmp_path / "files" / "step=2.ckpt")
    kept = {one.name for one in store.checkpoints()}
    assert kept == {names[1], names[3], "mine", far}
    drop_unnamed(store, tmp_path / "files", {names[3]})
    assert {one.name for one in store.checkpoints()} == {names[3], "mine", far}
    store.close()


def test_stores_that_keep_nothing_for_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tb.Store.open(backend="memory", dram_budget="16MiB")
    with pytest.raises(tb.UnsupportedError, match="no checkpoints to go back to; open the store"):
        keep_checkpoint(memory, tmp_path / "file")
    memory.close()
    store, emb = opened(tmp_path)
    step(emb)
    keep_checkpoint(store, tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(tb.UnsupportedError, match=r"written by one rank; save the tables with"):
            keep_checkpoint(store, tmp_path / "file")
    (rank,) = tb.dist.local_ranks(1)
    divided = tb.dist.ShardedEmbeddingBagCollection(
        [tb.EmbeddingBagConfig(10, 4, "item")], store=store, ranks=rank, optimizer=tb.SGD(lr=1.0)
    )
    divided.save(tmp_path / "ranks")
    divided.close()
    store.close()
