"""The server of a published model, over HTTP and gRPC.

The engine answers lookups by itself, and reads predictions up to the rows of their samples. These
go to the dense model of the snapshot, or to a :class:`~tierbed.serve.ServedModel`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from tierbed._native import NativeServer, NativeSnapshot
from tierbed._util.durations import parse_seconds
from tierbed.config.words import (
    LogLevel,
    NotNegative,
    Positive,
    PredictMode,
    SecondsText,
    check_word,
)
from tierbed.errors import InvalidError
from tierbed.results import Generation
from tierbed.serve.follow import Follow
from tierbed.serve.models import Scorer, ServedModel, load_model
from tierbed.serve.route import Route
from tierbed.serve.snapshot import Snapshot

__all__ = ["Limits", "ServeOptions", "Server"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests and clients may cost a server. No limit may be 0, but for inline_indices_max.

    Args:
        connections_max: Connections open at once; more are answered with 503 and closed.
        handshakes_max: Handshakes of TLS at once; others wait for them.
        requests_max: Lookups and predictions whose bodies have arrived, at once; more get a 503.
        queue_ms_max: Longest time that a request may wait for a thread, as predicted when it
            comes; one that would wait longer gets a 503 at once.
        body_bytes_max: Largest body accepted.
        indices_max: Most indices in one lookup.
        inline_indices_max: Most indices of a lookup that is answered by the thread that received
            it; 0: none is.
        bags_max: Most bags in one lookup: samples times features.
        answer_bytes_max: Largest answer to a lookup.
        buffer_bytes_max: Bytes of bodies and answers beyond the first 64 KiB of each.
        handshake_ms_max: Longest time from a connection to the end of its handshake.
        head_ms_max: Longest time for a request's head.
        body_ms_max: Longest time for a request's body.
        body_idle_ms_max: Longest pause within a body.
        request_ms_max: Longest time from a request's head to its answer.
        answer_ms_max: Longest time for a client to take its answer.
        idle_ms_max: Longest time that a connection may wait for a request.
        stop_ms_max: Longest time that stopping waits for requests under way.
        degraded_ms: How long ``/health`` tells of a failure after it happened.
    """

    connections_max: Positive = 2048
    handshakes_max: Positive = 256
    requests_max: Positive = 2048
    queue_ms_max: Positive = 50
    body_bytes_max: Positive = 16 << 20
    indices_max: Positive = 1 << 20
    inline_indices_max: NotNegative = 512
    bags_max: Positive = 1 << 20
    answer_bytes_max: Positive = 64 << 20
    buffer_bytes_max: Positive = 256 << 20
    handshake_ms_max: Positive = 5_000
    head_ms_max: Positive = 10_000
    body_ms_max: Positive = 10_000
    body_idle_ms_max: Positive = 5_000
    request_ms_max: Positive = 10_000
    answer_ms_max: Positive = 30_000
    idle_ms_max: Positive = 75_000
    stop_ms_max: Positive = 10_000
    degraded_ms: Positive = 60_000


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a server works and what it tells.

    Args:
        grpc_address: ``"host:port"`` for gRPC; port 0 picks a free one, None: no gRPC.
        admin_address: ``"host:port"`` for operators: a live page, statistics, probes; None: no such
            address.
        tokens: The file of tokens that clients need, a line for each: name, SHA-256, scopes.
        tls_cert: The server's certificate in PEM, then those up to its authority; None: plain.
        tls_key: The key of the certificate, in PEM.
        tls_client_ca: Authorities in PEM; a client needs a certificate of one of them.
        tls_client_names: DNS names, by comma, one of which a client's certificate must have.
        require_auth: Refuse an address that others can reach without tokens or tls_client_ca.
        deltas: A folder into which deltas are published, each a folder in it: the server answers
            from the newest, by name, as it comes.
        generation_grace: How long a shard answers from older generations, after they were
            last asked for; by default 5 s, and 0 for servers of no shard.
        limits: What requests and clients may cost.
        worker_threads: Threads that move bytes; by default 2, or the number of cores if less.
        lookup_threads: Threads that look up and predict; by default the cores, at most 16.
        snapshot_name: The snapshot's name in answers; None: its folder's name.
        model_name: The model's name in the Open Inference Protocol; lookups are ``NAME.rows``.
        predict: What scores samples: a module of Python, or with ``aoti`` the compiled model that
            was published, whose code then runs in this process.
        log_level: The least important lines written to standard error, one JSON object each.
        access_log: Write a line for every request, too, at level info.
        slow_ms: Requests that take longer are written.
        otlp_endpoint: The collector that traces are sent to by OTLP, over gRPC: http://host:4317.
            Needs a build with the feature otel.
    """

    grpc_address: str | None = None
    admin_address: str | None = None
    tokens: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tls_client_names: tuple[str, ...] = ()
    require_auth: bool = False
    deltas: Path | None = None
    generation_grace: SecondsText | None = None
    limits: Limits = Limits()
    worker_threads: Positive | None = None
    lookup_threads: Positive | None = None
    snapshot_name: str | None = None
    model_name: str = "tierbed"
    predict: PredictMode = "python"
    log_level: LogLevel = "warn"
    access_log: bool = False
    slow_ms: NotNegative = 1_000
    otlp_endpoint: str | None = None


def _scorer(model: nn.Module | ServedModel | None, snapshot: Snapshot) -> Scorer | None:
    """Returns what asks ``model``, or the one that was published, if any."""
    if model is None:
        model = load_model(snapshot)
    if isinstance(model, nn.Module):
        model = ServedModel(model)
    return None if model is None else Scorer(model, snapshot)


class _WithoutRows(Snapshot):
    """What a gateway has in place of a snapshot: tables without rows, which shards have."""

    def __init__(self, native: NativeSnapshot, path: str, row_counts: Mapping[str, int]) -> None:
        super().__init__(native, path)
        for table in self._tables:
            table["row_count"] = row_counts[table["name"]]


class Server:
    """A running server. Also a context manager.

    Args:
        snapshot: What to serve; keep it open. Or a :class:`Follow`, whose newest version answers;
            or a :class:`Route`: a gateway, which asks the shards of a divided model for rows.
        address: ``"host:port"``; port 0 picks a free one.
        with_model: Answer predictions too, when there is a model.
        model: The model to ask: a module with a ``head``, perhaps as a :class:`ServedModel`. By
            default the click model that the snapshot was published with.
        options: Limits, threads, log, and deltas to follow.

    Raises:
        InvalidError: Options out of range, or a model that cannot be served. With ``aoti`` also a
            module that is given, and a compiled model that is missing or of something else.

    Examples:
        >>> from tierbed.serve import Server
        >>> store = tb.Store.open("store", dram_budget="16MiB")
        >>> table = tb.EmbeddingBagConfig(name="item", num_embeddings=100, embedding_dim=8)
        >>> emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))
        >>> lengths = torch.ones(10, dtype=torch.int64)
        >>> batch = tb.KeyedJaggedTensor(["item"], torch.arange(10), lengths=lengths)
        >>> emb(batch).values().sum().backward()
        >>> _ = store.publish("base")
        >>> emb(batch).values().sum().backward()
        >>> _ = store.publish("delta-1", base="base")
        >>> with tb.Snapshot.open("base") as snapshot, Server(snapshot, "127.0.0.1:0") as server:
        ...     server.apply("delta-1").delta_rows
        10
        >>> store.close()
    """

    def __init__(
        self,
        snapshot: Snapshot | Follow | Route,
        address: str = "127.0.0.1:8080",
        *,
        with_model: bool = True,
        model: nn.Module | ServedModel | None = None,
        options: ServeOptions | None = None,
    ) -> None:
        given = options or ServeOptions()
        if given.generation_grace is not None:
            # The engine takes a number.
            grace_s = parse_seconds(given.generation_grace, "generation_grace")
            given = replace(given, generation_grace=str(grace_s))
        check_word("predict", given.predict, PredictMode)
        if not with_model:
            given = replace(given, predict="python")
        is_compiled = given.predict == "aoti"
        if is_compiled and model is not None:
            raise InvalidError(
                "a compiled model comes with its snapshot; leave out model, or predict by python"
            )
        self._predicts = is_compiled
        asks = with_model and not is_compiled
        if isinstance(snapshot, Snapshot):
            self._scorer = _scorer(model, snapshot) if asks else None
            self._native = NativeServer(snapshot.native, address, self._scorer, given)
            return
        following = snapshot.begin()
        place = snapshot.local if isinstance(snapshot, Follow) else snapshot.shards
        first_version = following.snapshot()
        if isinstance(snapshot, Route):
            found: Snapshot = _WithoutRows(first_version, os.fspath(place), snapshot.row_counts())
        else:
            found = Snapshot(first_version, os.fspath(place))
        # Closed before the server has it: a version leaves memory when the next one answers.
        with found as first:
            self._scorer = _scorer(model, first) if asks else None
        self._native = following.serve(address, self._scorer, given)

    @property
    def address(self) -> str:
        """The address really bound, ``"host:port"``."""
        return self._native.address

    @property
    def grpc_address(self) -> str | None:
        """The address really bound for gRPC, where there is one."""
        return self._native.grpc_address

    @property
    def admin_address(self) -> str | None:
        """The address really bound for operators, where there is one."""
        return self._native.admin_address

    @property
    def predicts(self) -> bool:
        """Whether ``/v1/predict`` has a model."""
        return self._predicts or self._scorer is not None

    def wait(self, timeout_s: float) -> bool:
        """Waits; True when the server has stopped.

        Args:
            timeout_s: Seconds to wait at most.
        """
        return self._native.wait(timeout_s)

    def apply(self, delta: str | os.PathLike[str]) -> Generation:
        """Answers from a delta from now on, while requests go on: each is of one generation.

        The delta was made against what answers now, or against the snapshot itself; then it takes
        the place of those applied before. A model that was published with it answers with it. What
        the delta does not bring, model or features, stays.

        Args:
            delta: The folder that ``Store.publish(..., base=...)`` wrote. It stays where it is as
                long as it answers.

        Returns:
            What answers now.

        Raises:
            InvalidError: It was made against something else, does not fit, or is the ninth.
            CorruptionError: It is not what was written.
                A server that follows a channel applies what is pushed there.
            ClosedError: The server has stopped. All is answered as before, whatever was raised.
        """
        return Generation(**self._native.apply(os.fspath(delta)))

    def drain(self) -> None:
        """Tells balancers to send no more requests: ``/readyz`` says so; all are still answered.

        Call it some time before :meth:`stop`, so that nobody is sent to a closed door.
        """
        self._native.drain()

    def reload(self) -> None:
        """Reads the files of tokens and of TLS again, changed or not.

        What cannot be used is told by the log, and what was read before goes on.
        """
        self._native.reload()

    def stop(self) -> bool:
        """Answers what is under way, then stops.

        Returns:
            Whether all work ended in time. A process should not end while some goes on: Python
            ends threads that are within a model by force.
        """
        return self._native.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
