"""A real Triton server with its Python backend: the same rows by the same protocol.

The server, the backend and their Python are where ``scripts/client-deps`` brings them. A model of
rows gathers them with NumPy, all requests of a batch at once; Triton's dynamic batcher is on.
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

__all__ = [
    "ROWS_MODEL",
    "Triton",
    "rows_served",
    "triton",
    "write_rows",
    "write_rows_model",
    "write_table",
]

ENVIRONMENT = Path(__file__).parents[3] / ".tools" / "triton"
BATCH_MAX = 4_096
# The model of the benchmark.
ROWS_MODEL = "tierbed.rows"
# Rows of a snapshot that are read at once.
READ_ROWS = 65_536

# Asks the Python of the environment where its libraries are.
_PLACES = """
import json, sysconfig
print(json.dumps([sysconfig.get_config_var("LIBDIR"), sysconfig.get_paths()["purelib"]]))
"""

# The backend's own interpreter sees no environment, so that its packages are named here.
_ROWS_SOURCE = """
import sys
sys.path[:0] = {packages!r}
import json
import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        names = json.loads(parameters["tables"]["string_value"])
        loaded = {{name: np.load(name) for name in dict.fromkeys(names)}}
        self.tables = [loaded[name] for name in names]
        self.is_one = len(loaded) == 1
        self.sizes = np.array([len(table) for table in self.tables])

    def gather(self, ids):
        if self.is_one:
            return self.tables[0][ids].reshape(len(ids), -1)
        parts = [table[ids[:, at]] for at, table in enumerate(self.tables)]
        return np.concatenate(parts, axis=1)

    def execute(self, requests):
        answers = [None] * len(requests)
        good, asked = [], []
        for at, request in enumerate(requests):
            ids = triton.get_input_tensor_by_name(request, "ids").as_numpy()
            if ids.size and (ids.min() < 0 or (ids >= self.sizes).any()):
                error = triton.TritonError("id is out of range", triton.TritonError.INVALID_ARG)
                answers[at] = triton.InferenceResponse(error=error)
            else:
                good.append(at)
                asked.append(ids)
        if good:
            rows = self.gather(asked[0] if len(asked) == 1 else np.concatenate(asked))
            start = 0
            for at, ids in zip(good, asked):
                part = triton.Tensor("pooled", rows[start : start + len(ids)])
                start += len(ids)
                answers[at] = triton.InferenceResponse([part])
        return answers
"""

_CONFIG = """
backend: "python"
max_batch_size: {batch}
input [ {{ name: "ids" data_type: TYPE_INT64 dims: [ {rows}{features} ] }} ]
output [ {{ name: "pooled" data_type: TYPE_FP32 dims: [ {rows}{width} ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{batching}
parameters {{ key: "tables" value: {{ string_value: {tables} }} }}
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


def write_rows_model(
    repository: Path, name: str, tables: Sequence[Path], *, dim: int, batches: bool = True
) -> None:
    """Writes a model that answers rows: input ``ids``, output ``pooled``.

    Args:
        repository: Folder of models.
        name: Of the model.
        tables: A file of NumPy for each feature, ``[rows, dim]``; features may share one.
        dim: Elements of a row.
        batches: Whether requests are batched; else one without samples is answered, too.

    Raises:
        AbsentError: Triton is not installed.
    """
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    # NumPy of the environment: that of Tierbed may be newer than the backend can use.
    (folder / "model.py").write_text(_ROWS_SOURCE.format(packages=[str(_places().packages)]))
    config = _CONFIG.format(
        batch=BATCH_MAX if batches else 0,
        batching="dynamic_batching { }" if batches else "",
        rows="" if batches else "-1, ",
        features=len(tables),
        width=dim * len(tables),
        # A string in a string: Triton's text has JSON's way to quote.
        tables=json.dumps(json.dumps([str(table) for table in tables])),
    )
    (repository / name / "config.pbtxt").write_text(config)


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
    _places()
    repository = folder / "models"
    repository.mkdir(parents=True)
    dim = write_rows(snapshot, folder / "rows.npy")
    write_rows_model(repository, ROWS_MODEL, [folder / "rows.npy"] * features, dim=dim)
    with triton(repository, loads=(ROWS_MODEL,)) as running:
        yield running


@contextlib.contextmanager
def triton(repository: Path, *, loads: Sequence[str] = ()) -> Iterator[Triton]:
    """Starts a server over a repository of models; ends it afterwards.

    Args:
        repository: Folder of models.
        loads: Models that are loaded now and again by request; else all are, once.

    Raises:
        AbsentError: Triton is not installed.
    """
    places = _places()
    http, grpc = free_port(), free_port()
    call = [str(places.home / "bin" / "tritonserver")]
    call += [f"--model-repository={repository}"]
    call += [f"--backend-directory={places.home / 'backends'}"]
    call += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false"]
    call += [f"--http-port={http}", f"--grpc-port={grpc}", "--disable-auto-complete-config"]
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
