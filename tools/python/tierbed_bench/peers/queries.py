"""The queries that all systems answer: distinct ids, unevenly asked for, scattered over the table.

Without a log ids follow a power law. With one, the table is the log's rows again and again, and a
query is of one copy, the first copies more often. Ids are permuted in both: they say nothing about
how often a row is asked for, as hashed ids do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierbed.errors import InvalidError
from tierbed.placement.build import QueryLog
from tierbed_bench.peers.table import Ids

__all__ = ["Queries"]

# A prime, so that a product with it permutes ids of every table that is no multiple of it.
SPREAD = 2_654_435_761


class Queries:
    """Where queries come from.

    Args:
        row_count: Rows of the table.
        skew: Exponent of the power law: of ids, or of copies of the log's rows.
        seed: Of all that is drawn.
        log: Queries of a log, one per line.

    Raises:
        InvalidError: The log has too few rows for a query.
    """

    def __init__(self, row_count: int, skew: float, seed: int, log: Path | None = None) -> None:
        self.row_count, self.skew, self.seed = row_count, skew, seed
        self._log = None if log is None else QueryLog.read(log)

    def drawn(self, count: int, id_count: int) -> Ids:
        """Returns ``[count, id_count]`` ids; those of a query are distinct.

        A log that is shorter is asked again, of other copies.
        """
        generator = np.random.default_rng((self.seed, id_count))
        if self._log is None:
            if 2 * id_count > self.row_count:
                raise InvalidError(
                    f"{id_count} rows a query of {self.row_count}; use a larger table"
                )
            many = self._drawn(generator, count, id_count)
        else:
            many = self._of_log(self._log, generator, count, id_count)
        return many * SPREAD % self.row_count

    def _drawn(self, generator: np.random.Generator, count: int, id_count: int) -> Ids:
        found = np.empty((count, id_count), np.int64)
        for at in range(count):
            ranks = self._ranks(generator.random(2 * id_count), self.row_count)
            kept = _distinct(ranks)
            while len(kept) < id_count:
                more = generator.integers(0, self.row_count, id_count)
                kept = _distinct(np.concatenate([kept, more]))
            found[at] = kept[:id_count]
        return found

    def _of_log(
        self, log: QueryLog, generator: np.random.Generator, count: int, id_count: int
    ) -> Ids:
        copies = max(1, self.row_count // log.row_count)
        if log.row_count < id_count:
            raise InvalidError(f"the log has {log.row_count} rows, a query {id_count}")
        starts = self._ranks(generator.random(count), copies) * log.row_count
        found = np.empty((count, id_count), np.int64)
        stream = _endless(log)
        for at in range(count):
            kept: Ids = np.empty(0, np.int64)
            # Queries that follow each other are one, up to the wanted length.
            while len(kept) < id_count:
                kept = _distinct(np.concatenate([kept, next(stream)]))
            found[at] = kept[:id_count] + starts[at]
        return found

    def _ranks(self, uniform: np.ndarray, count: int) -> Ids:
        """Inverts the continuous power law on ``[1, count + 1)``; ranks begin at 0."""
        if abs(self.skew - 1.0) < 1e-9:
            ranks = np.exp(uniform * np.log(count + 1.0))
        else:
            power = 1.0 - self.skew
            ranks = ((count + 1.0) ** power * uniform + (1.0 - uniform)) ** (1.0 / power)
        found: Ids = np.clip(ranks.astype(np.int64), 1, count) - 1
        return found


def _distinct(ids: Ids) -> Ids:
    """The first of equal ids, in their order."""
    _, first = np.unique(ids, return_index=True)
    return ids[np.sort(first)]


def _endless(log: QueryLog) -> Iterator[Ids]:
    while True:
        for at in range(len(log)):
            yield np.array(log[at], np.int64)
