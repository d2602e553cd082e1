"""Tables of a training store, and the ids of those of open vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tierbed._native import NativeStore
from tierbed._util.minutes import checked_minutes, minutes_now
from tierbed.config.tables import is_own
from tierbed.errors import InvalidError
from tierbed.results import EvictedIds

__all__ = ["StoreTables"]

# Ids that are handed out at once.
_IDS_AT_ONCE = 65536


def _no_vocabulary(table: str) -> InvalidError:
    return InvalidError(
        f"the ids of table {table!r} are its rows; only a table of open vocabulary "
        "(num_embeddings=None) keeps ids",
        {"table": table},
    )


class StoreTables:
    """The tables of a :class:`tierbed.Store`, and their ids."""

    _native: NativeStore
    _shared_ids: set[str]

    def tables(self) -> list[dict[str, Any]]:
        """Returns every table's ``name``, ``row_count``, ``dim``, ``optimizer``, ....

        A table of open vocabulary has as many rows as it has room for now.
        """
        return [table for table in self._schema() if not is_own(table)]

    def table(self, name: str) -> dict[str, Any]:
        """Returns the schema of table ``name``.

        Args:
            name: Name of the table.

        Raises:
            InvalidError: No such table.
        """
        return self._schema()[self.table_id(name)]

    def _schema(self) -> list[dict[str, Any]]:
        """Every table by id, the indexes of open vocabularies among them."""
        tables: list[dict[str, Any]] = self._native.schema()["tables"]
        return tables

    def vocabularies(self) -> dict[str, dict[str, Any]]:
        """Returns, per table of open vocabulary, what its index holds.

        ``id_count`` ids have a row, ``waiting_count`` are too rare for one, ``free_count`` rows
        are free; rows from ``next_row`` on were never given.
        """
        return {state["table"]: state for state in self._native.vocabularies()["tables"]}

    def translate(self, table: str, ids: Tensor) -> Tensor:
        """Returns the rows of ``ids``, of any shape, i64; changes nothing.

        Ids of an open vocabulary without a row of their own have the shared row, 0. Ids of other
        tables are rows already.

        Args:
            table: Name of the table.
            ids: Ids of any shape.
        """
        rows = ids.detach().to(torch.int64).cpu().contiguous().clone()
        self._native.translate_ids(self.table_id(table), rows.view(-1), None)
        return rows

    def ids(self, table: str) -> tuple[Tensor, Tensor]:
        """Returns the ids of a table of open vocabulary and their rows, ``[N]`` i64 each.

        In the order of the rows. Ids without a row of their own share row 0, which no id is named
        for. Takes 16 bytes of memory per id beside the budget, and up to 56 while it sorts;
        :meth:`scan_ids` takes none.

        Args:
            table: Name of the table.

        Raises:
            InvalidError: No such table, or one whose ids are rows.
        """
        parts: list[tuple[Tensor, Tensor]] = []
        self.scan_ids(table, lambda rows, ids: parts.append((ids, rows)))
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        ids, rows = (torch.cat([none, *(part[which] for part in parts)]) for which in (0, 1))
        rows, order = rows.sort()
        return ids[order], rows

    def scan_ids(self, table: str, visit: Callable[[Tensor, Tensor], None]) -> None:
        """Hands out the ids of a table of open vocabulary that have a row, some at a time.

        Args:
            table: Name of the table.
            visit: Called with rows ``[N]`` and their ids ``[N]``, i64, in no order.

        Raises:
            InvalidError: No such table, or one whose ids are rows.
        """
        at = self.table_id(table)
        if table not in self.vocabularies():
            raise _no_vocabulary(table)

        def hand_out(_: int, rows: Any, ids: Any) -> None:
            visit(from_dlpack(rows), from_dlpack(ids).view(-1))

        self._native.scan_ids(at, _IDS_AT_ONCE, hand_out)

    def table_id(self, name: str) -> int:
        """Returns the id of table ``name``.

        Args:
            name: Name of the table.

        Raises:
            InvalidError: No such table.
        """
        names = [table["name"] for table in self._schema()]
        if name not in names:
            known = [table["name"] for table in self.tables()]
            raise InvalidError(f"no table {name!r}; the store has {known}", {"table": name})
        return names.index(name)

    def assign_ids(self, table: str, ids: Tensor) -> Tensor:
        """Gives ids of a table of open vocabulary rows of their own, ``[N]`` i64, and returns them.

        At once, whatever the admission of the table asks for. Ids that have a row keep it.

        Args:
            table: Name of the table.
            ids: Ids ``[N]`` i64.

        Raises:
            InvalidError: No such table, or one whose ids are rows.
        """
        at = self.table_id(table)
        if table not in self.vocabularies():
            raise _no_vocabulary(table)
        asked = int(self.vocabularies()[table]["policy"]["admit_after"])
        for _ in range(asked):
            rows = ids.detach().to(torch.int64).cpu().contiguous().clone()
            self._native.translate_ids(at, rows, minutes_now())
            if bool((rows > 0).all()):
                return rows
        raise AssertionError(f"ids of {table!r} have no row after {asked} uses")

    def evict(
        self, table: str | None = None, *, now_mins: int | None = None
    ) -> dict[str, EvictedIds]:
        """Takes the rows of ids that the policy of their table judges; call it between steps.

        Freed rows start again from their initial values; an id that comes back is a new id.

        Args:
            table: One table of open vocabulary; by default all of them.
            now_mins: Minutes since 1970; by default the machine's time.

        Returns:
            What was taken, by table.

        Raises:
            InvalidError: ``now_mins`` is no number of minutes from 0 to 2^32 - 1, or other ranks
                hold rows of a table: their collection evicts.
        """
        now = checked_minutes(now_mins)
        counts = {}
        for name in self.vocabularies() if table is None else [table]:
            self._check_own_ids(name)
            ids, waiting = self._native.evict(self.table_id(name), now)
            counts[name] = EvictedIds(id_count=ids, waiting_count=waiting)
        return counts

    def _check_own_ids(self, name: str) -> None:
        """Refuses to evict ids whose rows other ranks hold too."""
        if name in self._shared_ids:
            raise InvalidError(
                f"other ranks hold rows of table {name!r} too; call evict() of its collection on "
                "all ranks",
                {"table": name},
            )

    def note_shared_ids(self, tables: Iterable[str]) -> None:
        """Remembers tables of open vocabulary whose rows other ranks hold too.

        Args:
            tables: Their names.
        """
        self._shared_ids.update(tables)
