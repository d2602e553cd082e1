"""The command ``bench``: suites that write OUT/SUITE.json and OUT/SUITE.png."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tierbed._util.bytes import parse_bytes
from tierbed.cli.fields import Fields, add
from tierbed.cli.options import JsonOut
from tierbed.cli.settings import numbers, words
from tierbed_bench.big.suite import BigOptions, run_big
from tierbed_bench.checkpoints import CheckpointOptions, run_checkpoints
from tierbed_bench.cli.options import Scratch
from tierbed_bench.cluster import ClusterOptions, run_cluster
from tierbed_bench.cores import PARTS as CORES_PARTS, CoresOptions, run_cores
from tierbed_bench.epochs import EpochsOptions, run_epochs
from tierbed_bench.examples import ExamplesOptions, run_examples
from tierbed_bench.exchange import ExchangeOptions, run_exchange
from tierbed_bench.fresh import FreshOptions, run_fresh
from tierbed_bench.lookup import run_lookup
from tierbed_bench.lookup_log import LogOptions, check, quick as quick_options, run_lookup_log
from tierbed_bench.models import ModelOptions, run_models
from tierbed_bench.network import NetworkOptions, run_network
from tierbed_bench.overlap import OverlapOptions, run_overlap
from tierbed_bench.peers.suite import PeersOptions, run_peers
from tierbed_bench.placement import PlacementOptions, run_placement
from tierbed_bench.plans import PlanOptions, run_plans
from tierbed_bench.precision import PrecisionOptions, run_precision
from tierbed_bench.serving import ServingOptions, run_serving
from tierbed_bench.shards import ShardsOptions, run_shards
from tierbed_bench.tiers import TiersOptions, run_tiers
from tierbed_bench.training import TrainingOptions, run_training

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


def training(
    *,
    options: Annotated[
        TrainingOptions, Fields(skip=("dram_share",), names={"seconds_max": "seconds"})
    ],
    out: Out = OUT,
    json: JsonOut = None,
    models: Annotated[
        str, typer.Option("--models", help="Whole steps of dlrm,deepfm,pnn, part by part.")
    ] = "",
    batch: Annotated[
        str, typer.Option("--batch", help="With --models: samples of a batch, by comma.")
    ] = "32,128,1024",
) -> None:
    """Measure training stores on a generated trace, each in a process of its own."""
    if not models:
        _told(run_training(out, options, json))
        return
    wanted = ModelOptions(
        models=words(models),
        batch_lens=numbers("--batch", batch, int),
        quick=options.quick,
        seed=options.seed,
    )
    _told(run_models(out, wanted, json))


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
    head_rows: Annotated[
        str,
        typer.Option("--head-rows", help="With --log: also heads before tails by id, as 1%,5%."),
    ] = "",
) -> None:
    """Measure lookups from a snapshot on disk, next to memory; with --log by placement.

    Caches of EVStore, FlashEmbedding and ours under one limit of memory are in `bench tiers`.
    """
    if log is None:
        _told(run_lookup(out, quick, seed, json))
        return
    options = LogOptions(
        log=log,
        table_bytes=parse_bytes(table, "table"),
        dim=dim,
        ratios=numbers("--ratios", ratios, float),
        caches=numbers("--cache", cache, float),
        threads=threads,
        batch=batch,
        calls=calls,
        seconds=seconds,
        scratch=scratch,
        seed=seed,
        head_rows=tuple(size.strip() for size in head_rows.split(",") if size.strip()),
    )
    check(options)
    _told(run_lookup_log(out, quick_options(options) if quick else options, json))


def precision(
    *,
    options: Annotated[PrecisionOptions, Fields(skip=("eval_share",))],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Measure codecs: their errors, the time to decode, and what they cost a model's AUC."""
    _told(run_precision(out, options, json))


def tiers(
    *,
    options: Annotated[TiersOptions, Fields(skip=("eval_share", "shared_requests"))],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Serve a trained model through tiers of the papers and ours: reads, latency and AUC.

    `served` limits memory by a cgroup, which takes root; without, the page cache is left out.
    """
    _told(run_tiers(out, options, json))


def placement(
    *,
    logs: Annotated[list[Path], typer.Option("--log", help="A query log; repeat for several.")],
    options: Annotated[
        PlacementOptions,
        Fields(
            skip=("logs", "caches", "threads"),
            names={"policy": "cache-policy", "queries_max": "queries"},
        ),
    ],
    cache: Annotated[
        str | None,
        typer.Option("--cache", help="Cached shares of the rows, by comma; else 0,0.01,0.05,0.1."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="They change times, never counts; else one a core."),
    ] = None,
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Count the pages that later queries read, by placement, space, cache and page selection."""
    caches = None if cache is None else numbers("--cache", cache, float)
    threads = threads or len(os.sched_getaffinity(0))
    _told(run_placement(out, replace(options, logs=logs, caches=caches, threads=threads), json))


def shards(
    *,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="A query log, or a folder of logs; repeat for several."),
    ] = None,
    options: Annotated[
        ShardsOptions,
        Fields(skip=("logs", "shards", "threads"), names={"queries_max": "queries"}),
    ],
    counts: Annotated[str, typer.Option("--shards", help="Numbers of shards, by comma.")] = "8,64",
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="They change times, never counts; else one a core."),
    ] = None,
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Count the shards that later queries need: by hash, by ranges of ids, by placement."""
    wanted = replace(
        options,
        logs=logs or (),
        shards=numbers("--shards", counts, int),
        threads=threads or len(os.sched_getaffinity(0)),
    )
    _told(run_shards(out, wanted, json))


def cores(
    *,
    options: Annotated[CoresOptions, Fields(skip=("cores", "parts"))],
    counts: Annotated[
        str, typer.Option("--cores", help="Numbers of cores, by comma.")
    ] = "1,2,4,8,16",
    parts: Annotated[
        str, typer.Option("--parts", help="Of training,lookups,placement.")
    ] = ",".join(CORES_PARTS),
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Measure how training, lookups and placement scale with cores, and the machine itself."""
    wanted = replace(options, cores=numbers("--cores", counts, int), parts=words(parts))
    _told(run_cores(out, wanted, json))


def overlap(
    *,
    options: Annotated[OverlapOptions, Fields(skip=("widths",))],
    widths: Annotated[
        str, typer.Option("--widths", help="Of the dense part, by comma; 0 is no dense part.")
    ] = "0,64,256,1024",
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Measure what a storage thread brings beside dense parts of several sizes."""
    wanted = replace(options, widths=numbers("--widths", widths, int))
    _told(run_overlap(out, wanted, json))


def big(
    *,
    options: Annotated[BigOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Measure tables larger than memory, phase by phase, next to a tenth of their size.

    It takes most of an hour and most of the disk; `--size 4GiB` is a few minutes. Each phase is a
    line of OUT/big.jsonl when it ends.
    """
    _told(run_big(out, options, json))


def exchange(
    *,
    options: Annotated[ExchangeOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Measure lookups of two ranks: one-sided, next to a collective exchange and to gloo."""
    _told(run_exchange(out, options, json))


def serve(
    *,
    options: Annotated[ServingOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Ask servers of the same rows at growing rates: Tierbed, Redis, memcached, Triton.

    Latency counts from the moment when a request was meant to be sent. Redis and memcached come
    by scripts/bench-deps, Triton by scripts/client-deps; what is not there is left out.
    """
    _told(run_serving(out, options, json))


def peers(
    *,
    options: Annotated[PeersOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Ask stores of the same rows under one limit of memory: a map, RocksDB, LMDB, Lance, others.

    The limit is a memory cgroup, which takes root. Packages and Redis come by scripts/bench-deps;
    what is not there is left out.
    """
    _told(run_peers(out, options, json))


def fresh(
    *,
    options: Annotated[FreshOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Measure publishing while training: its cost, that of noting changed rows, and freshness."""
    _told(run_fresh(out, options, json))


def checkpoints(
    *,
    options: Annotated[CheckpointOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Send checkpoints of a rank to an object store and load them, beside a copy of their files."""
    _told(run_checkpoints(out, options, json))


def plans(
    *,
    options: Annotated[PlanOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Hold what `tierbed plan --full-samples` computes against runs over all samples."""
    print(f"wrote {run_plans(out, options, json)}")


def epochs(
    *,
    options: Annotated[EpochsOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Train shuffled epochs that are planned together, one by one, by window and in memory."""
    _told(run_epochs(out, options, json))


def examples(
    *,
    options: Annotated[ExamplesOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Train the example models on disk and in plain torch: quality, time and memory of both."""
    print(f"wrote {run_examples(out, options, json)}")


def cluster(
    *,
    options: Annotated[ClusterOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Train on hosts of namespaces, and hold `plan cluster` against what is measured.

    Takes root. OUT/cluster.json is a file for `plan cluster --measured`.
    """
    print(f"wrote {run_cluster(out, options, json)}")


def network(
    *,
    options: Annotated[NetworkOptions, Fields()],
    out: Out = OUT,
    json: JsonOut = None,
) -> None:
    """Count what crosses the network between two hosts of namespaces, next to what must.

    Takes root.
    """
    print(f"wrote {run_network(out, options, json)}")


def _told(path: Path) -> None:
    print(f"wrote {path} and {path.with_suffix('.png')}")


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.add_typer(suites, name="bench")


for suite in (
    training,
    lookup,
    precision,
    tiers,
    placement,
    shards,
    cores,
    overlap,
    big,
    exchange,
    serve,
    peers,
    fresh,
    checkpoints,
    plans,
    epochs,
    examples,
    cluster,
    network,
):
    add(suites, suite.__name__, suite)
