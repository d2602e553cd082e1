"""``serve`` and ``lookup``: a published model, over HTTP or in this process."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.bytes import parse_bytes
from tierbed.cli import server_options as options
from tierbed.cli.options import (
    DramBudget,
    IoEngine,
    JsonOut,
    Threads,
    set_threads,
    shows_tables,
)
from tierbed.config.io import IoOptions
from tierbed.config.words import MissMode, SnapshotBackend
from tierbed.errors import InvalidError, IoError

__all__ = ["ask", "register"]


def serve(
    snapshot: Annotated[Path, typer.Argument(help="The snapshot's folder.")],
    address: Annotated[
        str, typer.Option("--address", help="host:port; port 0 picks a free one.")
    ] = "127.0.0.1:8080",
    dram_budget: DramBudget = "256MiB",
    backend: Annotated[SnapshotBackend, typer.Option("--backend")] = "direct",
    io_engine: IoEngine = "auto",
    cache: Annotated[
        str,
        typer.Option(
            "--cache",
            help="Tiers, by comma: codec:policy:share:admit, or a policy; and "
            "neighbours:second_chance:share.",
        ),
    ] = "lru",
    resident: Annotated[
        Path | None, typer.Option("--resident", help="Rows that stay in memory: a file of a plan.")
    ] = None,
    neighbours: Annotated[
        Path | None,
        typer.Option("--neighbours", help="File of neighbours; by default beside the snapshot."),
    ] = None,
    misses: Annotated[
        MissMode,
        typer.Option("--misses", help="Read, or answer by the plan, a neighbour, or a default."),
    ] = "read",
    refresh: Annotated[
        str,
        typer.Option(
            "--refresh",
            help="Tables, by comma, whose approximate answers are followed by a read; all: every.",
        ),
    ] = "",
    threads: Threads = 1,
    record: Annotated[
        Path | None, typer.Option("--record", help="Record queries here, for `tierbed place`.")
    ] = None,
    record_tables: Annotated[
        list[str] | None,
        typer.Option(
            "--record-tables",
            help="Tables that share pages, with commas between; repeat for several groups. "
            "By default every table by itself.",
        ),
    ] = None,
    record_sample: Annotated[
        float, typer.Option("--record-sample", help="Share of the queries that are recorded.")
    ] = 1.0,
    record_max: Annotated[
        str, typer.Option("--record-max", help="Most bytes of each log; the oldest are removed.")
    ] = "1GiB",
    connections_max: options.ConnectionsMax = 2048,
    requests_max: options.RequestsMax = 256,
    body_max: options.BodyMax = "16MiB",
    indices_max: options.IndicesMax = 1 << 20,
    bags_max: options.BagsMax = 1 << 20,
    answer_max: options.AnswerMax = "64MiB",
    buffer_max: options.BufferMax = "256MiB",
    head_ms_max: options.HeadMsMax = 10_000,
    body_ms_max: options.BodyMsMax = 30_000,
    body_idle_ms_max: options.BodyIdleMsMax = 5_000,
    request_ms_max: options.RequestMsMax = 60_000,
    answer_ms_max: options.AnswerMsMax = 30_000,
    idle_ms_max: options.IdleMsMax = 75_000,
    stop_ms_max: options.StopMsMax = 10_000,
    worker_threads: options.WorkerThreads = None,
    lookup_threads: options.LookupThreads = None,
    log_level: options.LogLevel = "info",
    access_log: options.AccessLog = False,
    slow_ms: options.SlowMs = 1_000,
) -> None:
    """Answer lookups and predictions over HTTP until interrupted."""
    from tierbed.serve.cache import CacheOptions
    from tierbed.serve.server import Limits, ServeOptions, Server
    from tierbed.serve.snapshot import Snapshot

    given = ServeOptions(
        limits=Limits(
            connections_max=connections_max,
            requests_max=requests_max,
            body_bytes_max=parse_bytes(body_max, "--body-max"),
            indices_max=indices_max,
            bags_max=bags_max,
            answer_bytes_max=parse_bytes(answer_max, "--answer-max"),
            buffer_bytes_max=parse_bytes(buffer_max, "--buffer-max"),
            head_ms_max=head_ms_max,
            body_ms_max=body_ms_max,
            body_idle_ms_max=body_idle_ms_max,
            request_ms_max=request_ms_max,
            answer_ms_max=answer_ms_max,
            idle_ms_max=idle_ms_max,
            stop_ms_max=stop_ms_max,
        ),
        worker_threads=worker_threads,
        lookup_threads=lookup_threads,
        log_level=log_level,
        access_log=access_log,
        slow_ms=slow_ms,
    )
    set_threads(threads)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with (
        Snapshot.open(
            snapshot,
            dram_budget=dram_budget,
            backend=backend,
            cache=CacheOptions(
                tiers=cache,
                neighbours=neighbours,
                refresh=refresh == "all" or refresh.split(",") if refresh else False,
            ),
            resident=resident,
            misses=misses,
            io=IoOptions(engine=io_engine),
        ) as opened,
        Server(opened, address, options=given) as server,
    ):
        if record is not None:
            groups = [group.split(",") for group in record_tables or []] or None
            logs = opened.record(record, tables=groups, sample=record_sample, bytes_max=record_max)
            print(f"recording queries in {', '.join(str(log) for log in logs)}", flush=True)
        answers = "lookups and predictions" if server.predicts else "lookups"
        print(f"serving {answers} on http://{server.address}", flush=True)
        while not stop.is_set() and not server.wait(0.2):
            pass
        if not server.stop():
            print("stopped, but a request did not end: ended by force", file=sys.stderr, flush=True)
            os._exit(1)
    print("stopped", file=sys.stderr)


def lookup(
    snapshot: Annotated[
        Path | None, typer.Argument(help="The snapshot's folder; or give --url.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A running server: http://127.0.0.1:8080")
    ] = None,
    table: Annotated[str | None, typer.Option("--table", help="Feature or table.")] = None,
    ids: Annotated[str, typer.Option("--ids", help="Row ids: 3,14,159. One vector each.")] = "",
    pool: Annotated[
        str | None, typer.Option("--pool", help="sum or mean: one vector for all ids.")
    ] = None,
    dram_budget: DramBudget = "64MiB",
    json_path: JsonOut = None,
) -> None:
    """Look up rows of a snapshot, or of a running server."""
    if (snapshot is None) == (url is None):
        raise InvalidError("name either a snapshot's folder or --url")
    if table is None or not ids:
        raise InvalidError("say what to look up, for example: --table c1 --ids 3,14,159")
    if pool not in (None, "sum", "mean"):
        raise InvalidError(f"--pool must be sum or mean, not {pool!r}")
    try:
        wanted = [int(text) for text in ids.split(",")]
    except ValueError as error:
        raise InvalidError(f"--ids must be whole numbers separated by commas: {ids!r}") from error
    offsets = [0, len(wanted)] if pool else list(range(len(wanted) + 1))
    if url is not None:
        vectors = _from_server(url, table, wanted, offsets, pool or "sum")
    else:
        assert snapshot is not None
        vectors = _from_snapshot(snapshot, table, wanted, offsets, pool or "sum", dram_budget)
    _show({"table": table, "ids": wanted, "pooling": pool, "vectors": vectors}, json_path)


def _show(result: dict[str, Any], json_path: Path | None) -> None:
    from tierbed._util.report import write_json

    if shows_tables(json_path):
        names = [result["pooling"]] if result["pooling"] else result["ids"]
        for name, vector in zip(names, result["vectors"], strict=True):
            print(name, " ".join(f"{value:.6g}" for value in vector))
    if json_path is not None:
        write_json(json_path, result)


def _from_snapshot(
    folder: Path, table: str, ids: list[int], offsets: list[int], pooling: str, dram_budget: str
) -> list[list[float]]:
    import torch

    from tierbed.jagged import KeyedJaggedTensor
    from tierbed.serve.snapshot import Snapshot

    if not folder.is_dir():
        raise InvalidError(f"no such folder: {folder}", {"path": str(folder)})
    bags = KeyedJaggedTensor([table], torch.tensor(ids), offsets=torch.tensor(offsets))
    with Snapshot.open(folder, dram_budget=dram_budget) as snapshot:
        vectors: list[list[float]] = snapshot.lookup(bags, pooling)[table].tolist()
    return vectors


def _from_server(
    url: str, feature: str, ids: list[int], offsets: list[int], pooling: str
) -> list[list[float]]:
    request = {"features": {feature: {"values": ids, "offsets": offsets}}, "pooling": pooling}
    vectors: list[list[float]] = ask(url, "/v1/lookup", request)["features"][feature]
    return vectors


def ask(url: str, route: str, request: dict[str, Any] | None = None) -> Any:
    """Asks a running server; with a request by POST, else by GET.

    Returns:
        The decoded JSON, or the text where it is none.

    Raises:
        InvalidError: The server refused the request, with its own words.
        IoError: Nobody answered.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidError(f"--url must start with http://, found {url!r}")
    body = None if request is None else json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    question = urllib.request.Request(url.rstrip("/") + route, body, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(question, timeout=30) as answer:  # noqa: S310
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace").strip()
        raise InvalidError(f"the server answered {error.code}: {told}", {"url": url}) from error
    except OSError as error:
        raise IoError(f"no answer from {url}: {error}; is the server running?") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.command("serve")(serve)
    app.command("lookup")(lookup)
