"""Redis, which has every row in memory: a server of its own, asked by ``MGET``.

Requests and answers of rows of one length are made and read as arrays: no client of Redis for
Python is as fast.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from tierbed.errors import UnsupportedError
from tierbed_bench.peers.systems.base import Peer
from tierbed_bench.peers.table import Ids, Rows, Table
from tierbed_bench.serving_process import START_S, AbsentError, end_process, free_port
from tierbed_bench.serving_systems import find_binary, unpacked_environment

__all__ = ["Redis"]

# Rows of one MSET.
FILL_ROWS = 2048


class Redis(Peer):
    """A server that keeps nothing on disk. With too little memory it refuses to be filled."""

    is_in_memory = True

    def __init__(self, table: Table, folder: Path) -> None:
        super().__init__(table, folder)
        try:
            self._program = find_binary("redis-server")
        except AbsentError as reason:
            raise UnsupportedError(str(reason)) from reason

    def load(self) -> None:
        """There is no form on disk; :meth:`open` fills the server."""

    def open(self, memory_bytes: int, clients: int) -> None:
        """Starts the server and sends all rows.

        Raises:
            OSError: It has no room for them, or ended.
        """
        self.port = free_port()
        call = [self._program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        call += ["--appendonly", "no", "--maxmemory", str(memory_bytes), "--dir", str(self.folder)]
        self.server = subprocess.Popen(
            call,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=unpacked_environment(),
        )
        # Where memory ends, the server ends, not the process that tells of it.
        Path(f"/proc/{self.server.pid}/oom_score_adj").write_text("1000")
        self._of_thread = threading.local()
        self._sockets: list[socket.socket] = []
        self._wait()
        self._fill()

    def _wait(self) -> None:
        ends_s = time.monotonic() + START_S
        while True:
            try:
                self._connection()
            except OSError:
                if time.monotonic() > ends_s or self.server.poll() is not None:
                    raise
                time.sleep(0.02)
            else:
                return

    def _connection(self) -> socket.socket:
        found: socket.socket | None = getattr(self._of_thread, "socket", None)
        if found is None:
            found = socket.create_connection(("127.0.0.1", self.port), timeout=START_S)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._of_thread.socket = found
            self._sockets.append(found)
        return found

    def _fill(self) -> None:
        connection = self._connection()
        for first, chunk in self.table.chunks():
            for start in range(0, len(chunk), FILL_ROWS):
                rows = chunk[start : start + FILL_ROWS]
                ids = np.arange(first + start, first + start + len(rows))
                connection.sendall(_set_request(ids, rows))
                answer = connection.recv(256)
                if answer != b"+OK\r\n":
                    told = answer.decode(errors="replace").strip() or "it ended"
                    raise OSError(
                        f"redis has room for {first + start} of {self.table.row_count} rows: {told}"
                    )

    def read(self, ids: Ids) -> Rows:
        """Gets all keys by one command.

        Raises:
            OSError: An answer is not of all these rows.
        """
        connection = self._connection()
        connection.sendall(_get_request(ids))
        shape = _answer(len(ids), self.table.row_bytes)
        head = f"*{len(ids)}\r\n".encode()
        answer = bytearray(len(head) + len(ids) * shape.itemsize)
        view, got = memoryview(answer), 0
        while got < len(answer):
            count = connection.recv_into(view[got:])
            if count == 0 or answer[:1] != b"*":
                raise OSError(f"redis answered {bytes(answer[:80])!r}")
            got += count
        items = np.frombuffer(answer, shape, offset=len(head))
        if not answer.startswith(head) or (items["head"] != items["head"][0]).any():
            raise OSError("redis lacks rows that it was filled with")
        return items["row"].view(np.float32).reshape(len(ids), self.table.dim)

    def close(self) -> None:
        """Ends the server."""
        for connection in self._sockets:
            connection.close()
        end_process(self.server)


def _items(ids: Ids, row_bytes: int = 0) -> np.ndarray:
    """Keys of four bytes as RESP has them, with room for a row behind each."""
    parts: list[tuple[str, str]] = [("head", "S4"), ("key", ">u4"), ("end", "S2")]
    if row_bytes:
        head = f"${row_bytes}\r\n"
        parts += [("row_head", f"S{len(head)}"), ("row", f"V{row_bytes}"), ("row_end", "S2")]
    items = np.empty(len(ids), np.dtype(parts))
    items["head"], items["key"], items["end"] = b"$4\r\n", ids, b"\r\n"
    if row_bytes:
        items["row_head"], items["row_end"] = head.encode(), b"\r\n"
    return items


def _set_request(ids: Ids, rows: Rows) -> bytes:
    items = _items(ids, rows.shape[1] * 4)
    items["row"] = np.ascontiguousarray(rows).view(f"V{rows.shape[1] * 4}")[:, 0]
    return f"*{1 + 2 * len(ids)}\r\n$4\r\nMSET\r\n".encode() + items.tobytes()


def _get_request(ids: Ids) -> bytes:
    return f"*{1 + len(ids)}\r\n$4\r\nMGET\r\n".encode() + _items(ids).tobytes()


def _answer(count: int, row_bytes: int) -> np.dtype:
    """An item of an answer of rows."""
    head = len(f"${row_bytes}\r\n")
    return np.dtype([("head", f"S{head}"), ("row", f"({row_bytes},)u1"), ("end", "S2")])
