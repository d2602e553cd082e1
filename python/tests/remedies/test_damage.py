"""Damaged files of stores: the folder is brought back from its copy, and all rows with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tierbed as tb

from .kit import collection, flip, opened, put_back, rows_of, step, table

FROM_A_COPY = "restore the store's folder from a copy"
REPAIR = "tierbed repair FOLDER"

SETTINGS = {
    "file": {"backend": "file"},
    "cold": {"backend": "cold"},
    "lsm": {"backend": "lsm"},
    "log": {"backend": "lsm", "durability": "step"},
    "memory": {"backend": "memory"},
    "shards": {"shards": 2, "order": "window"},
    "open": {"backend": "file"},
}


def _train(path: Path, name: str) -> list[torch.Tensor]:
    with opened(path, **SETTINGS[name]) as store:
        emb = collection(store, *_tables(name))
        for at in range(4):
            step(emb, 10 * at)
            store.checkpoint(f"c{at}")
        return _rows(store, name)


def _tables(name: str) -> list[tb.EmbeddingBagConfig]:
    rows = None if name == "open" else 1000
    other = [table("other", feature_names=["item"])] if name == "shards" else []
    return [table(rows=rows, feature_names=["item"]), *other]


def _rows(store: tb.Store, name: str) -> list[torch.Tensor]:
    collection(store, *_tables(name))
    if name == "open":
        ids, _ = store.ids("item")
        return [ids, store.gather_rows("item", store.translate("item", ids))]
    return [rows_of(store, one.name) for one in _tables(name)]


def _read_all(path: Path, name: str) -> list[torch.Tensor]:
    with opened(path, **SETTINGS[name]) as store:
        store.verify()
        store.load_extra()
        return _rows(store, name)


@pytest.mark.parametrize("way", ["flip", "cut", "missing", "zeros"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_damaged_store_comes_back_with_its_copy(tmp_path: Path, name: str, way: str) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    rows = _train(path, name)
    shutil.copytree(path, copy)
    told = set()
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        if not file.stat().st_size or file.name == "LOCK":
            continue
        if way == "flip":
            flip(file)
        elif way == "missing":
            file.unlink()
        else:
            kept = file.read_bytes()[: file.stat().st_size // 2] if way == "cut" else b""
            file.write_bytes(kept.ljust(file.stat().st_size if way == "zeros" else 0, b"\0"))
        try:
            found = _read_all(path, name)
        except tb.TierbedError as error:
            told.add(f"{file.name}: {error}")
        else:
            assert all(map(torch.equal, found, rows)), file.name
        put_back(copy, path)
        assert all(map(torch.equal, _read_all(path, name), rows))
        put_back(copy, path)
    without = sorted(one for one in told if "remedy: " not in one)
    assert not without, without
    assert any(FROM_A_COPY in one for one in told), told
