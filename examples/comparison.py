"""What the examples share: options, rows in plain torch to compare with, a report and a figure."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import tierbed as tb

MIB = 1 << 20


def arguments(description: str, *, budget: str, epochs: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that all examples have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, help="files to train on, not generated")
    parser.add_argument("--budget", default=budget, help=f"memory of the store ({budget})")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--store", type=Path, help="its folder; by default a temporary one")
    parser.add_argument("--check", action="store_true", help="train in plain torch, too; compare")
    parser.add_argument("--figure", type=Path, help="draw the quality of each epoch into this file")
    parser.add_argument("--json", type=Path, help="write what the report says into this file")
    return parser


@dataclass
class Run:
    """What a training run came to."""

    name: str
    quality: list[float] = field(default_factory=list)  # of each epoch
    seconds: float = 0.0
    rows_bytes: int = 0  # the most memory that rows, their state and indexes took
    tokens: int = 0  # of text, that it went through


@contextmanager
def timed(run: Run) -> Iterator[None]:
    """Adds the time of a block to ``run``."""
    begun = time.perf_counter()
    yield
    run.seconds += time.perf_counter() - begun


@contextmanager
def opened(folder: Path | None, budget: str) -> Iterator[tb.Store]:
    """Opens a store in ``folder``, or in one that is removed afterwards."""
    with ExitStack() as stack:
        folder = folder or Path(stack.enter_context(TemporaryDirectory())) / "store"
        yield stack.enter_context(tb.Store.open(folder, dram_budget=budget))


def root(values: Tensor) -> Tensor:
    """Returns the square root, rounded as IEEE 754 says; torch's of float32 may be one bit off."""
    return values.double().sqrt().float()


def summed(rows: tb.JaggedTensor) -> Tensor:
    """Returns the sum of each bag ``[B, D]``, added in the order of the batch."""
    bag = torch.repeat_interleave(rows.lengths())
    empty = rows.values().new_zeros(rows.lengths().numel(), rows.values().shape[1])
    return empty.index_add(0, bag, rows.values())


class TorchRows(nn.Module):
    """The tables of a collection as tensors in memory: what it does, in plain torch.

    Backward steps the rows, as it does those of a store. Every sum is in the order of the batch
    and no product is fused with a sum, so that bits may be compared; ``torch.optim`` promises
    neither.

    Args:
        collection: A collection whose rows are copied; its store may then be closed.
        optimizer: That of the rows.
    """

    def __init__(self, collection: nn.Module, optimizer: tb.Adagrad | tb.Adam) -> None:
        super().__init__()
        self.is_pooled = isinstance(collection, tb.EmbeddingBagCollection)
        of_bags, of_rows = "embedding_bag_configs", "embedding_configs"
        configs = getattr(collection, of_bags if self.is_pooled else of_rows)()
        self.configs = {config.name: config for config in configs}
        rows = collection.full_state_dict()
        prefix = collection.state_prefix
        self.rows = {name: rows[f"{prefix}.{name}.weight"] for name in self.configs}
        words = 2 if isinstance(optimizer, tb.Adam) else 1
        self.state = {
            name: [torch.zeros_like(of_table) for _ in range(words)]
            for name, of_table in self.rows.items()
        }
        self.steps = dict.fromkeys(self.configs, 0)
        self.optimizer = optimizer

    def forward(self, bags: tb.KeyedJaggedTensor) -> dict[str, tb.JaggedTensor] | tb.KeyedTensor:
        """Looks up a batch, every table once; sums the bags of a pooled collection."""
        found = {}
        for name, config in self.configs.items():
            parts = [bags[feature] for feature in config.feature_names]
            unique, at = torch.cat([part.values() for part in parts]).unique(return_inverse=True)
            touched = self.rows[name][unique]
            if self.training and torch.is_grad_enabled():
                touched.requires_grad_().register_post_accumulate_grad_hook(
                    partial(self._step, name, unique)
                )
            rows = nn.functional.embedding(at, touched)
            sizes = [part.values().numel() for part in parts]
            for feature, part, of_part in zip(
                config.feature_names, parts, rows.split(sizes), strict=True
            ):
                found[feature] = tb.JaggedTensor(of_part, lengths=part.lengths())
        if not self.is_pooled:
            return found
        pooled = [summed(of_feature) for of_feature in found.values()]
        return tb.KeyedTensor(
            list(found), [one.shape[1] for one in pooled], torch.cat(pooled, dim=1)
        )

    @torch.no_grad()
    def _step(self, name: str, unique: Tensor, touched: Tensor) -> None:
        self.steps[name] += 1
        grad, optimizer = touched.grad, self.optimizer
        state = [of_table[unique] for of_table in self.state[name]]
        if isinstance(optimizer, tb.Adam):
            beta1, beta2 = optimizer.betas
            state[0] += (grad - state[0]) * (1 - beta1)
            state[1] += (grad * grad - state[1]) * (1 - beta2)
            corrections = [1 - beta ** self.steps[name] for beta in optimizer.betas]
            lr = optimizer.lr * math.sqrt(corrections[1]) / corrections[0]
            change = state[0] / (root(state[1]) + optimizer.eps) * lr
        else:
            state[0] += grad * grad
            change = grad / (root(state[0]) + optimizer.eps) * optimizer.lr
        self.rows[name][unique] = touched - change
        for of_table, stepped in zip(self.state[name], state, strict=True):
            of_table[unique] = stepped

    def read_rows(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Returns rows of a table, as a store does."""
        return self.rows[table][first_row : first_row + row_count]

    def gather_rows(self, table: str, rows: Tensor) -> Tensor:
        """Returns rows of a table in any order, as a store does."""
        return self.rows[table][rows]

    def tables(self) -> list[dict[str, object]]:
        """Returns what :func:`tierbed.nn.row_chunks` asks of a store."""
        return [{"name": name, "row_count": len(rows)} for name, rows in self.rows.items()]

    def vocabularies(self) -> dict[str, dict[str, object]]:
        """Returns the tables of open vocabulary: none."""
        return {}

    def bytes(self) -> int:
        """Returns the bytes of rows and state."""
        state = [each for of_table in self.state.values() for each in of_table]
        return sum(each.nbytes for each in [*self.rows.values(), *state])

    def differences(self, store: tb.Store) -> int:
        """Counts the weights whose bits are not those of ``store``."""
        count = 0
        for name, rows in self.rows.items():
            theirs = store.read_rows(name, 0, len(rows))
            count += int((rows.view(torch.int32) != theirs.view(torch.int32)).sum())
        return count


def compare(
    options: argparse.Namespace,
    build: Callable[[tb.Store], nn.Module],
    train: Callable[[Run, nn.Module, Iterable[Any], Any], None],
    loader: Iterable[Any],
    *,
    quality: str,
    optimizer: tb.Adagrad | tb.Adam,
    finish: Callable[[nn.Module, tb.Store], None] | None = None,
) -> None:
    """Trains on disk and, with ``--check``, in plain torch; reports, compares and draws.

    Args:
        options: Those of :func:`arguments`.
        build: Makes a model with ``embeddings`` on a store, with the same dense weights each time.
        train: Trains a model with batches and adds the quality of each epoch; takes where the rows
            can be read, too.
        loader: Yields the batches of an epoch.
        quality: What is measured.
        optimizer: That of the rows.
        finish: Does more with the model on disk, when it is trained.
    """
    runs = [Run("on disk")]
    with opened(options.store, options.budget) as store:
        model = build(store)
        train(runs[0], model, tb.lookahead(loader, model), store)
        runs[0].rows_bytes = store.stats()["budget"]["peak_bytes"]
        if finish is not None:
            finish(model, store)
        if options.check:
            runs.append(Run("plain torch"))
            with tb.Store.open(backend="memory", dram_budget="64GiB") as twin:
                model = build(twin)
                model.embeddings = rows = TorchRows(model.embeddings, optimizer)
            train(runs[1], model, loader, rows)
            runs[1].rows_bytes = rows.bytes()
        report(runs, quality, options.json)
        if options.check:
            check(rows.differences(store), runs)
    if options.figure:
        draw(options.figure, runs, quality)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Returns how often a positive has a larger score than a negative; ties count half."""
    _, at, counts = scores.double().unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1) / 2  # the mean rank of equal scores
    is_positive = labels > 0.5
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    above = ranks[at][is_positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def report(runs: list[Run], quality: str, path: Path | None = None) -> None:
    """Prints a line per run; writes all of it into ``path``, as JSON."""
    for run in runs:
        print(
            f"{run.name}: {quality} {run.quality[-1]:.4f}, {run.seconds:.1f} s, "
            f"rows took {run.rows_bytes / MIB:.1f} MiB of memory",
            flush=True,
        )
    if path is not None:
        path.write_text(json.dumps({"quality": quality, "runs": [asdict(run) for run in runs]}))


def check(differing_rows: int, runs: list[Run]) -> None:
    """Ends the program unless rows and quality are those of plain torch, bit for bit."""
    ours, theirs = runs
    print(f"{differing_rows} weights differ in bits from plain torch", flush=True)
    if differing_rows or ours.quality != theirs.quality:
        raise SystemExit(f"not plain torch's numbers: {ours.quality}, {theirs.quality}")


def draw(path: Path, runs: list[Run], quality: str) -> None:
    """Draws the quality of every epoch, a line per run; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel=quality)
    for run, style in zip(runs, ("-", "--", ":"), strict=False):
        axes.plot(range(1, len(run.quality) + 1), run.quality, style, marker="o", label=run.name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path)
    print(f"drew {path}", flush=True)
