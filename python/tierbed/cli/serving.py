"""``serve`` and ``lookup``: a published model, over HTTP or in this process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tierbed._util.durations import parse_seconds
from tierbed._util.report import write_json
from tierbed.cli.fields import Fields, add
from tierbed.cli.options import DramBudget, JsonOut, Threads, shows_tables
from tierbed.cli.settings import words
from tierbed.config.io import IoOptions
from tierbed.config.words import (
    IoEngine,
    MissingShard,
    MissMode,
    Pooling,
    RowType,
    SecondsText,
    Share,
    SizeText,
    SnapshotBackend,
    WordsText,
)
from tierbed.errors import InvalidError, IoError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.serve.cache import CacheOptions
from tierbed.serve.follow import Follow
from tierbed.serve.recorded_upload import RecordUpload
from tierbed.serve.route import Route
from tierbed.serve.server import Limits, ServeOptions, Server
from tierbed.serve.snapshot import Snapshot

__all__ = ["ask", "register"]

# The exit code of a server that left work behind.
ABANDONED = 3


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the snapshot is read.

    Args:
        dram_budget: Memory for everything that is kept: 16MiB, 4GiB.
        backend: How pages are read.
        io_engine: auto falls back by itself.
        cache: Tiers, by comma: codec:policy:share:admit, or a policy; and
            neighbours:second_chance:share.
        resident: Rows that stay in memory: a file of a plan.
        neighbours: File of neighbours; by default beside the snapshot.
        misses: Read, or answer by the plan, a neighbour, or a default.
        refresh: Tables, by comma, whose approximate answers are followed by a read; all: every.
    """

    dram_budget: SizeText = "256MiB"
    backend: SnapshotBackend = "direct"
    io_engine: IoEngine = "auto"
    cache: WordsText = "lru"
    resident: Path | None = None
    neighbours: Path | None = None
    misses: MissMode = "read"
    refresh: tuple[str, ...] = ()

    def tiers(self) -> CacheOptions:
        """Returns what the cache is made of."""
        refresh = self.refresh == ("all",) or self.refresh
        return CacheOptions(tiers=self.cache, neighbours=self.neighbours, refresh=refresh or False)

    def open(self, folder: Path) -> Snapshot:
        """Opens the snapshot in ``folder``."""
        return Snapshot.open(
            folder,
            dram_budget=self.dram_budget,
            backend=self.backend,
            cache=self.tiers(),
            resident=self.resident,
            misses=self.misses,
            io=IoOptions(engine=self.io_engine),
        )


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is recorded of the queries.

    Args:
        record: Record queries here, for `tierbed place`.
        record_tables: Tables that share pages, with commas between; repeat for several groups. By
            default every table by itself.
        record_sample: Share of the queries that are recorded.
        record_bytes_max: Most bytes of each log; the oldest are removed.
    """

    record: str | None = None
    record_tables: list[str] | None = None
    record_sample: Share = 1.0
    record_bytes_max: int = 1 << 30

    def upload(self) -> RecordUpload | None:
        """Returns what uploads the queries; None where they stay in a folder, or none are."""
        is_address = self.record is not None and "://" in self.record
        return RecordUpload(str(self.record)) if is_address else None

    def begin(self, snapshot: Snapshot, upload: RecordUpload | None) -> None:
        """Records what is looked up from now on, where that is wanted."""
        if self.record is not None:
            logs = snapshot.record(
                self.record if upload is None else upload.folder,
                tables=[words(group) for group in self.record_tables or ()] or None,
                sample=self.record_sample,
                bytes_max=self.record_bytes_max,
            )
            told = [str(log) for log in logs]
            if upload is not None:
                told = [upload.place(log.name) for log in logs]
            print(f"recording queries in {', '.join(told)}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Followed:
    """How the versions of a channel are followed.

    Args:
        local: With LOCATION@CHANNEL: the folder of this machine that versions come to.
        poll: Time between two looks at the channel.
        sync_bandwidth: Most bytes per second that are fetched; by default a fifth of what the disk
            takes.
        swap_share: Part of the memory for rows that a new snapshot has until it answers alone.
    """

    local: Path | None = None
    poll: SecondsText = "2s"
    sync_bandwidth: SizeText | None = None
    swap_share: Share = 0.1

    def follow(self, place: str, reading: Reading, recording: Recording) -> Follow | None:
        """Returns what to follow; None where ``place`` is a folder."""
        if self.local is None:
            if "@" in place and not Path(place).exists():
                raise InvalidError(
                    f"the versions of a channel need a folder of this machine: {place}; add "
                    "--local FOLDER, each server has its own"
                )
            return None
        if recording.record is not None or reading.resident is not None:
            raise InvalidError(
                "a channel that is followed takes no --record and no --resident; give them to a "
                "server of one version: its folder, without --local"
            )
        location, _, channel = place.rpartition("@")
        return Follow(
            location or place,
            local=self.local,
            channel=channel if location else "stable",
            poll=self.poll,
            sync_bandwidth=self.sync_bandwidth,
            swap_share=self.swap_share,
            dram_budget=reading.dram_budget,
            backend=reading.backend,
            cache=reading.tiers(),
            misses=reading.misses,
            io=IoOptions(engine=reading.io_engine),
        )


@dataclass(frozen=True, kw_only=True)
class Routed:
    """How a gateway asks the servers of shards.

    Args:
        route: Answer as a gateway: the folder of shards.json, in place of a snapshot.
        members: With --route: the servers of each shard, a file in TOML or JSON, or
            dns:rows-{shard}:8001.
        missing_shard: What is answered for rows of a shard of which no server answers.
        row_type: How rows come from shards; narrower ones are rounded.
        shard_ca: Authorities of the shards' certificates, in PEM; None: plain.
        shard_cert: The certificate that shards want of a gateway, in PEM.
        shard_key: The key of that certificate, in PEM.
        shard_name: The name in the shards' certificates, where it is not that of their addresses.
        shard_token: The file of the token that shards want.
        shard_wait: Longest time at the start to wait for a server of every shard.
    """

    route: Path | None = None
    members: str | None = None
    missing_shard: MissingShard = "refuse"
    row_type: RowType = "f32"
    shard_ca: Path | None = None
    shard_cert: Path | None = None
    shard_key: Path | None = None
    shard_name: str | None = None
    shard_token: Path | None = None
    shard_wait: SecondsText = "60s"

    def given(self, place: str | None) -> Route | None:
        """Returns the route; None where the server has rows of its own."""
        if self.route is None and self.members is None:
            return None
        if self.route is None or self.members is None:
            raise InvalidError("a gateway needs a map and members; give --route and --members")
        if place is not None:
            raise InvalidError(
                f"a gateway has no snapshot of its own: {place}; leave out one of SNAPSHOT and "
                "--route"
            )
        return Route(
            self.route,
            self.members,
            missing_shard=self.missing_shard,
            row_type=self.row_type,
            ca=self.shard_ca,
            certificate=self.shard_cert,
            key=self.shard_key,
            server_name=self.shard_name,
            token=self.shard_token,
            wait=self.shard_wait,
        )


def _place(given: str, how: ServeOptions) -> tuple[str, ServeOptions]:
    """Splits ``NAME=`` off a place; it is the model's name."""
    name, _, place = given.partition("=")
    if not place or "/" in name:
        return given, how
    if how.model_name not in (ServeOptions().model_name, name):
        raise InvalidError(
            f"the model has two names: {name}, {how.model_name}; leave out one of NAME= and "
            "--model-name"
        )
    return place, replace(how, model_name=name)


class _Signals:
    """Signals to a server.

    SIGINT stops it at once, SIGTERM after a delay that a second one ends. SIGHUP reads files again.
    """

    def __init__(self) -> None:
        self.is_asked = self.is_urgent = self._is_changed = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        signal.signal(signal.SIGHUP, self._note_change)

    def takes_change(self) -> bool:
        """Tells, once for each SIGHUP, that files shall be read again."""
        is_changed, self._is_changed = self._is_changed, False
        return is_changed

    def _note_change(self, _number: int, _frame: object) -> None:
        self._is_changed = True

    def _note(self, number: int, _: object) -> None:
        self.is_urgent = self.is_asked or number == signal.SIGINT
        self.is_asked = True


def serve(
    snapshot: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME=]SNAPSHOT",
            help="The snapshot's folder, or LOCATION@CHANNEL of versions to follow; NAME= before "
            "it is the model's name.",
        ),
    ] = None,
    *,
    address: Annotated[
        str, typer.Option("--address", help="host:port; port 0 picks a free one.")
    ] = "127.0.0.1:8080",
    threads: Threads = 1,
    reading: Annotated[Reading, Fields(title="Rows")],
    versions: Annotated[Followed, Fields(title="Versions")],
    routing: Annotated[Routed, Fields(title="Shards")],
    recording: Annotated[Recording, Fields(title="Recording")],
    limits: Annotated[Limits, Fields(title="Limits", skip=("degraded_ms",))],
    how: Annotated[
        ServeOptions,
        Fields(
            title="Threads and log",
            skip=("limits", "snapshot_name"),
            defaults={"log_level": "info"},
        ),
    ],
    drain_delay: Annotated[
        SecondsText,
        typer.Option(
            "--drain-delay",
            metavar="SECONDS",
            help="After SIGTERM, seconds for balancers to see that the server is not ready; a "
            "second signal ends them.",
        ),
    ] = "5",
) -> None:
    """Answer lookups and predictions over HTTP until interrupted."""
    torch.set_num_threads(threads)
    signals = _Signals()
    route = routing.given(snapshot)
    if snapshot is None and route is None:
        raise InvalidError("no snapshot is named; give the folder that publish wrote, or --route")
    place, how = _place(snapshot or "", replace(how, limits=limits))
    with ExitStack() as stack:
        follow = route or versions.follow(place, reading, recording)
        # Ends after the snapshot, which writes its last queries then.
        upload = recording.upload()
        if upload is not None:
            stack.enter_context(upload)
        opened = None if follow else stack.enter_context(reading.open(Path(place)))
        served = follow or opened
        assert served is not None, "one of both"
        server = stack.enter_context(Server(served, address, options=how))
        if opened is not None:
            recording.begin(opened, upload)
        answers = "lookups and predictions" if server.predicts else "lookups"
        tls = "s" if how.tls_cert else ""
        beside = f" and grpc{tls}://{server.grpc_address}" if server.grpc_address else ""
        admin = f", admin on http{tls}://{server.admin_address}" if server.admin_address else ""
        print(f"serving {answers} on http{tls}://{server.address}{beside}{admin}", flush=True)
        while not signals.is_asked and not server.wait(0.2):
            if signals.takes_change():
                server.reload()
        server.drain()
        closes_s = time.monotonic() + parse_seconds(drain_delay)
        while not signals.is_urgent and time.monotonic() < closes_s and not server.wait(0.2):
            if signals.takes_change():
                server.reload()
        if not server.stop():
            print("stopped, but a request did not end: ended by force", file=sys.stderr, flush=True)
            os._exit(ABANDONED)
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
    pool: Annotated[Pooling | None, typer.Option("--pool", help="One vector for all ids.")] = None,
    dram_budget: DramBudget = "64MiB",
    json_path: JsonOut = None,
) -> None:
    """Look up rows of a snapshot, or of a running server."""
    if (snapshot is None) == (url is None):
        raise InvalidError("name either a snapshot's folder or --url")
    if table is None or not ids:
        raise InvalidError("say what to look up, for example: --table c1 --ids 3,14,159")
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
    if shows_tables(json_path):
        names = [result["pooling"]] if result["pooling"] else result["ids"]
        for name, vector in zip(names, result["vectors"], strict=True):
            print(name, " ".join(f"{value:.6g}" for value in vector))
    if json_path is not None:
        write_json(json_path, result)


def _from_snapshot(
    folder: Path, table: str, ids: list[int], offsets: list[int], pooling: Pooling, dram_budget: str
) -> list[list[float]]:
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

    A server with tokens is shown that of the environment variable ``TIERBED_TOKEN``.

    Returns:
        The decoded JSON, or the text where it is none.

    Raises:
        InvalidError: The server refused the request, with its own words.
        IoError: Nobody answered.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidError(f"--url must start with http:// or https://, found {url!r}")
    body = None if request is None else json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("TIERBED_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
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
    add(app, "serve", serve, section="serve")
    add(app, "lookup", lookup)
