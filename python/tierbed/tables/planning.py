"""What is to be read from a file into a table, checked before anything changes."""

from __future__ import annotations

from dataclasses import dataclass

from tierbed.config.optim import Optimizer
from tierbed.config.tables import EmbeddingBagConfig, Init
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.tables.found import FoundTable, State
from tierbed.tables.ids import checked_ids
from tierbed.tables.rows import Rows
from tierbed.tables.state import NEEDS_STEPS, STEP_NAMES, StatePart, part_named, state_parts
from tierbed.train.store import Store

__all__ = ["Choices", "Plan", "plan_table"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What holds for all tables of an import; see :func:`tierbed.tables.import_tables`."""

    state: bool | None = None
    steps: int | None = None
    allow_fewer: bool = False
    optimizer: Optimizer | None = None
    init: Init | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A table that is to be read.

    Args:
        table: Its name in the store.
        found: Where it is.
        ids: Its ids; None: numbers of rows from 0 on.
        is_open: Whether ids get rows, or are their numbers.
        state: Parts of the state, in the order of a store; none to begin it anew.
        shared_state: That of the shared row.
        steps: Steps done, where the state depends on them.
        config: The table that is to be made.
    """

    table: str
    found: FoundTable
    ids: Rows | None
    is_open: bool
    state: list[Rows]
    shared_state: list[Rows]
    steps: int | None
    config: EmbeddingBagConfig | None


@dataclass(frozen=True)
class _Target:
    """A table as it is, or will be, in the store."""

    name: str
    dim: int
    kind: str
    row_count: int | None
    config: EmbeddingBagConfig | None


def plan_table(
    store: Store, table: str, found: FoundTable, beside: State | None, choices: Choices
) -> Plan:
    """Checks that a table of a file fits one of a store.

    Args:
        store: The store.
        table: Name of the table there.
        found: The table of the file.
        beside: Its state, where it lies elsewhere in the file.
        choices: What was asked for.

    Raises:
        InvalidError: It does not fit.
        UnsupportedError: State of another optimizer.
    """
    target = _target(store, table, found, choices)
    if found.dim != target.dim:
        raise InvalidError(
            f"{found.name} has {found.dim} numbers a row, table {table!r} {target.dim}; make the "
            "table with that embedding_dim",
            {"table": table},
        )
    if target.row_count is None and found.ids is None:
        raise InvalidError(
            f"table {table!r} has an open vocabulary, whose rows belong to ids, and {found.name} "
            "has none; give them as an npy file: ids= (--ids TABLE=FILE)",
            {"table": table},
        )
    ids = checked_ids(found, target.row_count, store.path)
    _check_count(target, found, allow_fewer=choices.allow_fewer)
    state, shared, steps = _state(target, found, beside, choices)
    return Plan(
        table=table,
        found=found,
        ids=ids,
        is_open=target.row_count is None,
        state=state,
        shared_state=shared,
        steps=steps,
        config=target.config,
    )


def _target(store: Store, table: str, found: FoundTable, choices: Choices) -> _Target:
    there = {str(one["name"]): one for one in store.tables()}
    if table in there:
        schema = there[table]
        is_open = table in store.vocabularies()
        row_count = None if is_open else int(schema["row_count"])
        return _Target(table, int(schema["dim"]), str(schema["optimizer"]), row_count, None)
    if choices.optimizer is None:
        raise InvalidError(
            f"no table {table!r}, the store has {sorted(there)}; give optimizer= (--create "
            "--optimizer), that of the model that will train it, to make the table",
            {"table": table},
        )
    row_count = found.rows
    if found.ids is not None and found.has_row_numbers:
        row_count = 1 + max((int(chunk.max()) for chunk in found.ids.chunks()), default=0)
    config = EmbeddingBagConfig(
        num_embeddings=None if _is_open(found) else row_count,
        embedding_dim=found.dim,
        name=table,
        init=choices.init,
    )
    return _Target(
        table, found.dim, choices.optimizer.kind, None if _is_open(found) else row_count, config
    )


def _is_open(found: FoundTable) -> bool:
    return found.ids is not None and not found.has_row_numbers


def _check_count(target: _Target, found: FoundTable, *, allow_fewer: bool) -> None:
    if target.row_count is None or found.rows == target.row_count:
        return
    if found.rows > target.row_count:
        raise InvalidError(
            f"{found.name} has {found.rows} rows, table {target.name!r} {target.row_count}; make "
            "the table with as many",
            {"table": target.name},
        )
    if not allow_fewer and target.config is None:
        raise InvalidError(
            f"{found.name} has only {found.rows} rows, table {target.name!r} {target.row_count}; "
            "allow_fewer=True (--allow-fewer) leaves the others as they are",
            {"table": target.name},
        )


def _state(
    target: _Target, found: FoundTable, beside: State | None, choices: Choices
) -> tuple[list[Rows], list[Rows], int | None]:
    """Returns the parts of the state in the order of the store, also of the shared row."""
    parts = state_parts(target.kind, target.dim)
    given = beside or found.state
    if choices.state is False:
        return [], [], None
    if not given and found.split is not None:
        given = found.split(parts)
    if not given:
        if choices.state:
            raise InvalidError(
                f"no optimizer state lies beside {found.name}; say where it is: state_keys= "
                "(--state-key TABLE=NAME), or begin it anew: state=False (--no-state)",
                {"table": target.name},
            )
        return [], [], None
    steps = choices.steps if choices.steps is not None else found.steps
    placed: dict[str, Rows] = {}
    for name, rows in given.items():
        leaf = name.rpartition(".")[2]
        if leaf in STEP_NAMES:
            steps = int(rows.whole().item()) if choices.steps is None else steps
            continue
        part = part_named(leaf, parts)
        size = (rows.count, rows.width)
        told = found.optimizer or target.kind
        if part is None or size != (found.rows, part.width) or told != target.kind:
            raise UnsupportedError(
                f"the optimizer state {leaf!r} {list(rows.shape)} of {found.name} is not that of "
                f"table {target.name!r}, which trains by {target.kind}; make the table with the "
                "optimizer it is of, or begin it anew: state=False (--no-state)",
                {"table": target.name},
            )
        placed[part.name] = rows
    return [*_all_of(parts, placed, found)], _shared(parts, found), _steps(target, found, steps)


def _all_of(parts: list[StatePart], placed: dict[str, Rows], found: FoundTable) -> list[Rows]:
    missing = [part.name for part in parts if part.name not in placed]
    if missing:
        raise InvalidError(
            f"the optimizer state of {found.name} lacks {missing}; begin it anew: state=False "
            "(--no-state)",
            {"table": found.name},
        )
    return [placed[part.name] for part in parts]


def _shared(parts: list[StatePart], found: FoundTable) -> list[Rows]:
    named = {part_named(name, parts): rows for name, rows in found.shared_state.items()}
    return [named[part] for part in parts if part in named]


def _steps(target: _Target, found: FoundTable, steps: int | None) -> int | None:
    if target.kind not in NEEDS_STEPS:
        return None
    if steps is None:
        raise InvalidError(
            f"the optimizer state of {found.name} does not tell how many steps were done, which "
            f"{target.kind} needs; give steps= (--steps)",
            {"table": target.name},
        )
    return steps
