"""The command ``bench``: suites that write OUT/SUITE.json and OUT/SUITE.png."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierbed.cli.options import JsonOut, LogFormat, shares, words
from tierbed.errors import InvalidError
from tierbed_bench.cli.options import Scratch

__all__ = ["register", "suites"]

Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, about a minute.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for JSON and PNG.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything that is drawn.")]
OUT = Path("bench-out")

suites = typer.Typer(
    short_help="Measure all systems of a suite, as JSON and a picture.",
    help="Measure all systems of a suite; writes OUT/SUITE.json and OUT/SUITE.png.",
    no_args_is_help=True,
)


@suites.command()
def training(
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Share of Criteo-Kaggle's samples; 1 is all.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Slices a system.")] = 3,
    systems: Annotated[
        str, typer.Option("--systems", help="These beside the forward order, by comma.")
    ] = "",
    models: Annotated[
        str, typer.Option("--models", help="Whole steps of dlrm,deepfm,pnn, part by part.")
    ] = "",
    batch: Annotated[
        str, typer.Option("--batch", help="With --models: samples of a batch, by comma.")
    ] = "32,128,1024",
    seconds: Annotated[
        float, typer.Option("--seconds", help="Longest for one answer of a system.")
    ] = 400.0,
    scratch: Scratch = None,
) -> None:
    """Measure training stores on a generated trace, each in a process of its own."""
    from tierbed_bench import ModelOptions, TrainingOptions, run_models, run_training

    if models:
        wanted = ModelOptions(
            models=words(models), batch_lens=_numbers(batch), quick=quick, seed=seed
        )
        _told(run_models(out, wanted, json))
        return
    options = TrainingOptions(
        scale=scale,
        seed=seed,
        quick=quick,
        repeats=repeats,
        systems=words(systems),
        scratch=scratch,
        seconds_max=seconds,
    )
    _told(run_training(out, options, json))


@suites.command()
def lookup(
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Compare placements of this query log (text, a query a line)."),
    ] = None,
    table: Annotated[
        str, typer.Option("--table", help="With --log: the table is at least this large.")
    ] = "8GiB",
    dim: Annotated[int, typer.Option("--dim", help="With --log: elements of a row.")] = 64,
    ratios: Annotated[
        str, typer.Option("--ratios", help="With --log: replicas per row, by comma.")
    ] = "0,0.1,0.2,0.4,0.8",
    cache: Annotated[
        str, typer.Option("--cache", help="With --log: cached share of the rows, by comma.")
    ] = "0,0.01,0.05,0.1,0.2,0.4",
    threads: Annotated[int, typer.Option("--threads", help="With --log: threads that ask.")] = 4,
    batch: Annotated[int, typer.Option("--batch", help="With --log: queries of a call.")] = 1,
    calls: Annotated[
        int, typer.Option("--calls", help="With --log: measured calls of a thread, at most.")
    ] = 100_000,
    seconds: Annotated[
        float, typer.Option("--seconds", help="With --log: longest time of a measurement.")
    ] = 1.5,
    scratch: Scratch = None,
) -> None:
    """Measure lookups from a snapshot on disk, next to memory; with --log by placement.

    Caches of EVStore, FlashEmbedding and ours under one limit of memory are in `bench tiers`.
    """
    from tierbed._util.bytes import parse_bytes
    from tierbed_bench import LogOptions, run_lookup, run_lookup_log
    from tierbed_bench.lookup_log import check, quick as quick_options

    if log is None:
        _told(run_lookup(out, quick, seed, json))
        return
    options = LogOptions(
        log=log,
        table_bytes=parse_bytes(table, "table"),
        dim=dim,
        ratios=shares("--ratios", ratios),
        caches=shares("--cache", cache),
        threads=threads,
        batch=batch,
        calls=calls,
        seconds=seconds,
        scratch=scratch,
        seed=seed,
    )
    check(options)
    _told(run_lookup_log(out, quick_options(options) if quick else options, json))


@suites.command()
def precision(
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Criteo file to train and score on; else generated samples."),
    ] = None,
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
) -> None:
    """Measure codecs: their errors, the time to decode, and what they cost a model's AUC."""
    from tierbed_bench import PrecisionOptions, run_precision

    _told(run_precision(out, PrecisionOptions(log=log, quick=quick, seed=seed), json))


@suites.command()
def tiers(
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Criteo file to train and ask from; else generated samples."),
    ] = None,
    dram_shares: Annotated[
        str, typer.Option("--shares", help="DRAM of the caches as shares of the f32 bytes.")
    ] = "0.01,0.05",
    ratio: Annotated[
        float, typer.Option("--ratio", help="Replicas per row where rows are placed.")
    ] = 0.4,
    requests: Annotated[
        int, typer.Option("--requests", help="Ask at most this many of the samples one by one.")
    ] = 1_500,
    table: Annotated[
        str, typer.Option("--table", help="Of `served`: the table is at least this large.")
    ] = "512MiB",
    parts: Annotated[
        str,
        typer.Option(
            "--parts",
            help="counted (reads, AUC), served (latency), shared (several models), by comma.",
        ),
    ] = "counted,served,shared",
    scratch: Scratch = None,
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
) -> None:
    """Serve a trained model through tiers of the papers and ours: reads, latency and AUC.

    `served` limits memory by a cgroup, which takes root; without, the page cache is left out.
    """
    from tierbed._util.bytes import parse_bytes
    from tierbed_bench import TiersOptions, run_tiers

    options = TiersOptions(
        log=log,
        shares=shares("--shares", dram_shares),
        ratio=ratio,
        requests=requests,
        table_bytes=parse_bytes(table, "table"),
        parts=words(parts),
        scratch=scratch,
        quick=quick,
        seed=seed,
    )
    _told(run_tiers(out, options, json))


@suites.command()
def placement(
    logs: Annotated[list[Path], typer.Option("--log", help="A query log; repeat for several.")],
    log_format: LogFormat = "auto",
    split: Annotated[
        float, typer.Option("--split", help="Share of the queries to build from, the earlier ones.")
    ] = 0.8,
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", help="Split by this seed, not by time.")
    ] = None,
    rows_per_page: Annotated[
        int, typer.Option("--rows-per-page", min=1, help="Rows of a page.")
    ] = 16,
    ratios: Annotated[
        str, typer.Option("--ratios", help="Replicas per row, by comma.")
    ] = "0.1,0.2,0.4,0.8",
    cache: Annotated[
        str | None,
        typer.Option("--cache", help="Cached shares of the rows, by comma; else 0,0.01,0.05,0.1."),
    ] = None,
    cache_policy: Annotated[
        str, typer.Option("--cache-policy", help="Who leaves the cache.")
    ] = "s3_fifo",
    queries: Annotated[
        int | None, typer.Option("--queries", help="Read at most this many of a log.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="They change times, never counts; else one a core."),
    ] = None,
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
) -> None:
    """Count the pages that later queries read, by placement, space, cache and page selection."""
    from tierbed_bench import PlacementOptions, run_placement

    options = PlacementOptions(
        logs=logs,
        log_format=log_format,
        split=split,
        shuffle=shuffle,
        rows_per_page=rows_per_page,
        ratios=shares("--ratios", ratios),
        caches=None if cache is None else shares("--cache", cache),
        policy=cache_policy,
        quick=quick,
        queries_max=queries,
        seed=seed,
        threads=threads or len(os.sched_getaffinity(0)),
    )
    _told(run_placement(out, options, json))


@suites.command()
def exchange(quick: Quick = False, out: Out = OUT, seed: Seed = 1, json: JsonOut = None) -> None:
    """Measure lookups of two ranks: one-sided, next to a collective exchange and to gloo."""
    from tierbed_bench import ExchangeOptions, run_exchange

    _told(run_exchange(out, ExchangeOptions(quick=quick, seed=seed), json))


def _told(path: Path) -> None:
    print(f"wrote {path} and {path.with_suffix('.png')}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words(text))
    except ValueError as error:
        raise InvalidError(f"--batch must be numbers with commas between, not {text!r}") from error


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.add_typer(suites, name="bench")
