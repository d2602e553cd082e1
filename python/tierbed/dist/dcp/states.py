"""Tensors of a collection over ranks, by the names that a checkpoint has for them."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from tierbed.config.words import check_word
from tierbed.dist.checkpoint import RankTables
from tierbed.dist.collection import ShardedEmbeddingBagCollection
from tierbed.dist.dcp.tensors import Columns, DenseState, StepsDone, TableState
from tierbed.dist.dcp.written import CompactState, RowNumbers, UseCounts, Written
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.held import Held
from tierbed.dist.sequences import ShardedEmbeddingCollection
from tierbed.errors import UnsupportedError
from tierbed.tables.state import NEEDS_STEPS, StatePart, state_parts
from tierbed.train.coded_store import CodedStore
from tierbed.train.store import Store

__all__ = ["Layout", "optimizer_states", "table_states"]

Layout = Literal["dense", "compact"]
Collection = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
# As TorchRec calls the first and the second part of a row's state.
_PARTS = ("momentum1", "exp_avg_sq")


def table_states(
    rows: Collection, *, layout: Layout = "dense", prefix: str = ""
) -> dict[str, TableState]:
    """Returns the rows of a collection for a state dictionary; all ranks call this together.

    ``"dense"`` has ``embedding_bags.<table>.weight`` ``[N, D]``, as TorchRec names it (of sequences
    ``embeddings.<table>.weight``): every row, written or not. ``"compact"`` has the written rows
    alone, in ascending order: ``<table>.rows`` ``[K]`` i64, ``<table>.weights`` ``[K, D]``,
    ``<table>.state`` ``[K, S]`` where the optimizer has some, ``<table>.use_counts`` ``[K]`` i64,
    and ``<table>.steps`` ``[1]`` i64. It reads all rows once, and takes a bit per row in memory.

    Args:
        rows: The collection.
        layout: Which rows, and which names.
        prefix: What stands before the names: where the collection is in its model.

    Raises:
        UnsupportedError: Rows that do not train.
    """
    check_word("layout", layout, Layout)
    own, kind = _of(rows)
    start = f"{prefix}." if prefix else ""
    if layout == "dense":
        return {f"{start}{kind}.{name}.weight": state for name, state in _weights(own).items()}
    return {f"{start}{name}": state for name, state in _compact(own).items()}


def optimizer_states(rows: Collection, *, prefix: str = "") -> dict[str, Any]:
    """Returns the optimizer state of a collection as a fused optimizer of TorchRec has it.

    ``{"state": {"embedding_bags.<table>.weight": {"<table>.momentum1": ...}}}``, with
    ``"<table>.exp_avg_sq"`` where there is a second part, and ``"<table>.steps"``, which TorchRec
    does not have.

    Args:
        rows: The collection.
        prefix: As of :func:`table_states`.

    Raises:
        UnsupportedError: Rows that do not train.
    """
    own, kind = _of(rows)
    start = f"{prefix}." if prefix else ""
    store = _store(own)
    found: dict[str, dict[str, TableState]] = {}
    for config in own.tables:
        name, held = config.name, _held(own, config.name)
        whole = state_parts(own.optimizer.kind, config.embedding_dim)
        of_table: dict[str, TableState] = {
            f"{name}.{leaf}": DenseState(
                _columns(own, held, at),
                config.num_embeddings or 0,
                0 if _is_word(own, at) else part.width,
            )
            for at, (leaf, part) in enumerate(zip(_PARTS, whole, strict=False))
        }
        is_needed = own.optimizer.kind in NEEDS_STEPS
        of_table[f"{name}.steps"] = StepsDone(
            None if held is None else store, held, is_needed=is_needed
        )
        found[f"{start}{kind}.{name}.weight"] = of_table
    return {"state": found}


def _of(rows: Collection) -> tuple[RankTables, str]:
    """Returns what this rank holds, and how TorchRec calls tables of such a collection."""
    is_bags = isinstance(rows, ShardedEmbeddingBagCollection)
    own = rows._held() if isinstance(rows, ShardedEmbeddingBagCollection) else rows._bags._held()
    if isinstance(own.store, CodedStore):
        raise UnsupportedError(
            "a checkpoint of torch has rows that train, and a CodedStore's do not; "
            "use save of the collection"
        )
    for config in own.tables:
        if config.num_embeddings is None:
            raise UnsupportedError(
                f"table {config.name!r} has an open vocabulary, for whose index a checkpoint of "
                "torch has no place; use save of the collection",
                {"table": config.name},
            )
    return own, "embedding_bags" if is_bags else "embeddings"


def _store(own: RankTables) -> Store | DeviceStore:
    assert not isinstance(own.store, CodedStore), "checked before"
    return own.store


def _held(own: RankTables, table: str) -> Held | None:
    return next((one for one in own.held() if one.config.name == table), None)


def _is_word(own: RankTables, at: int) -> bool:
    """Whether a part of the state is a number per row."""
    kind = own.optimizer.kind
    return kind == "row_wise_adagrad" or (kind == "partial_row_wise_adam" and at == 1)


def _columns(own: RankTables, held: Held | None, at: int | None) -> Columns | None:
    """Returns weights, or the part ``at`` of the state, of what this rank holds."""
    if held is None:
        return None
    part: StatePart | None = None
    if at is not None:
        part = state_parts(own.optimizer.kind, len(held.columns))[at]
    is_word = at is not None and _is_word(own, at)
    return Columns(store=_store(own), held=held, part=part, is_word=is_word)


def _weights(own: RankTables) -> dict[str, TableState]:
    return {
        config.name: DenseState(
            _columns(own, _held(own, config.name), None),
            config.num_embeddings or 0,
            config.embedding_dim,
        )
        for config in own.tables
    }


def _compact(own: RankTables) -> dict[str, TableState]:
    written = _written(own)
    totals = _number(own, written)
    store, found = _store(own), dict[str, TableState]()
    for config in own.tables:
        name, of = config.name, written.get(config.name)
        total, held = totals[name], _held(own, name)
        weights = _columns(own, held, None)
        found[f"{name}.rows"] = RowNumbers(of, total)
        found[f"{name}.weights"] = CompactState(
            of, [] if weights is None else [(0, weights)], config.embedding_dim, total
        )
        parts = []
        whole = state_parts(own.optimizer.kind, config.embedding_dim)
        for at, part in enumerate(whole):
            columns = _columns(own, held, at)
            parts += [] if columns is None else [(part.first, columns)]
        if whole:
            width = whole[-1].first + whole[-1].width
            found[f"{name}.state"] = CompactState(of, parts, width, total)
        found[f"{name}.use_counts"] = UseCounts(of, store, total)
        found[f"{name}.steps"] = StepsDone(
            None if held is None else store, held, is_needed=own.optimizer.kind in NEEDS_STEPS
        )
    return found


def _written(own: RankTables) -> dict[str, Written]:
    """Returns the written rows of each table that is held."""
    held = {one.name: one for one in own.held()}
    found = {one.config.name: Written(one) for one in held.values()}

    def visit(table: str, rows: Tensor, _weights: Tensor, _state: Tensor, counts: Tensor) -> None:
        if table in held and rows.numel() > 0:
            of = found[held[table].config.name]
            of.add(rows)
            of.is_trained |= bool((counts > 0).any())

    _store(own).scan(visit)
    return found


def _number(own: RankTables, written: dict[str, Written]) -> dict[str, int]:
    """Says where rows of this rank stand among those of all; returns how many there are."""
    counts = {name: (one.held.rows.start, one.count()) for name, one in written.items()}
    of_ranks = own.ranks.gather(counts)
    totals = {}
    for config in own.tables:
        # Ranks that hold the same rows have equally many.
        ranges = {of[config.name] for of in of_ranks if config.name in of}
        totals[config.name] = sum(count for _, count in ranges)
        one = written.get(config.name)
        if one is not None:
            one.total = totals[config.name]
            one.first = sum(count for start, count in ranges if start < one.held.rows.start)
    return totals
