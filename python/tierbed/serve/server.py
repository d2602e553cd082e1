"""HTTP serving of a published model.

The engine's server answers lookups by itself. For predictions it hands the request's body to
:class:`Predictor`: the dense model of the snapshot on top of the snapshot's rows.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from tierbed._native import NativeServer
from tierbed._util.state import DENSE, MODEL
from tierbed.config.words import LogLevel, NotNegative, Positive
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn import CtrModel, build_model
from tierbed.results import Generation
from tierbed.serve.snapshot import Snapshot

__all__ = ["Limits", "Predictor", "ServeOptions", "Server", "load_model"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests and clients may cost a server. No limit may be 0.

    Args:
        connections_max: Connections open at once; more are answered with 503 and closed.
        handshakes_max: Handshakes of TLS at once; others wait for them.
        requests_max: Lookups and predictions whose bodies have arrived, at once; more get a 503.
        queue_ms_max: Longest time that a request may wait for a thread, as predicted when it
            comes; one that would wait longer gets a 503 at once.
        body_bytes_max: Largest body accepted.
        indices_max: Most indices in one lookup.
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
        tokens: The file of tokens that clients need, a line for each: name, SHA-256, scopes.
        tls_cert: The server's certificate in PEM, then those up to its authority; None: plain.
        tls_key: The key of the certificate, in PEM.
        tls_client_ca: Authorities in PEM; a client needs a certificate of one of them.
        tls_client_names: DNS names, by comma, one of which a client's certificate must have.
        require_auth: Refuse an address that others can reach without tokens or tls_client_ca.
        deltas: A folder into which deltas are published, each a folder in it: the server answers
            from the newest, by name, as it comes.
        limits: What requests and clients may cost.
        worker_threads: Threads that move bytes; by default 2, or the number of cores if less.
        lookup_threads: Threads that look up and predict; by default the cores, at most 16.
        snapshot_name: The snapshot's name in answers; None: its folder's name.
        model_name: The model's name in the Open Inference Protocol; lookups are ``NAME.rows``.
        log_level: The least important lines written to standard error, one JSON object each.
        access_log: Write a line for every request, too, at level info.
        slow_ms: Requests that take longer are written.
    """

    grpc_address: str | None = None
    tokens: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tls_client_names: tuple[str, ...] = ()
    require_auth: bool = False
    deltas: Path | None = None
    limits: Limits = Limits()
    worker_threads: Positive | None = None
    lookup_threads: Positive | None = None
    snapshot_name: str | None = None
    model_name: str = "tierbed"
    log_level: LogLevel = "warn"
    access_log: bool = False
    slow_ms: NotNegative = 1_000


def load_model(snapshot: Snapshot) -> CtrModel | None:
    """Builds the model a snapshot was published with, or None when it has none.

    Args:
        snapshot: An open snapshot.
    """
    config = snapshot.attachment(MODEL)
    dense = snapshot.attachment(DENSE)
    return None if config is None or dense is None else _built(config, dense, snapshot)


def _built(config: bytes, dense: bytes, snapshot: Snapshot) -> CtrModel:
    model = build_model(json.loads(config), snapshot)
    model.load_state_dict(load(dense))
    model.eval()
    return model


class Predictor:
    """Answers prediction requests.

    A request holds ``dense`` ``[B, dense_count]`` f32, ``values`` ``[E]`` i64 (row ids, feature
    by feature) and ``lengths`` ``[F*B]`` i64; without lengths every bag holds one id. The answer
    holds ``probability`` ``[B]`` f32 and ``logit`` ``[B]`` f32. Bodies are safetensors, or JSON
    objects with the same names, answered in kind. JSON has no word for numbers that are not
    finite: in an answer they are null, in a request they are refused.

    Args:
        model: From :func:`load_model`.
    """

    def __init__(self, model: CtrModel) -> None:
        self._model = model
        self._features = model.embeddings.feature_names()

    @property
    def features(self) -> list[str]:
        """Names of the features with ids, in the order of requests."""
        return list(self._features)

    @property
    def dense_count(self) -> int:
        """Numerical features of a sample."""
        return self._model.dense_count

    def __call__(self, body: bytes) -> bytes:
        """Answers one request.

        Raises:
            InvalidError: The body is not of the form above.
        """
        is_binary = _is_safetensors(body)
        answer = self.predict(_tensors(body, is_binary))
        if is_binary:
            return save(answer)
        told = {name: [_number(x) for x in value.tolist()] for name, value in answer.items()}
        return json.dumps(told, allow_nan=False).encode()

    def warm_up(self) -> None:
        """Answers a sample without ids, so that no request waits for code to be loaded."""
        self.predict(
            {
                "dense": torch.zeros(1, self._model.dense_count),
                "values": torch.empty(0, dtype=torch.int64),
                "lengths": torch.zeros(len(self._features), dtype=torch.int64),
            }
        )

    def predict(self, request: dict[str, Tensor]) -> dict[str, Tensor]:
        """Answers one request given as tensors.

        Args:
            request: ``dense``, ``values`` and perhaps ``lengths``, as above.

        Raises:
            InvalidError: Tensors are missing, or their shapes do not fit.
        """
        missing = {"dense", "values"} - request.keys()
        if missing:
            raise InvalidError(f"the request lacks {sorted(missing)}; it has {sorted(request)}")
        dense, values = request["dense"].to(torch.float32), request["values"].to(torch.int64)
        if dense.dim() != 2 or dense.shape[1] != self._model.dense_count:
            raise InvalidError(
                f"dense must be [B, {self._model.dense_count}], found {tuple(dense.shape)}"
            )
        samples = dense.shape[0]
        bags = samples * len(self._features)
        lengths = request.get("lengths", torch.ones(bags, dtype=torch.int64)).to(torch.int64)
        if lengths.numel() != bags or int(lengths.sum()) != values.numel():
            raise InvalidError(
                f"{samples} samples of {len(self._features)} features need {bags} lengths that "
                f"add up to the number of values, {values.numel()}; found {lengths.numel()} "
                f"lengths that add up to {int(lengths.sum())}"
            )
        sparse = KeyedJaggedTensor(
            self._features, values.reshape(-1), lengths=lengths.reshape(-1), stride=samples
        )
        with torch.inference_mode():
            logit = self._model(dense, sparse)
        return {"probability": torch.sigmoid(logit), "logit": logit}


class _Served(Predictor):
    """That of a server: each delta may bring the next one."""

    def __init__(self, model: CtrModel, snapshot: Snapshot) -> None:
        super().__init__(model)
        self._snapshot = snapshot
        self.warm_up()

    def successor(self, config: bytes, dense: bytes) -> _Served:
        """Returns that of a published model."""
        return _Served(_built(config, dense, self._snapshot), self._snapshot)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _refuse_constant(name: str) -> float:
    raise InvalidError(f"{name} is not a number of JSON")


def _is_safetensors(body: bytes) -> bool:
    if len(body) < 9 or body[8:9] != b"{":
        return False
    return int.from_bytes(body[:8], "little") <= len(body) - 8


def _tensors(body: bytes, is_binary: bool) -> dict[str, Tensor]:
    try:
        if is_binary:
            tensors: dict[str, Tensor] = load(body)
            return tensors
        request = json.loads(body, parse_constant=_refuse_constant)
        return {
            name: torch.tensor(
                request[name], dtype=torch.float32 if name == "dense" else torch.int64
            )
            for name in ("dense", "values", "lengths")
            if name in request
        }
    except Exception as error:
        raise InvalidError(f"the body is neither safetensors nor a JSON object: {error}") from error


class Server:
    """A running HTTP server. Also a context manager.

    Args:
        snapshot: What to serve; keep it open.
        address: ``"host:port"``; port 0 picks a free one.
        with_model: Answer predictions too, when the snapshot has a model.
        options: Limits, threads, log, and deltas to follow.

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
        snapshot: Snapshot,
        address: str = "127.0.0.1:8080",
        *,
        with_model: bool = True,
        options: ServeOptions | None = None,
    ) -> None:
        model = load_model(snapshot) if with_model else None
        self._predictor = None if model is None else _Served(model, snapshot)
        given = options or ServeOptions()
        self._native = NativeServer(snapshot.native, address, self._predictor, given)

    @property
    def address(self) -> str:
        """The address really bound, ``"host:port"``."""
        return self._native.address

    @property
    def grpc_address(self) -> str | None:
        """The address really bound for gRPC, where there is one."""
        return self._native.grpc_address

    @property
    def predicts(self) -> bool:
        """Whether ``/v1/predict`` has a model."""
        return self._predictor is not None

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
            ClosedError: The server has stopped. All is answered as before, whatever was raised.
        """
        return Generation(**self._native.apply(os.fspath(delta)))

    def drain(self) -> None:
        """Tells balancers to send no more requests: ``/readyz`` says so; all are still answered.

        Call it some time before :meth:`stop`, so that nobody is sent to a closed door.
        """
        self._native.drain()

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
