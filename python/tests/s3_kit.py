"""A store that speaks S3, and a line to it that counts, cuts and answers by itself."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

WEED = Path(__file__).resolve().parents[2] / ".tools" / "s3" / "bin" / "weed"
KEYS = {"accessKey": "writer", "secretKey": "secret-of-writer"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _is_made(filer: int, bucket: str) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", filer, timeout=2)
    try:
        asked.request("POST", f"/buckets/{bucket}/", headers={"Content-Length": "0"})
        return asked.getresponse().status in (201, 409)  # 409 when it was made already
    except OSError:
        return False
    finally:
        asked.close()


def _answers(s3: int) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", s3, timeout=2)
    try:
        asked.request("GET", "/")
        return asked.getresponse().status < 500
    except OSError:
        return False
    finally:
        asked.close()


@contextmanager
def seaweedfs(folder: Path, bucket: str) -> Iterator[str]:
    """Runs SeaweedFS with a bucket, and yields ``host:port``; skips where it was not brought."""
    weed = str(WEED) if WEED.exists() else shutil.which("weed")
    if weed is None:
        pytest.skip("no SeaweedFS; call scripts/s3-server")
    users = [{"name": "writer", "actions": ["Admin", "Read", "Write"], "credentials": [KEYS]}]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    ports = free_ports(8)
    names = ["master", "volume", "filer", "s3"]
    given = [f"-{name}.port={port}" for name, port in zip(names, ports[::2], strict=True)]
    given += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[1::2], strict=True)]
    given += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-volume.max=16"]
    given += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64"]
    given += [f"-dir={folder}", f"-s3.config={folder}/users.json"]
    given += [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([weed, "server", "-filer", "-s3", *given], **quiet)
    try:
        ends = time.monotonic() + 60
        while not (_is_made(ports[4], bucket) and _answers(ports[6])):
            assert time.monotonic() < ends, "SeaweedFS does not start"
            assert server.poll() is None
            time.sleep(0.1)
        yield f"127.0.0.1:{ports[6]}"
    finally:
        server.kill()
        server.wait()


def settings(endpoint: str) -> dict[str, str]:
    """Returns the environment that leads to the store at ``endpoint``."""
    return {
        "AWS_ENDPOINT_URL": f"http://{endpoint}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
    }


@dataclass(frozen=True)
class Request:
    """A request that came through."""

    method: str
    path: str
    sent: int
    received: int = field(compare=False)

    @property
    def name(self) -> str:
        """The last word of what it is about."""
        return self.path.split("?")[0].rsplit("/", 1)[-1]


#: Says what becomes of a request by its number: ``"fine"``, or ``"lost"`` before the store has it,
#: ``"unanswered"`` behind it, or a status that is answered instead.
Fate = Callable[[int, str, str], str | int]


class Line:
    """A proxy to a store.

    Args:
        endpoint: The store.
        fate: What becomes of requests.
    """

    def __init__(self, endpoint: str, fate: Fate) -> None:
        self.requests: list[Request] = []
        self._lock, self._count = threading.Lock(), 0
        line = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _serve(self) -> None:
                with line._lock:
                    number, line._count = line._count, line._count + 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                what = fate(number, self.command, self.path)
                if what == "lost":
                    self.close_connection = True
                    return
                if isinstance(what, int):
                    error = b"<Error><Code>SlowDown</Code></Error>" if what >= 300 else b""
                    self._answer(what, {"ETag": '"1"'}, error)
                    return
                store = http.client.HTTPConnection(endpoint, timeout=30)
                store.request(self.command, self.path, body, dict(self.headers.items()))
                answer = store.getresponse()
                found = answer.read()
                store.close()
                line.requests.append(Request(self.command, self.path, len(body), len(found)))
                if what == "unanswered":
                    self.close_connection = True
                    return
                self._answer(answer.status, dict(answer.getheaders()), found)

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                size = headers.get("Content-Length", len(body))
                self.send_header(
                    "Content-Length", str(size if self.command == "HEAD" else len(body))
                )
                self.end_headers()
                self.wfile.write(body)

        for verb in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{verb}", Handler._serve)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # Whoever asked was killed.

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
