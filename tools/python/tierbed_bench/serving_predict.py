"""What a prediction costs a server: a DLRM asked by the Open Inference Protocol, closed loop.

Tierbed is asked with the module of Python and with the compiled model, and a Triton server whose
Python backend has the same rows and the same dense part.

Some connections each send the next request when the last one is answered. What counts is the
server's processor time for a request; requests a second are those of a loop that shares the
machine with its clients. Answers are compared with the module's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierbed as tb
from tierbed.nn import DLRM
from tierbed_bench.serving_systems import served
from tierbed_bench.serving_triton import triton, triton_packages, write_table
from tierbed_bench.serving_triton_models import write_prediction_model

__all__ = ["measure_predictions"]

Row = dict[str, Any]
DENSE = 13
#: Requests that a connection sends in turn.
DIFFERENT = 32
#: What the order of additions may change.
RTOL, ATOL = 1e-4, 1e-5
#: What scores samples, by its name in results.
TIERBED = {"python": "tierbed_predict", "aoti": "tierbed_aoti"}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Request:
    head: bytes
    body: bytes
    logit: np.ndarray


@dataclass(frozen=True)
class _Server:
    name: str
    http: str
    pids: tuple[int, ...]


class _Head(torch.nn.Module):
    """The dense part of a model."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.model.head(dense, rows)


class _Model:
    """A published model with the answers of its module."""

    def __init__(self, folder: Path, shape: Row, seed: int) -> None:
        features = int(shape["id_count"])
        self.rows = int(shape["row_count"]) // features
        self.sizes = {f"c{at}": self.rows for at in range(features)}
        self.generator = torch.Generator().manual_seed(seed)
        self.store = tb.Store.open(folder / "trained", dram_budget="256MiB")
        torch.manual_seed(seed)
        self.module = DLRM(DENSE, self.sizes, store=self.store, embedding_dim=int(shape["dim"]))
        self.module.eval()
        self.snapshot = folder / "predicting"
        # The compiled model is left out where it cannot be compiled.
        self.without_compiled: str | None = None
        try:
            code = tb.compile_dense(self.module, self.store)
        except tb.UnsupportedError as error:
            code, self.without_compiled = {}, str(error)
        self.store.publish(self.snapshot, self.module, attachments=code)

    @contextlib.contextmanager
    def by_triton(self, folder: Path) -> Iterator[_Server]:
        """Serves the model by Triton: rows in memory, the dense part in TorchScript."""
        packages = [triton_packages(), Path(torch.__file__).parents[1]]
        repository = folder / "models"
        repository.mkdir(parents=True)
        tables = [folder / f"{name}.npy" for name in self.sizes]
        with tb.Snapshot.open(self.snapshot) as opened:
            for name, path in zip(self.sizes, tables, strict=True):
                write_table(opened, name, path)
        head, dim = folder / "head.pt", int(self.module.embedding_dim)
        example = torch.rand(2, DENSE), torch.rand(2, len(self.sizes), dim)
        with warnings.catch_warnings():
            # The number of features is part of the model.
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(_Head(self.module), example)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, head)
        write_prediction_model(
            *(repository, "tierbed", tables), head=head, dense_width=DENSE, packages=packages
        )
        with triton(repository) as running:
            yield _Server("triton_predict", running.http, running.pids)

    @contextlib.contextmanager
    def by_tierbed(self, folder: Path, predict: str) -> Iterator[_Server]:
        # A busy machine refuses nobody.
        options = ["--lookup-threads", "1", "--queue-ms-max", "60000", "--predict", predict]
        log, name = folder / f"predict-{predict}.log", TIERBED[predict]
        with served(self.snapshot, log, 256 << 20, options) as running:
            yield _Server(name, running.http, (running.pid,))

    def requests(self, address: str, samples: int) -> list[_Request]:
        return [self._request(address, samples) for _ in range(DIFFERENT)]

    def _request(self, address: str, samples: int) -> _Request:
        dense = torch.rand(samples, DENSE, generator=self.generator)
        shape = (samples, len(self.sizes))
        ids = torch.randint(self.rows, shape, generator=self.generator)
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        bags = tb.KeyedJaggedTensor(list(self.sizes), ids.T.reshape(-1), lengths=lengths)
        with torch.inference_mode():
            logit = self.module(dense, bags).numpy()
        tensors = [("dense", "FP32", dense.numpy()), ("ids", "INT64", ids.numpy())]
        inputs = [
            {
                "name": name,
                "datatype": kind,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, kind, array in tensors
        ]
        outputs = [{"name": "logit", "parameters": {"binary_data": True}}]
        # Ids lie at a multiple of eight bytes where the JSON has one.
        told = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        told += b" " * (-(len(told) + dense.numpy().nbytes) % 8)
        body = told + b"".join(array.tobytes() for _, _, array in tensors)
        head = (
            f"POST /v2/models/tierbed/infer HTTP/1.1\r\nHost: {address}\r\n"
            f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {len(told)}\r\n\r\n"
        )
        return _Request(head.encode(), body, logit)


class _Connection:
    """Sends requests and takes their answers, one after another."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.stream = socket.create_connection((host, int(port)), timeout=60.0)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.stream.makefile("rb")

    def ask(self, request: _Request) -> bytes:
        self.stream.sendall(request.head + request.body)
        status = self.file.readline()
        length = header = 0
        while line := self.file.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            elif name.lower() == b"inference-header-content-length":
                header = int(value)
        body = self.file.read(length)
        if b" 200 " not in status:
            raise RuntimeError(f"a prediction was answered with {status!r}: {body[:200]!r}")
        return body[header:]

    def check(self, request: _Request) -> None:
        found = np.frombuffer(self.ask(request), dtype=np.float32)
        if not np.allclose(found, request.logit, rtol=RTOL, atol=ATOL):
            raise RuntimeError("a prediction is not that of the module")

    def close(self) -> None:
        self.file.close()
        self.stream.close()


def measure_predictions(
    folder: Path,
    shape: Row,
    *,
    samples: Sequence[int],
    connections: Sequence[int],
    seconds: float,
    rounds: int,
    seed: int,
    with_triton: bool,
    absent: dict[str, str],
) -> list[Row]:
    """Asks in interleaved rounds; returns the rounds in the middle by processor time.

    What is left out is told in ``absent``, with the reason.

    Raises:
        AbsentError: Triton is asked for, and not installed.
    """
    model = _Model(folder, shape, seed)
    told: list[Row] = []
    with contextlib.ExitStack() as running:
        running.callback(model.store.close)
        servers = [running.enter_context(model.by_tierbed(folder, "python"))]
        if model.without_compiled is None:
            servers.append(running.enter_context(model.by_tierbed(folder, "aoti")))
        else:
            absent["tierbed_aoti"] = model.without_compiled
        if with_triton:
            servers.append(running.enter_context(model.by_triton(folder / "triton-predict")))
        for sample_count in samples:
            requests = {one.name: model.requests(one.http, sample_count) for one in servers}
            for count in connections:
                runs: dict[str, list[Row]] = {one.name: [] for one in servers}
                for _ in range(rounds):
                    for one in servers:
                        runs[one.name].append(_run(one, requests[one.name], count, seconds))
                for name, own in runs.items():
                    own.sort(key=lambda run: run["cpu_us"])
                    which = {"samples": sample_count, "connections": count}
                    told.append({"part": "predict", "system": name, **which, **own[len(own) // 2]})
    return told


def _run(server: _Server, requests: Sequence[_Request], count: int, seconds: float) -> Row:
    """Asks over some connections for a while, behind a quarter of that to warm up."""
    clients = [_Connection(server.http) for _ in range(count)]
    for request in requests:
        clients[0].check(request)
    asked = [0] * count
    stop = threading.Event()
    failed: list[BaseException] = []

    def ask_on(at: int) -> None:
        try:
            while not stop.is_set():
                clients[at].ask(requests[(asked[at] + at) % len(requests)])
                asked[at] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask_on, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 4)
    before, begun_s, begun_cpu_s = sum(asked), time.monotonic(), _cpu_s(server.pids)
    time.sleep(seconds)
    done, took_s = sum(asked) - before, time.monotonic() - begun_s
    cpu_s = _cpu_s(server.pids) - begun_cpu_s
    stop.set()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    if failed:
        raise failed[0]
    if not done:
        raise RuntimeError(f"no prediction was answered in {seconds} seconds")
    return {
        "rate": done / took_s,
        "cpu_us": 1e6 * cpu_s / done,
        "per_core_per_s": done / cpu_s if cpu_s else None,
    }


def _cpu_s(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS
