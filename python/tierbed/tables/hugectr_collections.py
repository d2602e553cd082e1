"""Embedding collections of HugeCTR: ``embedding_collection_N`` with two files for each table.

``keyI`` and ``weightI`` begin with 128 bytes of head; then come keys of 4 or 8 bytes, and rows of
f32. ``meta_data`` has i32: tables, kind of keys, kind of weights, two unused numbers, and ids of
tables; then keys per table as u64, and numbers per row as i32. HugeCTR dumps no optimizer state.

Source: HugeCTR 25.03, ``weight_io/parameter_IO.cpp`` and ``data_info.hpp``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tierbed.errors import CorruptionError, UnsupportedError
from tierbed.tables.found import FoundTable, TableFile
from tierbed.tables.rows import of_file

__all__ = ["collections_in", "read_collections"]

_HEAD_BYTES = 128
_KEYS = {0: "<u4", 1: "<i8"}
_FLOAT = 0


def collections_in(folder: Path) -> list[Path]:
    """Returns the embedding collections in a folder, or the folder itself if it is one."""
    candidates = [folder, *sorted(folder.glob("embedding_collection_*"))]
    return [path for path in candidates if (path / "meta_data").is_file()]


def read_collections(folder: Path) -> TableFile:
    """Opens what ``embedding_dump`` wrote.

    Raises:
        CorruptionError: A file is missing, or not as long as ``meta_data`` says.
        UnsupportedError: Weights of another kind than f32.
    """
    return TableFile(folder, [table for path in collections_in(folder) for table in _tables(path)])


def _tables(folder: Path) -> list[FoundTable]:
    raw = (folder / "meta_data").read_bytes()
    count = int(np.frombuffer(raw, "<i4", 1)[0]) if len(raw) >= 20 else -1
    if len(raw) < 20 + 16 * count or count < 0:
        raise _damaged(folder / "meta_data")
    _, keys_kind, weights_kind = np.frombuffer(raw, "<i4", 3).tolist()
    if weights_kind != _FLOAT or keys_kind not in _KEYS:
        raise UnsupportedError(
            f"{folder} has keys and weights of the kinds {keys_kind} and {weights_kind}; dump a "
            "model whose embeddings are float32",
            {"path": str(folder)},
        )
    ids = np.frombuffer(raw, "<i4", count, 20).tolist()
    rows = np.frombuffer(raw, "<u8", count, 20 + 4 * count).tolist()
    dims = np.frombuffer(raw, "<i4", count, 20 + 12 * count).tolist()
    found = []
    for at, (table, held, dim) in enumerate(zip(ids, rows, dims, strict=True)):
        kind = _KEYS[keys_kind]
        sizes = {f"key{at}": held * np.dtype(kind).itemsize, f"weight{at}": held * dim * 4}
        for name, size in sizes.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != _HEAD_BYTES + size:
                raise _damaged(path)
        found.append(
            FoundTable(
                name=f"{folder.name}.table_{table}",
                weight=of_file(folder / f"weight{at}", (held, dim), "<f4", _HEAD_BYTES),
                ids=of_file(folder / f"key{at}", (held,), kind, _HEAD_BYTES),
            )
        )
    return found


def _damaged(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path} is missing or not as long as meta_data says; bring all its files again from "
        "where they were written",
        {"path": str(path)},
    )
