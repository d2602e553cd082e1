"""Where does the time of a training step go, model by model and store by store?

The paper's Table 3 for our stores: loading a batch, look-ahead, lookup, dense compute, backward,
update, and the shares of loading, storage and compute. Every store trains the same model on the
same generated samples from the same beginning, with all rows on disk before the first step and
memory for 5 % of them; the scores and hence the AUC must be equal to the last bit, which the run
checks. Each sample is scored before it is trained on (progressive validation).

Batches are generated before the first step and the time of each is taken: that is loading.
Storage is the time that look-ahead, lookup and update take beyond those of the ``memory`` store;
all the rest is compute. Source: RecDB Table 3.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tierbed._util.report import print_table, write_json
from tierbed.config.optim import RowWiseAdagrad
from tierbed.data.batch import Batch
from tierbed.errors import InvalidError, TierbedError
from tierbed.nn import MODELS
from tierbed.nn.ctr import CtrModel
from tierbed.recipes.metrics import auc
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store
from tierbed_bench.common import ratio
from tierbed_bench.generator import GeneratedData, scale_for_rows
from tierbed_bench.suite import write_suite

__all__ = ["ModelOptions", "run_models"]

STORES = ("memory", "file", "lsm", "rocksdb", "forward")
PARTS = ("look_ahead", "lookup", "dense", "backward", "update")
DIM = 36
BUDGET_BYTES_MIN = 8 << 20  # below, buffers and indexes of some stores do not fit


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What to run.

    Args:
        models: Names of models.
        batch_lens: Samples of a batch, each a run of its own.
        quick: Fewer rows and steps.
        seed: Seed of samples and dense parameters.
        dram_share: Memory of every store on disk, as a share of the tables.
        window: Batches of look-ahead, for stores without a plan.
        stores: Where the rows live; ``"memory"`` comes first.
        rows: Rows of the tables, about; by default as ``quick`` says.
        samples: Samples to train on; by default as ``quick`` says.
    """

    models: tuple[str, ...]
    batch_lens: tuple[int, ...]
    quick: bool = False
    seed: int = 1
    dram_share: float = 0.05
    window: int = 64
    stores: tuple[str, ...] = STORES
    rows: int | None = None
    samples: int | None = None

    @property
    def row_count(self) -> int:
        """Rows of the tables, about."""
        return self.rows or (100_000 if self.quick else 1_000_000)

    def steps(self, batch_len: int) -> int:
        """Returns the steps of one run."""
        samples = self.samples or (16_384 if self.quick else 65_536)
        return max(8, min(256, samples // batch_len))


@dataclass(frozen=True)
class _Run:
    """One model with one batch length: its samples, the same for every store."""

    model: str
    batch_len: int
    data: GeneratedData
    batches: list[Batch]
    load_ms: float  # median, of one batch
    options: ModelOptions
    folder: Path

    @property
    def table_sizes(self) -> dict[str, int]:
        return dict(self.data.table_sizes())

    @property
    def table_bytes(self) -> int:
        return sum(self.table_sizes.values()) * 4 * (DIM + 2)


class _Planned:
    """Batches whose order is known, epoch after epoch."""

    def __init__(self, batches: list[Batch], name: str) -> None:
        self._batches = batches
        self._name = name

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def known_order(self) -> Any:
        """Promises the order; see :mod:`tierbed.data.order`."""
        order: Any = importlib.import_module("tierbed.data.order")
        return order.BatchOrder(self._name, lambda: self._batches, batch_count=len(self._batches))


def run_models(out: Path, options: ModelOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``models.json`` and ``models.png`` to ``out``."""
    for name in options.models:
        if name not in MODELS:
            raise InvalidError(f"unknown model {name!r}; there are {', '.join(sorted(MODELS))}")
    if not options.stores or options.stores[0] != "memory":
        raise InvalidError("the stores are held against memory, which must come first")
    if any(batch_len < 1 for batch_len in options.batch_lens):
        raise InvalidError(f"batches must hold at least 1 sample, not {options.batch_lens}")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=out, prefix="bench-") as folder:
        for model in options.models:
            for batch_len in options.batch_lens:
                rows += _compare(model, batch_len, options, Path(folder))
    ratios = _ratios(rows)
    names = [name for name in rows[0] if name not in ("row_count", "steps")]
    if any("skipped" in row for row in rows):
        names.append("skipped")
    print_table("training step by part, ms (median)", rows, list(dict.fromkeys(names)))
    print_table("steps per second", [{"ratio": k, "value": v} for k, v in ratios.items()])
    told = {"seed": options.seed, "threads": 1, "dim": DIM}
    path = write_suite(out, "models", rows, ratios, _bars(rows), told)
    if json_path is not None:
        import json

        write_json(json_path, json.loads(path.read_text()))
    return path


def _compare(
    model: str, batch_len: int, options: ModelOptions, folder: Path
) -> list[dict[str, Any]]:
    steps = options.steps(batch_len)
    scale = scale_for_rows(options.row_count)
    data = GeneratedData(scale, steps * batch_len, batch_len, options.seed)
    batches, load_ms = _load(data)
    run = _Run(model, batch_len, data, batches, load_ms, options, folder)
    rows: list[dict[str, Any]] = []
    scores: dict[str, Tensor] = {}
    for store in options.stores:
        row: dict[str, Any] = {"model": model, "batch": batch_len, "store": store, "steps": steps}
        try:
            times, scores[store] = _train(run, store)
        except TierbedError as error:
            rows.append({**row, "skipped": str(error)})
            continue
        rows.append({**row, **_row(run, times, scores[store])})
    for store, found in scores.items():
        if not torch.equal(found, scores["memory"]):
            raise RuntimeError(f"{model}, batch {batch_len}: {store} scored otherwise than memory")
    plain = rows[0]
    for row in rows:
        if "skipped" not in row:
            beyond = sum(row[f"{part}_ms"] - plain[f"{part}_ms"] for part in _STORED)
            row["load_share"] = row["load_ms"] / row["step_ms"]
            row["storage_share"] = beyond / row["step_ms"]
            row["compute_share"] = 1 - row["load_share"] - row["storage_share"]
    return rows


def _load(data: GeneratedData) -> tuple[list[Batch], float]:
    """Returns the batches, and the median time in ms of one."""
    batches, times = [], _Laps({"load": []})
    times.start()
    for batch in data:
        times.lap("load")
        batches.append(batch)
    return batches, 1e3 * median(times.times["load"])


_STORED = ("look_ahead", "lookup", "update")


def _row(run: _Run, times: dict[str, list[float]], scores: Tensor) -> dict[str, Any]:
    settled = {part: values[len(values) // 4 :] for part, values in times.items()}
    labels = torch.cat([batch.label for batch in run.batches])
    half = len(labels) // 2
    # Windows are brought in one sweep: the mean of look-ahead tells its cost, the median hides it.
    part_ms = {
        f"{part}_ms": 1e3 * (sum(v) / len(v) if part == "look_ahead" else median(v))
        for part, v in settled.items()
    }
    return {
        "row_count": sum(run.table_sizes.values()),
        "load_ms": run.load_ms,
        **part_ms,
        "step_ms": run.load_ms + sum(part_ms.values()),
        "auc": auc(labels[half:].numpy(), scores[half:].numpy()),
    }


def _open(run: _Run, store: str, path: Path) -> Store:
    budget = max(int(run.options.dram_share * run.table_bytes), BUDGET_BYTES_MIN)
    opener: Any = Store.open
    knows_order = "order" in inspect.signature(Store.open).parameters
    opened: Store
    if store == "memory":
        opened = opener(dram_budget=4 * run.table_bytes + (64 << 20), backend="memory", seed=1)
    elif store != "forward":
        extra = {"order": "window"} if knows_order else {}
        opened = opener(path, dram_budget=budget, backend=store, seed=1, **extra)
    elif knows_order:
        opened = opener(path, dram_budget=budget, order="forward", seed=1)
    else:
        raise TierbedError("the forward order cannot be chosen from Python yet")
    return opened


def _train(run: _Run, store: str) -> tuple[dict[str, list[float]], Tensor]:
    path = run.folder / f"{run.model}-{run.batch_len}-{store}"
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    with ExitStack() as stack:
        opened = stack.enter_context(_open(run, store, path))
        torch.manual_seed(run.options.seed)
        model = MODELS[run.model](
            run.data.dense_count,
            run.table_sizes,
            store=opened,
            embedding_dim=DIM,
            optimizer=RowWiseAdagrad(lr=0.02),
        )
        if store not in ("memory", "forward"):
            _write_all_rows(opened, run.table_sizes)
        dense = torch.optim.Adagrad(model.parameters(), lr=0.01)
        loader: Iterable[Batch] = _Planned(run.batches, f"{run.model}-{run.batch_len}")
        if store != "forward":
            loader = run.batches
        else:
            # An epoch without a step: rows are made, and lie where the plan wants them.
            for _ in lookahead(loader, model, run.options.window):
                pass
        scores = _steps(model, dense, lookahead(loader, model, run.options.window), times)
    return times, scores


def _write_all_rows(store: Store, table_sizes: dict[str, int]) -> None:
    """Puts every row on disk, as after earlier epochs."""
    step = 65536
    for name, rows in table_sizes.items():
        for first in range(0, rows, step):
            store.write_rows(name, first, store.read_rows(name, first, min(step, rows - first)))
    store.checkpoint("all rows", capture_rng=False)


def _steps(
    model: CtrModel,
    dense: torch.optim.Optimizer,
    batches: Iterator[Batch],
    times: dict[str, list[float]],
) -> Tensor:
    """Trains and takes the time of each part; returns the scores before each step."""
    scores: list[Tensor] = []
    clock = _Laps(times)
    while True:
        clock.start()
        batch = next(batches, None)
        if batch is None:
            return torch.cat(scores)
        clock.lap("look_ahead")
        pooled = model.embeddings(batch.sparse).values()
        clock.lap("lookup")
        # A leaf of its own parts the dense backward from the update of the rows.
        leaf = pooled.detach().requires_grad_()
        rows = leaf.view(leaf.shape[0], len(model.table_sizes), model.embedding_dim)
        logits = model.head(batch.dense, rows)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        clock.lap("dense")
        dense.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        dense.step()
        clock.lap("backward")
        torch.autograd.backward(pooled, leaf.grad)
        clock.lap("update")
        scores.append(logits.detach())


@dataclass
class _Laps:
    times: dict[str, list[float]]
    _at: float = field(default=0.0, init=False)

    def start(self) -> None:
        self._at = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.times[part].append(now - self._at)
        self._at = now


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    speed = {
        (row["model"], row["batch"], row["store"]): 1 / row["step_ms"]
        for row in rows
        if "skipped" not in row
    }
    ratios: dict[str, float | None] = {}
    for (model, batch, store), value in speed.items():
        for baseline in ("rocksdb", "memory"):
            if store != baseline and (model, batch, baseline) in speed:
                name = f"{model}_{batch}_{store}_vs_{baseline}"
                ratios[name] = ratio(value, speed[model, batch, baseline])
    return ratios


def _bars(rows: Sequence[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        ran = [row for row in rows if "skipped" not in row]
        names = [f"{row['model']} {row['batch']} {row['store']}" for row in ran]
        start = [0.0] * len(ran)
        for part in PARTS:
            width = [row[f"{part}_ms"] for row in ran]
            axes.barh(names, width, left=start, label=part.replace("_", "-"))
            start = [left + own for left, own in zip(start, width, strict=True)]
        axes.set_xlabel("ms per step")
        axes.tick_params(axis="y", labelsize=6)
        axes.invert_yaxis()
        axes.legend()

    return draw
