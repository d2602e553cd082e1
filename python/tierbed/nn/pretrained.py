"""Rows of modules that begin as tensors which exist."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tierbed.config.words import GivenRows, check_word
from tierbed.errors import InvalidError
from tierbed.train.store import Store

__all__ = ["check_pretrained", "copy_pretrained"]

_CHUNK_ROWS = 65536


def check_pretrained(store: object, embeddings: Mapping[str, Tensor], rows: GivenRows) -> set[str]:
    """Checks tensors ``[N, D]`` by table, and returns those that the store lacks.

    Args:
        store: The store.
        embeddings: The rows, by table.
        rows: What is done with tables that the store has.

    Raises:
        InvalidError: No training store, another shape, or a table that is there already.
    """
    check_word("rows", rows, GivenRows)
    if not isinstance(store, Store):
        raise InvalidError(
            f"from_pretrained copies rows into a tierbed.Store, not a {type(store).__name__}; "
            "tierbed.Store.open(path) opens one"
        )
    for name, tensor in embeddings.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise InvalidError(
                f"the rows of {name!r} are {tensor.dtype} {list(tensor.shape)}, not floats [N, D]"
            )
    there = {str(table["name"]) for table in store.tables()} & set(embeddings)
    if there and rows == "copy":
        raise InvalidError(
            f"the store has the tables {sorted(there)} already; rows='keep' trains on with its "
            "rows",
            {"tables": ",".join(sorted(there))},
        )
    return set(embeddings) - there


def copy_pretrained(store: Store, embeddings: Mapping[str, Tensor], new: set[str]) -> None:
    """Copies the rows of ``new`` tables, some at a time."""
    for name in sorted(new):
        rows = embeddings[name].detach()
        for first in range(0, rows.shape[0], _CHUNK_ROWS):
            part = rows[first : first + _CHUNK_ROWS].float().cpu().contiguous()
            store.write_rows(name, first, part)
