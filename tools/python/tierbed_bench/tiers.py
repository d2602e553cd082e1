"""Cache tiers of the papers and of Tierbed: reads, waits of requests, and the AUC that is left.

A DLRM is trained on the earlier samples of a log and published. Three parts follow. ``counted``
(:mod:`tierbed_bench.tiers_counted`): from the log's own tables, reads and AUC; its times are of
tables that the device's own memory holds. ``served`` (:mod:`tierbed_bench.tiers_served`): the
tables cloned until they are large, latency and inference under a limit of memory, beside the page
cache, FlashEmbedding, EVStore's layers and rows in memory. ``shared``
(:mod:`tierbed_bench.tiers_shared`): four such models on one budget, or with a part of it each.
"""

from __future__ import annotations

from dataclasses import dataclass
from json import loads
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tierbed._util.report import print_table, write_json
from tierbed_bench.common import ratio
from tierbed_bench.precision import DIM
from tierbed_bench.suite import write_suite
from tierbed_bench.tiers_counted import CountedOptions, measure_counted
from tierbed_bench.tiers_model import TrainedOptions, publish
from tierbed_bench.tiers_served import BATCH, ServedOptions, measure_served
from tierbed_bench.tiers_shared import SharedOptions, measure_shared

__all__ = ["TiersOptions", "run_tiers"]

Row = dict[str, Any]
QUICK_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class TiersOptions:
    """What to run.

    Args:
        log: Criteo file to train and ask from; else generated samples.
        eval_share: Share of the samples, the last ones, that are asked and scored.
        shares: DRAM of the caches, as shares of the f32 bytes.
        ratio: Replicas per row where all tables are placed together.
        requests: Ask at most this many single requests of a system, in each part.
        table_bytes: Of ``served``: the table is at least that large.
        shared_requests: Of ``shared``: requests of all models together.
        parts: counted (reads, AUC), served (latency), shared (several models), by comma.
        scratch: Folder for snapshots, deleted again; by default the folder of results.
        quick: Fewer generated samples and requests, a smaller table.
        seed: Of generated samples and initial weights.
    """

    log: Path | None = None
    eval_share: float = 0.2
    shares: tuple[float, ...] = (0.01, 0.05)
    ratio: float = 0.4
    requests: int = 1_500
    table_bytes: int = 512 << 20
    shared_requests: int = 48_000
    parts: tuple[str, ...] = ("counted", "served", "shared")
    scratch: Path | None = None
    quick: bool = False
    seed: int = 1


def run_tiers(out: Path, options: TiersOptions, json: Path | str | None = None) -> Path:
    """Runs the suite; writes ``tiers.json`` and ``tiers.png`` to ``out``."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    shares = options.shares[:1] if options.quick else options.shares
    with TemporaryDirectory(dir=options.scratch or out) as folder:
        published = publish(
            Path(folder),
            TrainedOptions(
                log=options.log,
                eval_share=options.eval_share,
                # What shares memory is not placed.
                shares=() if options.parts == ("shared",) else shares,
                ratio=options.ratio,
                quick=options.quick,
                seed=options.seed,
            ),
        )
        if "counted" in options.parts:
            requests = min(options.requests, 300) if options.quick else options.requests
            counted = CountedOptions(
                shares=shares,
                requests=min(requests, published.source.eval_samples),
                quick=options.quick,
            )
            rows += measure_counted(published, counted)
        if "served" in options.parts:
            served = ServedOptions(
                table_bytes=min(options.table_bytes, QUICK_TABLE_BYTES)
                if options.quick
                else options.table_bytes,
                shares=shares,
                # Fewer do not fill the largest cache: then policies would have nothing to choose.
                warm_requests=6_000 if options.quick else 300_000,
                singles=min(options.requests, 200) if options.quick else options.requests,
                batches=10 if options.quick else 60,
                seed=options.seed,
            )
            rows += measure_served(Path(folder), published, served)
        if "shared" in options.parts:
            asked = (
                min(options.shared_requests, 4_000) if options.quick else options.shared_requests
            )
            rows += measure_shared(
                published, SharedOptions(shares=shares, requests=asked, seed=options.seed)
            )
    ratios = {**_read_ratios(rows), **_time_ratios(rows), **_shared_ratios(rows)}
    _print(rows, ratios)
    told = {
        "dim": DIM,
        "batch": BATCH,
        "log": str(options.log) if options.log else "generated",
        "requests": options.requests,
        "train_samples": published.source.train_samples,
        "f32_bytes": published.f32_bytes,
        "auc": published.exact["auc"],
        "pr_auc": published.exact["pr_auc"],
    }
    path = write_suite(out, "tiers", rows, ratios, lambda figure: _draw(figure, rows), told)
    if json is not None:
        write_json(json, loads(path.read_text()))
    return path


# ---------------------------------------------------------------- results


def _read_ratios(rows: list[Row]) -> dict[str, float]:
    """Reads of EV-LFU, a row at a time, next to pages of the others with the same bytes."""
    found = {}
    base = {
        (row["part"], row["budget_share"]): row["rows_read_per_request"]
        for row in rows
        if row["system"] in ("ev_lfu", "ev_lfu_f32") and "rows_read_per_request" in row
    }
    for row in rows:
        reads = base.get((row["part"], row.get("budget_share")))
        pages = row.get("pages_read_per_request")
        if reads and pages and row["system"].startswith("group_frequency"):
            name = f"{row['part']}_{row['system']}_{100 * row['budget_share']:g}pct"
            found[f"ev_lfu_rows_vs_{name}_pages"] = ratio(reads, pages)
    return found


def _shared_ratios(rows: list[Row]) -> dict[str, float]:
    """Rows read on one budget next to those with a fixed part of it for each model."""
    found = {}
    reads = {
        (row["system"], row["budget_share"]): row["rows_read_per_request"]
        for row in rows
        if row["part"] == "shared"
    }
    for (system, share), shared in reads.items():
        even = reads.get((system.replace("shared_", "even_"), share))
        if system.startswith("shared_") and even:
            found[f"{system}_{100 * share:g}pct_vs_even_rows"] = ratio(shared, even)
    return found


def _time_ratios(rows: list[Row]) -> dict[str, float]:
    """Lookups next to those through a map, inference next to rows in memory."""
    served = [row for row in rows if row["part"] == "served" and "latency_us_mean" in row]
    memory = next((row for row in served if row["system"] == "memory"), None)
    mapped = {row["budget_share"]: row for row in served if row["system"] == "mmap"}
    found = {}
    for row in served:
        name = f"{row['system']}_{100 * row['budget_share']:g}pct"
        base = mapped.get(row["budget_share"])
        if base is not None and row is not base:
            for what, field in (("request", "latency_us_mean"), ("batch", "batch_lookup_us_mean")):
                found[f"mmap_vs_{name}_{what}_lookup"] = ratio(base[field], row[field])
        if memory is not None and row is not memory:
            for what in ("inference", "pipelined"):
                field = f"batch_{what}_us_mean"
                found[f"{name}_vs_memory_{what}"] = ratio(row[field], memory[field])
    return found


def _print(rows: list[Row], ratios: dict[str, float]) -> None:
    counted = (
        "system dram_share rows_read_per_request pages_read_per_request perfect_hit_rate "
        "approximate_rows_per_request auc_change pr_auc_change"
    )
    served = (
        "system budget_share latency_us_mean latency_us_p90 latency_us_p99 cpu_us_mean "
        "rows_read_per_request pages_read_per_request batch_lookup_us_mean "
        "batch_inference_us_mean batch_pipelined_us_mean auc_change"
    )
    shared = (
        "system budget_share models budget_bytes used_bytes_max rows_read_per_request "
        "pages_read_per_request"
    )
    simulated = "system budget_share batch_lookup_us_mean batch_inference_us_mean hit_rate"
    for part, is_simulated, title, columns in (
        ("counted", None, "counted: requests of one sample, the log's own tables", counted),
        ("served", False, f"served: a large table; batches of {BATCH}", served),
        ("shared", None, "shared: several models on one budget, or a fixed part each", shared),
        ("served", True, f"simulated times of the EV-SSD; batches of {BATCH}", simulated),
    ):
        found = [
            row for row in rows if row["part"] == part and row.get("is_simulated") == is_simulated
        ]
        if found:
            print_table(title, found, columns.split())
    for row in rows:
        if "note" in row:
            print(f"{row['system']} at {100 * row['budget_share']:g} %: {row['note']}")
    print_table("ratios", [{"ratio": name, "value": value} for name, value in ratios.items()])


def _draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots(1, 2)
    # Without latencies the second panel is of models that share.
    second = ("shared", "rows_read_per_request", "rows read per request, several models")
    if any(row["part"] == "served" for row in rows):
        second = ("served", "batch_lookup_us_mean", f"lookup of {BATCH} requests, us")
        axes[1].set_xscale("log")
    first = ("counted", "pages_read_per_request", "pages read per request")
    for panel, (part, field, title) in zip(axes, (first, second), strict=True):
        shown = [row for row in rows if row["part"] == part and field in row]
        names = [f"{row['system']} {100 * row.get('budget_share', 1):g} %" for row in shown]
        panel.barh(names, [row[field] for row in shown], color="#3b6ea5")
        panel.set_xlabel(title)
        panel.tick_params(labelsize=5)
        panel.invert_yaxis()
