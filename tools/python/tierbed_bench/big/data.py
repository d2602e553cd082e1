"""Tables larger than memory and the batches that train them, made block by block.

Every table has equally many rows. A batch takes some of its ids from a permutation of all rows, so
that one epoch touches each row, and draws the others with skewed popularity. Batch ``n`` depends on
the shape and ``n`` alone, and no list of ids is longer than a batch.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tierbed.config.optim import RowWiseAdagrad
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.data.order import BatchOrder, fingerprint
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import EmbeddingBagCollection
from tierbed.train.store import Store
from tierbed_bench.common import zipf_ranks

__all__ = ["Batches", "Sample", "Shape", "shape_for"]

#: Products of a row and a factor below it stay within 64 bits.
ROWS_MAX = 1 << 31
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_SKEW = 1.05


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained.

    Args:
        rows: Rows of each table.
        tables: Tables, each of a feature with one id per sample.
        dim: Elements of a row, float32.
        batch: Samples of a batch.
        drawn_share: Of the ids, those drawn with skewed popularity; the others sweep all rows.
        seed: Of all that is drawn.
    """

    rows: int
    tables: int
    dim: int
    batch: int
    drawn_share: float = 0.25
    seed: int = 1

    @property
    def names(self) -> list[str]:
        """Names of the tables, which are those of the features."""
        return [f"t{at:02d}" for at in range(self.tables)]

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows, without optimizer state."""
        return self.tables * self.rows * self.dim * 4

    @property
    def row_count(self) -> int:
        """Rows of all tables."""
        return self.tables * self.rows

    @property
    def swept(self) -> int:
        """Samples of a batch whose ids sweep the tables."""
        return max(1, round(self.batch * (1.0 - self.drawn_share)))

    @property
    def batch_count(self) -> int:
        """Batches of an epoch."""
        return -(-self.rows // self.swept)

    @property
    def batch_ids(self) -> int:
        """Ids of a batch."""
        return self.tables * self.batch

    def configs(self) -> list[EmbeddingBagConfig]:
        """Returns the tables."""
        return [
            EmbeddingBagConfig(num_embeddings=self.rows, embedding_dim=self.dim, name=name)
            for name in self.names
        ]

    def bags(self, store: Store) -> EmbeddingBagCollection:
        """Returns the tables on a store, which steps their rows."""
        return EmbeddingBagCollection(
            self.configs(), store=store, optimizer=RowWiseAdagrad(lr=0.02)
        )

    def gradient(self) -> Tensor:
        """Returns the gradient of every batch, ``[B, F * D]``; each sample has another."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.batch, self.tables * self.dim, generator=generator) * 0.01

    def as_dict(self) -> dict[str, Any]:
        """Returns what another process makes it again from."""
        return asdict(self)

    @cached_property
    def _factors(self) -> tuple[int, int]:
        """Two factors without a common divisor with the rows: of the sweep, and of popularity."""
        return _coprime(int(self.rows * _GOLDEN), self.rows), _coprime(
            int(self.rows * (1.0 - _GOLDEN) ** 2), self.rows
        )

    def column(self, number: int, table: int) -> Tensor:
        """Returns the ids of a feature in batch ``number``, ``[B]`` i64."""
        sweep, popular = self._factors
        first = number * self.swept
        swept = torch.arange(first, first + self.swept, dtype=torch.int64) % self.rows
        generator = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + number) * self.tables + table
        )
        uniform = torch.rand(self.batch - self.swept, generator=generator, dtype=torch.float64)
        drawn = zipf_ranks(uniform, self.rows, _SKEW)
        return torch.cat(
            [(swept * sweep + table) % self.rows, (drawn * popular + table) % self.rows]
        )

    def ids(self, number: int) -> KeyedJaggedTensor:
        """Returns batch ``number``, one id per bag."""
        columns = [self.column(number, table) for table in range(self.tables)]
        lengths = torch.ones(self.batch_ids, dtype=torch.int64)
        return KeyedJaggedTensor(self.names, torch.cat(columns), lengths=lengths, stride=self.batch)


def shape_for(table_bytes: int, *, tables: int, dim: int, batch: int, seed: int) -> Shape:
    """Returns the shape whose rows take about ``table_bytes``.

    Raises:
        InvalidError: So few or so many rows that nothing can be measured.
    """
    rows = table_bytes // (tables * dim * 4)
    if not 64 <= rows <= ROWS_MAX:
        raise InvalidError(
            f"{table_bytes} bytes are {rows} rows in each of {tables} tables of dim {dim}; from 64 "
            f"to {ROWS_MAX} can be measured, so give another --size, --tables or --dim",
            {"rows": str(rows)},
        )
    return Shape(rows=rows, tables=tables, dim=dim, batch=batch, seed=seed)


def _coprime(near: int, rows: int) -> int:
    """Returns a number from ``near`` on that has no common divisor with ``rows``."""
    factor = max(1, near)
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


class Batches:
    """The batches of an epoch, in an order that is known before.

    Args:
        shape: Of the tables.
        start: Batches of the first epoch that are done.
    """

    def __init__(self, shape: Shape, start: int = 0) -> None:
        self._shape = shape
        self._start = start
        self.seconds = 0.0  # that making them took

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        start, self._start = self._start, 0
        for number in range(start, self._shape.batch_count):
            begun_s = time.perf_counter()
            batch = self._shape.ids(number)
            self.seconds += time.perf_counter() - begun_s
            yield batch

    def known_order(self) -> BatchOrder:
        """Promises the order; see :mod:`tierbed.data.order`."""
        count = self._shape.batch_count
        return BatchOrder(
            fingerprint(self._shape.as_dict()),
            lambda: (self._shape.ids(number) for number in range(count)),
            self._start,
            count,
        )


class Sample:
    """Rows that are compared between runs: every so many of each table.

    Args:
        shape: Of the tables.
        row_count: About how many rows.
    """

    def __init__(self, shape: Shape, row_count: int = 100_000) -> None:
        self._shape = shape
        self.step = max(1, shape.row_count // row_count)
        self._parts: list[tuple[int, Tensor, Tensor]] = []

    def visit(self, name: str, rows: Tensor, weights: Tensor, state: Tensor, uses: Tensor) -> None:
        """Keeps the rows of the sample among those of a scan."""
        chosen = torch.nonzero(rows % self.step == 0)[:, 0]
        if len(chosen):
            record = torch.cat([weights[chosen], state[chosen], uses[chosen, None].float()], 1)
            self._parts.append((self._shape.names.index(name), rows[chosen], record))

    def digest(self) -> tuple[str, int]:
        """Returns a digest of weights, state and use counts, and the number of rows."""
        tables = torch.cat([torch.full_like(rows, table) for table, rows, _ in self._parts])
        keys = tables * self._shape.rows + torch.cat([rows for _, rows, _ in self._parts])
        order = keys.argsort()
        records = torch.cat([record for _, _, record in self._parts])[order]
        found = hashlib.sha256(keys[order].numpy().tobytes())
        found.update(records.numpy().tobytes())
        return found.hexdigest(), len(keys)
