"""The command ``sim``: query logs replayed through caches, memory and SSDs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed import _native
from tierbed._util.report import print_table, write_json
from tierbed.cli.fields import Fields, add
from tierbed.cli.options import JsonOut, shows_tables
from tierbed_bench.cli.options import Png, ReplayedLog, ReplayedQueries, write_curves
from tierbed_bench.sim.cache import SimOptions, draw_curves, simulate
from tierbed_bench.sim.exchange import model_report
from tierbed_bench.sim.memory import Log, MatchOptions, generated_log, match_memory
from tierbed_bench.sim.ssd import SsdSimOptions, draw_ssd, simulate_ssd

__all__ = ["register"]

sim = typer.Typer(help="Replay query logs through caches, memory and SSDs.", no_args_is_help=True)


@sim.callback()
def _sim() -> None:
    """Replay query logs through caches, memory and SSDs."""


def cache(
    log: ReplayedLog,
    *,
    options: Annotated[
        SimOptions,
        Fields(
            names={
                "capacity_shares": "capacity",
                "warm_share": "warm",
                "query_count_max": "queries",
                "admission_threshold": "admit-from",
                "has_bounds": "bounds/--no-bounds",
            }
        ),
    ],
    png: Png = None,
    json: JsonOut = None,
) -> None:
    """Replay a query log through cache policies, from an empty cache, and count hits.

    A hit is a row that was there; a perfect hit a query of which every row was.
    """
    result = simulate(log, options)
    if shows_tables(json):
        columns = ["policy", "capacity_share", "hit_rate", "perfect_hit_rate", "misses_per_request"]
        print_table(f"{log.name}: {result['distinct_rows']:,} rows", result["rows"], columns)
    write_curves(result, json, png, draw_curves)


def memory(
    *,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="As of `sim cache`; without, samples are generated."),
    ] = None,
    options: Annotated[
        MatchOptions, Fields(names={"baseline_share": "share", "warm_share": "warm"})
    ],
    queries: ReplayedQueries = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Without --log: samples to generate.")
    ] = 458_406,
    scale: Annotated[
        float, typer.Option("--scale", help="Without --log: share of Criteo's cardinalities.")
    ] = 0.01,
    json: JsonOut = None,
) -> None:
    """Find the least memory, all metadata included, that has the perfect hits of another cache."""
    if log is None:
        trace: Log = generated_log(samples, scale, threads=options.threads)
    else:
        trace = _native.CacheLog(str(log), queries)
    found = match_memory(trace, options, lambda line: typer.echo(line, err=True))
    result = {"log": "generated" if log is None else str(log), **found}
    if shows_tables(json):
        columns = ["policy", "codec", "memory_share", "metadata_bytes_per_row", "rows_share"]
        columns += ["perfect_hit_rate", "misses_per_request"]
        title = f"{result['distinct_rows']:,} rows of dim {options.dim}"
        print_table(title, result["rows"], columns)
    if json is not None:
        write_json(json, result)


def ssd(
    log: ReplayedLog,
    *,
    options: Annotated[
        SsdSimOptions,
        Fields(
            skip=("admit_from", "warm_share"),
            names={
                "vector_bytes": "vector-bytes",
                "cache_share": "cache",
                "query_count_max": "queries",
            },
        ),
    ],
    png: Png = None,
    json: JsonOut = None,
) -> None:
    """Send a query log to a simulated SSD that reads vectors (FlashEmbedding).

    All times are simulated. Beside it: block reads behind a page cache, and rows in memory.
    """
    result = simulate_ssd(log, options)
    if shows_tables(json):
        columns = ["sweep", "value", "system", "lookup_us", "lookup_ratio", "total_us"]
        columns += ["bytes_ratio", "hit_rate"]
        print_table(f"{log.name}: simulated times", result["rows"], columns)
    write_curves(result, json, png, draw_ssd)


def exchange(json: JsonOut = None) -> None:
    """Predict exchanges between GPUs from bytes and bandwidths, beside the ratios of the paper.

    A model: nothing is measured. Its one free number is fitted to two GPUs of the paper and held
    against three and four.
    """
    report = model_report()
    if shows_tables(json):
        print_table("model: baseline / fused, fitted to two GPUs", report["hold_out"])
        print_table("model: from bytes alone", report["rows"])
        print_table("model: share sent, weak scaling, four V100", report["volume"])
    if json is not None:
        write_json(json, report)


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    add(sim, "cache", cache)
    add(sim, "memory", memory)
    add(sim, "ssd", ssd)
    add(sim, "exchange", exchange)
    app.add_typer(sim, name="sim")
