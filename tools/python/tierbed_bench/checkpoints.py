"""How fast are checkpoints of ranks sent to an object store and read back, and in which memory?

The store is SeaweedFS on this machine, or ``--location``. One rank saves a table whose rows were
all trained, and loads it into a new store. Beside it ``obstore`` copies the same files, from a
folder and into one, with equally many at the same time: it reads no rows, makes no files, computes
no digests. A round runs both, each round another one first; ratios are medians over rounds.

``peak_bytes`` is how much the resident memory of the process grew beyond what it was before.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tierbed as tb
from tierbed import dist as tbd
from tierbed._native import NativeObjects
from tierbed._util.report import print_table, write_json
from tierbed.config.words import Positive
from tierbed.dist.checkpoint_files import STREAMS
from tierbed.errors import InvalidError
from tierbed_bench.common import process_bytes, ratio
from tierbed_bench.seaweedfs import seaweedfs
from tierbed_bench.suite import write_suite

__all__ = ["CheckpointOptions", "run_checkpoints"]

DIM = 64
WRITE_ROWS = 65_536
QUICK_ROWS = 20_000
WAYS = ("upload", "download")
SYSTEMS = ("tierbed", "obstore")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is measured.

    Args:
        rows: Rows of the table; each has 64 numbers and as many of optimizer state.
        rounds: Rounds that count.
        location: An address below which to write, such as s3://bucket/bench; by default SeaweedFS
            is started here.
        dram_budget: Memory of the store.
        quick: 20,000 rows and two rounds.
        seed: Of the rows.
    """

    rows: Positive = 1_000_000
    rounds: Positive = 5
    location: str | None = None
    dram_budget: str = "64MiB"
    quick: bool = False
    seed: int = 1


@dataclass
class _Times:
    """What rounds of a system took."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def run(self, work: Callable[[], None], *, counts: bool) -> None:
        """Runs a round."""
        Path("/proc/self/clear_refs").write_text("5")
        before = process_bytes("VmHWM")
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        work()
        if counts:
            self.seconds.append(time.perf_counter() - wall_s)
            self.cpu_s.append(time.process_time() - cpu_s)
            self.peak_bytes = max(self.peak_bytes, process_bytes("VmHWM") - before)


def run_checkpoints(out: Path, options: CheckpointOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``checkpoints.json`` and ``checkpoints.png`` to ``out``.

    Raises:
        InvalidError: There is no store to write to, or no obstore.
    """
    rows = QUICK_ROWS if options.quick else options.rows
    rounds = 2 if options.quick else options.rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierbed-saves-")))
        if options.location is None:
            (folder / "s3").mkdir()
            location, settings = stack.enter_context(seaweedfs(folder / "s3"))
            stack.enter_context(_environment(settings))
        else:
            location = options.location.rstrip("/")
        bench = _Bench(folder, location, rows, options)
        stack.callback(bench.close)
        for number in range(rounds + 1):
            bench.round(number, counts=number > 0)
        found, file_bytes, files = bench.times, bench.file_bytes, len(bench.names)
    table = [
        {
            "variant": system,
            "way": way,
            "bytes": file_bytes,
            "files": files,
            "seconds": median(times.seconds),
            "bytes_per_s": file_bytes / median(times.seconds),
            "cpu_s": median(times.cpu_s),
            "peak_bytes": times.peak_bytes,
        }
        for (system, way), times in found.items()
    ]
    ratios: dict[str, float | None] = {
        f"{way}_vs_obstore": median(
            ratio(theirs, own)
            for own, theirs in zip(
                found["tierbed", way].seconds, found["obstore", way].seconds, strict=True
            )
        )
        for way in WAYS
    }
    print_table("checkpoints of a rank", table)
    print_table("rate", [{"ratio": name, "value": value} for name, value in ratios.items()])
    told = {
        "rows": rows,
        "dim": DIM,
        "rounds": rounds,
        "streams": STREAMS,
        "dram_budget": options.dram_budget,
        "store": "SeaweedFS on this machine" if options.location is None else "given",
        "seed": options.seed,
    }
    path = write_suite(out, "checkpoints", table, ratios, _bars(table), told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets what leads to the store; afterwards all is as before."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _bars(rows: list[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{row['variant']}, {row['way']}" for row in rows]
        axes.barh(names, [row["bytes_per_s"] / 2**20 for row in rows])
        axes.set_xlabel("MiB/s of one rank")
        axes.invert_yaxis()

    return draw


class _Bench:
    """A trained rank, its files in a folder, and both who bring them to the store."""

    def __init__(self, folder: Path, location: str, rows: int, options: CheckpointOptions) -> None:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise InvalidError(
                "there is no obstore to compare with; pip install obstore"
            ) from error
        self._folder, self._location, self._options = folder, location, options
        self._tables = [tb.EmbeddingBagConfig(rows, DIM, "item")]
        self._trained = self._rank(folder / "trained")
        _train(self._trained.store, rows, options.seed)
        self._trained.save(folder / "saved")
        self.names = sorted(path.name for path in (folder / "saved").iterdir())
        self.file_bytes = sum((folder / "saved" / name).stat().st_size for name in self.names)
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        config: Any = {
            "access_key_id": os.environ.get("AWS_ACCESS_KEY_ID", ""),
            "secret_access_key": os.environ.get("AWS_SECRET_ACCESS_KEY", ""),
            "region": os.environ.get("AWS_REGION", "us-east-1"),
            **({} if endpoint is None else {"endpoint": endpoint}),
        }
        self._peer = S3Store(
            bucket,
            prefix=f"{prefix}/peer" if prefix else "peer",
            config=config,
            client_options={"allow_http": True},
        )
        self.times = {(system, way): _Times() for way in WAYS for system in SYSTEMS}

    def _rank(self, path: Path) -> Any:
        (rank,) = tbd.local_ranks(1)
        store = tb.Store.open(path, backend="file", dram_budget=self._options.dram_budget)
        return tbd.ShardedEmbeddingBagCollection(
            self._tables, store=store, ranks=rank, optimizer=tb.Adagrad(lr=0.05)
        )

    def round(self, number: int, *, counts: bool) -> None:
        """Runs both systems, both ways, and removes what they wrote."""
        order = SYSTEMS if number % 2 else SYSTEMS[::-1]
        address = f"{self._location}/round-{number}"
        sent = {
            "tierbed": lambda: self._trained.save(address),
            "obstore": lambda: self._each(self._send),
        }
        for system in order:
            self.times[system, "upload"].run(sent[system], counts=counts)
        loaded = self._rank(self._folder / f"loaded-{number}")
        copied = self._folder / f"copied-{number}"
        copied.mkdir()
        brought = {
            "tierbed": lambda: loaded.load(address),
            "obstore": lambda: self._each(lambda name: self._bring(name, copied)),
        }
        for system in order:
            self.times[system, "download"].run(brought[system], counts=counts)
        self._check(loaded, copied)
        loaded.close()
        loaded.store.close()
        shutil.rmtree(self._folder / f"loaded-{number}")
        shutil.rmtree(copied)
        for place in (address, f"{self._location}/peer"):
            objects = NativeObjects(place)
            for name, _ in objects.list():
                objects.remove(name)

    def _each(self, work: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(work, self.names))

    def _send(self, name: str) -> None:
        import obstore

        obstore.put(self._peer, name, self._folder / "saved" / name)

    def _bring(self, name: str, to: Path) -> None:
        import obstore

        with (to / name).open("wb") as file:
            for chunk in obstore.get(self._peer, name).stream():
                file.write(chunk)

    def _check(self, loaded: Any, copied: Path) -> None:
        """Both brought what was saved."""
        last = self._tables[0].num_embeddings or 0
        for first in (0, last - 10):
            rows = (one.store.read_rows("item", first, 10) for one in (self._trained, loaded))
            assert torch.equal(*rows), "rows that were loaded are those that were saved"
        sizes = [(copied / name).stat().st_size for name in self.names]
        assert sum(sizes) == self.file_bytes, "all files were copied"

    def close(self) -> None:
        """Gives the rank back."""
        self._trained.close()
        self._trained.store.close()


def _train(store: Any, rows: int, seed: int) -> None:
    """Writes all rows as if they had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, rows, WRITE_ROWS):
        count = min(WRITE_ROWS, rows - first)
        weights = torch.randn(count, DIM, generator=generator)
        used = torch.ones(count, dtype=torch.int64)
        store.write_rows("item", first, weights, weights.square(), used)
