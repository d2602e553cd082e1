"""The model that ``tierbed bench tiers`` serves: trained, published, and its rows placed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed.codec import Codec
from tierbed.data.source import Source
from tierbed.placement.build import Placement, QueryLog, place, rows_per_page_of
from tierbed.recipes.run import EVAL_BATCH, Run, TrainOptions, auto_batch_size
from tierbed_bench.precision import DIM, PrecisionOptions, open_samples, use_counts

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["LARGE_TABLE", "PLACED_CODECS", "CacheOf", "Published", "TrainedOptions", "publish"]

#: Name of the one table that all features read where the rows are cloned.
LARGE_TABLE = "rows"
#: Caches that rows are placed for: the codecs, and the policy.
PLACED_CODECS = ("f32", "int8")
POLICY = "group_frequency"


@dataclass(frozen=True, kw_only=True)
class TrainedOptions:
    """What to train and how to place.

    Args:
        log: Samples in Criteo's layout; generated ones when None.
        eval_share: Share of the samples, the last ones, that are not trained on.
        shares: Bytes of caches, as shares of the f32 bytes; rows are placed for each.
        ratio: Replicas per row.
        quick: Fewer generated samples.
        seed: Of generated samples, initial weights and placements.
    """

    log: Path | None
    eval_share: float
    shares: tuple[float, ...]
    ratio: float
    quick: bool
    seed: int


#: Share of the f32 bytes, and codec, of a cache.
CacheOf: TypeAlias = "tuple[float, str]"


@dataclass(frozen=True)
class Published:
    """Everything that systems are measured with.

    Attributes:
        plain: A snapshot with every table on pages of its own, most used rows first.
        placed: Snapshots with all tables placed together, by the share of the bytes and the codec
            of the cache they are placed for.
        placements: Of these: rows numbered through all tables, on pages they share.
        by_frequency: The same rows, most used first.
        source: The samples.
        f32_bytes: Bytes of all rows.
        exact: AUC and the like of the rows as they are.
        rows: ``[N, D]`` per table.
        counts: ``[N]`` per table, uses by the earlier samples.
    """

    plain: Path
    placed: dict[CacheOf, Path]
    placements: dict[CacheOf, Placement]
    by_frequency: Placement
    source: Source
    f32_bytes: int
    exact: dict[str, float]
    rows: dict[str, Tensor]
    counts: dict[str, Tensor]


def publish(folder: Path, options: TrainedOptions) -> Published:
    """Trains a DLRM on the earlier samples and publishes it twice."""
    samples = PrecisionOptions(
        log=options.log, eval_share=options.eval_share, quick=options.quick, seed=options.seed
    )
    source = open_samples(folder, samples)
    train = TrainOptions(
        embedding_dim=DIM,
        batch_size=auto_batch_size(source.train_samples),
        seed=options.seed,
    )
    memory = {"backend": "memory", "dram_budget": "8GiB"}
    run = Run(folder / "run", source, train, source.train_samples, store_options=memory)
    try:
        run.train()
        rows = {name: run.store.read_rows(name, 0, n) for name, n in source.table_sizes.items()}
        exact = run.evaluate(source.eval_samples)
        run.store.publish(folder / "plain", run.model)
        log = _log(source)
        placements = {
            (share, codec): _place(log, options, (share, codec))
            for share in options.shares
            for codec in PLACED_CODECS
        }
        names = tuple(source.table_sizes)
        placed = {}
        for (share, codec), placement in placements.items():
            file, out = folder / "placement", folder / f"placed.{share}.{codec}"
            placement.write(file)
            run.store.publish(out, run.model, placement={names: file})
            placed[share, codec] = out
    finally:
        run.close()
    return Published(
        plain=folder / "plain",
        placed=placed,
        placements=placements,
        by_frequency=place(
            log, rows_per_page=rows_per_page_of(DIM), method="by_frequency", ratio=0.0
        ).ordered_by_use(log),
        source=source,
        f32_bytes=sum(4 * table.numel() for table in rows.values()),
        exact=exact,
        rows=rows,
        counts=use_counts(source, rows),
    )


def _log(source: Source) -> QueryLog:
    batches = source.batches(0, source.train_samples, EVAL_BATCH)
    return QueryLog.from_samples(source.table_sizes, (batch.sparse for batch in batches))


def _place(log: QueryLog, options: TrainedOptions, cache: CacheOf) -> Placement:
    """Places all tables together, for what misses a cache of so many bytes.

    The share of the rows that such a cache holds matters: what it holds needs no good place, and
    what it does not hold is all that is read.
    """
    share, codec = cache
    budget = int(share * log.row_count * 4 * DIM)
    row_bytes = Codec(codec, DIM).code_bytes
    held = _native.CacheLog.rows_within(POLICY, row_bytes, log.row_count, budget)
    misses = log.misses(log, held / log.row_count, policy=POLICY).log
    with Progress("placing", None, "levels") as bar:
        placed = place(
            log,
            misses=misses,
            rows_per_page=rows_per_page_of(DIM),
            ratio=options.ratio,
            seed=options.seed,
            threads=len(os.sched_getaffinity(0)),
            progress=bar.set,
        )
    return placed.ordered_by_use(misses)
