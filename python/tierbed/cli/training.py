"""``train``, ``eval``, ``publish``: from a log to a published model."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tierbed._util.progress import Progress
from tierbed._util.report import write_text
from tierbed.cli.fields import Fields, add
from tierbed.cli.folders import tables_folder
from tierbed.cli.options import Codec, Data, DramBudget, HeadRows, JsonOut, Threads, finish
from tierbed.cli.run_options import (
    CONFIGURATION,
    DATA,
    VOCABULARY,
    RunFolder,
    StepSamples,
    Tables,
    open_run,
    tell,
    with_files,
)
from tierbed.cli.settings import Effective, Key
from tierbed.cli.stop import StopSignal
from tierbed.config import words
from tierbed.config.words import DataFormat
from tierbed.data.source import SYNTHETIC_SAMPLES, DataOptions, open_source
from tierbed.errors import InvalidError
from tierbed.recipes.evaluate import evaluate
from tierbed.recipes.run import EVAL_BATCH, RUN_FILE, Run, TrainOptions, load_run, read_run
from tierbed.train.publisher import Publisher
from tierbed.train.shards import Shards, parse_by, push_shards
from tierbed.train.store import Store

__all__ = ["register"]


def train(
    store: RunFolder,
    *,
    data: Data = None,
    source_options: Annotated[DataOptions, DATA],
    batch_size: StepSamples = None,
    options: Annotated[
        TrainOptions,
        Fields(
            title="Training",
            section="train",
            skip=("batch_size",),
            names={"embedding_dim": "dim"},
        ),
    ],
    tables: Tables,
    threads: Threads = 1,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write a page here: memory, reads, other budgets."),
    ] = None,
    json_path: JsonOut = None,
    effective: Effective,
) -> None:
    """Train a click model whose tables live in a store; started again, it continues."""
    torch.set_num_threads(threads)
    given = with_files(source_options, data, options.seed)
    with contextlib.ExitStack() as closing:
        with StopSignal("no step was trained; the same command begins again") as stop:
            source = open_source(given, store / VOCABULARY)
            run = open_run(store, source, options, batch_size, tables)
            closing.enter_context(contextlib.closing(run))
            write_text(store / CONFIGURATION, effective.text)
            if run.resumed_from_step is not None:
                tell(f"continuing at step {run.resumed_from_step}")
            if report is not None:
                run.store.record()
            stop.begin()
            trained = run.train(
                on_checkpoint=lambda step: tell(f"checkpoint at step {step}"),
                should_stop=stop.is_asked,
            )
        stop.exit(f"the same command goes on at step {run.steps}")
        result = _result_of(run, trained)
        if report is not None:
            run.store.report().save(report)
    finish(result, json_path, f"{options.model} on {given.format}")


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
    data: Annotated[Data, Key("eval", "paths")] = None,
    data_format: Annotated[
        DataFormat | None, typer.Option("--format", help="By default that of the training.")
    ] = None,
    dram_budget: DramBudget = "1GiB",
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Use only the first samples.")
    ] = None,
    threads: Threads = 1,
    json_path: JsonOut = None,
) -> None:
    """Score another file with a trained model."""
    torch.set_num_threads(threads)
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


def _check_publish(out: Path | None, to: str | None, *, base: Path | None, delta: bool) -> None:
    """Refuses what goes nowhere, or has a base of another kind."""
    if (out is None) == (to is None):
        raise InvalidError("a version goes to a folder or to a location; give --out or --to")
    if (delta and to is None) or (base is not None and out is None):
        raise InvalidError(
            "--base is for --out, and --delta for --to, whose channel says what it differs from; "
            "give --out with --base, or --to with --delta"
        )


def _divided(
    shards: int | None, replicas: int, shard_by: list[str], everywhere: str
) -> Shards | None:
    """Returns into which shards a publish goes; None for one snapshot."""
    if shards is not None:
        by = parse_by(shard_by)
        return Shards(count=shards, replicas=replicas, by=by, everywhere=everywhere)
    if shard_by:
        raise InvalidError("--shard-by says how rows are divided; say into how many by --shards")
    return None


def publish(
    store: RunFolder,
    *,
    out: Annotated[Path | None, typer.Option("--out", help="The snapshot: a new folder.")] = None,
    base: Annotated[
        Path | None, typer.Option("--base", help="A snapshot: write only what differs from it.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", help="In place of a folder: the location that gets a version."),
    ] = None,
    channel: Annotated[
        str, typer.Option("--channel", help="With --to: the channel that moves to it.")
    ] = "canary",
    delta: Annotated[
        bool,
        typer.Option(
            "--delta/--no-delta",
            help="With --to: only what differs from the channel's version.",
        ),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled/--no-compiled",
            help="Compile the model too, for servers with --predict aoti.",
        ),
    ] = False,
    codec: Codec = None,
    head_rows: HeadRows = None,
    shards: Annotated[
        int | None,
        typer.Option("--shards", min=1, help="Divide rows into so many snapshots, one per host."),
    ] = None,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="With --shards: servers of each, as a note.")
    ] = 1,
    shard_by: Annotated[
        list[str] | None,
        typer.Option(
            "--shard-by",
            metavar="HOW",
            help="hash, rows (ranges of ids), a placement with shards, or TABLE=PLACEMENT for each "
            "table or TABLE+TABLE.",
        ),
    ] = None,
    everywhere: Annotated[
        words.SizeText,
        typer.Option("--everywhere", metavar="SIZE", help="Tables this small are on every shard."),
    ] = "1MiB",
    dram_budget: DramBudget = "1GiB",
    json_path: JsonOut = None,
) -> None:
    """Write a serving snapshot of a trained model, or of a bare store."""
    _check_publish(out, to, base=base, delta=delta)
    divided = _divided(shards, replicas, shard_by or [], everywhere)
    if divided is not None and (delta or base is not None):
        raise InvalidError("a delta is not divided into shards; publish in full, with --shards")
    model = None
    if compiled and not (store / RUN_FILE).is_file():
        raise InvalidError(
            "a bare store has no model to compile; leave out --compiled, or name the folder of "
            "tierbed train",
            {"store": str(store)},
        )
    if (store / RUN_FILE).is_file():
        opened, model, _ = load_run(store, dram_budget=dram_budget)
    else:
        opened = Store.open(tables_folder(store), dram_budget=dram_budget)
    with opened, Progress("publishing", None, "rows") as bar:
        if out is not None:
            report = opened.publish(
                out,
                model,
                base=base,
                codec=codec,
                head_rows=head_rows,
                shards=divided,
                compiled=compiled,
                progress=bar.set,
            )
            result = {**asdict(report), "snapshot": str(out)}
        elif divided is not None:
            assert to is not None, "either was given"
            with tempfile.TemporaryDirectory(prefix="shards.", dir=store) as folder:
                report = opened.publish(
                    folder,
                    model,
                    codec=codec,
                    head_rows=head_rows,
                    shards=divided,
                    compiled=compiled,
                    progress=bar.set,
                )
                version = push_shards(folder, to, channel=channel)
            result = {**asdict(report), **asdict(version), "location": to, "channel": channel}
        else:
            assert to is not None, "either was given"
            publisher = Publisher(
                opened,
                model,
                to,
                channel=channel,
                delta_every=None,
                full_every=None,
                keep=None,
                codec=codec,
                head_rows=head_rows,
                compiled=compiled,
                on_error="raise",
            )
            with publisher:
                version = publisher.publish_now(full=not delta)
            # With it are the notes of what changes from here on, for the next delta.
            opened.checkpoint_rows(f"published-{channel}")
            result = {**asdict(version), "location": to, "channel": channel}
    finish(result, json_path, f"published {store}")


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    add(app, "train", train, "Train a click model; started again, it goes on.", section="train")
    add(app, "eval", eval_, section="eval")
    add(app, "publish", publish, "Write a serving snapshot of a model or store.", section="publish")
