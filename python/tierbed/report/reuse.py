"""Hits that a memory of another size would have, from a sample of the rows that were looked up.

Source: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS" (FAST
2015), with a fixed number of sampled rows and the correction of §3.5. A row is in the sample, or
not, by a hash of its number. For each use of a sampled row, the different sampled rows used since
its last use say how large a memory that drops the least recently used row must be to still have
it. Memory and time per use do not grow with the tables.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from tierbed.errors import InvalidError

__all__ = ["ReuseSample"]

_HASH_BITS = 24
# Buckets per doubling of the distance: a capacity is right within 4.5 %.
_PER_DOUBLING = 16
_TABLE_BITS = 40


class ReuseSample:
    """The distances between uses of the same row, sampled.

    Args:
        row_count_max: Most rows in the sample; some hundred bytes each.

    Raises:
        InvalidError: No rows.
    """

    def __init__(self, row_count_max: int = 8192) -> None:
        if row_count_max < 1:
            raise InvalidError(f"a sample needs at least 1 row, not {row_count_max}")
        self._row_count_max = row_count_max
        self._threshold = 1 << _HASH_BITS
        self._last: dict[int, int] = {}
        self._stamps: list[int] = []
        self._by_hash: list[tuple[int, int]] = []
        self._clock = 0
        self._reuses: dict[int, float] = {}
        self._first_uses = 0.0
        self.use_count = 0
        """Uses of rows, in the sample or not."""

    @property
    def rate(self) -> float:
        """Share of the rows that are in the sample."""
        return self._threshold / (1 << _HASH_BITS)

    @property
    def row_count(self) -> int:
        """Rows in the sample."""
        return len(self._last)

    def note(self, tables: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Notes the rows of a lookup.

        A row that comes again within the lookup is in memory whatever the size.

        Args:
            tables: ``[E]`` i64, the table of each row.
            rows: ``[E]`` i64.
        """
        keys = (tables.astype(np.uint64) << np.uint64(_TABLE_BITS)) ^ rows.astype(np.uint64)
        hashes = _hashes(keys)
        self.use_count += keys.size
        taken = hashes < self._threshold
        if not taken.any():
            return
        some, first, counts = np.unique(keys[taken], return_index=True, return_counts=True)
        again = int(counts.sum()) - some.size
        if again:
            self._reuses[0] = self._reuses.get(0, 0.0) + again
        for key, digest in zip(some.tolist(), hashes[taken][first].tolist(), strict=True):
            self._use(key, digest)

    def _use(self, key: int, digest: int) -> None:
        if digest >= self._threshold:  # the sample became smaller on the way
            return
        self._clock += 1
        before = self._last.get(key)
        if before is None:
            self._first_uses += 1
            heapq.heappush(self._by_hash, (-digest, key))
        else:
            at = bisect_right(self._stamps, before)
            bucket = _bucket((len(self._stamps) - at) / self.rate)
            self._reuses[bucket] = self._reuses.get(bucket, 0.0) + 1
            del self._stamps[at - 1]
        self._last[key] = self._clock
        self._stamps.append(self._clock)
        if len(self._last) > self._row_count_max:
            self._shrink()

    def _shrink(self) -> None:
        """Takes out the rows of the largest hash; what was counted then weighs less."""
        before, threshold = self._threshold, -self._by_hash[0][0]
        while self._by_hash and -self._by_hash[0][0] >= threshold:
            _, key = heapq.heappop(self._by_hash)
            del self._stamps[bisect_right(self._stamps, self._last.pop(key)) - 1]
        self._threshold = threshold
        share = threshold / before
        self._reuses = {bucket: count * share for bucket, count in self._reuses.items()}
        self._first_uses *= share

    def hit_ratio(self, row_capacity: float) -> float | None:
        """Returns the share of the uses that found their row in a memory of ``row_capacity`` rows.

        Args:
            row_capacity: Rows that it holds; the least recently used one leaves.

        Returns:
            From 0 to 1; None when no use was noted.
        """
        expected = self.use_count * self.rate
        if expected <= 0:
            return None
        # Hot rows that happen to be in the sample, or not, are put right at distance 0.
        found = self._first_uses + sum(self._reuses.values())
        most = _bucket(row_capacity)
        hits = sum(count for bucket, count in self._reuses.items() if bucket < most)
        return min(1.0, max(0.0, (hits + expected - found) / expected))

    def first_use_ratio(self) -> float | None:
        """Returns the share of the uses that were the first of their row: no memory has these."""
        expected = self.use_count * self.rate
        return None if expected <= 0 else min(1.0, self._first_uses / expected)


def _bucket(distance: float) -> int:
    return 1 + int(_PER_DOUBLING * math.log2(1 + distance))


def _hashes(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns ``_HASH_BITS`` mixed bits of each key (the finisher of splitmix64)."""
    mixed = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    taken: NDArray[np.int64] = (mixed >> np.uint64(64 - _HASH_BITS)).astype(np.int64)
    return taken
