"""Tables of a store written into files of other tools."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tierbed._util.bytes import parse_bytes
from tierbed.config.words import TableFormat, check_word
from tierbed.errors import InvalidError
from tierbed.tables.dynamicemb import write_dynamicemb
from tierbed.tables.faiss import write_faiss
from tierbed.tables.found import FoundTable
from tierbed.tables.hugectr import write_hugectr
from tierbed.tables.of_store import table_of
from tierbed.tables.parquet import write_parquet
from tierbed.tables.rows import CHUNK_ROWS
from tierbed.tables.tensors import named_tensors, write_npy, write_safetensors, write_torch
from tierbed.tables.writing import Progress, Report
from tierbed.train.store import Store

__all__ = ["ExportedTable", "export_tables"]

Writer = Callable[[list[FoundTable], Path, Report], None]
_OF_SUFFIX = {".npy": "npy", ".safetensors": "safetensors", ".parquet": "parquet"}
_OF_SUFFIX |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "pt")
_OF_SUFFIX |= dict.fromkeys((".faiss", ".index"), "faiss")
_FILES: dict[str, Writer] = {
    "npy": write_npy,
    "safetensors": write_safetensors,
    "pt": write_torch,
    "parquet": write_parquet,
    "faiss": write_faiss,
}
_FOLDERS: dict[str, Writer] = {"hugectr": write_hugectr, "dynamicemb": write_dynamicemb}
_MANY = ("safetensors", "pt")
_WITHOUT_STATE = ("faiss", "hugectr")


@dataclass(frozen=True)
class ExportedTable:
    """What was written of a table.

    Args:
        table: Its name.
        rows: Rows with an id; the shared one of an open vocabulary does not count.
        has_state: Whether optimizer state went along.
    """

    table: str
    rows: int
    has_state: bool


def export_tables(
    store: Store,
    path: str | os.PathLike[str],
    tables: str | Sequence[str] | None = None,
    *,
    file_format: TableFormat | None = None,
    state: bool = False,
    shard_bytes: int | str = "5GB",
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress | None = None,
) -> list[ExportedTable]:
    """Writes tables with their ids into a new file or folder, ``chunk_rows`` rows at a time.

    The end of the name says the format: ``.safetensors``, ``.npy``, ``.pt``, ``.parquet``,
    ``.faiss``. Another name is a folder in ``file_format``, with a file per table where that is a
    format of files. What was there under that name is replaced when all is written.

    Of a table of open vocabulary: the rows that ids have, their ids, and the row of all other ids
    where the format can have one (not in faiss, HugeCTR and dynamicemb).

    Args:
        store: The store.
        path: The file or folder.
        tables: Names of tables; by default all.
        file_format: ``"safetensors"``, ``"npy"``, ``"pt"``, ``"parquet"``, ``"faiss"``,
            ``"hugectr"`` or ``"dynamicemb"``; by default what the name says.
        state: Whether optimizer state goes along, under torch's names.
        shard_bytes: A safetensors file of more is split between tables, with an index.
        chunk_rows: Rows in memory at a time.
        progress: Called with (rows done, rows in all).

    Raises:
        InvalidError: No such table, an unknown format, or one that has not all that is asked for.
        UnsupportedError: State that the format does not know.

    Examples:
        >>> tables = [tb.EmbeddingBagConfig(1000, 16, "item")]
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     emb = tb.EmbeddingBagCollection(tables, store=store)
        ...     tb.tables.export_tables(store, "item.safetensors")
        [ExportedTable(table='item', rows=1000, has_state=False)]
    """
    target = Path(path)
    kind = _format(target, file_format)
    names = [tables] if isinstance(tables, str) else list(tables or _all(store))
    is_folder = target.suffix.lower() not in _OF_SUFFIX
    if not is_folder and len(names) > 1 and kind not in _MANY:
        raise InvalidError(
            f"{target} holds one table, not {names}; name a folder and the format, or one table",
            {"path": str(target)},
        )
    if state and kind in _WITHOUT_STATE:
        raise InvalidError(
            f"{kind} has no optimizer state that a store can write; export without state, or as "
            "safetensors, pt, parquet, npy or dynamicemb",
            {"path": str(target)},
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent
    found = [table_of(store, name, with_state=state, scratch=scratch) for name in names]
    counted = [table.weight for table in found]
    report = Report(sum(table.rows for table in found), chunk_rows, progress, counted)
    if is_folder:
        _write_folder(found, target, kind, report)
    else:
        _write_file(found, target, kind, report, parse_bytes(shard_bytes, "shard_bytes"))
    return [
        ExportedTable(name, table.rows, bool(table.state))
        for name, table in zip(names, found, strict=True)
    ]


def _all(store: Store) -> list[str]:
    return [str(table["name"]) for table in store.tables()]


def _format(path: Path, told: str | None) -> str:
    found = _OF_SUFFIX.get(path.suffix.lower())
    if told is not None:
        check_word("file_format", told, TableFormat)
    if (found is None and told is None) or (None not in (found, told) and found != told):
        asked = "" if told is None else f", which is to be {told}"
        raise InvalidError(
            f"cannot tell the format of {path}{asked}; end its name in one of "
            f"{sorted(_OF_SUFFIX)}, or give file_format= (--format) for a folder",
            {"path": str(path)},
        )
    return str(found or told)


def _write_folder(tables: list[FoundTable], folder: Path, kind: str, report: Report) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidError(
            f"{folder} is not empty; give a new folder for the tables", {"path": str(folder)}
        )
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        if kind in _FOLDERS:
            _FOLDERS[kind](tables, temporary, report)
        else:
            for table in tables:
                _FILES[kind]([table], temporary / f"{table.short}.{kind}", report)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_file(
    tables: list[FoundTable], path: Path, kind: str, report: Report, shard_bytes: int
) -> None:
    """Writes in a folder beside, from where the files move when they are whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        shards = _shards(tables, shard_bytes) if kind == "safetensors" else [tables]
        if len(shards) == 1:
            _FILES[kind](tables, temporary / path.name, report)
        else:
            _write_shards(shards, temporary, path.stem, report)
        for written in temporary.iterdir():
            written.replace(path.with_name(written.name))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _bytes(table: FoundTable) -> int:
    parts = named_tensors(table).values()
    return sum((8 if rows.dtype == torch.int64 else 4) * rows.count * rows.width for rows in parts)


def _shards(tables: list[FoundTable], shard_bytes: int) -> list[list[FoundTable]]:
    """Returns tables of at most ``shard_bytes`` together, or one that is larger."""
    shards: list[list[FoundTable]] = [[]]
    held = 0
    for table in tables:
        size = _bytes(table)
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(table)
        held += size
    return shards


def _write_shards(shards: list[list[FoundTable]], folder: Path, stem: str, report: Report) -> None:
    """Writes shards and their index as Hugging Face names them."""
    places: dict[str, str] = {}
    for at, tables in enumerate(shards, start=1):
        name = f"{stem}-{at:05}-of-{len(shards):05}.safetensors"
        write_safetensors(tables, folder / name, report)
        places |= {tensor: name for table in tables for tensor in named_tensors(table)}
    total = sum(_bytes(table) for tables in shards for table in tables)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
