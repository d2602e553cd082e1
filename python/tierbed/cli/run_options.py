"""Options that the verbs of a training run share, and the run that they open."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tierbed.config import words
from tierbed.config.io import IoOptions
from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from tierbed.data.source import Source
    from tierbed.recipes.run import Run

VOCABULARY = "vocabulary"

Order = Annotated[words.Order, typer.Option("--order", help="forward is along a plan.")]
OnMismatch = Annotated[
    words.OnMismatch | None,
    typer.Option("--on-mismatch", help="What a batch does that was not planned."),
]
DiskQuota = Annotated[str | None, typer.Option("--disk-quota", help="Most bytes on disk.")]
Backend = Annotated[
    words.Backend | None,
    typer.Option(
        "--backend",
        metavar="|".join(get_args(words.Backend)),
        help="How rows are kept when training by window.",
    ),
]
Shards = Annotated[
    int | None,
    typer.Option("--shards", min=1, help="New run: parts that train at the same time."),
]
RunFolder = Annotated[Path, typer.Option("--store", help="The run's folder.")]
Scale = Annotated[
    float, typer.Option("--scale", help="synthetic: share of Criteo's published cardinalities.")
]
Dim = Annotated[int, typer.Option("--dim", min=1, help="Elements per row.")]
StepSamples = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="By default chosen from the data.")
]
Window = Annotated[int, typer.Option("--window", min=0, help="Look-ahead, in batches.")]
CheckpointSteps = Annotated[
    int, typer.Option("--checkpoint-steps", min=0, help="0: at the end, or when interrupted.")
]
Samples = Annotated[
    int | None, typer.Option("--samples", min=1, help="Use only the first samples.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of initial weights and generated samples.")]
MinCount = Annotated[
    int, typer.Option("--min-count", min=1, help="Rarer tokens share one row per feature.")
]
Label = Annotated[str, typer.Option("--label", help="parquet: column of the label.")]
Dense = Annotated[str, typer.Option("--dense", help="parquet: columns of numbers, a,b,c.")]
Categorical = Annotated[
    str, typer.Option("--categorical", help="parquet: columns of tokens, a,b,c.")
]
EvalLast = Annotated[
    float, typer.Option("--eval-last", min=0.0, max=0.9, help="Share kept for evaluation.")
]


def check_names(told: dict[str, Any]) -> None:
    """Refuses names of no model or optimizer."""
    from tierbed.nn import MODELS
    from tierbed.recipes.run import OPTIMIZERS

    _one_of("--model", told["model"], MODELS)
    _one_of("--optimizer", told["optimizer"], OPTIMIZERS)


def open_source_of(told: dict[str, Any], vocabulary: Path) -> Source:
    """Opens the samples that ``train`` or ``plan`` was told of."""
    from tierbed.data.source import DataOptions, open_source

    options = DataOptions(
        told["data_format"],
        tuple(map(str, told["data"] or ())),
        samples=told["samples"],
        eval_share=told["eval_last"],
        min_count=told["min_count"],
        seed=told["seed"],
        scale=told["scale"],
        label=told["label"],
        dense=_names(told["dense"]),
        categorical=_names(told["categorical"]),
    )
    return open_source(options, vocabulary)


def open_run(folder: Path, source: Source, told: dict[str, Any]) -> Run:
    """Opens the run that ``train`` or ``plan`` was told of."""
    from tierbed.recipes.run import Run, TrainOptions, auto_batch_size

    options = TrainOptions(
        model=told["model"],
        embedding_dim=told["dim"],
        batch_size=told["batch_size"] or auto_batch_size(source.train_samples),
        epochs=told["epochs"],
        optimizer=told["optimizer"],
        lr=told["lr"],
        dense_lr=told["dense_lr"],
        seed=told["seed"],
        window=told["window"],
        checkpoint_steps=told["checkpoint_steps"],
    )
    names = ("dram_budget", "disk_quota", "backend", "order", "on_mismatch", "shards")
    return Run(
        folder,
        source,
        options,
        source.train_samples,
        store_options={
            **{name: told[name] for name in names},
            "io": IoOptions(engine=told["io_engine"]),
        },
        about={"data": source.about()},
        eval_samples=source.eval_samples,
    )


def tell(message: str) -> None:
    """Says something beside the result."""
    print(message, file=sys.stderr, flush=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _one_of(option: str, value: str, known: Any) -> None:
    if value not in known:
        raise InvalidError(f"{option} must be one of {', '.join(sorted(known))}, not {value!r}")
