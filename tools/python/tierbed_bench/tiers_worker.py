"""A process that serves a trained model from a large snapshot, under a limit of memory.

Commands: ``load`` brings the requests and the dense part of the model; ``ask`` opens the snapshot,
warms it, and asks: single requests, then batches one after the other, then batches of which the
next is looked up while the dense part works on the last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from tierbed.config.tables import EmbeddingBagConfig
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn import CtrModel, EmbeddingBagCollection
from tierbed.recipes.metrics import summary
from tierbed.serve.cache import CacheOptions
from tierbed.serve.models import load_model
from tierbed.serve.snapshot import Snapshot
from tierbed_bench.common import percentile
from tierbed_bench.memory_group import MemoryGroup
from tierbed_bench.tiers_model import LARGE_TABLE
from tierbed_bench.workers import answer_commands

__all__ = ["main"]

#: Room for what the process allocates while it is measured, beside rows and pages.
SLACK_BYTES = 4 << 20
#: Bytes of a file that are read at once before anything is measured.
READ_BYTES = 1 << 20


class _Session:
    """Requests and the dense part of a model.

    Args:
        job: ``requests``: a file with ``ids`` ``[R, F]`` i64, ``dense`` ``[R, N]`` f32 and
            ``label`` ``[R]``; ``model``: a snapshot published with its model.
        group: Limits this process, where it can be limited.
    """

    def __init__(self, job: dict[str, Any], group: MemoryGroup | None) -> None:
        told = torch.load(job["requests"], weights_only=True)
        self.ids: Tensor = told["ids"]
        self.dense: Tensor = told["dense"]
        self.label: Tensor = told["label"]
        self.group = group
        self._kept = Snapshot.open(job["model"], dram_budget="1GiB", cache=[])
        model = load_model(self._kept)
        if model is None:
            raise InvalidError("the snapshot was published without its model")
        self.model: CtrModel = model
        self.features = model.embeddings.feature_names()

    def bags(self, first: int, last: int) -> KeyedJaggedTensor:
        """Requests ``first..last``, one id per feature."""
        ids = self.ids[first:last].T.reshape(-1)
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        return KeyedJaggedTensor(self.features, ids, lengths=lengths, stride=last - first)

    def score(self, pooled: Tensor, first: int) -> Tensor:
        """The dense part: logits ``[B]`` of the requests from ``first`` on."""
        rows = pooled.view(pooled.shape[0], len(self.features), -1)
        return self.model.head(self.dense[first : first + pooled.shape[0]], rows)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Opens a snapshot and asks it; see :mod:`tierbed_bench.tiers_served` for the fields."""
        if self.group is not None:
            self.group.allow(0)
        _settle(Path(job["snapshot"]))
        snapshot = Snapshot.open(
            job["snapshot"],
            dram_budget="64GiB",
            backend=job["backend"],
            cache=CacheOptions(tiers=job["cache"], bytes_max=job["cache_bytes"]),
            resident=job["plan"],
            misses=job["misses"],
        )
        with snapshot, torch.inference_mode():
            table = snapshot.tables()[0]
            tables = [
                EmbeddingBagConfig(
                    name=LARGE_TABLE,
                    num_embeddings=table["row_count"],
                    embedding_dim=table["dim"],
                    feature_names=self.features,
                )
            ]
            asked = _Asked(self, snapshot, EmbeddingBagCollection(tables, store=snapshot), job)
            return asked.measure()


class _Asked:
    """One open snapshot; requests are taken one after the other, none twice but for warming."""

    def __init__(
        self,
        session: _Session,
        snapshot: Snapshot,
        rows: EmbeddingBagCollection,
        job: dict[str, Any],
    ) -> None:
        self.session, self.snapshot, self.rows, self.job = session, snapshot, rows.eval(), job
        self.batch = int(job["batch"])
        self.next = int(job["warm_requests"])

    def measure(self) -> dict[str, Any]:
        limit_bytes = self._limit()
        for first, last in self._spans(int(self.job["warm_from"]), self.next, self.batch):
            self.rows(self.session.bags(first, last))
        return {
            "limit_bytes": limit_bytes,
            **self._singles(int(self.job["singles"])),
            **self._batches(int(self.job["batches"])),
            **self._pipelined(int(self.job["batches"])),
            **self._held(),
        }

    def _limit(self) -> int | None:
        """Allows what is in use without a row, and the bytes for rows or pages."""
        group = self.session.group
        if group is None:
            return None
        # The first scores allocate what all later ones use again.
        pooled = torch.zeros(self.batch, self.rows(self.session.bags(0, 1)).values().shape[1])
        self.session.score(pooled, 0)
        limit_bytes = group.used_bytes() + int(self.job["rows_bytes"]) + SLACK_BYTES
        group.allow(limit_bytes)
        return limit_bytes

    def _singles(self, count: int) -> dict[str, Any]:
        waits: list[float] = []
        before = self._counts()
        cpu_s = 0.0
        perfect, reads = 0, before["rows_read"]
        for _ in range(count):
            bags = self.session.bags(self.next, self.next + 1)
            cpu_started_s, started_s = time.process_time(), time.perf_counter()
            self.rows(bags)
            waits.append(time.perf_counter() - started_s)
            cpu_s += time.process_time() - cpu_started_s
            self.next += 1
            now = self._counts()["rows_read"]
            perfect, reads = perfect + (now == reads), now
        grown = {name: value - before[name] for name, value in self._counts().items()}
        return {
            "latency_us_mean": 1e6 * mean(waits),
            "latency_us_p90": 1e6 * percentile(waits, 0.9),
            "latency_us_p99": 1e6 * percentile(waits, 0.99),
            "cpu_us_mean": 1e6 * cpu_s / count,
            "perfect_hit_rate": perfect / count,
            "rows_read_per_request": grown["rows_read"] / count,
            "pages_read_per_request": grown["pages_read"] / count,
            "approximate_rows_per_request": (grown["rows_surrogate"] + grown["rows_default"])
            / count,
        }

    def _batches(self, count: int) -> dict[str, Any]:
        """Batches one after the other: lookup, then the dense part."""
        looked_up, scored = [], []
        logits = []
        before, first_asked = self._counts(), self.next
        for first, last in self._ahead(count):
            bags = self.session.bags(first, last)
            started_s = time.perf_counter()
            pooled = self.rows(bags).values()
            between_s = time.perf_counter()
            logits.append(self.session.score(pooled, first))
            looked_up.append(between_s - started_s)
            scored.append(time.perf_counter() - between_s)
        pages = self._counts()["pages_read"] - before["pages_read"]
        label = self.session.label[first_asked : self.next]
        scores = torch.sigmoid(torch.cat(logits))
        told = summary(label.numpy(), scores.numpy())
        return {
            "batch_lookup_us_mean": 1e6 * mean(looked_up),
            "batch_lookup_us_p99": 1e6 * percentile(looked_up, 0.99),
            "batch_dense_us_mean": 1e6 * mean(scored),
            "batch_inference_us_mean": 1e6 * (mean(looked_up) + mean(scored)),
            "batch_pages_read_per_request": pages / (self.next - first_asked),
            "scored_requests": self.next - first_asked,
            "auc": told["auc"],
            "pr_auc": told["pr_auc"],
        }

    def _pipelined(self, count: int) -> dict[str, Any]:
        """The same, the next batch being looked up while the last one is scored."""

        def lookup(first: int, last: int) -> tuple[int, Tensor]:
            with torch.inference_mode():
                return first, self.rows(self.session.bags(first, last)).values()

        started_s = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            coming: Future[tuple[int, Tensor]] | None = None
            for span in self._ahead(count):
                arrived, coming = coming, pool.submit(lookup, *span)
                if arrived is not None:
                    first, pooled = arrived.result()
                    self.session.score(pooled, first)
            if coming is not None:
                first, pooled = coming.result()
                self.session.score(pooled, first)
        return {"batch_pipelined_us_mean": 1e6 * (time.perf_counter() - started_s) / count}

    def _ahead(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the next ``count`` batches."""
        for _ in range(count):
            span = (self.next, self.next + self.batch)
            self.next = span[1]
            yield span

    @staticmethod
    def _spans(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
        for at in range(first, last, step):
            yield at, min(at + step, last)

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.snapshot.stats()["snapshot"]["lookups"]
        return counts

    def _held(self) -> dict[str, Any]:
        stats = self.snapshot.stats()["snapshot"]
        return {
            "cache_used_bytes": stats["cache_used_bytes"],
            "resident_bytes": stats["resident_bytes"],
            "queue_depth": stats["queue_depth"],
            "io_engine": stats["io"]["engine"],
            "tiers": stats["tiers"],
            "neighbours": stats["neighbours"],
        }


def _join(folder: str | None) -> MemoryGroup | None:
    """Puts this process into a group, where there is one."""
    if folder is None:
        return None
    group = MemoryGroup(Path(folder))
    group.add(os.getpid())
    return group


def _settle(folder: Path) -> None:
    """Lets all files of a folder begin alike, however long ago they were written.

    What was just written goes to the device now, not while requests wait for it. Everything is
    read once, for caches behind the device that keep what was read, and the page cache forgets it.
    """
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            while file.read(READ_BYTES):
                pass
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Answers:
    """What a worker says to commands; the session is that of the last ``load``."""

    def __init__(self) -> None:
        self._session: _Session | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "load":
            self._session = _Session(command["job"], _join(command["group"]))
            return {}
        if self._session is None:
            raise InvalidError("load comes first")
        return self._session.ask(command["job"])


def main() -> None:
    """Serves commands until standard input ends."""
    torch.set_num_threads(1)
    answer_commands(_Answers().answer)


if __name__ == "__main__":
    main()
