"""What do several models on one machine read when they share the memory of their caches?

EVStore's experiment 12 gives each of four models a fixed quarter. Here the same models are asked
the same requests twice: with a fixed part of the bytes each (``even``), and on one budget whose
parts follow demand (``shared``). Counted; the answers of both are the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tierbed._util.progress import Progress
from tierbed.jagged import KeyedJaggedTensor
from tierbed.serve.cache import CacheOptions, TierBudget
from tierbed.serve.snapshot import Snapshot
from tierbed_bench.tiers_model import Published

__all__ = ["MODELS", "SharedOptions", "measure_shared"]

Row = dict[str, Any]
#: Models on one machine, as in the paper.
MODELS = 4
#: Of each model, how often it is asked next to the others; in ``uneven`` the other way around
#: from the half on.
TRAFFIC = {"equal": (1.0, 1.0, 1.0, 1.0), "uneven": (8.0, 4.0, 2.0, 1.0)}
CACHE = "f32:group_frequency"
#: Requests of a lookup, all of one model.
BATCH = 8
#: Share of the requests before counting begins.
WARM_SHARE = 0.2
#: Groups from one division to the next: a run is short.
EPOCH_GROUPS = 500


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """What to measure.

    Args:
        shares: Bytes of all caches together, as shares of the f32 bytes of all models.
        requests: Asked of all models together.
        seed: Of who is asked when.
    """

    shares: tuple[float, ...]
    requests: int
    seed: int


def measure_shared(published: Published, options: SharedOptions) -> list[Row]:
    """Returns a row for each share, traffic and system, ``part`` being ``shared``."""
    jobs = [
        (share, traffic, system)
        for share in options.shares
        for traffic in TRAFFIC
        for system in ("even", "shared")
    ]
    rows = []
    with Progress("sharing", len(jobs), "runs") as bar:
        for share, traffic, system in jobs:
            bar.advance(0, note=f"{system} {traffic} {share:g}")
            rows.append(_measure(published, options, (share, traffic, system)))
            bar.advance(1)
    return rows


def _measure(published: Published, options: SharedOptions, job: tuple[float, str, str]) -> Row:
    """Asks all models; counts after the warm share."""
    share, traffic, system = job
    budget_bytes = int(share * MODELS * published.f32_bytes)
    with ExitStack() as stack:
        budget = None
        cache = CacheOptions(tiers=CACHE, bytes_max=budget_bytes // MODELS)
        if system == "shared":
            budget = TierBudget(budget_bytes, epoch_groups=EPOCH_GROUPS)
            cache = CacheOptions(tiers=CACHE, budget=budget)
        # Counts need no device: pages come through the page cache.
        models = [
            stack.enter_context(
                Snapshot.open(published.plain, dram_budget="256MiB", backend="mmap", cache=cache)
            )
            for _ in range(MODELS)
        ]
        asked, crc, before = 0, 0, [_counts(model) for model in models]
        asked_before, used_bytes = 0, 0
        for model, bags in _requests(published, options, traffic):
            if asked_before == 0 and asked >= WARM_SHARE * options.requests:
                before, asked_before = [_counts(each) for each in models], asked
            crc = zlib.crc32(models[model].lookup(bags).values().numpy().tobytes(), crc)
            asked += BATCH
            if asked % 512 == 0:
                used_bytes = max(used_bytes, _used_bytes(models, budget))
        grown = [
            {name: after[name] - counted[name] for name in after}
            for after, counted in zip((_counts(model) for model in models), before, strict=True)
        ]
        requests = asked - asked_before
        return {
            "part": "shared",
            "system": f"{system}_{traffic}",
            "budget_share": share,
            "models": MODELS,
            "budget_bytes": budget_bytes,
            "used_bytes_max": used_bytes,
            "rows_read_per_request": sum(each["rows_read"] for each in grown) / requests,
            "pages_read_per_request": sum(each["pages_read"] for each in grown) / requests,
            "answers_crc": crc,
            "members": [] if budget is None else [asdict(one) for one in budget.stats().members],
        }


def _requests(
    published: Published, options: SharedOptions, traffic: str
) -> Iterator[tuple[int, KeyedJaggedTensor]]:
    """Yields who is asked, and the requests. Each model goes its own way through the log."""
    source = published.source
    starts = [model * source.train_samples // MODELS for model in range(MODELS)]
    streams = [_samples(published, start) for start in starts]
    generator = torch.Generator().manual_seed(options.seed)
    weights = torch.tensor(TRAFFIC[traffic])
    for at in range(0, options.requests, BATCH):
        now = weights if at < options.requests / 2 else weights.flip(0)
        model = int(torch.multinomial(now, 1, generator=generator))
        yield model, next(streams[model])


def _samples(published: Published, start: int) -> Iterator[KeyedJaggedTensor]:
    """Yields the earlier samples from ``start`` on, over and over."""
    source = published.source
    while True:
        for batch in source.batches(start, source.train_samples, BATCH):
            if batch.label.numel() == BATCH:
                yield batch.sparse
        start = 0


def _counts(model: Snapshot) -> dict[str, int]:
    counts: dict[str, int] = model.stats()["snapshot"]["lookups"]
    return counts


def _used_bytes(models: list[Snapshot], budget: TierBudget | None) -> int:
    """Bytes of all caches, metadata and measuring included."""
    if budget is not None:
        return budget.stats().used_bytes
    return sum(int(model.stats()["snapshot"]["cache_used_bytes"]) for model in models)
