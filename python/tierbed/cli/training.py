"""``train``, ``eval``, ``publish``, ``generate``: from a log to a published model."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from tierbed.cli.run_options import (
    VOCABULARY,
    Backend,
    Categorical,
    CheckpointSteps,
    Dense,
    Dim,
    DiskQuota,
    EvalLast,
    Label,
    MinCount,
    OnMismatch,
    Order,
    RunFolder,
    Samples,
    Scale,
    Seed,
    Shards,
    StepSamples,
    Window,
    check_names,
    open_run,
    open_source_of,
    tell,
)
from tierbed.cli.stop import StopSignal

if TYPE_CHECKING:
    from tierbed.recipes.run import Run

__all__ = ["register"]


def train(
    store: RunFolder,
    data: Data = None,
    data_format: DataFormat = "criteo",
    model: Model = "dlrm",
    dim: Dim = 16,
    dram_budget: DramBudget = "1GiB",
    eval_last: EvalLast = 0.2,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the data.")] = 1,
    batch_size: StepSamples = None,
    optimizer: Annotated[str, RowOptimizer] = "adagrad",
    lr: Annotated[float, typer.Option("--lr", help="Learning rate of the rows.")] = 0.02,
    dense_lr: Annotated[float, typer.Option("--dense-lr", help="Of the dense part.")] = 0.002,
    window: Window = 32,
    checkpoint_steps: CheckpointSteps = 0,
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
    told = dict(locals())
    check_names(told)
    set_threads(threads)
    with contextlib.ExitStack() as closing:
        with StopSignal("no step was trained; the same command begins again") as stop:
            run = open_run(store, open_source_of(told, store / VOCABULARY), told)
            closing.enter_context(contextlib.closing(run))
            if run.resumed_from_step is not None:
                tell(f"continuing at step {run.resumed_from_step}")
            stop.begin()
            trained = run.train(
                on_checkpoint=lambda step: tell(f"checkpoint at step {step}"),
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
    finish({**asdict(report), "snapshot": str(out)}, json_path, f"published {store}")


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


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.command("train", short_help="Train a click model; started again, it goes on.")(train)
    app.command("eval")(eval_)
    app.command("publish", short_help="Write a serving snapshot of a model or store.")(publish)
    app.command("generate")(generate)
