"""Options that the verbs of a training run share, and the run that they open."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.progress import Progress
from tierbed.cli.fields import Fields
from tierbed.cli.settings import Key
from tierbed.config.io import IoOptions
from tierbed.config.words import Backend, IoEngine, OnMismatch, Order, Positive, SizeText
from tierbed.data.source import DataOptions, Source
from tierbed.recipes.run import Run, TrainOptions, auto_batch_size

VOCABULARY = "vocabulary"
#: What was set when the run was started last, for `--config`.
CONFIGURATION = "config.toml"

RunFolder = Annotated[Path, Key("store", "path"), typer.Option("--store", help="The run's folder.")]
StepSamples = Annotated[
    int | None,
    Key("train"),
    typer.Option(
        "--batch-size",
        min=1,
        metavar="N",
        help="Samples per step; by default chosen from the data.",
        rich_help_panel="Training",
    ),
]
#: The seed is that of the training; paths are options of their own.
DATA = Fields(
    title="Data",
    section="data",
    skip=("paths", "seed", "first_sample"),
    names={"eval_share": "eval-last"},
    defaults={"eval_share": 0.2},
)


@dataclass(frozen=True, kw_only=True)
class StoreArguments:
    """How the rows are kept.

    Args:
        dram_budget: Memory for everything the store keeps: 16MiB, 4GiB.
        order: forward is along a plan.
        on_mismatch: What a batch does that was not planned.
        backend: How rows are kept when training by window.
        io_engine: auto falls back by itself.
        disk_quota: Most bytes on disk.
        shards: New run: parts that train at the same time.
        hbm_budget: Memory of --device for rows of the forward order: 8GiB.
    """

    dram_budget: SizeText = "1GiB"
    order: Order = "auto"
    on_mismatch: OnMismatch | None = None
    backend: Backend | None = None
    io_engine: IoEngine = "auto"
    disk_quota: SizeText | None = None
    shards: Positive | None = None
    hbm_budget: SizeText | None = None

    def of_store(self, device: str) -> dict[str, Any]:
        """Returns the arguments of :meth:`tierbed.Store.open`, of a run on ``device``."""
        given = dict(vars(self))
        given["io"] = IoOptions(engine=given.pop("io_engine"))
        if self.hbm_budget is not None:
            given["device"] = device
        return given


Tables = Annotated[StoreArguments, Fields(title="Store", section="store")]


def with_files(options: DataOptions, data: list[Path] | None, seed: int) -> DataOptions:
    """Returns what ``--data`` and ``--seed`` add to the other options of the samples."""
    return replace(options, paths=tuple(map(str, data or ())), seed=seed)


def open_run(
    folder: Path,
    source: Source,
    options: TrainOptions,
    batch_size: int | None,
    tables: StoreArguments,
) -> Run:
    """Opens the run that ``train`` or ``plan`` was told of."""
    batch_size = batch_size or auto_batch_size(source.train_samples)
    return Run(
        folder,
        source,
        replace(options, batch_size=batch_size),
        source.train_samples,
        store_options=tables.of_store(options.device),
        about={"data": source.about()},
        eval_samples=source.eval_samples,
    )


def tell(message: str) -> None:
    """Says something beside the result, unless the command is quiet."""
    if not Progress.is_quiet:
        print(message, file=sys.stderr, flush=True)
