"""Mutated HTTP requests against a real server on the loopback, among them ones it must answer.

The server is a process of its own over a whole snapshot. Every answer of a request that was left
as it was is compared with the rows; a mutated one may be refused, and must not bring the server
down, keep it from answering, or be a 5xx.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed.placement import import_tables
from tierbed.serve import Server

from .damage import _rows
from .outcome import Outcome
from .processes import Child, ended

REQUESTS = 250
SIZES = {"a": (60, 6), "b": (24, 5)}
Rows = dict[str, torch.Tensor]


def run_case(number: int, luck: random.Random, scratch: Path) -> list[Outcome]:
    """Starts a server, sends it requests one by one, and stops it."""
    child = Child(lambda tell: _serve(scratch / "snapshot", tell))
    deadline = time.monotonic() + 60
    while not child.told and time.monotonic() < deadline and child.listen(0.2):
        pass
    if not child.told or "address" not in child.told[0]:
        found = ended(child, child.wait())
        return [Outcome(label="server", came="wrong", text=f"{found.kind} {found.error}")]
    host, port = child.told[0]["address"].rsplit(":", 1)
    rows = {name: _rows(*shape, seed=at) for at, (name, shape) in enumerate(SIZES.items())}
    outcomes = []
    for _ in range(REQUESTS):
        outcomes.append(_one(luck, (host, int(port)), rows))
        if outcomes[-1].came == "hang":
            break
    alive = _ask((host, int(port)), _request("GET", "/health", b"", "application/json"), 30.0)
    is_alive = alive is not None and alive[0] == 200
    child.kill()
    found = ended(child, child.wait())
    if not is_alive or found.signal != 9:
        came = "signal" if found.signal != 9 else "hang"
        text = f"the server is gone: signal {found.signal} {found.error}"
        outcomes.append(Outcome(label="server after all requests", came=came, text=text))
    else:
        outcomes.append(Outcome(label="server after all requests", came="right"))
    return outcomes


def _serve(path: Path, tell: Callable[[Any], None]) -> None:
    import_tables(
        {name: _rows(*shape, seed=at) for at, (name, shape) in enumerate(SIZES.items())}, path
    )
    with (
        tb.Snapshot.open(path, dram_budget="8MiB") as snapshot,
        Server(snapshot, "127.0.0.1:0") as server,
    ):
        tell({"address": server.address})
        time.sleep(600)


def _one(luck: random.Random, address: tuple[str, int], rows: Rows) -> Outcome:
    body, kind, wanted = _lookup(luck, rows)
    raw = _request("POST", "/v1/lookup", body, kind)
    is_mutated = luck.random() < 0.8
    if is_mutated:
        raw = _mutated(luck, raw, body, kind)
    answer = _ask(address, raw, 0.3 if is_mutated else 30.0)
    label = "mutated request" if is_mutated else "request"
    if answer is None:
        # Bytes that are no request may end in a closed connection, a good request may not.
        came = "refused" if is_mutated else "wrong"
        return Outcome(label=label, came=came, text="closed without an answer")
    status, content = answer
    if status >= 500:
        return Outcome(label=label, came="wrong", text=f"{status} {content[:200]!r}: {raw[:200]!r}")
    if not is_mutated and (status != 200 or not _is_right(content, kind, wanted)):
        came = "silent" if status == 200 else "wrong"
        return Outcome(label=label, came=came, text=f"{status} {content[:200]!r}")
    return Outcome(label=label, came="right" if status == 200 else "refused")


# ---------------------------------------------------------------- requests


def _lookup(luck: random.Random, rows: Rows) -> tuple[bytes, str, Rows]:
    bags = luck.randint(0, 6)
    given, wanted = {}, {}
    for name, table in rows.items():
        lengths = [luck.randint(0, 4) for _ in range(bags)]
        values = [luck.randrange(len(table)) for _ in range(sum(lengths))]
        offsets = [sum(lengths[:at]) for at in range(bags + 1)]
        pooled = torch.zeros(bags, table.shape[1])
        for bag in range(bags):
            for value in values[offsets[bag] : offsets[bag + 1]]:
                pooled[bag] = pooled[bag] + table[value]
        given[name], wanted[name] = {"values": values, "offsets": offsets}, pooled
    if luck.random() < 0.5:
        return json.dumps({"features": given}).encode(), "application/json", wanted
    parts = {
        f"{n}.{k}": torch.tensor(v, dtype=torch.int64)
        for n, p in given.items()
        for k, v in p.items()
    }
    from safetensors.torch import save

    return save(parts), "application/x-safetensors", wanted


def _request(method: str, path: str, body: bytes, kind: str) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
    return f"{head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _mutated(luck: random.Random, raw: bytes, body: bytes, kind: str) -> bytes:
    way = luck.randrange(7)
    if way == 0:
        at = luck.randrange(len(raw))
        return raw[:at] + luck.randbytes(luck.randint(1, 9)) + raw[at + 1 :]
    if way == 1:
        return raw[: luck.randrange(1, len(raw))]
    if way == 2 and body:
        changed = bytearray(body)
        for _ in range(luck.randint(1, 4)):
            changed[luck.randrange(len(changed))] = luck.randrange(256)
        return _request("POST", "/v1/lookup", bytes(changed), kind)
    if way == 3:
        odd = luck.choice([-1, 2**31, 2**63 - 1, -(2**63), 1e308, "x", None, [], {}, True, 0.5])
        told = {"features": {"a": {"values": [odd], "offsets": [0, luck.choice([1, odd])]}}}
        return _request("POST", "/v1/lookup", json.dumps(told).encode(), "application/json")
    if way == 4:
        method = luck.choice(["GET", "PUT", "DELETE", "PATCH", "TRACE", "X"])
        path = luck.choice(
            ["/", "/v1/lookup", "/v1/predict", "/%00", "/../etc/passwd", "/" + "a" * 9000]
        )
        return _request(method, path, body, kind)
    if way == 5:
        length = luck.choice([b"-1", b"99999999999999999999", b"0", b"7", b"abc"])
        return raw.replace(str(len(body)).encode(), length, 1)
    head = struct.pack("<Q", luck.choice([0, 1, len(body), 2**40, 2**63])) + luck.randbytes(40)
    return _request("POST", "/v1/lookup", head, "application/x-safetensors")


def _ask(address: tuple[str, int], raw: bytes, patience_seconds: float) -> tuple[int, bytes] | None:
    """Sends bytes and reads the answer; None when there is none.

    A server may wait for the rest of a request; after a while it is told that nothing comes.
    """
    found = b""
    try:
        with socket.create_connection(address, timeout=patience_seconds) as connection:
            connection.sendall(raw)
            is_told = False
            while True:
                try:
                    part = connection.recv(1 << 16)
                except TimeoutError:
                    if is_told:
                        raise
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(30)
                    is_told = True
                    continue
                if not part:
                    break
                found += part
    except OSError:
        return None
    head, _, content = found.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return None
    return int(words[1]), content


def _is_right(content: bytes, kind: str, wanted: Rows) -> bool:
    if kind == "application/json":
        found = json.loads(content)["features"]
        return all(
            torch.equal(torch.tensor(found[name]).view(rows.shape), rows)
            for name, rows in wanted.items()
        )
    from safetensors.torch import load

    tensors = load(content)
    return all(torch.equal(tensors[name], rows) for name, rows in wanted.items())
