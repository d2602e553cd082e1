"""``train``, ``eval``, ``publish``, ``plan``, ``generate``: from a log to a published model."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tierbed._util.bytes import parse_bytes
from tierbed._util.progress import Progress
from tierbed.cli.options import (
    FORMATS,
    Data,
    DataFormat,
    DramBudget,
    IoEngine,
    JsonOut,
    Model,
    RowOptimizer,
    Threads,
    finish,
    set_threads,
)
from tierbed.cli.stop import StopSignal
from tierbed.config import words
from tierbed.config.io import IoOptions
from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from tierbed.recipes.run import Run

__all__ = ["register"]

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


def train(
    store: RunFolder,
    data: Data = None,
    data_format: DataFormat = "criteo",
    model: Model = "dlrm",
    dim: Annotated[int, typer.Option("--dim", min=1, help="Elements per row.")] = 16,
    dram_budget: DramBudget = "1GiB",
    eval_last: EvalLast = 0.2,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the data.")] = 1,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="By default chosen from the data.")
    ] = None,
    optimizer: Annotated[str, RowOptimizer] = "adagrad",
    lr: Annotated[float, typer.Option("--lr", help="Learning rate of the rows.")] = 0.02,
    dense_lr: Annotated[float, typer.Option("--dense-lr", help="Of the dense part.")] = 0.002,
    window: Annotated[int, typer.Option("--window", min=0, help="Look-ahead, in batches.")] = 32,
    checkpoint_steps: Annotated[
        int,
        typer.Option("--checkpoint-steps", min=0, help="0: at the end, or when interrupted."),
    ] = 0,
    seed: Seed = 0,
    samples: Samples = None,
    min_count: MinCount = 1,
    scale: Scale = 0.01,
    label: Label = "label",
    dense: Dense = "",
    categorical: Categorical = "",
    order: Order = "auto",
    on_mismatch: OnMismatch = None,
    backend: Backend = None,
    io_engine: IoEngine = "auto",
    disk_quota: DiskQuota = None,
    shards: Shards = None,
    threads: Threads = 1,
    json_path: JsonOut = None,
) -> None:
    """Train a click model whose tables live in a store; started again, it continues."""
    from tierbed.data.source import DataOptions, open_source
    from tierbed.nn import MODELS
    from tierbed.recipes.run import OPTIMIZERS, Run, TrainOptions, auto_batch_size

    _one_of("--model", model, MODELS)
    _one_of("--optimizer", optimizer, OPTIMIZERS)
    set_threads(threads)
    with contextlib.ExitStack() as closing:
        with StopSignal("no step was trained; the same command begins again") as stop:
            source = open_source(
                DataOptions(
                    data_format,
                    tuple(map(str, data or ())),
                    samples=samples,
                    eval_share=eval_last,
                    min_count=min_count,
                    seed=seed,
                    scale=scale,
                    label=label,
                    dense=_names(dense),
                    categorical=_names(categorical),
                ),
                store / VOCABULARY,
            )
            options = TrainOptions(
                model=model,
                embedding_dim=dim,
                batch_size=batch_size or auto_batch_size(source.train_samples),
                epochs=epochs,
                optimizer=optimizer,
                lr=lr,
                dense_lr=dense_lr,
                seed=seed,
                window=window,
                checkpoint_steps=checkpoint_steps,
            )
            store_options = {
                "dram_budget": dram_budget,
                "disk_quota": disk_quota,
                "backend": backend,
                "io": IoOptions(engine=io_engine),
                "order": order,
                "on_mismatch": on_mismatch,
                "shards": shards,
            }
            run = Run(
                store,
                source,
                options,
                source.train_samples,
                store_options=store_options,
                about={"data": source.about()},
                eval_samples=source.eval_samples,
            )
            closing.enter_context(contextlib.closing(run))
            if run.resumed_from_step is not None:
                _tell(f"continuing at step {run.resumed_from_step}")
            stop.begin()
            trained = run.train(
                on_checkpoint=lambda step: _tell(f"checkpoint at step {step}"),
                should_stop=stop.is_asked,
            )
        stop.exit(f"the same command goes on at step {run.steps}")
        result = _result_of(run, trained)
    finish(result, json_path, f"{model} on {data_format}")


def _result_of(run: Run, trained: dict[str, Any]) -> dict[str, Any]:
    scores = run.evaluate(run.eval_samples) if run.eval_samples else {}
    return {
        **scores,
        **trained,
        **run.usage(),
        "model": run.options.model,
        "embedding_dim": run.options.embedding_dim,
        "batch_size": run.options.batch_size,
        "train_samples": run.train_samples,
        "resumed_from_step": run.resumed_from_step,
        "store": str(run.folder),
        "stats": run.store.stats(),
    }


def eval_(
    store: RunFolder,
    data: Data = None,
    data_format: Annotated[
        str | None,
        typer.Option("--format", metavar=FORMATS, help="By default that of the training."),
    ] = None,
    dram_budget: DramBudget = "1GiB",
    samples: Samples = None,
    threads: Threads = 1,
    json_path: JsonOut = None,
) -> None:
    """Score another file with a trained model."""
    from tierbed.data.source import SYNTHETIC_SAMPLES, DataOptions, open_source
    from tierbed.recipes.evaluate import evaluate
    from tierbed.recipes.run import EVAL_BATCH, load_run, read_run

    set_threads(threads)
    trained = read_run(store)["data"]
    trained_on = DataOptions.from_dict({k: v for k, v in trained.items() if k != "files"})
    options = replace(
        trained_on,
        format=data_format or trained_on.format,
        paths=tuple(map(str, data or ())),
        samples=samples,
        eval_share=0.0,
        # Generated samples are scored behind those of the training.
        first_sample=trained_on.first_sample + (trained_on.samples or SYNTHETIC_SAMPLES),
    )
    source = open_source(options, store / VOCABULARY, must_exist=True)
    opened, model, description = load_run(store, dram_budget=dram_budget)
    with opened:
        total = source.train_samples
        with Progress("scoring", total, "samples") as bar:

            def batches() -> Any:
                for batch in source.batches(0, total, EVAL_BATCH):
                    yield batch
                    bar.advance(int(batch.label.numel()))

            result: dict[str, Any] = dict(evaluate(model, batches(), window=4))
        budget = opened.stats()["budget"]
    result.update(
        dram_budget_bytes=budget["limit_bytes"],
        dram_peak_bytes=budget["peak_bytes"],
        model=description["options"]["model"],
        store=str(store),
    )
    finish(result, json_path, f"evaluation of {store}")


def publish(
    store: RunFolder,
    out: Annotated[Path, typer.Option("--out", help="The snapshot: a new folder.")],
    base: Annotated[
        Path | None, typer.Option("--base", help="A snapshot: write only what differs from it.")
    ] = None,
    dram_budget: DramBudget = "1GiB",
    json_path: JsonOut = None,
) -> None:
    """Write a serving snapshot of a trained model, or of a bare store."""
    from tierbed.cli.folders import tables_folder
    from tierbed.recipes.run import RUN_FILE, load_run
    from tierbed.train.store import Store

    model = None
    if (store / RUN_FILE).is_file():
        opened, model, _ = load_run(store, dram_budget=dram_budget)
    else:
        opened = Store.open(tables_folder(store), dram_budget=dram_budget)
    with opened, Progress("publishing", None, "rows") as bar:
        report = opened.publish(out, model, base=base, progress=bar.set)
    finish({**report, "snapshot": str(out)}, json_path, f"published {store}")


def plan(
    data: Data = None,
    data_format: DataFormat = "criteo",
    dim: Annotated[int, typer.Option("--dim", min=1, help="Elements per row.")] = 16,
    dram_budget: DramBudget = "1GiB",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1)] = 128,
    optimizer: Annotated[str, RowOptimizer] = "adagrad",
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="How much of the data to look at.")
    ] = 50_000,
    min_count: MinCount = 1,
    seed: Seed = 0,
    scale: Scale = 0.01,
    label: Label = "label",
    dense: Dense = "",
    categorical: Categorical = "",
    json_path: JsonOut = None,
) -> None:
    """Predict memory, disk and reads per batch of training by window from a sample of its data."""
    import tempfile

    from tierbed.data.source import DataOptions, open_source
    from tierbed.recipes.run import OPTIMIZERS
    from tierbed.train.sizing import TableShape, predict

    _one_of("--optimizer", optimizer, OPTIMIZERS)
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(
            DataOptions(
                data_format,
                tuple(map(str, data or ())),
                samples=samples,
                min_count=min_count,
                seed=seed,
                scale=scale,
                label=label,
                dense=_names(dense),
                categorical=_names(categorical),
            ),
            Path(folder) / VOCABULARY,
        )
        sizes = source.table_sizes
        tables = [TableShape(name, rows, dim, optimizer) for name, rows in sizes.items()]
        prediction = predict(
            tables,
            {name: name for name in sizes},
            parse_bytes(dram_budget, "--dram-budget"),
            (b.sparse for b in source.batches(0, source.train_samples, batch_size)),
        )
    result = {"samples": source.train_samples, "batch_size": batch_size, **prediction.to_dict()}
    finish(result, json_path, "plan")
    if not prediction.fits:
        _tell(f"the budget is too small: at least {prediction.dram_min_bytes:,} bytes are needed")


def generate(
    out: Annotated[Path, typer.Option("--out", help="The file: .tsv, .tsv.gz or .tsv.zst.")],
    samples: Annotated[int, typer.Option("--samples", min=1)] = 100_000,
    scale: Scale = 0.01,
    seed: Seed = 0,
    json_path: JsonOut = None,
) -> None:
    """Write generated samples in Criteo's layout."""
    from tierbed.data import write_criteo_tsv

    with Progress("generating", samples, "samples") as bar:
        write_criteo_tsv(out, samples, scale=scale, seed=seed, progress=bar.set)
    size = out.stat().st_size
    finish({"samples": samples, "file_bytes": size, "file": str(out)}, json_path, "generated")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _one_of(option: str, value: str, known: Any) -> None:
    if value not in known:
        raise InvalidError(f"{option} must be one of {', '.join(sorted(known))}, not {value!r}")


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.command("train", short_help="Train a click model; started again, it goes on.")(train)
    app.command("eval")(eval_)
    app.command("publish", short_help="Write a serving snapshot of a model or store.")(publish)
    app.command("plan", short_help="Predict memory, disk and reads of training.")(plan)
    app.command("generate")(generate)
