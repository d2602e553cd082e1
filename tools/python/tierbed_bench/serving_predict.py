"""What a prediction costs a server: a DLRM asked by the Open Inference Protocol, closed loop.

Some connections each send the next request when the last one is answered. What counts is the
server's processor time for a request; requests a second are those of a loop that shares the
machine with its clients. Answers are compared with the module's.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierbed as tb
from tierbed.nn import DLRM
from tierbed_bench.serving_systems import served

__all__ = ["measure_predictions"]

Row = dict[str, Any]
DENSE = 13
#: Requests that a connection sends in turn.
DIFFERENT = 32
#: What the order of additions may change.
RTOL, ATOL = 1e-4, 1e-5
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Request:
    head: bytes
    body: bytes
    logit: np.ndarray


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
        self.store.publish(self.snapshot, self.module)

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
) -> list[Row]:
    """Asks in rounds; returns the rounds in the middle by processor time."""
    model = _Model(folder, shape, seed)
    told: list[Row] = []
    try:
        # A busy machine refuses nobody.
        options = ["--lookup-threads", "1", "--queue-ms-max", "60000"]
        with served(model.snapshot, folder / "predict.log", 256 << 20, options) as running:
            for sample_count in samples:
                requests = model.requests(running.http, sample_count)
                for count in connections:
                    runs = [
                        _run(running.http, running.pid, requests, count, seconds)
                        for _ in range(rounds)
                    ]
                    runs.sort(key=lambda run: run["cpu_us"])
                    which = {"samples": sample_count, "connections": count}
                    middle = runs[len(runs) // 2]
                    told.append({"part": "predict", "system": "tierbed_predict", **which, **middle})
    finally:
        model.store.close()
    return told


def _run(address: str, pid: int, requests: Sequence[_Request], count: int, seconds: float) -> Row:
    """Asks over some connections for a while, behind a quarter of that to warm up."""
    clients = [_Connection(address) for _ in range(count)]
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
    before, begun_s, begun_cpu_s = sum(asked), time.monotonic(), _cpu_s(pid)
    time.sleep(seconds)
    done, took_s, cpu_s = sum(asked) - before, time.monotonic() - begun_s, _cpu_s(pid) - begun_cpu_s
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


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
