"""Training of a click model on a log, which can be stopped and resumed.

A run is a folder: ``tables/`` is the store, ``vocabulary`` maps tokens to row ids, ``run.json``
says how the run was started. Dense parameters, dense optimizer, data position and generators lie
in the store's checkpoint, so everything becomes durable together. A run that is started again
continues at its last checkpoint, bit for bit as if it had never stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed._util.report import write_json
from tierbed.config.optim import OPTIMIZERS
from tierbed.config.words import ModelKind, NotNegative, OptimizerKind, Positive, Rate
from tierbed.data.batch import Batch
from tierbed.data.order import BatchOrder, fingerprint
from tierbed.data.source import Source
from tierbed.errors import InvalidError
from tierbed.nn import CtrModel, build_model
from tierbed.recipes.evaluate import evaluate, score
from tierbed.recipes.metrics import summary
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store

__all__ = ["Run", "TrainOptions", "auto_batch_size"]

RUN_FILE = "run.json"
TABLES = "tables"
EVAL_BATCH = 1024


@dataclass(frozen=True)
class TrainOptions:
    """How to train. What changes the numbers is fixed for the life of a run.

    Args:
        model: What is on top of the tables.
        embedding_dim: Elements per row.
        batch_size: Samples per step.
        epochs: Passes over the data.
        optimizer: Of the rows.
        lr: Learning rate of the rows.
        dense_lr: Learning rate of Adam on the dense part.
        seed: Of initial weights and generated samples.
        window: Look-ahead in batches; changes speed only.
        checkpoint_steps: Steps between checkpoints; 0: at the end, or when interrupted.
        device: Where the dense part trains, such as ``cuda``; a run may go on on another one.
    """

    model: ModelKind = "dlrm"
    embedding_dim: Positive = 16
    batch_size: Positive = 128
    epochs: Positive = 1
    optimizer: OptimizerKind = "adagrad"
    lr: Rate = 0.02
    dense_lr: Rate = 0.002
    seed: int = 0
    window: NotNegative = 32
    checkpoint_steps: NotNegative = 0
    device: str = "cpu"


def auto_batch_size(sample_count: int) -> int:
    """Returns a power of two that gives some 400 steps, between 64 and 2,048."""
    size = 64
    while size < 2048 and sample_count // (2 * size) >= 300:
        size *= 2
    return size


class Run:
    """A training run in a folder.

    Args:
        folder: The run's folder; made when missing.
        source: Where the samples come from.
        options: How to train.
        train_samples: Samples ``0..train_samples`` train; the rest evaluates.
        store_options: Arguments of :meth:`tierbed.Store.open`.
        about: Kept in ``run.json`` for ``tierbed eval`` and people.
        eval_samples: Samples behind the training samples. In forward order the plan of an epoch
            has them behind its last step, so that scoring them needs no search for their rows.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        options: TrainOptions,
        train_samples: int,
        *,
        store_options: dict[str, Any],
        about: dict[str, Any] | None = None,
        eval_samples: int = 0,
    ) -> None:
        if train_samples < 1:
            raise InvalidError("no samples to train on; check --data and --eval-last")
        self.folder = folder
        self.source = source
        self.options = options
        self.train_samples = train_samples
        self.eval_samples = eval_samples
        self.device = find_device(options.device)
        self._scored = _Scored()
        folder.mkdir(parents=True, exist_ok=True)
        self._check_same(about or {})
        self.store = Store.open(folder / TABLES, seed=options.seed, **store_options)
        try:
            torch.manual_seed(options.seed)
            self.model = build_model(
                {
                    "kind": options.model,
                    "dense_count": source.dense_count,
                    "table_sizes": source.table_sizes,
                    "embedding_dim": options.embedding_dim,
                },
                self.store,
                OPTIMIZERS[options.optimizer](lr=options.lr),
            ).to(self.device)
            self.dense_optimizer = torch.optim.Adam(self.model.parameters(), lr=options.dense_lr)
            self.steps = 0
            self.samples_done = 0
            self.resumed_from_step: int | None = None
            self._durable_step = -1
            self._resume()
            write_json(folder / RUN_FILE, self._description(about or {}))
        except BaseException:
            self.store.close()
            raise

    @property
    def samples_total(self) -> int:
        """Samples of all epochs."""
        return self.train_samples * self.options.epochs

    def train(
        self,
        on_checkpoint: Callable[[int], None] | None = None,
        steps_max: int | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """Trains to the end, or for ``steps_max`` steps, and checkpoints.

        Args:
            on_checkpoint: Called with the number of steps a checkpoint holds.
            steps_max: Stop early; nothing is checkpointed then beyond the regular interval.
            should_stop: Asked after every step; True checkpoints and ends.

        Returns:
            ``steps``, ``samples_per_s``, ``train_seconds``, ``train_loss`` (mean of this call).
        """
        self.model.train()
        first_step, first_sample = self.steps, self.samples_done
        # Added up where losses are: asking for one makes the host wait for the device.
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        started_s = time.perf_counter()
        with Progress("training", self.samples_total, "samples") as bar:
            bar.set(self.samples_done)
            for batch in lookahead(_Remaining(self), self.model, window=self.options.window):
                if isinstance(batch, _EvalBatch):
                    self._scored.add(self.steps, score(self.model, [batch]))
                    continue
                loss_sum += self._step(batch)
                bar.advance(int(batch.label.numel()))
                every = self.options.checkpoint_steps
                if every and self.steps % every == 0:
                    self.checkpoint(on_checkpoint)
                if should_stop is not None and should_stop():
                    if self._durable_step != self.steps:
                        self.checkpoint(on_checkpoint)
                    break
                if steps_max is not None and self.steps - first_step >= steps_max:
                    break
        seconds = time.perf_counter() - started_s
        steps = self.steps - first_step
        if steps and self.samples_done >= self.samples_total and self._durable_step != self.steps:
            self.checkpoint(on_checkpoint)
        return {
            "steps": self.steps,
            "samples_per_s": (self.samples_done - first_sample) / seconds if steps else None,
            "train_seconds": seconds,
            "train_loss": loss_sum.item() / steps if steps else None,
        }

    def evaluate(self, eval_samples: int) -> dict[str, float]:
        """Scores the ``eval_samples`` samples behind the training samples.

        What was planned and scored behind the last step is not scored again.
        """
        labels, scores = self._scored.of(self.steps)
        if labels.size == eval_samples:
            return {**summary(labels, scores), "eval_samples": eval_samples}
        return evaluate(self.model, self.eval_batches(eval_samples), window=4)

    def eval_batches(self, eval_samples: int) -> Iterator[Batch]:
        """Yields the ``eval_samples`` samples behind the training samples in batches."""
        first = self.train_samples
        return self.source.batches(first, first + eval_samples, EVAL_BATCH)

    def usage(self) -> dict[str, Any]:
        """Returns memory and disk of the store, in bytes."""
        stats = self.store.stats()
        return {
            "dram_budget_bytes": stats["budget"]["limit_bytes"],
            "dram_peak_bytes": stats["budget"]["peak_bytes"],
            "disk_bytes": stats["disk_bytes"],
            "table_bytes": table_bytes(self.store),
        }

    def checkpoint(self, on_checkpoint: Callable[[int], None] | None = None) -> None:
        """Makes the run durable where it stands."""
        self.store.checkpoint(
            f"step-{self.steps}",
            extra={
                "model": self.model.state_dict(),
                "dense_optimizer": self.dense_optimizer.state_dict(),
                "steps": self.steps,
                "samples_done": self.samples_done,
            },
        )
        self._durable_step = self.steps
        if on_checkpoint is not None:
            on_checkpoint(self.steps)

    def close(self) -> None:
        """Closes the store."""
        self.store.close()

    def _step(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch.dense.to(self.device), batch.sparse)
        loss = binary_cross_entropy_with_logits(logits, batch.label.to(self.device))
        self.dense_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.dense_optimizer.step()
        self.steps += 1
        self.samples_done += int(batch.label.numel())
        return loss.detach()

    def _resume(self) -> None:
        extra = self.store.load_extra()
        if extra is None:
            return
        self.model.load_state_dict(extra["model"])
        self.dense_optimizer.load_state_dict(extra["dense_optimizer"])
        self.steps, self.samples_done = extra["steps"], extra["samples_done"]
        self.resumed_from_step = self.steps
        self.store.restore_rng()

    def _check_same(self, about: dict[str, Any]) -> None:
        """Refuses to continue a run with options or data it was not started with."""
        path = self.folder / RUN_FILE
        if not path.is_file() or not (self.folder / TABLES / "CURRENT").is_file():
            return
        known = json.loads(path.read_text())
        stored = _what_counts(known["options"], known["train_samples"], known.get("data", {}))
        asked = _what_counts(asdict(self.options), self.train_samples, about.get("data", {}))
        changed = sorted(
            name for name in stored.keys() | asked.keys() if stored.get(name) != asked.get(name)
        )
        if changed:
            told = ", ".join(f"{n}: {stored.get(n)!r} -> {asked.get(n)!r}" for n in changed)
            raise InvalidError(
                f"the run in {self.folder} was started otherwise ({told}); "
                "use the same options and data to continue it, or another folder"
            )

    def _description(self, about: dict[str, Any]) -> dict[str, Any]:
        return {
            "format": "tierbed-run 1",
            "model": self.model.config(),
            "options": asdict(self.options),
            "train_samples": self.train_samples,
            **about,
        }


class _EvalBatch(Batch):
    """A batch to score, not to train on."""


_Floats = NDArray[np.float32]


@dataclass
class _Scored:
    """Labels and scores of the evaluation behind one step."""

    step: int = -1
    parts: list[tuple[_Floats, _Floats]] = field(default_factory=list)

    def add(self, step: int, part: tuple[_Floats, _Floats]) -> None:
        """Adds a batch; forgets those of another step."""
        if step != self.step:
            self.step, self.parts = step, []
        self.parts.append(part)

    def of(self, step: int) -> tuple[_Floats, _Floats]:
        """Returns labels and scores behind ``step``, ``[N]`` each; empty when there are none."""
        if step != self.step:
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        labels, scores = zip(*self.parts, strict=True)
        return np.concatenate(labels), np.concatenate(scores)


class _Remaining:
    """The batches of a run that are still to come, epoch after epoch; they tell their order.

    In forward order the batches to score come behind the last step of each epoch.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._source = run.source
        self._samples = run.train_samples
        self._batch_size = run.options.batch_size
        self._done = run.samples_done
        self._total = run.samples_total
        stands = run.store.order()
        # Steps of an epoch are done, its evaluation is not.
        self._is_unscored = self._done > 0 and stands.get("batch") == self._step_count

    @property
    def _step_count(self) -> int:
        return -(-self._samples // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._is_unscored:
            yield from self._to_score()
        done = self._done
        while done < self._total:
            position = done % self._samples
            yield from self._source.batches(position, self._samples, self._batch_size)
            done += self._samples - position
            if self._run.store.order()["kind"] == "forward":
                yield from self._to_score()

    def _to_score(self) -> Iterator[Batch]:
        for batch in self._run.eval_batches(self._run.eval_samples):
            yield _EvalBatch(batch.dense, batch.sparse, batch.label)

    def _epoch(self) -> Iterator[Batch]:
        yield from self._source.batches(0, self._samples, self._batch_size)
        yield from self._to_score()

    def known_order(self) -> BatchOrder:
        """Returns the order of one epoch, which all epochs share."""
        parts = [self._source.identity(), self._samples, self._batch_size]
        eval_samples = self._run.eval_samples
        if eval_samples:
            parts += [eval_samples, EVAL_BATCH]
        start = self._done % self._samples // self._batch_size
        return BatchOrder(
            fingerprint(parts),
            self._epoch,
            self._step_count if self._is_unscored else start,
            self._step_count + -(-eval_samples // EVAL_BATCH),
            lambda at: at < self._step_count,
        )


def _what_counts(
    options: dict[str, Any], train_samples: int, data: dict[str, Any]
) -> dict[str, Any]:
    """Returns what must not change in the life of a run.

    Window and checkpoint interval change speed only; more epochs continue a run, and so does
    another device; files may move, but not change name or size.
    """
    kept = {**options, **data, "train_samples": train_samples}
    for name in ("window", "checkpoint_steps", "device", "epochs", "paths"):
        kept.pop(name, None)
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


def find_device(name: str) -> torch.device:
    """Returns the device called ``name``.

    Raises:
        InvalidError: No such name, or a GPU that is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidError(f"device {name!r} is none that torch knows; name cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            "train on cpu, or see what tierbed doctor says of torch"
        )
    return device


def table_bytes(store: Store) -> int:
    """Returns the bytes of all rows, touched or not, with their optimizer state."""
    tables: list[Any] = store.tables()
    return sum(_native.table_bytes(table) for table in tables)


def read_run(folder: Path) -> dict[str, Any]:
    """Reads the ``run.json`` of a run.

    Raises:
        InvalidError: Not the folder of a run.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise InvalidError(
            f"{folder} holds no training run ({RUN_FILE} is missing); name the folder given to "
            "tierbed train as --store",
            {"path": str(folder)},
        )
    description: dict[str, Any] = json.loads(path.read_text())
    return description


def load_run(folder: Path, **store_options: Any) -> tuple[Store, CtrModel, dict[str, Any]]:
    """Opens a trained run to score or publish it: store, model, description.

    Raises:
        InvalidError: Not a run, or one without a checkpoint.
    """
    description = read_run(folder)
    options = description["options"]
    store = Store.open(folder / TABLES, seed=options["seed"], **store_options)
    try:
        extra = store.load_extra()
        if extra is None:
            raise InvalidError(f"the run in {folder} has no checkpoint yet; train it first")
        model = build_model(
            description["model"], store, OPTIMIZERS[options["optimizer"]](lr=options["lr"])
        )
        model.load_state_dict(extra["model"])
        model.eval()
    except BaseException:
        store.close()
        raise
    return store, model, description
