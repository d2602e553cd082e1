"""Rows in state dictionaries: ``load_state_dict`` writes those it finds into the store."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, float32, nn

from tierbed.train.store import Store

if TYPE_CHECKING:
    from tierbed.nn.embedding import Collection

__all__ = ["LoadReport", "take_rows", "tell_not_loaded"]

_CHUNK_ROWS = 65536
_HELD_BY = ("embedding_bags", "embeddings")


@dataclass(frozen=True)
class LoadReport:
    """What torch tells at the end of ``load_state_dict``.

    Args:
        missing: Names that are missing.
        unexpected: Names that nobody takes.
        errors: What else is wrong.
    """

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def take_rows(
    collection: Collection, names: Mapping[str, str], state_dict: dict[str, Any], told: LoadReport
) -> None:
    """Writes the rows of a state dictionary into the store, where there are any.

    Rows keep their optimizer state, as ``load_state_dict`` of torch leaves that to optimizers.

    Args:
        collection: Whose tables they are.
        names: Of the rows in ``state_dict``, by table.
        state_dict: The dictionary.
        told: Where torch looks for what is wrong.
    """
    found = {table: name for table, name in names.items() if name in state_dict}
    for table, name in found.items():
        if name in told.unexpected:
            told.unexpected.remove(name)
        wrong = _why_not(collection, table, state_dict[name])
        if wrong is None:
            _write(collection.store, table, state_dict[name])
        else:
            told.errors.append(f"{name}: {wrong}")


def _why_not(collection: Collection, table: str, rows: Any) -> str | None:
    """Returns why ``rows`` cannot be written; None when they can."""
    config = next(one for one in collection._configs if one.name == table)
    store = collection.store
    if not isinstance(store, Store):
        return f"the rows of a {type(store).__name__} are not loaded; load them into its store"
    if config.num_embeddings is None:
        return (
            "rows of an open vocabulary belong to ids; write both into a file by 'tierbed export' "
            "and read that by 'tierbed import'"
        )
    if type(rows) not in (Tensor, nn.Parameter) or not rows.is_floating_point():
        return (
            f"rows are a Tensor of floats, not a {type(rows).__name__} of "
            f"{getattr(rows, 'dtype', None)}; tierbed.torchrec.load_state_dict takes sharded and "
            "coded rows"
        )
    expected = (config.num_embeddings, config.embedding_dim)
    if tuple(rows.shape) != expected:
        return f"size mismatch: rows of shape {tuple(rows.shape)}, the table has {expected}"
    return None


def _write(store: Any, table: str, rows: Tensor) -> None:
    for first in range(0, len(rows), _CHUNK_ROWS):
        part = rows[first : first + _CHUNK_ROWS].detach().to("cpu", float32).contiguous()
        _, state = store.read_rows_and_state(table, first, len(part))
        counts = store.use_counts(table, first, len(part))
        store.write_rows(table, first, part, state, counts)


def tell_not_loaded(prefix: str, names: Mapping[str, str], state_dict: Mapping[str, Any]) -> None:
    """Names rows that no table takes: torch skips them with strict=False."""
    starts = tuple(f"{prefix}{held}." for held in _HELD_BY)
    left = [key for key in state_dict if key.startswith(starts) and key not in names.values()]
    if left:
        warnings.warn(
            f"rows {left[:20]} are not loaded, the collection has {sorted(names.values())}; rename "
            "them, leave them out, or write them with store.write_rows(table, 0, weight)",
            stacklevel=2,
        )
