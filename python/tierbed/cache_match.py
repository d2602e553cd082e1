"""How little memory does it take to have the hits of another cache?

Replays a log through a baseline of a given size, then through policies over narrower rows at
growing budgets, by bisection. Budgets are those of real tiers: codes, index, keys, policy and
remembered scores. Equal logs and options give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tierbed import _native
from tierbed.codec import Codec
from tierbed.data import GeneratedData
from tierbed.errors import InvalidError
from tierbed.placement import QueryLog
from tierbed.progress import Progress
from tierbed.sparse import KeyedJaggedTensor

__all__ = ["MatchOptions", "generated_log", "match_memory"]

#: Bisection ends where the budget is known to this part of itself.
TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class MatchOptions:
    """What must be matched, and by whom.

    Attributes:
        baseline: The policy to be matched, over f32 rows.
        baseline_share: Its rows, as a share of the log's distinct rows; its metadata are free.
        policies: Who is to match it.
        codecs: How these keep rows.
        dim: Elements of a row.
        warm_share: Share of the queries replayed before counting begins, in ``[0, 1)``.
    """

    baseline: str = "ev-lfu"
    baseline_share: float = 0.05
    policies: tuple[str, ...] = ("ours",)
    codecs: tuple[str, ...] = ("f32", "int8", "int4")
    dim: int = 32
    warm_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.baseline_share <= 1:
            raise InvalidError(f"the share must be in (0, 1], not {self.baseline_share}")
        if not 0 <= self.warm_share < 1:
            raise InvalidError(f"warm share must be in [0, 1), not {self.warm_share}")


def match_memory(trace: _native.CacheLog, options: MatchOptions) -> dict[str, Any]:
    """Finds the least memory that has as many perfect hits as the baseline.

    Returns:
        ``rows``: for the baseline and for each policy and codec ``policy, codec, memory_share``
        (of the f32 bytes of all distinct rows, all metadata included but for the baseline),
        ``memory_bytes, capacity_rows, perfect_hit_rate, hit_rate, misses_per_request`` and
        ``code_bytes, metadata_bytes_per_row``. ``memory_share`` is None where all rows do not
        suffice.
    """
    queries, _, distinct = trace.sizes()
    f32_bytes = 4 * options.dim * distinct
    base_rows = max(1, int(options.baseline_share * distinct))
    with Progress("replays", None, "replays") as bar:
        replays = _Replays(trace, int(queries * options.warm_share), bar)
        rows: list[dict[str, Any]] = [
            {
                "policy": options.baseline,
                "codec": "f32",
                "code_bytes": 4 * options.dim,
                "memory_share": options.baseline_share,
                "memory_bytes": 4 * options.dim * base_rows,
                "capacity_rows": base_rows,
                **replays.rates(options.baseline, base_rows),
            }
        ]
        wanted = rows[0]["perfect_hit_rate"]
        rows += [
            {"policy": policy, "codec": codec, **_matched(replays, policy, codec, options, wanted)}
            for policy in options.policies
            for codec in options.codecs
        ]
    return {"queries": queries, "distinct_rows": distinct, "f32_bytes": f32_bytes, "rows": rows}


def _matched(
    replays: _Replays, policy: str, codec: str, options: MatchOptions, wanted: float
) -> dict[str, Any]:
    """Returns the least memory of one policy and codec, and what it gives."""
    code_bytes = Codec(codec, options.dim).code_bytes
    f32_bytes = 4 * options.dim * replays.distinct_rows

    def held_in(memory_bytes: int) -> int:
        return _native.CacheLog.rows_within(policy, code_bytes, replays.distinct_rows, memory_bytes)

    def is_enough(memory_bytes: int) -> bool:
        held = held_in(memory_bytes)
        return held > 0 and replays.rates(policy, held)["perfect_hit_rate"] >= wanted

    least = _least(is_enough, f32_bytes)
    if least is None:
        return {"code_bytes": code_bytes, "memory_share": None}
    held = held_in(least)
    return {
        "code_bytes": code_bytes,
        "memory_share": least / f32_bytes,
        "memory_bytes": least,
        "capacity_rows": held,
        "metadata_bytes_per_row": least / held - code_bytes,
        **replays.rates(policy, held),
    }


class _Replays:
    """Replays of one log, each made once."""

    def __init__(self, trace: _native.CacheLog, first: int, bar: Progress) -> None:
        self._trace, self._first, self._bar = trace, first, bar
        self.distinct_rows = trace.sizes()[2]
        self._known: dict[tuple[str, int], dict[str, float]] = {}

    def rates(self, policy: str, held: int) -> dict[str, float]:
        """Hit rates of a cache of ``held`` rows."""
        if (policy, held) not in self._known:
            queries, perfect, asked, hits = self._trace.replay(policy, held, self._first, 0)
            self._known[policy, held] = {
                "perfect_hit_rate": perfect / max(queries, 1),
                "hit_rate": hits / max(asked, 1),
                "misses_per_request": (asked - hits) / max(queries, 1),
            }
            self._bar.advance(note=f"{policy} {held:,} rows")
        return self._known[policy, held]


def _least(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Finds the least number up to ``most`` that is enough, to ``TOLERANCE``, by bisection."""
    if not is_enough(most):
        return None
    low, high = 0, most
    while high - low > TOLERANCE * high:
        # Halves while nothing is known from below, so that small answers come soon.
        middle = high // 4 if low == 0 else (low + high) // 2
        if middle == 0:
            return high
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def generated_log(samples: int, scale: float, seed: int = 0) -> _native.CacheLog:
    """Makes a log of generated samples in Criteo's shape, of ``scale`` times its cardinalities."""
    data = GeneratedData(scale, samples, 1024, seed)
    batches = data.batches(0, samples, 1 << 14)
    with Progress("generating", samples, "samples") as bar:

        def sparse() -> Iterator[KeyedJaggedTensor]:
            for batch in batches:
                yield batch.sparse
                bar.advance(int(batch.label.numel()))

        sizes = dict(data.table_sizes())
        log = QueryLog.from_samples(sizes, sparse())
    return _native.CacheLog.of(log.native, list(sizes.values()))
