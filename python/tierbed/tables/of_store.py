"""Tables of a store as what writers write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from tierbed.config.optim import OPTIMIZERS, Optimizer
from tierbed.tables.found import FoundTable
from tierbed.tables.numbers import Numbers, RowOrder
from tierbed.tables.rows import Rows
from tierbed.tables.scanned import ScannedRows
from tierbed.tables.state import NEEDS_STEPS, StatePart, state_parts
from tierbed.train.store import Store

__all__ = ["table_of"]

# Rows between two that are wanted which are read along.
_GAP_ROWS = 64


def table_of(store: Store, name: str, *, with_state: bool, scratch: Path) -> FoundTable:
    """Returns a table of a store; its rows are read when they are written.

    Of an open vocabulary: the rows that ids have, in the order of the rows, and the shared one.

    Args:
        store: The store.
        name: Name of the table.
        with_state: Whether its optimizer state goes along.
        scratch: Folder with room for 32 bytes of each id, and for rows on their way, of a store in
            forward order.
    """
    schema = store.table(name)
    kind, dim = str(schema["optimizer"]), int(schema["dim"])
    parts = state_parts(kind, dim) if with_state else []
    ids = numbers = None
    count = int(schema["row_count"])
    if name in store.vocabularies():
        next_row = int(store.vocabularies()[name]["next_row"])
        order = RowOrder(next_row, str(scratch))
        store.scan_ids(name, order.add)
        numbers, ids = order.finish()
        count = numbers.count
    reader = _Reader(store, name, numbers, with_state=bool(parts))
    if store.order()["kind"] == "forward":
        reader.scanned = ScannedRows(store, name, scratch)
    shared = _Reader(store, name, _shared_row(str(scratch)), with_state=bool(parts))
    optimizer = store.optimizers.get(store.table_id(name), OPTIMIZERS[kind]())
    return FoundTable(
        name=f"{name}.weight",
        weight=Rows((count, dim), torch.float32, reader.weights),
        ids=None if ids is None else ids.rows(),
        shared=None if ids is None else Rows((1, dim), torch.float32, shared.weights),
        state={part.name: reader.state(part, count) for part in parts},
        shared_state={} if ids is None else {part.name: shared.state(part, 1) for part in parts},
        steps=store.steps_done(name) if with_state and kind in NEEDS_STEPS else None,
        optimizer=kind,
        numbers=_numbers(optimizer) if with_state else {},
    )


def _shared_row(scratch: str) -> Numbers:
    """Returns the number of the row that ids without one share."""
    numbers = Numbers(scratch)
    numbers.append(torch.zeros(1, dtype=torch.int64, device="cpu"))
    return numbers


def _numbers(optimizer: Optimizer) -> dict[str, float]:
    """Returns the numbers of an optimizer."""
    told = dataclasses.asdict(optimizer)
    betas = told.pop("betas", None)
    return told if betas is None else {**told, "beta1": betas[0], "beta2": betas[1]}


class _Reader:
    """Rows of a table with their state; those read last stay in memory for the next part."""

    def __init__(self, store: Store, table: str, numbers: Numbers | None, with_state: bool) -> None:
        self._store = store
        self._table = table
        self._numbers = numbers
        self._with_state = with_state
        self.scanned: ScannedRows | None = None
        self._last: tuple[int, int] | None = None
        self._held = (torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))

    def weights(self, first: int, count: int) -> Tensor:
        """Reads rows ``[count, D]``."""
        return self._read(first, count)[0]

    def state(self, part: StatePart, count: int) -> Rows:
        """Returns a part of the state of all ``count`` rows."""
        end = part.first + part.width
        return Rows(
            (count, part.width),
            torch.float32,
            lambda at, n: self._read(at, n)[1][:, part.first : end],
        )

    def _read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        if self._last != (first, count):
            self._held, self._last = self._fresh(first, count), (first, count)
        return self._held

    def _fresh(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        store, table = self._store, self._table
        wanted = None if self._numbers is None else self._numbers.read(first, count)
        if self.scanned is not None:
            if wanted is None:
                return self.scanned.read(first, count)
            # Along a plan no row is given back: those of ids follow each other.
            low = int(wanted[0])
            assert int(wanted[-1]) == low + count - 1, f"rows of {table!r} have gaps"
            return self.scanned.read(low, count)
        if wanted is not None:
            if not self._with_state:
                return store.gather_rows(table, wanted), torch.empty(0, device="cpu")
            return self._gathered(wanted)
        if self._with_state:
            return store.read_rows_and_state(table, first, count)
        return store.read_rows(table, first, count), torch.empty(0, device="cpu")

    def _gathered(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows in ascending order with their state, runs of near ones at once."""
        weights, states = [], []
        for run in torch.tensor_split(wanted, torch.nonzero(wanted.diff() > _GAP_ROWS)[:, 0] + 1):
            low = int(run[0])
            rows, state = self._store.read_rows_and_state(self._table, low, int(run[-1]) - low + 1)
            weights.append(rows[run - low])
            states.append(state[run - low])
        return torch.cat(weights), torch.cat(states)
