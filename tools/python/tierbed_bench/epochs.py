"""What do shuffled epochs cost: planned together, one by one, by window, or in memory?

A ``DataLoader`` shuffles the same samples anew in every epoch. All ways train the same batches and
must end with the same rows. Each is a process of its own, and ways take turns over the rounds. All
checkpoint behind every epoch; only plans of one epoch need that.

What is measured is the whole: reading samples, making plans, moving rows, training, checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tierbed._util.bytes import format_bytes
from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.config.optim import RowWiseAdagrad
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.config.words import Positive
from tierbed.errors import InvalidError, TierbedError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import EmbeddingBagCollection
from tierbed.train.lookahead import Lookahead, lookahead
from tierbed.train.store import Store
from tierbed_bench.big.process import disk_bytes
from tierbed_bench.common import DeviceBytes, measured_apart, process_bytes, ratio
from tierbed_bench.suite import write_suite

__all__ = ["WAYS", "EpochsOptions", "run_epochs"]

Row = dict[str, Any]
#: Orders of a store, and how many epochs a plan has.
WAYS = ("memory", "window", "one_by_one", "together")
WINDOW = 64
_MIX = 0x5851_F42D_4C95_7F2D
_SPREAD = 2_654_435_761
_CHUNK_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class EpochsOptions:
    """What to measure.

    Args:
        epochs: Epochs, each in another order.
        samples: Samples of an epoch; what is left of a batch is dropped.
        rows: Rows of each table.
        tables: Tables, each of a feature with one id per sample.
        dim: Elements of a row.
        batch: Samples of a batch.
        share: Memory of a store on disk, as a share of the rows' bytes.
        rounds: Measurements of each way; the median counts.
        seed: Of ids and shuffles.
        raw_ids: Tables are of open vocabulary, and ids any 64-bit numbers.
        collections: Collections over one store that share the tables, in equal parts.
    """

    epochs: Positive = 3
    samples: Positive = 400_000
    rows: Positive = 250_000
    tables: Positive = 16
    dim: Positive = 32
    batch: Positive = 2048
    share: float = 0.05
    rounds: Positive = 3
    seed: int = 1
    raw_ids: bool = False
    collections: Positive = 1

    def __post_init__(self) -> None:
        if self.epochs < 2 or self.samples < self.batch:
            raise InvalidError("--epochs begin at 2, and --samples fill at least one --batch")
        if not 0.0 < self.share <= 1.0:
            raise InvalidError(f"--share is above 0 and at most 1, not {self.share:g}")
        if self.tables % self.collections:
            raise InvalidError("--collections divide --tables into equal parts")
        if self.collections > 1 and self.raw_ids:
            raise InvalidError("several --collections of --raw-ids do not follow one plan")

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows, without optimizer state."""
        return 4 * self.dim * self.rows * self.tables

    @property
    def ids(self) -> int:
        """Ids of all epochs."""
        return self.epochs * (self.samples // self.batch) * self.batch * self.tables


def run_epochs(out: Path, options: EpochsOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``epochs.json`` and ``epochs.png`` to ``out``.

    Raises:
        TierbedError: A process failed, or ways ended with other rows.
    """
    found: dict[str, list[Row]] = {way: [] for way in WAYS}
    with Progress("epochs", options.rounds * len(WAYS), "runs") as bar:
        for _ in range(options.rounds):
            for way in WAYS:
                found[way].append(_measured(way, options, out))
                bar.advance(1, way)
    results = {way: {row.pop("result") for row in rows} for way, rows in found.items()}
    if len(set.union(*results.values())) > 1:
        raise TierbedError(f"ways ended with other rows: {results}")
    rows = [_median(of_way) for of_way in found.values()]
    speeds = {row["way"]: row["ids_per_s"] for row in rows}
    ratios = {
        f"together_vs_{way}": ratio(speeds["together"], speeds[way])
        for way in WAYS
        if way != "together"
    }
    told = {**asdict(options), "table_bytes": options.table_bytes, "window": WINDOW}
    path = write_suite(out, "epochs", rows, ratios, _figure(rows), told)
    print_table(f"shuffled epochs, tables of {format_bytes(options.table_bytes)}", rows)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _median(rows: Sequence[Row]) -> Row:
    return sorted(rows, key=lambda row: float(row["ids_per_s"]))[len(rows) // 2]


def _measured(way: str, options: EpochsOptions, out: Path) -> Row:
    """Measures in a process of its own, with its files below ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        return measured_apart(__name__, [way, folder, json.dumps(asdict(options))], way)


def _figure(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Speed, and bytes moved for each id, by way."""

    def draw(figure: Any) -> None:
        speed, moved = figure.subplots(1, 2)
        ways = [row["way"] for row in rows]
        speed.bar(ways, [row["ids_per_s"] / 1e6 for row in rows])
        speed.set_ylabel("million ids per second, all included")
        moved.bar(ways, [row["read_bytes_per_id"] for row in rows], label="read")
        below = [row["read_bytes_per_id"] for row in rows]
        moved.bar(
            ways, [row["written_bytes_per_id"] for row in rows], bottom=below, label="written"
        )
        moved.set_ylabel("bytes of disk per id")
        moved.legend()

    return draw


# ------------------------------------------------------------ in the process of a measurement


class _Samples(Dataset[Tensor]):
    """Samples whose ids follow from their number, few of them popular."""

    def __init__(self, options: EpochsOptions) -> None:
        self._options = options

    def __len__(self) -> int:
        return self._options.samples

    def __getitems__(self, at: list[int]) -> Tensor:
        options = self._options
        places = torch.tensor(at)[:, None] * options.tables + torch.arange(options.tables)
        mixed = (places + options.seed) * _MIX  # wraps
        mixed = (mixed ^ (mixed >> 29)) * _MIX
        uniform = ((mixed >> 11) & ((1 << 52) - 1)).double() / (1 << 52)
        ranks = (options.rows**uniform - 1.0).long().clamp_(max=options.rows - 1)
        ids = ranks * _SPREAD % options.rows
        # An odd factor keeps different ids different.
        return (ids + 1) * _MIX if options.raw_ids else ids

    def __getitem__(self, at: int) -> Tensor:
        return self.__getitems__([at])[0]


def _loader(options: EpochsOptions) -> DataLoader[Tensor]:
    names = _names(options)
    lengths = torch.ones(options.tables * options.batch, dtype=torch.int64)

    # What __getitems__ returned, and not a list of samples.
    def bags(ids: Any) -> KeyedJaggedTensor:
        values = ids.t().contiguous().view(-1)
        return KeyedJaggedTensor(names, values, lengths=lengths, stride=options.batch)

    return DataLoader(
        _Samples(options),
        options.batch,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(options.seed),
        collate_fn=bags,
    )


def _names(options: EpochsOptions) -> list[str]:
    return [f"t{at}" for at in range(options.tables)]


def _open(way: str, options: EpochsOptions, folder: Path) -> Store:
    if way == "memory":
        room = 4 * options.table_bytes + (256 << 20)
        return Store.open(backend="memory", dram_budget=room, seed=options.seed)
    order: Any = "window" if way == "window" else "forward"
    # Small tables need some memory of their own.
    budget = max(16 << 20, int(options.share * options.table_bytes))
    return Store.open(folder / "store", dram_budget=budget, order=order, seed=options.seed)


def _collections(
    options: EpochsOptions, store: Store
) -> tuple[Any, Callable[[KeyedJaggedTensor], None]]:
    """Returns the collections, or the one, and what looks a batch up in all and steps them."""
    rows = None if options.raw_ids else options.rows
    each = options.tables // options.collections
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=options.dim)
        for name in _names(options)
    ]
    embs = [
        EmbeddingBagCollection(
            tables[first : first + each], store=store, optimizer=RowWiseAdagrad()
        )
        for first in range(0, options.tables, each)
    ]
    grad = torch.full((options.batch, each * options.dim), 1e-3)

    def step(batch: KeyedJaggedTensor) -> None:
        parts = [batch] if len(embs) == 1 else batch.split([each] * len(embs))
        pooled = [emb(part).values() for emb, part in zip(embs, parts, strict=True)]
        torch.autograd.backward(pooled, [grad] * len(pooled))

    return embs[0] if len(embs) == 1 else embs, step


def _train(way: str, options: EpochsOptions, folder: Path) -> Row:
    with _open(way, options, folder) as store:
        embs, step = _collections(options, store)
        together = options.epochs if way == "together" else 1
        ahead: Lookahead[KeyedJaggedTensor] = lookahead(
            _loader(options), embs, WINDOW, lambda batch: batch, epochs=together
        )
        before, begun_s, cpu_s = DeviceBytes.now(), time.perf_counter(), time.process_time()
        first_waits, disk_peak_bytes = [], 0
        for epoch in range(options.epochs):
            asked_s = time.perf_counter()
            for at, batch in enumerate(ahead):
                if at == 0:
                    first_waits.append(time.perf_counter() - asked_s)
                step(batch)
            if way != "memory":
                store.checkpoint(f"epoch {epoch}", capture_rng=False)
                disk_peak_bytes = max(disk_peak_bytes, disk_bytes(folder))
        seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        after, order = DeviceBytes.now(), store.order()
        result = _digest(store, options)
    return {
        "ids_per_s": options.ids / seconds,
        "cpu_ns_per_id": 1e9 * cpu_s / options.ids,
        "read_bytes_per_id": (after.read - before.read) / options.ids,
        "written_bytes_per_id": (after.written - before.written) / options.ids,
        "first_batch_s": sum(first_waits),
        "disk_bytes": disk_peak_bytes,
        "peak_rss_bytes": process_bytes("VmHWM"),
        "seconds": seconds,
        "order": order["kind"],
        "replans": order.get("replan_count", 0),
        "result": result,
    }


def _digest(store: Store, options: EpochsOptions) -> str:
    digest = hashlib.blake2b(digest_size=16)
    count = int(store.vocabularies()["t0"]["next_row"]) if options.raw_ids else options.rows
    for first in range(0, count, _CHUNK_ROWS):
        rows = store.read_rows("t0", first, min(_CHUNK_ROWS, count - first))
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()


def _main(way: str, folder: str, told: str) -> None:
    torch.set_num_threads(1)
    row = _train(way, EpochsOptions(**json.loads(told)), Path(folder))
    print(json.dumps({"way": way, **row}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
