"""Tables that files hold, and which of their tensors belong to which table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierbed.errors import InvalidError
from tierbed.tables.rows import Rows
from tierbed.tables.state import STATE_NAMES, STEP_NAMES, StatePart

__all__ = ["FoundTable", "State", "TableFile", "tables_of"]

State = Mapping[str, Rows]


@dataclass(frozen=True, kw_only=True)
class FoundTable:
    """A table in a file, or one of a store on its way into a file.

    Args:
        name: Its name there.
        weight: Its rows ``[N, D]``.
        ids: The id of each row ``[N]``; None: ids are numbers of rows.
        has_row_numbers: Whether ``ids`` are numbers of rows of a larger table.
        shared: The row ``[1, D]`` of all ids that have none.
        state: Optimizer state, by the names of the file.
        shared_state: That of the shared row.
        steps: Steps that the optimizer did, where the file says so.
        optimizer: Its kind, where the file says so.
        numbers: Those of the optimizer, such as ``lr``, of a table of a store.
        split: Returns the state of a file that does not tell of what parts it is.
    """

    name: str
    weight: Rows
    ids: Rows | None = None
    has_row_numbers: bool = False
    shared: Rows | None = None
    state: State = field(default_factory=dict)
    shared_state: State = field(default_factory=dict)
    steps: int | None = None
    optimizer: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    split: Callable[[list[StatePart]], State] | None = None

    @property
    def base(self) -> str:
        """Its name without ``.weight``."""
        return self.name.removesuffix(".weight")

    @property
    def short(self) -> str:
        """The last word of its name, which is that of the table in a store."""
        return self.base.rpartition(".")[2]

    def is_called(self, name: str | None) -> bool:
        """Whether ``name`` is the end of its name, with or without ``.weight``.

        Args:
            name: The end, such as ``item`` of ``model.item.weight``.
        """
        return any(f".{own}".endswith(f".{name}") for own in (self.name, self.base))

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.weight.count

    @property
    def dim(self) -> int:
        """Numbers per row."""
        return self.weight.width

    @property
    def has_state(self) -> bool:
        """Whether optimizer state lies beside it."""
        return bool(self.state) or self.split is not None


@dataclass(frozen=True)
class TableFile:
    """What a file or a folder holds.

    Args:
        path: Where.
        tables: Its tables.
        tensors: All tensors that have names, tables among them.
    """

    path: Path
    tables: list[FoundTable]
    tensors: Mapping[str, Rows] = field(default_factory=dict)

    def pick(self, key: str | None = None, table: str | None = None) -> FoundTable:
        """Returns one of its tables.

        Args:
            key: Its name, or the last word of it; None: the only one, or that of ``table``.
            table: Name of the table in a store.

        Raises:
            InvalidError: It is not there, or several could be meant.
        """
        wanted = table if key is None else key
        for one in self.tables:
            if one.name == wanted:
                return one
        named = [one for one in self.tables if one.is_called(wanted)]
        if len(named) == 1:
            return named[0]
        if key is None and len(self.tables) == 1:
            return self.tables[0]
        names = [one.name for one in self.tables]
        told = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        if not names:
            raise InvalidError(
                f"{self.path} holds no table; one is a tensor of floats [N, D], alone or in "
                "dictionaries",
                {"path": str(self.path)},
            )
        if key is not None:
            raise InvalidError(
                f"{self.path} holds {told}, and no {key!r} or several; give one of these names",
                {"path": str(self.path)},
            )
        raise InvalidError(
            f"{self.path} holds {told}; name one of them, as in item={names[0]}",
            {"path": str(self.path)},
        )

    def numbered_state(self) -> dict[str, list[str]]:
        """Returns optimizer state that belongs to no table by its name, by where it lies."""
        weights = {one.name: one.weight for one in self.tables}
        found: dict[str, list[str]] = {}
        for name, rows in self.tensors.items():
            stem, _, leaf = name.rpartition(".")
            owner = _owner(stem, weights) or _owner(stem.removesuffix(".shared"), weights)
            if _is_state(name) and owner is None:
                found.setdefault(stem, []).append(f"{leaf} {list(rows.shape)}")
        return found

    def state_under(self, key: str) -> State:
        """Returns the tensors whose names begin with ``key``, by what follows.

        Args:
            key: The beginning, such as ``optimizer.state.0``.

        Raises:
            InvalidError: There are none.
        """
        start = f"{key}."
        found = {
            name[len(start) :]: rows
            for name, rows in self.tensors.items()
            if name.startswith(start)
        }
        if not found:
            ends = sorted({name.rpartition(".")[0] for name in self.tensors if _is_state(name)})
            raise InvalidError(
                f"{self.path} has no optimizer state {key!r}, but {ends[:20]}; give one of these "
                "names",
                {"path": str(self.path)},
            )
        return found


def tables_of(tensors: Mapping[str, Rows]) -> list[FoundTable]:
    """Finds tables among named tensors, with ids and optimizer state beside them.

    ``item.weight`` has its ids in ``item.ids`` and its state in ``item.exp_avg`` or
    ``item.weight.exp_avg``; or, as TorchRec names it, in ``state.<path>.item.weight.item.exp_avg``.
    """
    weights = {name: rows for name, rows in tensors.items() if _is_table(name, rows)}
    state: dict[str, dict[str, Rows]] = {name: {} for name in weights}
    shared: dict[str, dict[str, Rows]] = {name: {} for name in weights}
    for name, rows in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf not in STATE_NAMES:
            continue
        owner = _owner(stem, weights)
        if owner is not None:
            state[owner][leaf] = rows
        elif (of_shared := _owner(stem.removesuffix(".shared"), weights)) is not None:
            shared[of_shared][leaf] = rows
    found = []
    for name, weight in weights.items():
        base = name.removesuffix(".weight")
        steps = [state[name].pop(key) for key in STEP_NAMES if key in state[name]]
        found.append(
            FoundTable(
                name=name,
                weight=weight,
                ids=tensors.get(f"{base}.ids"),
                shared=tensors.get(f"{base}.shared"),
                state=state[name],
                shared_state=shared[name],
                steps=int(steps[0].whole().item()) if steps else None,
            )
        )
    return found


def _is_table(name: str, rows: Rows) -> bool:
    is_matrix = len(rows.shape) == 2 and rows.dtype.is_floating_point
    return is_matrix and name.rpartition(".")[2] not in STATE_NAMES | {"ids", "shared"}


def _is_state(name: str) -> bool:
    return name.rpartition(".")[2] in STATE_NAMES


def _owner(stem: str, weights: Mapping[str, Rows]) -> str | None:
    """Returns the table whose state is called ``stem``."""
    for name in (stem, f"{stem}.weight"):
        if name in weights:
            return name
    _, found, rest = f".{stem}".rpartition(".state.")
    for path in (rest, rest.rpartition(".")[0]) if found else ():
        owners = [name for name in weights if path and f".{name}".endswith(f".{path}")]
        if len(owners) == 1:
            return owners[0]
    return None
