"""Which rows share pages: files that ``tierbed place`` wrote, and tables made elsewhere.

A snapshot lays its tables out by placements. :func:`import_tables` makes one of matrices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tierbed import _native
from tierbed._util.bytes import parse_bytes
from tierbed.config.words import PageCodec, check_word
from tierbed.errors import InvalidError
from tierbed.results import SnapshotReport

__all__ = [
    "HeadRows",
    "PlacementFiles",
    "TableCodecs",
    "import_tables",
    "placement_files",
    "read_tables",
    "table_codecs",
    "table_heads",
]

PathLike: TypeAlias = "str | os.PathLike[str]"
PlacementFiles: TypeAlias = "PathLike | Mapping[str | tuple[str, ...], PathLike]"
TableCodecs: TypeAlias = "PageCodec | Mapping[str, PageCodec]"
HeadRows: TypeAlias = "int | str | Mapping[str, int | str]"


def placement_files(
    placement: PlacementFiles | None,
    tables: Sequence[Mapping[str, Any]],
    table_id: Callable[[str], int],
) -> list[tuple[list[int], str]]:
    """Returns the table ids and the file of each placement.

    Args:
        placement: A file where there is one table, or a file per table or tuple of tables.
        tables: The tables there are, each with its ``name``.
        table_id: Gives the id of a name.

    Raises:
        InvalidError: One file for several tables.
    """
    if placement is None:
        return []
    if not isinstance(placement, Mapping):
        names = [str(table["name"]) for table in tables]
        if len(names) != 1:
            raise InvalidError(
                f"one placement for {len(names)} tables: say which, as {{tables: file}}",
                {"tables": ", ".join(names)},
            )
        placement = {names[0]: placement}
    return [
        (
            [table_id(name) for name in ((group,) if isinstance(group, str) else group)],
            os.fspath(path),
        )
        for group, path in placement.items()
    ]


def table_codecs(
    codec: TableCodecs | None, tables: Sequence[str], table_id: Callable[[str], int]
) -> list[tuple[int, str]]:
    """Returns the table ids and the codec of each.

    Args:
        codec: One for all tables, or one for each that is not f32.
        tables: The names of the tables there are.
        table_id: Gives the id of a name.

    Raises:
        InvalidError: No such codec.
    """
    if codec is None:
        return []
    named = codec if isinstance(codec, Mapping) else dict.fromkeys(tables, codec)
    for word in named.values():
        check_word("codec", word, PageCodec)
    return [(table_id(name), word) for name, word in named.items()]


def table_heads(
    head_rows: HeadRows | None,
    tables: Sequence[str],
    table_id: Callable[[str], int],
    placed: Sequence[tuple[list[int], str]],
) -> list[tuple[int, str]]:
    """Returns the ids of tables that have a tail, and the size of the head of each.

    Args:
        head_rows: One for all tables that share no pages, or one for each that has a tail.
        tables: The names of the tables there are.
        table_id: Gives the id of a name.
        placed: What :func:`placement_files` returned.
    """
    if head_rows is None:
        return []
    if isinstance(head_rows, Mapping):
        return [(table_id(name), str(size)) for name, size in head_rows.items()]
    shared = {table for group, _ in placed for table in group}
    ids = (table_id(name) for name in tables)
    return [(table, str(head_rows)) for table in ids if table not in shared]


def import_tables(
    tables: Mapping[str, Tensor],
    out: PathLike,
    *,
    placement: PlacementFiles | None = None,
    codec: TableCodecs | None = None,
    head_rows: HeadRows | None = None,
    dram_budget: int | str = "1GiB",
) -> SnapshotReport:
    """Writes a serving snapshot of plain tables.

    Rows are read where they lie, so that tables mapped from files need no memory.

    Args:
        tables: Name and rows ``[rows, dim]``, float32, of each table.
        out: A new folder.
        placement: As for :meth:`tierbed.Store.publish`.
        codec: As for :meth:`tierbed.Store.publish`.
        head_rows: As for :meth:`tierbed.Store.publish`; the first rows are the head. Rows lie by id
            anyway, so with 0 the pages are the same and no index is needed.
        dram_budget: Bytes for indexes and buffers.

    Raises:
        InvalidError: A table is no matrix of float32, or a placement does not fit.
    """
    names = list(tables)
    for name, rows in tables.items():
        if rows.dim() != 2 or rows.dtype != torch.float32:
            raise InvalidError(
                f"table {name!r} must be [rows, dim] float32, not {list(rows.shape)} {rows.dtype}",
                {"table": name},
            )

    def table_id(name: str) -> int:
        if name not in names:
            raise InvalidError(f"no table {name!r}; there are {names}", {"table": name})
        return names.index(name)

    placed = placement_files(placement, [{"name": name} for name in names], table_id)
    written = _native.import_tables(
        [(name, rows.detach().contiguous()) for name, rows in tables.items()],
        placed,
        table_codecs(codec, names, table_id),
        table_heads(head_rows, names, table_id, placed),
        os.fspath(out),
        parse_bytes(dram_budget, "dram_budget"),
    )
    return SnapshotReport(**written)


def read_tables(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Opens the tables of ``.npy``, ``.safetensors`` and torch files, mapped where possible.

    A ``.npy`` file is one table with the name of the file; of the others every two-dimensional
    floating-point tensor is a table, with its own name without a trailing ``.weight``.

    Args:
        paths: The files.

    Raises:
        InvalidError: No table, or two of one name.
    """
    tables: dict[str, Tensor] = {}
    for path in paths:
        for name, rows in _read(path).items():
            if name in tables:
                raise InvalidError(f"two tables are called {name!r}", {"path": str(path)})
            tables[name] = rows.to(torch.float32)
    if not tables:
        raise InvalidError("no table: files hold no two-dimensional floating-point tensor")
    return tables


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".npy":
        # A copy-on-write map: torch takes no array that cannot be written to.
        rows = np.load(path, mmap_mode="c", allow_pickle=False)
        found: Mapping[str, Any] = {path.stem: torch.from_numpy(rows)}
    elif path.suffix == ".safetensors":
        # `import tierbed` loads this file, and few programs read such tables.
        from safetensors.torch import load_file

        found = load_file(path)
    else:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for key in ("state_dict", "model", "model_state_dict"):
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
                found = found[key]
        if not isinstance(found, Mapping):
            raise InvalidError("file holds no named tensors", {"path": str(path)})
    return {
        name.removesuffix(".weight"): value
        for name, value in found.items()
        if isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()
    }
