"""The command ``sim``: query logs replayed through caches, memory and SSDs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed.cli.options import JsonOut, shares, shows_tables, words
from tierbed_bench.cli.options import Png, ReplayedLog, ReplayedQueries, write_curves

__all__ = ["register"]

sim = typer.Typer(help="Replay query logs through caches, memory and SSDs.", no_args_is_help=True)

POLICIES = "lru,s3_fifo,ev_car,ev_lfu,group_frequency,auto"
CAPACITIES = "0.005,0.01,0.02,0.05,0.1,0.2"


@sim.callback()
def _sim() -> None:
    """Replay query logs through caches, memory and SSDs."""


@sim.command("cache")
def cache(
    log: ReplayedLog,
    policies: Annotated[str, typer.Option("--policies", help="By comma, or `all`.")] = POLICIES,
    capacity: Annotated[
        str, typer.Option("--capacity", help="Shares of the log's distinct rows, by comma.")
    ] = CAPACITIES,
    warm: Annotated[
        float, typer.Option("--warm", help="Share of the queries replayed before counting.")
    ] = 0.0,
    queries: ReplayedQueries = None,
    threshold: Annotated[
        int,
        typer.Option("--admit-from", help="Uses from which on rows enter, 1 to 3; 0: always."),
    ] = 0,
    bounds: Annotated[
        bool, typer.Option("--bounds/--no-bounds", help="Offline bounds beside the policies.")
    ] = True,
    png: Png = None,
    json: JsonOut = None,
) -> None:
    """Replay a query log through cache policies, from an empty cache, and count hits.

    A hit is a row that was there; a perfect hit a query of which every row was.
    """
    from tierbed._util.report import print_table
    from tierbed_bench.sim.cache import SimOptions, draw_curves, simulate

    options = SimOptions(
        policies=words(policies),
        capacity_shares=shares("--capacity", capacity),
        warm_share=warm,
        query_count_max=queries,
        admission_threshold=threshold,
        has_bounds=bounds,
    )
    result = simulate(log, options)
    if shows_tables(json):
        columns = ["policy", "capacity_share", "hit_rate", "perfect_hit_rate", "misses_per_request"]
        print_table(f"{log.name}: {result['distinct_rows']:,} rows", result["rows"], columns)
    write_curves(result, json, png, draw_curves)


@sim.command("memory")
def memory(
    log: Annotated[
        Path | None,
        typer.Option("--log", help="As of `sim cache`; without, samples are generated."),
    ] = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="Policy of f32 rows that is to be matched.")
    ] = "ev_lfu",
    share: Annotated[
        float, typer.Option("--share", help="Its rows, as a share of the distinct rows.")
    ] = 0.05,
    policies: Annotated[
        str, typer.Option("--policies", help="Who is to match it.")
    ] = "group_frequency",
    codecs: Annotated[str, typer.Option("--codecs", help="How they keep rows.")] = "f32,int8,int4",
    dim: Annotated[int, typer.Option("--dim", min=1, help="Elements of a row.")] = 32,
    warm: Annotated[
        float, typer.Option("--warm", help="Share of the queries replayed before counting.")
    ] = 0.0,
    queries: ReplayedQueries = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Without --log: samples to generate.")
    ] = 458_406,
    scale: Annotated[
        float, typer.Option("--scale", help="Without --log: share of Criteo's cardinalities.")
    ] = 0.01,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="They change no count; by default one a core."),
    ] = None,
    json: JsonOut = None,
) -> None:
    """Find the least memory, all metadata included, that has the perfect hits of another cache."""
    from tierbed._native import CacheLog
    from tierbed._util.report import print_table, write_json
    from tierbed_bench.sim.memory import Log, MatchOptions, generated_log, match_memory

    options = MatchOptions(
        baseline=baseline,
        baseline_share=share,
        policies=words(policies),
        codecs=words(codecs),
        dim=dim,
        warm_share=warm,
        threads=threads,
    )
    if log is None:
        trace: Log = generated_log(samples, scale, threads=threads)
    else:
        trace = CacheLog(str(log), queries)
    found = match_memory(trace, options, lambda line: typer.echo(line, err=True))
    result = {"log": "generated" if log is None else str(log), **found}
    if shows_tables(json):
        columns = ["policy", "codec", "memory_share", "metadata_bytes_per_row", "rows_share"]
        columns += ["perfect_hit_rate", "misses_per_request"]
        print_table(f"{result['distinct_rows']:,} rows of dim {dim}", result["rows"], columns)
    if json is not None:
        write_json(json, result)


@sim.command("ssd")
def ssd(
    log: ReplayedLog,
    read_us: Annotated[
        int, typer.Option("--read-us", min=1, help="Read of a flash page: 4, 10 or 30.")
    ] = 10,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Queries of a batch.")] = 128,
    vector_bytes: Annotated[
        int, typer.Option("--vector-bytes", min=1, help="Bytes of a row.")
    ] = 128,
    cache_share: Annotated[
        float, typer.Option("--cache", help="Caches, as a share of all rows' bytes.")
    ] = 0.01,
    sub_batches: Annotated[
        int, typer.Option("--sub-batches", min=1, help="Parts of a batch in the pipeline.")
    ] = 8,
    row_ns: Annotated[int, typer.Option("--row-ns", min=0, help="Host time of a row.")] = 100,
    block_host_ns: Annotated[
        int, typer.Option("--block-host-ns", min=0, help="Host time of a block read.")
    ] = 10_000,
    dense_us: Annotated[
        int, typer.Option("--dense-us", min=0, help="Host time of a batch besides lookups.")
    ] = 2_000,
    queries: ReplayedQueries = None,
    png: Png = None,
    json: JsonOut = None,
) -> None:
    """Send a query log to a simulated SSD that reads vectors (FlashEmbedding).

    All times are simulated. Beside it: block reads behind a page cache, and rows in memory.
    """
    from tierbed._util.report import print_table
    from tierbed_bench.sim.ssd import SsdSimOptions, draw_ssd, simulate_ssd

    options = SsdSimOptions(
        read_us=read_us,
        batch=batch,
        vector_bytes=vector_bytes,
        cache_share=cache_share,
        sub_batches=sub_batches,
        row_ns=row_ns,
        block_host_ns=block_host_ns,
        dense_us=dense_us,
        query_count_max=queries,
    )
    result = simulate_ssd(log, options)
    if shows_tables(json):
        columns = ["sweep", "value", "system", "lookup_us", "lookup_ratio", "total_us"]
        columns += ["bytes_ratio", "hit_rate"]
        print_table(f"{log.name}: simulated times", result["rows"], columns)
    write_curves(result, json, png, draw_ssd)


@sim.command("exchange")
def exchange(json: JsonOut = None) -> None:
    """Predict exchanges between GPUs from bytes and bandwidths, beside the ratios of the paper.

    A model: nothing is measured. Its one free number is fitted to two GPUs of the paper and held
    against three and four.
    """
    from tierbed._util.report import print_table, write_json
    from tierbed_bench.sim.exchange import model_report

    report = model_report()
    if shows_tables(json):
        print_table("model: baseline / fused, fitted to two GPUs", report["hold_out"])
        print_table("model: from bytes alone", report["rows"])
        print_table("model: share sent, weak scaling, four V100", report["volume"])
    if json is not None:
        write_json(json, report)


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.add_typer(sim, name="sim")
