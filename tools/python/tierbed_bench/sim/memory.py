"""How little memory does it take to have the hits of another cache?

Replays a log through a baseline of a given size, and through other policies at sizes that close in
on as many perfect hits: the log is read, or generated, once for all caches of a pass.

```text
pass 1   baseline, and sizes around its own ─▶ between which two is it met?
pass 2   sizes around where it should be met ─▶ closer; until it is known to one per cent
```

How many rows are needed depends on no codec; the memory for them is that of real tiers: codes,
index, keys, policy and remembered scores. Equal logs and options give equal results.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed.codec import Codec
from tierbed.config.words import Positive
from tierbed.errors import InvalidError
from tierbed_bench.generator import DRIFT

if TYPE_CHECKING:
    from tierbed._native_options import GeneratorOptions

__all__ = ["MatchOptions", "generated_log", "match_memory"]

#: The search ends where the rows are known to this part of themselves.
TOLERANCE = 0.01
#: Sizes of one pass, of each policy.
SIZES = 4
#: From one size to the next while it is not known between which two the answer is.
STEP = 0.75
#: From one size to the next around where the answer should be: two of them are close enough.
CLOSE = 1 - 0.95 * TOLERANCE
#: Policies number slots with 24 bits.
ROWS_MAX = ((1 << 12) - 1) << 12

Counts = tuple[int, int, int, int]


class Log(Protocol):
    """Queries that can be replayed, held or made anew."""

    def sizes(self) -> tuple[int, int, int]:
        """Queries, rows asked for, distinct rows."""

    def replay_each(
        self,
        caches: list[tuple[str, int]],
        first: int,
        threads: int,
        progress: Callable[[int, int], None] | None,
    ) -> list[Counts]:
        """Queries, perfect hits, rows and hits of each cache from query ``first`` on."""


@dataclass(frozen=True, kw_only=True)
class MatchOptions:
    """What must be matched, and by whom.

    Attributes:
        baseline: The policy to be matched, over f32 rows.
        baseline_share: Its rows, as a share of the log's distinct rows; its metadata are free.
        policies: Who is to match it.
        codecs: How these keep rows.
        dim: Elements of a row.
        warm_share: Share of the queries replayed before counting begins.
        threads: Threads that replay, each a cache at a time; they change no count. By default one
            a core.
    """

    baseline: str = "ev_lfu"
    baseline_share: float = 0.05
    policies: tuple[str, ...] = ("group_frequency",)
    codecs: tuple[str, ...] = ("f32", "int8", "int4")
    dim: Positive = 32
    warm_share: float = 0.0
    threads: Positive | None = None

    def __post_init__(self) -> None:
        if not 0 < self.baseline_share <= 1:
            raise InvalidError(f"the share must be in (0, 1], not {self.baseline_share}")
        if not 0 <= self.warm_share < 1:
            raise InvalidError(f"warm share must be in [0, 1), not {self.warm_share}")


def match_memory(
    log: Log, options: MatchOptions, told: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Finds the least memory that has as many perfect hits as the baseline.

    Args:
        log: What is replayed.
        options: What must be matched.
        told: Hears a line after every pass: what each cache had, and the peak of memory so far.

    Returns:
        ``rows``: for the baseline and for each policy and codec ``policy, codec, memory_share``
        (of the f32 bytes of all distinct rows, all metadata included but for the baseline),
        ``memory_bytes, capacity_rows, rows_share, perfect_hit_rate, hit_rate, misses_per_request``
        and ``code_bytes, metadata_bytes_per_row``. ``memory_share`` is None where more
        rows would be needed than a cache can have. ``replays``: every size that was
        replayed.
    """
    replays = _Replays(log, options, told)
    base = (options.baseline, max(1, int(options.baseline_share * replays.distinct_rows)))
    found = _needed_rows(replays, base, options.policies)
    f32_bytes = 4 * options.dim * replays.distinct_rows
    rows: list[dict[str, Any]] = [
        {
            "policy": options.baseline,
            "codec": "f32",
            "code_bytes": 4 * options.dim,
            "memory_share": options.baseline_share,
            "memory_bytes": 4 * options.dim * base[1],
            **replays.told_of(*base),
        }
    ]
    for policy in options.policies:
        for codec in options.codecs:
            row: dict[str, Any] = {"policy": policy, "codec": codec, "memory_share": None}
            row["code_bytes"] = code_bytes = Codec(codec, options.dim).code_bytes
            needed = found[policy]
            if needed is not None:
                row |= replays.told_of(policy, needed)
                memory_bytes = _memory_of(policy, code_bytes, needed, replays.distinct_rows)
                row["memory_bytes"] = memory_bytes
                row["metadata_bytes_per_row"] = memory_bytes / needed - code_bytes
                row["memory_share"] = memory_bytes / f32_bytes
            rows.append(row)
    queries, _, distinct = log.sizes()
    return {
        "queries": queries,
        "distinct_rows": distinct,
        "f32_bytes": f32_bytes,
        "rows": rows,
        "replays": replays.all(),
        "resident_peak_bytes": _resident_peak_bytes(),
    }


def _needed_rows(
    replays: _Replays, base: tuple[str, int], policies: tuple[str, ...]
) -> dict[str, int | None]:
    """Returns the fewest rows of each policy with the perfect hits of ``base``.

    None if no number of rows has them. Passes go on until all are known.
    """
    searches = {policy: _Search(base[1], replays.distinct_rows) for policy in policies}
    wanted = [base]
    while True:
        wanted += [
            (policy, rows) for policy, search in searches.items() for rows in search.next_sizes()
        ]
        if not wanted:
            return {policy: search.enough for policy, search in searches.items()}
        replays.add(wanted)
        wanted = []
        for policy, search in searches.items():
            search.note(replays.perfect(policy), replays.perfect(base[0])[base[1]])


@dataclass
class _Search:
    """Between which two sizes of a cache is a rate reached?"""

    start: int
    most: int
    #: The largest size known to be too small and the smallest known to be enough; their rates,
    #: less the wanted one.
    too_few: int = 0
    enough: int | None = None
    lacks: float = 0.0
    exceeds: float = 0.0
    is_begun: bool = False
    #: Whether the pass before left more than half of what was between the two.
    is_stuck: bool = False

    def __post_init__(self) -> None:
        self.most = min(self.most, ROWS_MAX)
        self.start = min(self.start, self.most)

    def note(self, rates: dict[int, float], wanted: float) -> None:
        """Takes the rates of all sizes so far."""
        before = (self.enough or self.most) - self.too_few
        enough = [rows for rows, rate in rates.items() if rate >= wanted]
        self.enough = min(enough, default=None)
        below = [rows for rows in rates if self.enough is None or rows < self.enough]
        self.too_few = max(below, default=0)
        if self.enough is not None:
            self.exceeds = rates[self.enough] - wanted
        if self.too_few > 0:
            self.lacks = wanted - rates[self.too_few]
        between = (self.enough or self.most) - self.too_few
        self.is_stuck = self.is_begun and 2 * between > before
        self.is_begun = True

    def next_sizes(self) -> list[int]:
        """Returns the sizes to try next, none when the answer is known."""
        low, high = self.too_few, self.enough
        if not self.is_begun:
            sizes = [self.start * STEP**at for at in range(SIZES)]
        elif high is None:
            sizes = [low / STEP ** (at + 1) for at in range(SIZES)]
        elif low == 0:
            sizes = [high * STEP ** (at + 1) for at in range(SIZES)]
        elif high - low <= max(1, TOLERANCE * high):
            return []
        elif self.is_stuck:
            sizes = [low * (high / low) ** ((at + 1) / (SIZES + 1)) for at in range(SIZES)]
        else:
            # Rates are about straight over the logarithm of the size.
            share = self.lacks / max(self.lacks + self.exceeds, 1e-12)
            guess = low * (high / low) ** share
            sizes = [guess * CLOSE ** (at - (SIZES - 1) / 2) for at in range(SIZES)]
        least, most = (low + 1, self.most) if high is None else (low + 1, high - 1)
        return sorted({min(max(round(size), least), most) for size in sizes if least <= most})


def _memory_of(policy: str, code_bytes: int, needed: int, distinct_rows: int) -> int:
    """Returns the least bytes of a tier with room for ``needed`` rows."""

    def held_in(memory_bytes: int) -> int:
        return _native.CacheLog.rows_within(policy, code_bytes, distinct_rows, memory_bytes)

    low, high = 0, needed * code_bytes
    while held_in(high) < needed:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if held_in(middle) >= needed else (middle, high)
    return high


class _Replays:
    """Replays of one log, each made once, several in one pass."""

    def __init__(self, log: Log, options: MatchOptions, told: Callable[[str], None] | None) -> None:
        queries, _, self.distinct_rows = log.sizes()
        self._log, self._told = log, told
        self._first = int(queries * options.warm_share)
        self._threads = options.threads or len(os.sched_getaffinity(0))
        self._known: dict[tuple[str, int], dict[str, float]] = {}
        self._passes = 0

    def add(self, caches: list[tuple[str, int]]) -> None:
        """Replays what is not known, in one pass over the log."""
        caches = sorted(set(caches) - set(self._known), key=lambda cache: -cache[1])
        if not caches:
            return
        self._passes += 1
        with Progress(f"pass {self._passes}: {len(caches)} caches", None, "queries") as bar:
            found = self._log.replay_each(caches, self._first, self._threads, bar.set)
        for cache, (queries, perfect, asked, hits) in zip(caches, found, strict=True):
            self._known[cache] = {
                "perfect_hit_rate": perfect / max(queries, 1),
                "hit_rate": hits / max(asked, 1),
                "misses_per_request": (asked - hits) / max(queries, 1),
            }
        if self._told is not None:
            sizes = ", ".join(
                f"{policy} {rows:,} rows {self._known[policy, rows]['perfect_hit_rate']:.3%}"
                for policy, rows in caches
            )
            peak = f"{_resident_peak_bytes() / 1e9:.2f} GB"
            self._told(f"pass {self._passes}: perfect hits of {sizes}; memory at most {peak}")

    def perfect(self, policy: str) -> dict[int, float]:
        """Rates of perfect hits of a policy by its rows."""
        known = self._known.items()
        return {rows: rates["perfect_hit_rate"] for (name, rows), rates in known if name == policy}

    def told_of(self, policy: str, held: int) -> dict[str, float]:
        """Size and hit rates of a cache of ``held`` rows."""
        share = held / self.distinct_rows
        return {"capacity_rows": held, "rows_share": share, **self._known[policy, held]}

    def all(self) -> list[dict[str, Any]]:
        """Everything that was replayed, by policy and size."""
        return [{"policy": name, **self.told_of(name, held)} for name, held in sorted(self._known)]


def _resident_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def generated_log(
    samples: int, scale: float, seed: int = 0, threads: int | None = None
) -> _native.GeneratedLog:
    """Numbers the rows of generated samples, with ``scale`` times Criteo's cardinalities.

    The samples are made anew in each pass: memory is some bytes per row, whatever ``samples``.
    """
    options: GeneratorOptions = {"scale": scale, "seed": seed, "drift": DRIFT}
    with Progress("numbering rows", samples, "samples") as bar:
        threads = threads or len(os.sched_getaffinity(0))
        return _native.GeneratedLog(options, samples, threads, bar.set)
