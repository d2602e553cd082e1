"""Dumps of dynamicemb: per table and rank a file of keys, of values, and of optimizer state.

``T_emb_keys.rank_R.world_size_W`` i64, ``T_emb_values...`` f32 ``[N, D]``, ``T_emb_opt_values...``
f32 ``[N, S]`` and ``T_opt_args.json``. Scores are not read: the eviction of a store has its own.

Source: NVIDIA recsys-examples v26.06.01 (the same since v25.09), ``batched_dynamicemb_tables.py``
and ``key_value_table.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tierbed.errors import CorruptionError, UnsupportedError
from tierbed.tables.found import FoundTable, TableFile
from tierbed.tables.rows import Rows, joined, of_file
from tierbed.tables.state import state_parts
from tierbed.tables.writing import Report, bytes_of, numbers_of

__all__ = ["is_dynamicemb", "read_dynamicemb", "write_dynamicemb"]

_KEYS = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)")
_KINDS = {
    "sgd": "sgd",
    "adam": "adam",
    "exact_adagrad": "adagrad",
    "exact_row_wise_adagrad": "row_wise_adagrad",
}


def is_dynamicemb(folder: Path) -> bool:
    """Whether a folder, or one within, has a dump."""
    return any(True for _ in folder.rglob("*_emb_keys.rank_*.world_size_*"))


def read_dynamicemb(folder: Path) -> TableFile:
    """Opens a dump, with the folders of its collections or of one.

    Raises:
        CorruptionError: Files of a rank are missing, or have no whole rows.
    """
    found: dict[tuple[Path, str], int] = {}
    for path in sorted(folder.rglob("*_emb_keys.rank_*.world_size_*")):
        told = _KEYS.fullmatch(path.name)
        if told is not None:
            found[path.parent, told["table"]] = int(told["ranks"])
    tables = []
    for (parent, name), ranks in found.items():
        module = ".".join(parent.relative_to(folder).parts)
        tables.append(_table(parent, name, ranks, f"{module}.{name}" if module else name))
    return TableFile(folder, tables)


def _table(folder: Path, table: str, ranks: int, name: str) -> FoundTable:
    def file(item: str, rank: int) -> Path:
        return folder / f"{table}_{item}.rank_{rank}.world_size_{ranks}"

    missing = [
        file(item, rank).name
        for rank in range(ranks)
        for item in ("emb_keys", "emb_values")
        if not file(item, rank).is_file()
    ]
    if missing:
        raise CorruptionError(
            f"{folder} lacks {missing[:10]} of {ranks} ranks; bring all its files again from where "
            "they were written",
            {"path": str(folder)},
        )
    counts = [file("emb_keys", rank).stat().st_size // 8 for rank in range(ranks)]
    total = sum(counts)
    keys = [of_file(file("emb_keys", at), (count,), "<i8", 0) for at, count in enumerate(counts)]
    has_state = all(file("emb_opt_values", rank).is_file() for rank in range(ranks))
    told = _told(folder / f"{table}_opt_args.json")
    kind = _KINDS.get(str(told.get("opt_type")))
    weight = _matrix([file("emb_values", rank) for rank in range(ranks)], counts)
    state: dict[str, Rows] = {}
    if has_state and total:
        packed = _matrix([file("emb_opt_values", rank) for rank in range(ranks)], counts)
        kind = kind or _kind_of(packed.width, weight.width)
        parts = state_parts(kind, weight.width)
        if sum(part.width for part in parts) != packed.width:
            raise CorruptionError(
                f"the state of {table} in {folder} has {packed.width} numbers a row, not those of "
                f"{kind} as {table}_opt_args.json says; bring all its files again from where they "
                "were written",
                {"path": str(folder)},
            )
        state = {part.name: packed.columns(part.first, part.width) for part in parts}
    return FoundTable(
        name=name,
        weight=weight,
        ids=joined(keys),
        state=state,
        steps=int(told["iters"]) if "iters" in told else None,
        optimizer=kind if state else None,
    )


def _matrix(files: list[Path], counts: list[int]) -> Rows:
    """Returns the rows of all ranks; their width follows from the sizes."""
    sizes = [file.stat().st_size for file in files]
    width = max((size // (4 * n) for size, n in zip(sizes, counts, strict=True) if n), default=0)
    for file, size, count in zip(files, sizes, counts, strict=True):
        if size != 4 * width * count:
            raise CorruptionError(
                f"{file} has {size} bytes, not {count} rows of {width} numbers as its keys and the "
                "other ranks say; bring all its files again from where they were written",
                {"path": str(file)},
            )
    pairs = zip(files, counts, strict=True)
    return joined([of_file(file, (count, width), "<f4", 0) for file, count in pairs])


def _told(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        told: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptionError(f"{path} is no JSON: {error}", {"path": str(path)}) from error
    return told


def _kind_of(state_width: int, dim: int) -> str:
    widths = {1: "row_wise_adagrad", dim: "adagrad", 2 * dim: "adam"}
    return widths.get(state_width, "sgd")


def write_dynamicemb(tables: list[FoundTable], folder: Path, report: Report) -> None:
    """Writes a dump of one rank, which a run of any number of ranks loads.

    Raises:
        UnsupportedError: State of an optimizer that dynamicemb does not have.
    """
    for table in tables:
        start, end = folder / table.short, ".rank_0.world_size_1"
        kind = next((name for name, ours in _KINDS.items() if ours == table.optimizer), None)
        if table.state and kind is None:
            raise UnsupportedError(
                f"dynamicemb has no {table.optimizer}, of which the state of {table.short!r} is; "
                "export without state",
                {"table": table.short},
            )
        files = {"emb_keys": [numbers_of(table)], "emb_values": [table.weight]}
        if table.state:
            files["emb_opt_values"] = list(table.state.values())
        for item, parts in files.items():
            with Path(f"{start}_{item}{end}").open("wb") as file:
                for first in range(0, table.rows, report.chunk_rows):
                    count = min(report.chunk_rows, table.rows - first)
                    file.write(bytes_of(_beside(parts, first, count)))
                    if item == "emb_values":
                        report.add(count)
        numbers = {**table.numbers, "opt_type": kind, "iters": table.steps or 0}
        Path(f"{start}_opt_args.json").write_text(json.dumps(numbers if kind else {}))


def _beside(parts: list[Rows], first: int, count: int) -> Any:
    import torch

    read = [part.read(first, count) for part in parts]
    return read[0] if len(read) == 1 else torch.cat([one.view(count, -1) for one in read], dim=1)
