"""The trainer of ``tierbed demo online``: a process that trains on a stream and publishes versions.

It says on standard output what it did, a JSON object a line, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tierbed import Adagrad, Publisher, Store
from tierbed.data.batch import Batch
from tierbed.nn import CtrModel, build_model
from tierbed_bench.online_stream import BLOCK, Stream

__all__ = ["FIRST", "NEWEST", "PROBE", "TrainerOptions", "batch_request", "trainer_command"]

PROBE = 2 * BLOCK
TOLD_EVERY = 200
#: The channels: of the newest version, and of the first one.
NEWEST, FIRST = "stable", "first"


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What the trainer does.

    Args:
        out: Folder of the store, and of the location ``models``.
        stream: What it trains on.
        model: What is on top of the tables.
        embedding_dim: Elements of a row.
        dram_budget_bytes: Of the store.
        first_samples: Samples trained before the first version.
        samples_per_s: Samples of the stream that come in a second from then on.
        publish_s: Seconds from one publication to the next.
    """

    out: str
    stream: Stream
    model: str
    embedding_dim: int
    dram_budget_bytes: int
    first_samples: int
    samples_per_s: int
    publish_s: float


def trainer_command(options: TrainerOptions) -> list[str]:
    """Returns the command line of the trainer's process."""
    return [sys.executable, "-m", "tierbed_bench.online_trainer", json.dumps(asdict(options))]


def batch_request(batch: Batch) -> dict[str, Any]:
    """Returns a prediction request of the Open Inference Protocol for a batch with an id a bag."""
    count, features = len(batch), len(batch.sparse.keys())
    ids = batch.sparse.values().view(features, count).t().contiguous()
    return {
        "inputs": [
            _input("dense", "FP32", batch.dense),
            _input("ids", "INT64", ids),
        ]
    }


def _input(name: str, kind: str, values: torch.Tensor) -> dict[str, Any]:
    told = {"name": name, "datatype": kind, "shape": list(values.shape)}
    return told | {"data": values.reshape(-1).tolist()}


class _Trainer:
    def __init__(self, options: TrainerOptions) -> None:
        self.options = options
        self.out = Path(options.out)
        self.stream = options.stream
        torch.manual_seed(options.stream.seed)
        self.store = Store.open(
            self.out / "store", dram_budget=options.dram_budget_bytes, seed=options.stream.seed
        )
        config = {
            "kind": options.model,
            "dense_count": self.stream.dense_count,
            "table_sizes": dict(self.stream.table_sizes),
            "embedding_dim": options.embedding_dim,
        }
        self.model: CtrModel = build_model(config, self.store, Adagrad(lr=0.05))
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.002)
        self.sample = 0
        self.step_at_s = time.time()
        # Published by hand, so that it can be told what each version took.
        self.publisher = Publisher(
            self.store, self.model, self.out / "models", channel=NEWEST, delta_every="365d"
        )

    def step(self) -> None:
        """Trains on the next batch."""
        batch = self.stream.batch(self.sample, BLOCK)
        loss = binary_cross_entropy_with_logits(self.model(batch.dense, batch.sparse), batch.label)
        self.dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.dense.step()
        self.sample += BLOCK
        self.step_at_s = time.time()

    def first(self) -> None:
        """Trains until the first version, and publishes it."""
        steps = self.options.first_samples // BLOCK
        for number in range(steps):
            self.step()
            if number % TOLD_EVERY == 0:
                _tell({"trained": self.sample})
        self.publish("base")
        self.publisher.promote(FIRST)
        _tell({"first": self.sample})

    def follow(self) -> None:
        """Trains on what has come, and publishes, until standard input ends."""
        begun_s = time.monotonic()
        begun_at, next_s = self.sample, self.options.publish_s
        while not _input_ended():
            now_s = time.monotonic() - begun_s
            come = begun_at + int(now_s * self.options.samples_per_s)
            if come - self.sample >= BLOCK:
                self.step()
            else:
                time.sleep(0.002)
            if now_s >= next_s:
                self.publish()
                next_s = max(next_s + self.options.publish_s, time.monotonic() - begun_s)
                _tell({"behind": begun_at + int(now_s * self.options.samples_per_s) - self.sample})
        self.publish()
        self.probe()

    def publish(self, name: str | None = None) -> None:
        """Publishes the next version, and says what it took."""
        begun_s = time.perf_counter()
        version = self.publisher.publish_now().version
        report = self.publisher.stats().report
        assert report is not None, "something was published"
        _tell(
            {
                "published": name or f"version-{version}",
                "identity": report.identity,
                "sample": self.sample,
                "committed_at_s": self.step_at_s,
                "seconds": time.perf_counter() - begun_s,
                "rows": report.row_count,
                "bytes": report.pages_bytes + report.index_bytes + report.attachments_bytes,
            }
        )

    def probe(self) -> None:
        """Says what the model predicts now for the samples that follow."""
        batch = self.stream.batch(self.sample, PROBE)
        with torch.inference_mode():
            logit = self.model.eval()(batch.dense, batch.sparse)
        _tell({"probe": self.sample, "logit": logit.tolist()})


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _input_ended() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def main(text: str) -> None:
    """Runs the trainer as its options, in JSON, say."""
    given = json.loads(text)
    options = TrainerOptions(**{**given, "stream": Stream(**given["stream"])})
    trainer = _Trainer(options)
    with trainer.store, trainer.publisher:
        trainer.first()
        sys.stdin.readline()
        trainer.follow()


if __name__ == "__main__":
    main(sys.argv[1])
