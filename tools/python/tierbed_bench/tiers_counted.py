"""What do tiers of the same bytes read, and what AUC is left? Counted, on the log's own tables.

All earlier samples warm the tiers, in their order; then later ones are asked one by one, and at
last all of these are scored through the same open snapshot. Every system has the same bytes for
its tiers: index, keys, policy and surrogates included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierbed._util.progress import Progress
from tierbed.config.words import MissMode, SnapshotBackend
from tierbed.errors import InvalidError
from tierbed.nn import CtrModel
from tierbed.recipes.evaluate import evaluate
from tierbed.recipes.run import EVAL_BATCH
from tierbed.serve.cache import CacheOptions, TierPlan
from tierbed.serve.models import load_model
from tierbed.serve.neighbours import find_neighbours
from tierbed.serve.resident import plan_tiers
from tierbed.serve.snapshot import Snapshot
from tierbed_bench.tiers_model import Published

__all__ = ["CountedOptions", "measure_counted"]

Row = dict[str, Any]
# The budgets of plans that read nothing, as shares of the f32 bytes.
PLAN_SHARES = (0.02, 0.04)
WARM_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class CountedOptions:
    """What to measure.

    Args:
        shares: Bytes of all tiers, as shares of the bytes of the f32 rows.
        requests: Samples asked one by one.
        quick: One plan that reads nothing instead of several.
    """

    shares: tuple[float, ...]
    requests: int
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to keep rows.

    Args:
        name: As results spell it.
        cache: Its tiers.
        backend: Of the snapshot.
        placed_for: The codec of the cache that all tables are placed together for; None: every
            table has pages of its own.
    """

    name: str
    cache: tuple[str, ...] = ()
    backend: SnapshotBackend = "direct"
    placed_for: str | None = None


# EVStore's layers hold rows of 8 and 4 bits in its own formats; its third has 4 % of the bytes
# (experiment 11), and reads its file between requests, so that counts repeat.
SYSTEMS = (
    System(name="lru", cache=("f32:lru",)),
    System(name="flash_embedding", cache=("f32:lru:1:2",)),
    System(name="ev_lfu", cache=("f32:ev_lfu",)),
    System(name="evstore_l1", cache=("evstore8:ev_lfu",)),
    System(name="evstore_l1_l2", cache=("evstore8:ev_lfu", "evstore4:ev_lfu")),
    System(
        name="evstore_l1_l2_l3",
        cache=("evstore8:ev_lfu:48", "evstore4:ev_lfu:48", "neighbours:second_chance:4:inline"),
    ),
    System(name="group_frequency_f32_placed", cache=("f32:group_frequency",), placed_for="f32"),
    System(name="group_frequency_int8", cache=("int8:group_frequency",)),
    System(name="group_frequency_int8_placed", cache=("int8:group_frequency",), placed_for="int8"),
    System(
        name="group_frequency_int8_int4_placed",
        cache=("int8:group_frequency:0.5", "int4:group_frequency:0.5"),
        placed_for="int8",
    ),
)


def measure_counted(published: Published, options: CountedOptions) -> list[Row]:
    """Measures bounds, plans that read nothing, and all systems at all shares.

    Returns:
        A row for each, ``part`` being ``counted``.
    """
    asked = _Requests(published, options.requests)
    jobs = [*_bounds(), *_plans(published, options), *_systems(published, options)]
    rows = []
    with Progress("asking", len(jobs), "systems") as bar:
        for job in jobs:
            bar.advance(0, note=job.system.name)
            rows.append(asked.measure(job))
            bar.advance(1)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A system with its bytes.

    Args:
        system: How rows are kept.
        cache_bytes: Bytes of its tiers.
        plan: That.
        misses: How misses are answered.
        told: More for its row.
    """

    system: System
    cache_bytes: int = 0
    plan: TierPlan | None = None
    misses: MissMode = "read"
    told: Row = field(default_factory=dict)

    def folder(self, published: Published) -> Path:
        """The snapshot it reads."""
        codec = self.system.placed_for
        if codec is None:
            return published.plain
        return published.placed[self.told["budget_share"], codec]


def _bounds() -> Iterator[_Job]:
    """Yields the rows in memory, and mapped pages that the operating system may cache at will."""
    for backend in ("memory", "mmap"):
        yield _Job(system=System(name=backend, backend=backend), told={"budget_share": 1.0})


def _plans(published: Published, options: CountedOptions) -> Iterator[_Job]:
    """Yields plans that keep something of every row and read nothing."""
    for share in PLAN_SHARES[-1:] if options.quick else PLAN_SHARES:
        budget = int(share * published.f32_bytes)
        plan = plan_tiers(published.rows, published.counts, dram_bytes=budget)
        yield _Job(
            system=System(name=f"resident_{plan.about['head']}_{plan.about['tail']}"),
            plan=plan,
            misses="default",
            told={"budget_share": share, **plan.about},
        )


def _systems(published: Published, options: CountedOptions) -> Iterator[_Job]:
    near = find_neighbours(published.rows, published.counts)
    with Snapshot.open(published.plain, cache=[]) as snapshot:
        near.write(snapshot)
    for share in options.shares:
        for system in SYSTEMS:
            has_neighbours = any(part.startswith("neighbours") for part in system.cache)
            yield _Job(
                system=system,
                cache_bytes=int(share * published.f32_bytes),
                misses="surrogate" if has_neighbours else "read",
                told={"budget_share": share},
            )


class _Requests:
    """The samples, read once, and how a system is asked for them."""

    def __init__(self, published: Published, count: int) -> None:
        source, self.published, self.count = published.source, published, count
        last = source.train_samples
        self._warm = [batch.sparse for batch in source.batches(0, last, WARM_BATCH)]
        self._singles = [batch.sparse for batch in source.batches(last, last + count, 1)]
        self._scored = list(source.batches(last, last + source.eval_samples, EVAL_BATCH))

    def measure(self, job: _Job) -> Row:
        """Warms, asks and scores."""
        published, system = self.published, job.system
        with Snapshot.open(
            job.folder(published),
            dram_budget="2GiB",
            backend=system.backend,
            cache=CacheOptions(tiers=system.cache, bytes_max=job.cache_bytes),
            resident=job.plan,
            misses=job.misses,
        ) as snapshot:
            for bags in self._warm:
                snapshot.lookup(bags)
            before = snapshot.stats()["snapshot"]
            perfect = self._ask(snapshot)
            after = snapshot.stats()["snapshot"]
            scored = self._score(snapshot)
        grown = {
            key: (after["lookups"][key] - before["lookups"][key]) / self.count
            for key in after["lookups"]
        }
        reads = after["io"]["read_count"] - before["io"]["read_count"]
        dram_bytes = job.cache_bytes + after["resident_bytes"]
        return {
            "part": "counted",
            "system": system.name,
            **job.told,
            "dram_bytes": dram_bytes,
            "dram_share": dram_bytes / published.f32_bytes,
            "cache_used_bytes": after["cache_used_bytes"],
            "rows_per_request": grown["row_count"],
            "rows_read_per_request": grown["rows_read"],
            "pages_read_per_request": grown["pages_read"],
            "device_reads_per_request": reads / self.count,
            "approximate_rows_per_request": grown["rows_surrogate"] + grown["rows_default"],
            "perfect_hit_rate": perfect / self.count,
            "auc_change": scored["auc"] - published.exact["auc"],
            "pr_auc_change": scored["pr_auc"] - published.exact["pr_auc"],
            "tiers": after["tiers"],
            "neighbours": after["neighbours"],
        }

    def _ask(self, snapshot: Snapshot) -> int:
        """Asks request by request; returns how many read nothing."""
        perfect, reads = 0, snapshot.stats()["snapshot"]["lookups"]["rows_read"]
        for bags in self._singles:
            snapshot.lookup(bags)
            now = snapshot.stats()["snapshot"]["lookups"]["rows_read"]
            perfect, reads = perfect + (now == reads), now
        return perfect

    def _score(self, snapshot: Snapshot) -> dict[str, float]:
        model: CtrModel | None = load_model(snapshot)
        if model is None:
            raise InvalidError("the snapshot was published without its model")
        return evaluate(model, self._scored)
