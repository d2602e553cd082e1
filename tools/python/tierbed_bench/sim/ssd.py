"""What would a device that reads vectors be worth? Query logs on a simulated SSD.

Device and host are models: all times are simulated, and equal logs and options give equal
results. The device is that of FlashEmbedding (APSys 2021); the sweeps follow its figures 10 to 14.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed.config.words import NotNegative, Positive
from tierbed.errors import InvalidError

__all__ = ["SsdSimOptions", "draw_ssd", "simulate_ssd"]

READ_US = (4, 10, 30)
BATCHES = (64, 128, 256, 512)
CACHE_SHARES = (0.001, 0.01, 0.05, 0.1)
_REFERENCE = "vectors_cache_pipeline"


@dataclass(frozen=True, kw_only=True)
class SsdSimOptions:
    """The device and the host around it; defaults are the paper's where it gives them.

    Attributes:
        read_us: From the cells of a flash page to its buffer, in microseconds: 4, 10 or 30.
        batch: Queries of a batch.
        vector_bytes: Bytes of a row.
        cache_share: Bytes of the row cache, and of the page cache of block reads, as a share of
            the bytes of all rows.
        admit_from: Uses from which on a row enters the cache, 1 to 3; 0: always.
        sub_batches: Parts of a batch in the pipeline (not in the paper).
        row_ns: Host time per row: index, copy, pool (not in the paper).
        block_host_ns: Host time per block read: page fault, file system, block layer, interrupt
            (not in the paper).
        dense_us: Host time of a batch for all but lookups (not in the paper).
        warm_share: Share of the batches that pass before counting.
        query_count_max: Replay only the first so many queries.
    """

    read_us: Positive = 10
    batch: Positive = 128
    vector_bytes: Positive = 128
    cache_share: float = 0.01
    admit_from: int = 2
    sub_batches: Positive = 8
    row_ns: NotNegative = 100
    block_host_ns: NotNegative = 10_000
    dense_us: NotNegative = 2_000
    warm_share: float = 0.5
    query_count_max: Positive | None = None

    def __post_init__(self) -> None:
        if self.admit_from not in range(4):
            raise InvalidError(f"admission threshold must be 0 to 3, not {self.admit_from}")
        counts = (self.read_us, self.batch, self.vector_bytes, self.sub_batches)
        if min(counts) < 1 or min(self.row_ns, self.block_host_ns, self.dense_us) < 0:
            raise InvalidError(f"sizes are at least 1 and times at least 0: {self}")

    def native(self) -> str:
        """The options as the simulation reads them."""
        fields = asdict(self)
        del fields["query_count_max"]
        return json.dumps(fields)


def simulate_ssd(
    log: str | os.PathLike[str], options: SsdSimOptions | None = None
) -> dict[str, Any]:
    """Sends ``log`` to the simulated device: once as told, and in three sweeps around it.

    Args:
        log: One query per line, or samples in Criteo's layout; plain, gzip or zstd.
        options: The device and the host.

    Returns:
        ``rows``: one flat object per sweep (``default``, ``read_us``, ``batch``, ``cache_share``),
        value and system, with ``lookup_us`` per batch, ``lookup_us_per_query``, ``lookup_us_p99``,
        ``total_us``, ``host_bytes`` and ``flash_pages`` per batch, ``hit_rate``, and
        ``lookup_ratio`` and ``bytes_ratio``, both over the pipelined system of the same value. All
        times are simulated.

    Raises:
        InvalidError: The log has a line that is no query, or fewer queries than a batch.
    """
    options = options or SsdSimOptions()
    trace = _native.CacheLog(os.fspath(log), options.query_count_max)
    sweeps: list[tuple[str, list[SsdSimOptions]]] = [
        ("default", [options]),
        ("read_us", [replace(options, read_us=us) for us in READ_US]),
        ("batch", [replace(options, batch=batch) for batch in BATCHES]),
        ("cache_share", [replace(options, cache_share=share) for share in CACHE_SHARES]),
    ]
    queries, asked_rows, distinct_rows = trace.sizes()
    rows: list[dict[str, Any]] = []
    done: dict[SsdSimOptions, list[dict[str, Any]]] = {}
    with Progress("simulated devices", sum(len(told) for _, told in sweeps)) as progress:
        for sweep, choices in sweeps:
            for told in choices:
                if told.batch > queries and sweep == "batch":
                    progress.advance(note=f"{sweep}: too few queries")
                    continue
                if told not in done:
                    done[told] = json.loads(trace.replay_ssd(told.native()))
                value = getattr(told, sweep, None)
                rows += _with_ratios(done[told], sweep, value, told.batch)
                progress.advance(note=sweep)
    return {
        "log": os.fspath(log),
        "queries": queries,
        "asked_rows": asked_rows,
        "distinct_rows": distinct_rows,
        "is_simulated": True,
        "options": asdict(options),
        "rows": rows,
    }


def _with_ratios(
    systems: list[dict[str, Any]], sweep: str, value: float | None, batch: int
) -> list[dict[str, Any]]:
    reference = next(row for row in systems if row["system"] == _REFERENCE)
    return [
        {
            "sweep": sweep,
            "value": value,
            "system": row["system"],
            "lookup_us": row["lookup_us"],
            "lookup_us_per_query": row["lookup_us"] / batch,
            "lookup_us_p99": row["lookup_us_p99"],
            "total_us": row["total_us"],
            "host_bytes": row["host_bytes"],
            "flash_pages": row["flash_pages"],
            "hit_rate": row["hit_rate"],
            "lookup_ratio": row["lookup_us"] / reference["lookup_us"],
            "bytes_ratio": row["host_bytes"] / max(reference["host_bytes"], 1.0),
        }
        for row in systems
    ]


def draw_ssd(figure: Any, result: dict[str, Any]) -> None:
    """Draws latency, bytes and whole batches of the systems, and the sweeps, onto a figure."""
    axes = figure.subplots(2, 3).ravel()
    default = [row for row in result["rows"] if row["sweep"] == "default"]
    for panel, field, title in (
        (axes[0], "lookup_us", "lookups of a batch, us"),
        (axes[1], "host_bytes", "bytes from the device per batch"),
        (axes[2], "total_us", "whole batch, us"),
    ):
        panel.barh([row["system"] for row in default], [row[field] for row in default])
        panel.set_title(title, fontsize="small")
    for panel, sweep in zip(axes[3:], ("batch", "cache_share", "read_us"), strict=True):
        swept = [row for row in result["rows"] if row["sweep"] == sweep]
        for system in dict.fromkeys(row["system"] for row in swept):
            points = [
                (row["value"], row["lookup_us_per_query"])
                for row in swept
                if row["system"] == system
            ]
            panel.plot(*zip(*sorted(points), strict=True), marker="o", ms=3, label=system)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(sweep)
        panel.set_title("lookups of a query, us", fontsize="small")
    axes[5].legend(fontsize="x-small")
    figure.suptitle("simulated times", fontsize="small")
