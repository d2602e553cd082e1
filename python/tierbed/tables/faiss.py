"""Flat indexes of faiss, with or without ids of their own, read and written without faiss.

An index that holds whole vectors is a header and the vectors; ``IDMap`` is a header, such an index,
and an id per vector. Bytes are little-endian; rows are read where they lie, and written as they
come, so that an index larger than memory moves.

Source: faiss 1.15, ``impl/index_write.cpp``: ``write_index_header``, ``IxFI``, ``IxF2``, ``IxMp``.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

from tierbed.errors import CorruptionError, UnsupportedError
from tierbed.tables.found import FoundTable, TableFile
from tierbed.tables.rows import of_file
from tierbed.tables.writing import Report, bytes_of

__all__ = ["read_faiss", "write_faiss"]

# dim, vectors, two unused numbers, whether it is trained, and the metric.
_HEADER = struct.Struct("<iqqq?i")
_COUNT = struct.Struct("<Q")
_UNUSED = 1 << 20
_INNER_PRODUCT = 0
_METRICS_WITHOUT_ARGUMENT = (0, 1)
_FLAT = (b"IxFI", b"IxF2", b"IxFl")
_WITH_IDS = (b"IxMp", b"IxM2")


def read_faiss(path: Path) -> TableFile:
    """Opens a flat index.

    Raises:
        UnsupportedError: An index that holds codes or a graph.
        CorruptionError: It is not whole.
    """
    with path.open("rb") as file:
        try:
            kind = file.read(4)
            has_ids = kind in _WITH_IDS
            if has_ids:
                _header(file)
                kind = file.read(4)
            if kind not in _FLAT:
                raise UnsupportedError(
                    f"{path} is an index of kind {kind!r}, which is no flat one; take the vectors "
                    "that it was built of, or save index.reconstruct_n(0, index.ntotal) as npy",
                    {"path": str(path)},
                )
            dim, count = _header(file)
            held = _COUNT.unpack(file.read(8))[0]
            start = file.tell()
            file.seek(4 * held, 1)
            ids_count = _COUNT.unpack(file.read(8))[0] if has_ids else count
            ids_start = file.tell()
        except struct.error:
            raise _cut(path) from None
    end = ids_start + 8 * ids_count if has_ids else start + 4 * held
    if held != count * dim or ids_count != count or path.stat().st_size < end:
        raise _cut(path)
    weight = of_file(path, (count, dim), "<f4", start)
    ids = of_file(path, (count,), "<i8", ids_start) if has_ids else None
    return TableFile(path, [FoundTable(name=path.stem, weight=weight, ids=ids)])


def _cut(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path} is not a whole index; bring all its files again from where they were written",
        {"path": str(path)},
    )


def _header(file: IO[bytes]) -> tuple[int, int]:
    """Reads the dim and how many vectors there are."""
    dim, count, _, _, _, metric = _HEADER.unpack(file.read(_HEADER.size))
    if metric not in _METRICS_WITHOUT_ARGUMENT:
        file.read(4)
    return dim, count


def write_faiss(tables: list[FoundTable], path: Path, report: Report) -> None:
    """Writes a flat index of inner products; with ids, if the table has an open vocabulary."""
    table = tables[0]
    header = _HEADER.pack(table.dim, table.rows, _UNUSED, _UNUSED, True, _INNER_PRODUCT)
    with path.open("wb") as file:
        if table.ids is not None:
            file.write(b"IxMp" + header)
        file.write(b"IxFI" + header + _COUNT.pack(table.rows * table.dim))
        for chunk in report.chunks(table.weight):
            file.write(bytes_of(chunk))
        if table.ids is not None:
            file.write(_COUNT.pack(table.rows))
            for chunk in table.ids.chunks(report.chunk_rows):
                file.write(bytes_of(chunk))
