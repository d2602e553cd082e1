"""What does training give end to end? DLRM with its tables on SSD, its dense part on a GPU.

    python tools/python/gpu/gpu_end_to_end.py --lines train.jsonl [--dry-run]

One model, one order of batches, four places of rows:

- ids_on_device: rows in a store, ids on the device, which are copied back for every lookup;
- rows_on_host: rows in a store, ids on the host, vectors and gradients on streams of their own;
- windows_on_device: rows in a store, those of the current window in memory of the device;
- rows_on_device: all rows in memory of the device, the ceiling.

Stores follow a plan with memory for a share of the tables. All four must end with equal rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_measure import DEVICE, IS_DRY, ratio
from gpu_told import Told
from torch import Tensor, nn

import tierbed as tb
from tierbed.data import BatchOrder

TABLES, DIM, DENSE = (26, 64, 13) if not IS_DRY else (2, 8, 3)
ROWS = 8_000_000 // 26 if not IS_DRY else 300
BATCH, BATCHES = (32768, 24) if not IS_DRY else (16, 4)
EPOCHS = 3
BUDGET_SHARE = 0.05
BUDGET_BYTES_MIN = 8 << 20
WAYS = ("ids_on_device", "rows_on_host", "windows_on_device", "rows_on_device")
# Ways whose ids stay on the host.
IDS_ON_HOST = ("rows_on_host", "windows_on_device")


class Log:
    """Batches whose order is known: ids with a long tail, the same in every epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = []
        lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)
        for _ in range(BATCHES):
            drawn = torch.rand(TABLES * BATCH, generator=generator, dtype=torch.float64)
            ids = (drawn.pow(6) * ROWS).long()
            bags = tb.KeyedJaggedTensor(names(), ids, lengths=lengths, stride=BATCH)
            dense = torch.rand(BATCH, DENSE, generator=generator)
            label = (torch.rand(BATCH, generator=generator) < 0.3).float()
            self.batches.append((dense, bags, label))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(EPOCHS):
            yield from self.batches

    def known_order(self) -> BatchOrder:
        """Returns the order of an epoch."""
        return BatchOrder("end to end", lambda: iter(self.batches), 0, BATCHES)


def names() -> list[str]:
    """Returns the tables, a feature each."""
    return [f"t{at}" for at in range(TABLES)]


def dlrm(store: tb.Store) -> Any:
    """Returns the model, on the host."""
    torch.manual_seed(3)
    config = {
        "kind": "dlrm",
        "dense_count": DENSE,
        "table_sizes": dict.fromkeys(names(), ROWS),
        "embedding_dim": DIM,
        "hidden": [512, 256] if not IS_DRY else [8],
    }
    return tb.nn.build_model(config, store, tb.RowWiseAdagrad(lr=0.02))


def on_device(model: Any) -> Any:
    """Returns the collection that holds the rows of ``model`` on the device."""
    from tierbed import dist

    return dist.ShardedEmbeddingBagCollection(
        model.embeddings.embedding_bag_configs(),
        store=dist.DeviceStore(DEVICE, seed=5),
        optimizer=tb.RowWiseAdagrad(lr=0.02),
        ranks=dist.local_ranks(1)[0],
        exchange=dist.ExchangeOptions(samples_max=BATCH, indices_max=TABLES * BATCH),
    )


class Training:
    """A model, trained on the log.

    Args:
        way: Where rows and ids are.
        log: The batches.
        folder: Of the store.
    """

    def __init__(self, way: str, log: Log, folder: Path) -> None:
        self.way = way
        self.log = log
        budget = max(BUDGET_BYTES_MIN, int(TABLES * ROWS * (DIM + 2) * 4 * BUDGET_SHARE))
        if way == "rows_on_device":
            self.store = tb.Store.open(backend="memory", dram_budget="16GiB", seed=5)
        else:
            on = {"device": DEVICE} if way == "windows_on_device" else {}
            self.store = tb.Store.open(folder / way, dram_budget=budget, seed=5, **on)
        self.model = dlrm(self.store)
        if way == "rows_on_device":
            self.model.embeddings = on_device(self.model)
        device = None if way == "ids_on_device" else DEVICE
        self.dense = [part for name, part in self.model.named_children() if name != "embeddings"]
        for part in self.dense:
            part.to(DEVICE)
        if way == "rows_on_host":
            self.model.embeddings.to(device)
        parameters = [parameter for part in self.dense for parameter in part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.02)

    def batches(self) -> Any:
        """Returns what the loop goes over."""
        if self.way == "rows_on_device":
            return self.log
        return tb.lookahead(self.log, self.model, window=16, key=lambda batch: batch[1])

    def step(self, batch: Any) -> Tensor:
        """Trains on a batch; returns the loss, on the device."""
        dense, bags, label = batch
        if self.way not in IDS_ON_HOST:
            bags = bags.to(DEVICE)
        logits = self.model(dense.to(DEVICE, non_blocking=True), bags)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label.to(DEVICE))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def rows(self) -> list[Tensor]:
        """Returns the trained rows of the first table, and their dense parameters."""
        parameters = [parameter.detach().cpu() for parameter in self.dense[0].parameters()]
        store: Any = self.store
        if self.way == "rows_on_device":
            store = self.model.embeddings.store
        return [store.read_rows("t0", 0, min(ROWS, 100_000)), *parameters]


def busy_share(training: Training, batches: Iterator[Any], steps: int) -> float | None:
    """Returns the share of time that the GPU computes or copies in ``steps`` steps."""
    if IS_DRY:
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _, batch in zip(range(steps), batches, strict=False):
            training.step(batch)
        torch.cuda.synchronize()
    wall_us = 1e6 * (time.perf_counter() - begun_s)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy_us, end = 0.0, 0.0
    for first, last in spans:
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy_us / wall_us


def run(way: str, log: Log, folder: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Trains the log's epochs; the last but one is timed, the last is looked at."""
    training = Training(way, log, folder)
    batches = iter(training.batches())
    losses = []
    seconds = None
    for epoch in range(EPOCHS - 1):
        if not IS_DRY:
            torch.cuda.synchronize()
        begun_s = time.perf_counter()
        losses += [training.step(next(batches)) for _ in range(BATCHES)]
        total = torch.stack(losses).sum().item()
        training.store.stats()
        seconds = None if IS_DRY or not epoch else time.perf_counter() - begun_s
    busy = busy_share(training, batches, BATCHES // 2)
    for batch in batches:
        losses.append(training.step(batch))
    row = {
        "part": "end_to_end",
        "way": way,
        "measured": "dry-run" if IS_DRY else "measured-1gpu",
        "batch": BATCH,
        "samples_per_s": None if seconds is None else BATCH * BATCHES / seconds,
        "gpu_busy_share": busy,
        "loss": total / (BATCHES * (EPOCHS - 1)),
    }
    rows = training.rows()
    training.store.close()
    return row, rows


def main() -> int:
    """Measures; returns 1 when ways end with other rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, help="write each result there at once, a line each")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: all paths, no times")
    options = parser.parse_args()
    told = Told(options.lines)
    log = Log()
    found: dict[str, list[Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            row, found[way] = run(way, log, Path(folder))
            pairs = zip(found[way], found[WAYS[0]], strict=True)
            told.add({**row, "equal": all(torch.equal(*pair) for pair in pairs)})
    speeds = {row["way"]: row["samples_per_s"] for row in told.rows}
    told.add(
        {
            "part": "end_to_end_ratios",
            "rows_on_host_vs_ids_on_device": ratio(speeds["rows_on_host"], speeds["ids_on_device"]),
            **{
                f"{way}_vs_rows_on_device": ratio(speeds[way], speeds["rows_on_device"])
                for way in IDS_ON_HOST
            },
        }
    )
    return 1 if any(row.get("equal") is False for row in told.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
