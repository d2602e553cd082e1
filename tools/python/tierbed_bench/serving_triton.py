"""A real Triton server with its Python backend: the same rows by the same protocol.

The server, the backend and their Python are where ``scripts/client-deps`` brings them; models are
those of :mod:`tierbed_bench.serving_triton_models`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierbed as tb
from tierbed_bench.serving_process import (
    START_S,
    AbsentError,
    end_process,
    free_port,
    on_first_core,
)
from tierbed_bench.serving_triton_models import write_rows_model

__all__ = [
    "ROWS_MODEL",
    "Triton",
    "own_backends",
    "rows_served",
    "triton",
    "triton_packages",
    "write_rows",
    "write_table",
]

ENVIRONMENT = Path(__file__).parents[3] / ".tools" / "triton"
# Where `make triton-backend` puts the backend of Tierbed.
BACKENDS = Path(__file__).parents[3] / "build" / "backends"
# The model of the benchmark.
ROWS_MODEL = "tierbed.rows"
# Rows of a snapshot that are read at once.
READ_ROWS = 65_536

# Asks the Python of the environment where its libraries are.
_PLACES = """
import json, sysconfig
print(json.dumps([sysconfig.get_config_var("LIBDIR"), sysconfig.get_paths()["purelib"]]))
"""


@dataclass(frozen=True)
class Triton:
    """A running server.

    Args:
        http: Its address for HTTP.
        grpc: Its address for gRPC.
        pids: The server, and the processes of its models.
    """

    http: str
    grpc: str
    pids: tuple[int, ...]

    def load(self, model: str) -> None:
        """Loads a model again; returns when it answers."""
        url = f"http://{self.http}/v2/repository/models/{model}/load"
        request = urllib.request.Request(url, data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=START_S):  # noqa: S310
            pass


@dataclass(frozen=True)
class _Places:
    """Where the parts of a server are."""

    libraries: str
    packages: Path

    @property
    def home(self) -> Path:
        return self.packages / "pytriton" / "tritonserver"


def _places() -> _Places:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise AbsentError("Triton is not here; run scripts/client-deps")
    told = subprocess.run([python, "-c", _PLACES], capture_output=True, text=True, check=True)
    library_folder, packages = json.loads(told.stdout)
    own = Path(packages).parent / "site-packages" / "nvidia_pytriton.libs"
    places = _Places(f"{library_folder}:{own}", Path(packages))
    if not (places.home / "backends" / "python" / "triton_python_backend_stub").exists():
        raise AbsentError("Triton's Python backend is not here; run scripts/client-deps")
    return places


def triton_packages() -> Path:
    """Where NumPy is for models: that of Tierbed may be newer than the backend can use.

    Raises:
        AbsentError: Triton is not installed.
    """
    return _places().packages


def own_backends() -> Path:
    """The folder of backends that has Tierbed's.

    Raises:
        AbsentError: It was not built.
    """
    if not (BACKENDS / "tierbed" / "libtriton_tierbed.so").exists():
        raise AbsentError("Tierbed's backend is not here; run make triton-backend")
    return BACKENDS


def write_table(snapshot: tb.Snapshot, name: str, path: Path) -> int:
    """Writes all rows of a table as a file of NumPy; returns the elements of a row."""
    [table] = (one for one in snapshot.tables() if one["name"] == name)
    rows = np.empty((table["row_count"], table["dim"]), dtype=np.float32)
    for start in range(0, len(rows), READ_ROWS):
        ids = torch.arange(start, min(start + READ_ROWS, len(rows)))
        bags = tb.KeyedJaggedTensor([name], ids, lengths=torch.ones_like(ids))
        rows[start : start + len(ids)] = snapshot.lookup(bags, "sum")[name].numpy()
    np.save(path, rows)
    return int(rows.shape[1])


def write_rows(snapshot: Path, path: Path) -> int:
    """As :func:`write_table`, of a snapshot's only table."""
    with tb.Snapshot.open(snapshot) as opened:
        [table] = opened.tables()
        return write_table(opened, table["name"], path)


@contextlib.contextmanager
def rows_served(snapshot: Path, folder: Path, features: int) -> Iterator[Triton]:
    """Serves a snapshot's only table by Triton, as ``ROWS_MODEL``.

    Args:
        snapshot: Folder of the snapshot.
        folder: What is written goes here.
        features: How many features read the table.

    Raises:
        AbsentError: Triton is not installed.
    """
    packages = [triton_packages()]
    repository = folder / "models"
    repository.mkdir(parents=True)
    dim = write_rows(snapshot, folder / "rows.npy")
    tables = [folder / "rows.npy"] * features
    write_rows_model(repository, ROWS_MODEL, tables, dim=dim, packages=packages)
    with triton(repository, loads=(ROWS_MODEL,)) as running:
        yield running


@contextlib.contextmanager
def triton(
    repository: Path, *, loads: Sequence[str] = (), backends: Path | None = None
) -> Iterator[Triton]:
    """Starts a server over a repository of models; ends it afterwards.

    Args:
        repository: Folder of models.
        loads: Models that are loaded now and again by request; else all are, once.
        backends: Folder of backends, which complete configurations; else Triton's own, which
            do not.

    Raises:
        AbsentError: Triton is not installed.
    """
    places = _places()
    http, grpc = free_port(), free_port()
    call = [str(places.home / "bin" / "tritonserver")]
    call += [f"--model-repository={repository}"]
    call += [f"--backend-directory={backends or places.home / 'backends'}"]
    call += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false"]
    call += [f"--http-port={http}", f"--grpc-port={grpc}"]
    call += ["--disable-auto-complete-config"] if backends is None else []
    if loads:
        call += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in loads)]
    log_path = repository.parent / "triton.log"
    with log_path.open("w") as log, on_first_core():
        process = subprocess.Popen(
            call, stdout=log, stderr=log, text=True, env={"LD_LIBRARY_PATH": places.libraries}
        )
    try:
        _wait_ready(f"127.0.0.1:{http}", process, log_path)
        pids = (process.pid, *_children(process.pid))
        yield Triton(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", pids)
    finally:
        end_process(process)


def _children(pid: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    for told in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, told.read_text().split()):
            found += [child, *_children(child)]
    return found


def _wait_ready(address: str, process: subprocess.Popen[Any], log_path: Path) -> None:
    ends_s = time.monotonic() + START_S
    while True:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=5),
        ):
            return
        if process.poll() is not None or time.monotonic() > ends_s:
            last = log_path.read_text(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"tritonserver did not start: {' | '.join(last)}")
        time.sleep(0.05)
