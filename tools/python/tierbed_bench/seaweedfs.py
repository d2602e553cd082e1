"""SeaweedFS for a benchmark: a store that speaks S3, on this machine, with one bucket."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tierbed.errors import InvalidError

__all__ = ["seaweedfs"]

BUCKET = "bench"
_START_S = 60.0
_KEYS = {"accessKey": "writer", "secretKey": "secret-of-writer"}
_WEED = Path(__file__).resolve().parents[3] / ".tools" / "s3" / "bin" / "weed"


@contextmanager
def seaweedfs(folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Runs the store; yields an address in it, and the settings that lead there.

    Raises:
        InvalidError: It was not brought.
    """
    weed = str(_WEED) if _WEED.exists() else shutil.which("weed")
    if weed is None:
        raise InvalidError("there is no SeaweedFS here; call scripts/s3-server, or give --location")
    users = [{"name": "writer", "actions": ["Admin", "Read", "Write"], "credentials": [_KEYS]}]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    ports = _free_ports(8)
    names = ["master", "volume", "filer", "s3"]
    given = [f"-{name}.port={port}" for name, port in zip(names, ports[::2], strict=True)]
    given += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[1::2], strict=True)]
    given += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-volume.max=64"]
    given += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=256"]
    given += [f"-dir={folder}", f"-s3.config={folder}/users.json"]
    given += [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    server = subprocess.Popen(
        [weed, "server", "-filer", "-s3", *given],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends_s = time.monotonic() + _START_S
        while not (
            _asked(ports[4], "POST", f"/buckets/{BUCKET}/") and _asked(ports[6], "GET", "/")
        ):
            if server.poll() is not None or time.monotonic() > ends_s:
                raise InvalidError("SeaweedFS does not start; call scripts/s3-server again")
            time.sleep(0.2)
        yield (
            f"s3://{BUCKET}",
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[6]}",
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": _KEYS["accessKey"],
                "AWS_SECRET_ACCESS_KEY": _KEYS["secretKey"],
            },
        )
    finally:
        server.kill()
        server.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _asked(port: int, verb: str, path: str) -> bool:
    """Whether somebody answers at the port, and has nothing against it."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        asked.request(verb, path, headers={"Content-Length": "0"})
        return asked.getresponse().status in (200, 201, 403, 409)
    except OSError:
        return False
    finally:
        asked.close()
