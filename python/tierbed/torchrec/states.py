"""State dictionaries of models whose collections lie in a store, under TorchRec's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tierbed.config.words import check_word
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.nn import EmbeddingBagCollection, EmbeddingCollection
from tierbed.tables.state import NEEDS_STEPS, STEP_NAMES, StatePart, part_named, state_parts
from tierbed.torchrec.int8 import Int8Layout, check_width, decoded
from tierbed.torchrec.pieces import Parts, StateTensors, Tensors, rows_of, whole
from tierbed.train.store import Store

__all__ = ["Held", "full_state_dict", "held_by", "load_rows", "load_state_dict"]


@dataclass(frozen=True)
class Held:
    """A table of a model that lies in a store.

    Args:
        name: Of its rows in a state dictionary.
        store: Where they are.
        table: Its name there.
    """

    name: str
    store: Store
    table: str

    @property
    def schema(self) -> Mapping[str, Any]:
        """What the store tells of the table."""
        return self.store.table(self.table)

    def state_columns(self) -> list[tuple[str, int, int]]:
        """Names, first column and columns of the parts of a row's state, as of TorchRec."""
        names = ("momentum1", "exp_avg_sq")
        parts = zip(names, self.state_parts(), strict=False)
        return [(name, part.first, part.width) for name, part in parts]

    def state_parts(self) -> list[StatePart]:
        """The parts of a row's state."""
        return state_parts(str(self.schema["optimizer"]), int(self.schema["dim"]))


def held_by(model: nn.Module) -> list[Held]:
    """Returns the tables of ``model`` that lie in a store.

    Raises:
        UnsupportedError: One has an open vocabulary, or its rows are those of a snapshot.
    """
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            continue
        start = f"{path}." if path else ""
        store = module.store
        if not isinstance(store, Store):
            raise UnsupportedError(
                f"the rows of {path or 'the model'} lie in a {type(store).__name__}, which is only "
                "looked up; take the model on its training store"
            )
        for table in module.table_names():
            if table in store.vocabularies():
                raise UnsupportedError(
                    f"table {table!r} has an open vocabulary, whose rows belong to ids; move it by "
                    "'tierbed export', which writes the ids too",
                    {"table": table},
                )
            found.append(Held(f"{start}{module.state_prefix}.{table}.weight", store, table))
    return found


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state of a model and all rows of its tables, whole, under TorchRec's names.

    TorchRec's model of the same modules loads it. For tables that fit in memory;
    :func:`save_checkpoint` is for others.

    Args:
        model: A model with collections over a store.
    """
    full = dict(model.state_dict())
    for held in held_by(model):
        full[held.name] = held.store.read_rows(held.table, 0, int(held.schema["row_count"]))
    return full


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    optimizer_state: Mapping[str, Any] | None = None,
    steps: int | None = None,
    int8: Int8Layout | None = None,
    strict: bool = True,
    chunk_rows: int = 65536,
) -> None:
    """Loads the state of TorchRec's model: rows go into the store, all else into ``model``.

    Everything is checked before anything changes. Rows are float32, or floats of fewer bytes;
    sharded tensors are taken where all shards are of this process. Without ``optimizer_state`` the
    state of the rows starts anew.

    Args:
        model: A model with collections over a store, of the same modules.
        state_dict: ``state_dict()`` of TorchRec's model.
        optimizer_state: ``state_dict()`` of its fused optimizer: tensors by name of the rows.
        steps: Steps that optimizer did, for Adam, whose state does not tell them.
        int8: How rows of one byte per weight lie, if there are any: ``"scale_bias_last"`` as
            FBGEMM's ``FloatToFused8BitRowwiseQuantized`` writes them, ``"scale_bias_first"`` as
            TorchRec's quantized modules keep them. They become float32.
        strict: Whether every row and every tensor of the model must be there, and nothing else.
        chunk_rows: Rows written at a time.

    Raises:
        InvalidError: Rows or their state are missing, or of another shape.
        UnsupportedError: State that rows do not have.
        RuntimeError: As of ``torch.nn.Module.load_state_dict``.
    """
    tables = held_by(model)
    names = {held.name for held in tables}
    rows = StateTensors({name: value for name, value in state_dict.items() if name in names})
    state = _flat_state(tables, optimizer_state) if optimizer_state is not None else None
    loads = plan_rows(tables, rows, state, steps, int8=int8, strict=strict)
    model.load_state_dict(
        {name: value for name, value in state_dict.items() if name not in names}, strict=strict
    )
    load_rows(loads, chunk_rows)


@dataclass(frozen=True)
class TableLoad:
    """What is to be written into a table.

    Args:
        held: The table.
        weights: Its rows.
        state: Parts of their state, by first column.
        steps: Steps done; None to begin anew.
        int8: How its rows lie, where they are bytes.
    """

    held: Held
    weights: Parts
    state: dict[int, Parts]
    steps: int | None
    int8: Int8Layout | None


def _flat_state(tables: list[Held], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the state of each table, by the name of its rows, of a ``KeyedOptimizer``."""
    by_name: Mapping[str, Any] = given.get("state", given)
    flat = {}
    for held in tables:
        # FusedEmbeddingBagCollection names rows without what holds them.
        for name in (held.name, f"{held.table}.weight"):
            if name in by_name:
                flat[held.name] = dict(by_name[name])
                break
    return flat


def plan_rows(
    tables: list[Held],
    rows: Tensors,
    state: Mapping[str, Mapping[str, Any]] | None,
    steps: int | None,
    *,
    int8: Int8Layout | None,
    strict: bool,
    name_of: Mapping[str, str] | None = None,
) -> list[TableLoad]:
    """Checks what is to be loaded, and returns it.

    Args:
        tables: The tables of the model.
        rows: Their rows.
        state: Tensors of their state, by the name of the rows; None to start it anew.
        steps: Steps done, for optimizers that need them.
        int8: How rows of bytes lie.
        strict: Whether all rows must be there.
        name_of: Names in ``rows``, by the name of the rows in the model.

    Raises:
        InvalidError: Rows or their state are missing, or of another shape.
        UnsupportedError: State that rows do not have.
    """
    there = set(rows.names())
    loads, missing = [], []
    for held in tables:
        name = held.name if name_of is None else name_of[held.name]
        if name not in there:
            missing.append(name)
            continue
        weights = rows.parts(name)
        layout = _checked_layout(held, name, weights, int8)
        found: dict[int, Parts] = {}
        done = None
        if state is not None:
            found, done = _state_of(held, state.get(held.name, {}), steps)
        loads.append(TableLoad(held, weights, found, done, layout))
    if missing and strict:
        raise InvalidError(
            f"the rows {missing} are missing; strict=False leaves those of the store",
            {"missing": ",".join(missing)},
        )
    return loads


def _checked_layout(
    held: Held, name: str, weights: Parts, int8: Int8Layout | None
) -> Int8Layout | None:
    """Checks the rows of a table, and returns how they lie where they are bytes."""
    rows, dim = int(held.schema["row_count"]), int(held.schema["dim"])
    weights.check_whole(name)
    if weights.dtype.is_floating_point:
        _check_size(name, weights.size, (rows, dim))
        return None
    if int8 is None or weights.dtype != torch.uint8:
        raise InvalidError(
            f"the rows {name} are {weights.dtype}; give int8='scale_bias_last' or "
            "int8='scale_bias_first' for rows of FBGEMM in bytes",
            {"name": name},
        )
    check_word("int8", int8, Int8Layout)
    width = weights.size[1] if len(weights.size) == 2 else 0
    _check_size(name, weights.size, (rows, width))
    check_width(name, width, dim, int8)
    if any(piece.sizes[1] != width for piece in weights.pieces):
        raise InvalidError(
            f"the rows {name} are sharded by columns, so that a shard has no scale of its own; "
            "shard tables by rows before they are quantized",
            {"name": name},
        )
    return int8


def _state_of(
    held: Held, state: Mapping[str, Any], steps: int | None
) -> tuple[dict[int, Parts], int]:
    """Returns the parts of the state of a table by first column, and the steps done."""
    kind, row_count = str(held.schema["optimizer"]), int(held.schema["row_count"])
    columns = held.state_parts()
    found: dict[int, Parts] = {}
    for given, value in state.items():
        key = given.rpartition(".")[2]
        if key in STEP_NAMES:
            told = whole(value, given) if isinstance(value, Parts) else value
            steps = int(told) if steps is None else steps
            continue
        column = part_named(key, columns)
        if column is None:
            raise UnsupportedError(
                f"the state {given!r} of {held.name} is none of rows with optimizer {kind}; leave "
                "out optimizer_state, or make the collection with the optimizer it is of",
                {"table": held.table},
            )
        parts = value if isinstance(value, Parts) else StateTensors({given: value}).parts(given)
        size = parts.size if len(parts.size) == 2 else (*parts.size, 1)
        _check_size(f"the state {given!r} of {held.name}", size, (row_count, column.width))
        parts.check_whole(given)
        found[column.first] = parts
    if len(found) < len(columns):
        names = [name for name, first, _ in held.state_columns() if first not in found]
        raise InvalidError(
            f"the optimizer state of {held.name} lacks {names}; leave out optimizer_state to start "
            "it anew",
            {"table": held.table},
        )
    if steps is None and kind in NEEDS_STEPS:
        raise InvalidError(
            f"the optimizer state of {held.name} does not tell how many steps were done, which "
            f"{kind} needs; give steps=",
            {"table": held.table},
        )
    return found, steps or 0


def _check_size(what: str, found: tuple[int, ...], expected: tuple[int, int]) -> None:
    if tuple(found) != expected:
        raise InvalidError(f"{what} is {list(found)}, not {list(expected)} as in the store")


def load_rows(loads: list[TableLoad], chunk_rows: int) -> None:
    """Writes rows and their state into their stores, ``chunk_rows`` at a time."""
    for load in loads:
        store, table = load.held.store, load.held.table
        dim = int(load.held.schema["dim"])
        for first, column, read in _parts(load.weights, chunk_rows):
            part = read.float() if load.int8 is None else decoded(read, dim, load.int8)
            if part.shape[1] < dim:
                rows = store.read_rows(table, first, part.shape[0])
                rows[:, column : column + part.shape[1]] = part
                store.write_rows(table, first, rows)
            else:
                store.write_rows(table, first, part.contiguous())
        for start, parts in load.state.items():
            for first, column, part in _parts(parts, chunk_rows):
                rows, state = store.read_rows_and_state(table, first, part.shape[0])
                at = start + column
                state[:, at : at + part.shape[1]] = part
                store.write_rows(table, first, rows, state)
        store.set_steps_done(table, load.steps or 0)


def _parts(parts: Parts, chunk_rows: int) -> Iterator[tuple[int, int, Tensor]]:
    for piece in parts.pieces:
        column = piece.offsets[1] if len(piece.offsets) > 1 else 0
        for first, rows in rows_of(piece, chunk_rows):
            yield first, column, rows


def read_state(held: Held, part: str, first: int, count: int) -> Tensor:
    """Returns rows of a part of the state, as TorchRec shapes it: ``[N]`` where it is one word."""
    _, start, width = next(one for one in held.state_columns() if one[0] == part)
    _, state = held.store.read_rows_and_state(held.table, first, count)
    columns = state[:, start : start + width]
    return (columns[:, 0] if width == 1 and _is_word(held, part) else columns).contiguous()


def _is_word(held: Held, part: str) -> bool:
    """Whether a part of the state is a number per row, whatever the dim."""
    kind = str(held.schema["optimizer"])
    row_wise = kind == "row_wise_adagrad"
    return row_wise or (kind == "partial_row_wise_adam" and part == "exp_avg_sq")


def state_size(held: Held, part: str) -> torch.Size:
    """Returns the size of a part of the state of a table, as TorchRec shapes it."""
    width = next(one[2] for one in held.state_columns() if one[0] == part)
    rows = int(held.schema["row_count"])
    return torch.Size([rows] if _is_word(held, part) else [rows, width])
