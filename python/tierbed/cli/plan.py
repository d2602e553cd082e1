"""``plan``: what a training run will need, rehearsed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from tierbed._util.bytes import parse_bytes
from tierbed.cli.options import (
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
from tierbed.errors import InvalidError

__all__ = ["register"]


def plan(
    data: Data = None,
    data_format: DataFormat = "criteo",
    model: Model = "dlrm",
    dim: Dim = 16,
    dram_budget: DramBudget = "1GiB",
    eval_last: EvalLast = 0.2,
    batch_size: StepSamples = None,
    optimizer: Annotated[str, RowOptimizer] = "adagrad",
    window: Window = 32,
    checkpoint_steps: CheckpointSteps = 0,
    seed: Seed = 0,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Of a run over only the first samples.")
    ] = 50_000,
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
    scratch: Annotated[
        Path | None,
        typer.Option("--scratch", help="An existing folder on the disk to ask about."),
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """Rehearse training on the first samples; report memory, disk and I/O per batch.

    Trains two epochs in a scratch folder that is gone afterwards, with the options of the run.
    """
    # Learning rates change no need. Of three epochs two are trained, so that none is the last.
    told = {**locals(), "epochs": 3, "lr": 0.02, "dense_lr": 0.002}
    from tierbed.recipes.rehearsal import rehearse

    check_names(told)
    budget_bytes = parse_bytes(dram_budget, "--dram-budget")
    if scratch is not None and not scratch.is_dir():
        raise InvalidError(f"--scratch: no such folder: {scratch}; make it first, or leave it out")
    set_threads(threads)
    with (
        StopSignal("the scratch folder is gone"),
        TemporaryDirectory(dir=scratch, prefix="tierbed-plan-") as folder,
    ):
        source = open_source_of(told, Path(folder) / VOCABULARY)
        needs = rehearse(
            Path(folder),
            lambda at, budget: open_run(at, source, {**told, "dram_budget": budget}),
            budget_bytes,
        )
    sample_count = source.train_samples + source.eval_samples
    finish({"samples": sample_count, **needs.to_dict()}, json_path, "plan")
    if sample_count == samples and data_format != "synthetic":
        tell(f"this is a run over the first {samples:,} samples; --samples looks at more")
    if not needs.fits:
        tell(
            f"the budget is too small: at least {needs.dram_budget_bytes:,} bytes are needed, "
            "which this was rehearsed with"
        )


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.command("plan", short_help="Rehearse training: memory, disk and I/O that it needs.")(plan)
