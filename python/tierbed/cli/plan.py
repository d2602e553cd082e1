"""``plan``: what a training run will need, rehearsed; and what hosts a cluster needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from tierbed._util.bytes import parse_bytes
from tierbed.cli.fields import Fields, add
from tierbed.cli.options import Data, JsonOut, Threads, finish
from tierbed.cli.plan_cluster import plan_cluster
from tierbed.cli.run_options import (
    DATA,
    VOCABULARY,
    StepSamples,
    Tables,
    open_run,
    tell,
    with_files,
)
from tierbed.cli.settings import Key
from tierbed.cli.stop import StopSignal
from tierbed.data.source import DataOptions, Source, open_source
from tierbed.errors import InvalidError
from tierbed.recipes.full_size import at_full_size, count_used_rows
from tierbed.recipes.rehearsal import Rehearsal, rehearse
from tierbed.recipes.run import Run, TrainOptions, auto_batch_size

__all__ = ["register"]

SAMPLES = 50_000
#: Fewer say nothing of how rows grow.
SAMPLES_MIN = 8
#: What `tierbed plan` is without a further word.
DEFAULT = "run"


def plan(
    *,
    data: Data = None,
    source_options: Annotated[
        DataOptions,
        # Those of the run are more than a rehearsal needs.
        replace(DATA, defaults={**DATA.defaults, "samples": SAMPLES}, sections={"samples": "plan"}),
    ],
    batch_size: StepSamples = None,
    options: Annotated[
        TrainOptions,
        # Learning rates change no need.
        Fields(
            title="Training",
            section="train",
            skip=("batch_size", "epochs", "lr", "dense_lr"),
            names={"embedding_dim": "dim"},
        ),
    ],
    tables: Tables,
    threads: Annotated[Threads, Key("train")] = 1,
    scratch: Annotated[
        Path | None,
        typer.Option("--scratch", help="An existing folder on the disk to ask about."),
    ] = None,
    full_samples: Annotated[
        int | None,
        typer.Option(
            "--full-samples",
            min=1,
            metavar="N",
            help="Also compute what a run over so many samples needs; rehearses the half, too.",
        ),
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """Rehearse training on the first samples; report memory, disk and I/O per batch.

    Trains two epochs in a scratch folder that is gone afterwards, with the options of the run.
    Hosts that serve and train are planned by `tierbed plan cluster`.
    """
    # Of three epochs two are trained, so that none is the last.
    options = replace(options, epochs=3)
    budget_bytes = parse_bytes(tables.dram_budget, "--dram-budget")
    if scratch is not None and not scratch.is_dir():
        raise InvalidError(f"--scratch: no such folder: {scratch}; make it first, or leave it out")
    torch.set_num_threads(threads)
    with (
        StopSignal("the scratch folder is gone"),
        TemporaryDirectory(dir=scratch, prefix="tierbed-plan-") as folder,
    ):
        given = with_files(source_options, data, options.seed)
        source = open_source(given, Path(folder) / VOCABULARY)
        sample_count = source.train_samples + source.eval_samples
        batch_size = batch_size or auto_batch_size(source.train_samples)

        def rehearsed(samples: Source) -> Rehearsal:
            def open_in(at: Path, budget: int) -> Run:
                limited = replace(tables, dram_budget=str(budget))
                return open_run(at, samples, options, batch_size, limited)

            return rehearse(Path(folder), open_in, budget_bytes)

        needs = rehearsed(source)
        result = {"samples": sample_count, **needs.to_dict()}
        if full_samples is not None:
            result |= _at_full_size(given, source, needs, full_samples, rehearsed, Path(folder))
    finish(result, json_path, "plan")
    if sample_count == given.samples and given.format != "synthetic":
        tell(f"this is a run over the first {sample_count:,} samples; --samples looks at more")
    if not needs.fits:
        print(
            f"the budget is too small: at least {needs.dram_budget_bytes:,} bytes are needed, "
            "which this was rehearsed with",
            file=sys.stderr,
            flush=True,
        )


def _at_full_size(
    given: DataOptions,
    source: Source,
    needs: Rehearsal,
    full_samples: int,
    rehearsed: Callable[[Source], Rehearsal],
    folder: Path,
) -> dict[str, Any]:
    """Rehearses the first half of the samples, too, and computes what all samples need."""
    sample_count = source.train_samples + source.eval_samples
    if full_samples < sample_count or sample_count < SAMPLES_MIN:
        raise InvalidError(
            f"--full-samples {full_samples:,} is computed from {sample_count:,} samples; it takes "
            f"as many at least, and {SAMPLES_MIN} of them: set --samples"
        )
    half = open_source(replace(given, samples=sample_count // 2), folder / f"{VOCABULARY}-half")
    full = at_full_size(
        rehearsed(half), needs, count_used_rows(source, half), sample_count, full_samples
    )
    if full.later_epoch_read_bytes_per_batch is None:
        tell(
            f"the rows of {sample_count // 2:,} samples fit the memory, so that bytes of a batch "
            "are not computed; rehearse more with --samples"
        )
    return full.to_dict()


class _Plans(TyperGroup):
    """Plans by name; without a name it is the rehearsal of a run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name before options that come without one."""
        if not args or args[0] not in self.commands:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    plans = typer.Typer(
        cls=_Plans,
        short_help="Rehearse training; or size a cluster.",
        help="Rehearse training (run, also without a name), or size a cluster before it is bought.",
    )
    add(plans, DEFAULT, plan, "Rehearse training: memory, disk and I/O.", section="plan")
    add(plans, "cluster", plan_cluster, "Size a cluster before it is bought.", section="cluster")
    app.add_typer(plans, name="plan")
