"""Shapes of the tables of a storage: what dynamicemb asks before it asks for rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierbed.adapters.base import base_of
from tierbed.adapters.dynamicemb.records import RecordTable
from tierbed.config.admission import EvictionPolicy
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.store import Store

if TYPE_CHECKING:
    from dynamicemb.types import Storage as _Storage
else:
    _Storage = base_of("dynamicemb.types", "Storage")

__all__ = ["StorageShapes"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class StorageShapes(_Storage):
    """A storage whose tables have their shapes; :class:`TierbedStorage` reads and writes rows.

    Args:
        options: dynamicemb's options of each table.
        optimizer: dynamicemb's optimizer.
        store: Keeps the rows.
        tables: Names of the tables in the store.
        eviction_policy: Which keys the store evicts when it is asked to.

    Raises:
        InvalidError: Not one name for each table, or a table of that name with another shape.
        UnsupportedError: Rows of another dtype, rows that are too wide, or two scores for each id.
    """

    def __init__(
        self,
        options: Sequence[Any],
        optimizer: Any,
        store: Store,
        tables: Sequence[str],
        eviction_policy: EvictionPolicy | None,
    ) -> None:
        _check(options, tables)
        self._optimizer = optimizer
        self._dtype: torch.dtype = options[0].embedding_dtype
        self._tables = [
            RecordTable(
                store, name, int(one.dim), int(optimizer.get_state_dim(one.dim)), eviction_policy
            )
            for one, name in zip(options, tables, strict=True)
        ]
        self._dim_max = max(table.dim for table in self._tables)
        self._width = max(table.dim + table.state_dim for table in self._tables)

    def embedding_dtype(self) -> torch.dtype:
        """Returns the dtype of values; float16 and bfloat16 are kept as float32, exactly."""
        return self._dtype

    def embedding_dim(self, table_id: int) -> int:
        """Returns how many weights a row has.

        Args:
            table_id: The table.
        """
        return self._tables[table_id].dim

    def value_dim(self, table_id: int) -> int:
        """Returns how many numbers a row has, weights and state.

        Args:
            table_id: The table.
        """
        return self._tables[table_id].dim + self._tables[table_id].state_dim

    def max_embedding_dim(self) -> int:
        """Returns the most weights of a row of any table."""
        return self._dim_max

    def max_value_dim(self) -> int:
        """Returns the most numbers of a row of any table: the width of values."""
        return self._width

    def embedding_dims(self, on_device: bool = False) -> Tensor:
        """Returns the weights of a row by table, ``[T]`` i64.

        Args:
            on_device: Whether the tensor is to be on the GPU of this process.
        """
        dims = torch.tensor([table.dim for table in self._tables], device="cpu")
        return dims.to(torch.device("cuda", torch.cuda.current_device())) if on_device else dims

    def all_dims_vec4(self) -> bool:
        """Whether all rows have multiples of four weights, and of numbers."""
        return all(
            table.dim % 4 == 0 and (table.dim + table.state_dim) % 4 == 0 for table in self._tables
        )

    def init_optimizer_state(self) -> float:
        """Returns what state starts from."""
        return float(self._optimizer.get_initial_optim_states())

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return len(self._tables)

    def size(self) -> int:
        """Returns how many keys all tables have together."""
        return sum(table.count() for table in self._tables)


def _check(options: Sequence[Any], tables: Sequence[str]) -> None:
    if len(options) != len(tables) or not tables:
        raise InvalidError(
            f"dynamicemb puts {len(options)} tables into this storage, which has names for "
            f"{list(tables)}; make one external_storage for each group, with a name for each table"
        )
    for one, name in zip(options, tables, strict=True):
        if one.embedding_dtype not in _DTYPES:
            raise UnsupportedError(
                f"table {name!r} has rows of {one.embedding_dtype}; choose float32, float16 or "
                "bfloat16",
                {"table": name},
            )
        if isinstance(getattr(one, "score_strategy", None), tuple):
            raise UnsupportedError(
                f"table {name!r} has two scores for each id, and a store keeps one; choose one "
                "score_strategy",
                {"table": name},
            )
