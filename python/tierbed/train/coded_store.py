"""Trained tables in memory in half the bytes, or a quarter.

A :class:`CodedStore` keeps rows as f16, bf16 or int8, as the ``data_type`` of each table says, and
collections take it in place of a :class:`tierbed.Store`: alone or, in
:mod:`tierbed.dist`, one for each rank. Lookups decode while they pool, and add in float32.
Its rows do not train: a step smaller than half the last place of a code would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierbed._native import NativeCodedTables
from tierbed.codec import Codec
from tierbed.config.optim import SGD
from tierbed.config.tables import BaseEmbeddingConfig
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.store import Store

__all__ = ["CodedStore"]

CHUNK_ROWS = 65536


class CodedStore:
    """Tables in memory whose rows are kept in the ``data_type`` of their table.

    Every row is there: one that was never written has its initial value, rounded.

    Args:
        seed: From it come the initial rows of every table, as in :class:`tierbed.Store`.

    Examples:
        >>> store = tb.CodedStore()
        >>> table = tb.EmbeddingBagConfig(1000, 16, "item", data_type="int8")
        >>> emb = tb.EmbeddingBagCollection([table], store=store)
        >>> store.read_rows("item", first_row=0, row_count=2).shape
        torch.Size([2, 16])
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._native = NativeCodedTables()
        self._seed = seed

    @classmethod
    def of(cls, store: Store, tables: Sequence[BaseEmbeddingConfig]) -> CodedStore:
        """Copies ``tables`` of a training store, each as its ``data_type`` says.

        Args:
            store: Where the rows were trained.
            tables: Those to copy, as they are there but for ``data_type``.

        Raises:
            InvalidError: Another shape, or a number that the type cannot keep.
        """
        coded = cls(seed=store.seed)
        for config in tables:
            coded.add_table(config)
            shape = store.table(config.name)
            if (shape["row_count"], shape["dim"]) != (config.num_embeddings, config.embedding_dim):
                raise InvalidError(
                    f"table {config.name!r} of the store is {shape['row_count']} x {shape['dim']}, "
                    f"not {config.num_embeddings} x {config.embedding_dim}",
                    {"table": config.name},
                )
            for first in range(0, shape["row_count"], CHUNK_ROWS):
                count = min(CHUNK_ROWS, shape["row_count"] - first)
                coded.write_rows(config.name, first, store.read_rows(config.name, first, count))
        return coded

    @property
    def native(self) -> NativeCodedTables:
        """The engine's tables, for collections."""
        return self._native

    @property
    def seed(self) -> int:
        """Seed of the initial rows."""
        return self._seed

    @property
    def is_trainable(self) -> bool:
        """False: rows change by :meth:`write_rows` only."""
        return False

    @property
    def takes_gradients(self) -> bool:
        """True, to refuse them: who trains a model on these rows calls ``eval()`` on them first."""
        return True

    def add_table(self, config: BaseEmbeddingConfig, rows: range | None = None) -> int:
        """Adds a table, or finds the same one again, and returns its id.

        Args:
            config: The table.
            rows: Which of its rows are kept here, one after the other; by default all.

        Raises:
            InvalidError: A table of that name with another shape, type or other rows exists, or
                an open vocabulary.
        """
        if config.num_embeddings is None:
            raise InvalidError(
                f"table {config.name!r} has an open vocabulary; a CodedStore keeps dense ids",
                {"table": config.name},
            )
        kept = range(config.num_embeddings) if rows is None else rows
        schema = config.schema(SGD(), self._seed)
        return self._native.add_table(schema, config.codec_name(), kept.start, kept.stop)

    def tables(self) -> list[dict[str, Any]]:
        """Returns every table's ``name``, ``row_count``, ``dim``, ... and what is kept of it.

        That is ``codec``, ``rows`` (first, end) and ``held_bytes``.
        """
        tables: list[dict[str, Any]] = self._native.schema()["tables"]
        for at, table in enumerate(tables):
            codec, first, end, held_bytes = self._native.kept_as(at)
            table.update(codec=codec, rows=(first, end), held_bytes=held_bytes)
        return tables

    def table_id(self, name: str) -> int:
        """Returns the id of table ``name``.

        Args:
            name: Name of the table.

        Raises:
            InvalidError: No such table.
        """
        return self._table(name)[0]

    def vocabularies(self) -> dict[str, dict[str, Any]]:
        """Returns nothing: there are no open vocabularies here."""
        return {}

    def read_rows(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Decodes rows ``first_row..`` of a table, ``[row_count, D]`` f32.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """
        at, shape = self._table(table)
        rows = torch.empty((row_count, shape["dim"]), device="cpu")
        self._native.read_rows(at, first_row, rows)
        return rows

    def write_rows(self, table: str, first_row: int, weights: Tensor) -> None:
        """Overwrites rows ``first_row..`` with ``weights`` ``[N, D]`` f32, rounded.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            weights: Rows ``[N, D]`` f32.

        Raises:
            InvalidError: Rows that are not kept here, or a number that the type cannot keep; rows
                before it are written then.
        """
        at, shape = self._table(table)
        dim = shape["dim"]
        if weights.dim() != 2 or weights.shape[1] != dim:
            raise InvalidError(
                f"rows of table {table!r} must be [N, {dim}], found {tuple(weights.shape)}",
                {"table": table},
            )
        self._native.write_rows(at, first_row, weights.detach().contiguous())

    def read_codes(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Copies the codes of rows ``first_row..``, ``[row_count, code_bytes]`` u8.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """
        at, shape = self._table(table)
        code_bytes = Codec(shape["codec"], shape["dim"]).code_bytes
        codes = torch.empty((row_count, code_bytes), dtype=torch.uint8, device="cpu")
        self._native.read_codes(at, first_row, row_count, codes)
        return codes

    def write_codes(self, table: str, first_row: int, codes: Tensor) -> None:
        """Overwrites rows ``first_row..`` with ``codes`` ``[N, code_bytes]`` u8.

        They are of the table's codec: what :meth:`read_codes` returned, to the last bit.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            codes: Codes ``[N, code_bytes]`` u8.
        """
        self._native.write_codes(self.table_id(table), first_row, codes.contiguous())

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedStore:
        # Its rows do not train, so that a copied model has the same.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a CodedStore cannot be copied or pickled, its rows are in this process only; share "
            "it, make one where it is used, or send a tierbed.Snapshot"
        )

    def _table(self, name: str) -> tuple[int, dict[str, Any]]:
        """Returns the id of table ``name``, and what :meth:`tables` tells of it."""
        tables = self.tables()
        for at, table in enumerate(tables):
            if table["name"] == name:
                return at, table
        names = [table["name"] for table in tables]
        raise InvalidError(f"no table {name!r}; the store has {names}", {"table": name})
