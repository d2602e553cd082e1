"""Tables of files of other tools read into a store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer
from tierbed.config.tables import Init
from tierbed.errors import InvalidError
from tierbed.tables.found import TableFile
from tierbed.tables.ids import with_ids
from tierbed.tables.planning import Choices, Plan, plan_table
from tierbed.tables.rows import CHUNK_ROWS, Rows
from tierbed.tables.sources import find_tables
from tierbed.tables.writing import Progress
from tierbed.train.store import Store

__all__ = ["ImportedTable", "import_tables"]

Path = str | os.PathLike[str]
Names = str | Sequence[str] | Mapping[str, str | None]


@dataclass(frozen=True)
class ImportedTable:
    """What was read into a table, or would be.

    Args:
        table: Its name in the store.
        source: Its name in the file.
        rows: Rows read.
        has_ids: Whether they came with ids.
        has_state: Whether optimizer state came along; else it began anew.
        is_new: Whether the table was made.
    """

    table: str
    source: str
    rows: int
    has_ids: bool
    has_state: bool
    is_new: bool


def import_tables(
    store: Store,
    path: Path,
    tables: Names | None = None,
    *,
    ids: Mapping[str, Path] | None = None,
    state: bool | None = None,
    state_keys: Mapping[str, str] | None = None,
    steps: int | None = None,
    allow_fewer: bool = False,
    optimizer: Optimizer | None = None,
    init: Init | None = None,
    dry_run: bool = False,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress | None = None,
) -> list[ImportedTable]:
    """Reads tables of a file or folder into a store, ``chunk_rows`` rows at a time.

    :func:`find_tables` tells what is read. Names, shapes, ids and sizes of files are checked before
    anything changes. Checkpoint afterwards; an error on the way leaves the last checkpoint.

    Ids that lie beside the rows belong to an open vocabulary, where the table is one: each gets a
    row of its own, whatever its admission. Of another table they are numbers of rows.

    Args:
        store: The store.
        path: The file or folder.
        tables: Names of tables in the store; or, by such a name, the name in the file. By default
            all tables of the store that the file has, and with ``optimizer`` all that it has.
        ids: By table, an npy file with its ids ``[N]``.
        state: Whether optimizer state comes along: True insists, False begins it anew. By default
            it comes where it lies beside the rows.
        state_keys: By table, where its state lies in a file that numbers parameters, as an
            optimizer of torch does: ``{"item": "optimizer.state.0"}``.
        steps: Steps that the optimizer did, for Adam, where the file does not tell them.
        allow_fewer: Whether a table may have more rows than the file; the others stay.
        optimizer: Makes tables that the store lacks with this one. A table with ids gets an open
            vocabulary.
        init: How other rows of such a table start; its seed follows from that of the store.
        dry_run: Checks and tells, and changes nothing.
        chunk_rows: Rows in memory at a time.
        progress: Called with (rows done, rows in all).

    Raises:
        InvalidError: Another shape or optimizer, too few rows, an id twice, or an unknown name.
        UnsupportedError: Optimizer state that the rows do not have.
        CorruptionError: The file is not whole.

    Examples:
        >>> torch.save({"model": torch.nn.EmbeddingBag(1000, 16).state_dict()}, "model.pt")
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     done = tb.tables.import_tables(
        ...         store, "model.pt", {"item": "model.weight"}, optimizer=tb.SGD(lr=0.1)
        ...     )
        >>> done[0].rows, done[0].is_new
        (1000, True)
    """
    file = find_tables(path)
    wanted = _wanted(store, file, tables, makes=optimizer is not None)
    ids, state_keys = ids or {}, state_keys or {}
    unknown = sorted((set(ids) | set(state_keys)) - set(wanted))
    if unknown:
        raise InvalidError(
            f"ids or state of {unknown} are given, but {sorted(wanted)} are read; name those tables"
        )
    choices = Choices(
        state=state,
        steps=steps,
        allow_fewer=allow_fewer,
        optimizer=optimizer,
        init=init,
    )
    plans = []
    for table, key in wanted.items():
        found = file.pick(key, table)
        found = with_ids(found, ids[table]) if table in ids else found
        beside = file.state_under(state_keys[table]) if table in state_keys else None
        plans.append(plan_table(store, table, found, beside, choices))
    if not dry_run:
        for plan in plans:
            if plan.config is not None:
                store.add_table(plan.config, optimizer)
        total, done = sum(plan.found.rows for plan in plans), 0
        for plan in plans:
            for count in _read(store, plan, chunk_rows):
                done += count
                if progress is not None:
                    progress(done, total)
    return [_result(plan) for plan in plans]


def _wanted(
    store: Store, file: TableFile, tables: Names | None, *, makes: bool
) -> dict[str, str | None]:
    """Returns names in the file by names in the store."""
    if isinstance(tables, Mapping):
        return dict(tables)
    if tables is not None:
        return dict.fromkeys([tables] if isinstance(tables, str) else tables)
    there = {str(table["name"]) for table in store.tables()}
    names = [(one.short, one.name) for one in file.tables if makes or one.short in there]
    shorts = [short for short, _ in names]
    if not names or len(set(shorts)) < len(shorts):
        told = [one.name for one in file.tables]
        raise InvalidError(
            f"{file.path} holds {told[:20]}, which cannot be told apart or are none of the store's "
            f"{sorted(there)}; name the tables: tables={{'item': 'item.weight'}} (--table "
            "item=item.weight)",
            {"path": str(file.path)},
        )
    return dict(names)


def _result(plan: Plan) -> ImportedTable:
    return ImportedTable(
        plan.table,
        plan.found.name,
        plan.found.rows,
        plan.ids is not None,
        bool(plan.state),
        plan.config is not None,
    )


def _read(store: Store, plan: Plan, chunk_rows: int) -> Iterator[int]:
    """Reads a table, and yields how many rows each time."""
    found, table = plan.found, plan.table
    if found.shared is not None and plan.is_open:
        shared_state = _state_of(plan.shared_state, 0, 1)
        store.write_rows(table, 0, found.shared.matrix(0, 1), shared_state)
    for first in range(0, found.rows, chunk_rows):
        count = min(chunk_rows, found.rows - first)
        weights = found.weight.matrix(first, count)
        rows_state = _state_of(plan.state, first, count)
        if plan.ids is None:
            store.write_rows(table, first, weights, rows_state)
        else:
            rows = plan.ids.read(first, count)
            rows = store.assign_ids(table, rows) if plan.is_open else rows
            store.scatter_rows(table, rows, weights, rows_state)
        yield count
    if plan.steps is not None:
        store.set_steps_done(table, plan.steps)


def _state_of(parts: list[Rows], first: int, count: int) -> Tensor | None:
    """Returns the state of rows ``[count, S]`` f32."""
    if not parts:
        return None
    return torch.cat([part.matrix(first, count) for part in parts], dim=1)
