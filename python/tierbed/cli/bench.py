"""``bench SUITE``: measure this machine. Every suite writes OUT/SUITE.json and OUT/SUITE.png."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed.cli.options import JsonOut
from tierbed.errors import InvalidError

__all__ = ["register", "suites"]

Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, about a minute.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for JSON and PNG.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything that is drawn.")]
OUT = Path("bench-out")

suites = typer.Typer(
    help="Measure all systems of a suite; writes OUT/SUITE.json and OUT/SUITE.png.",
    no_args_is_help=True,
)


@suites.command()
def training(
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Share of Criteo-Kaggle's samples; 1 is all.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Slices a system.")] = 3,
    systems: Annotated[
        str, typer.Option("--systems", help="These beside the forward order, by comma.")
    ] = "",
    models: Annotated[
        str, typer.Option("--models", help="Whole steps of dlrm,deepfm,pnn, part by part.")
    ] = "",
    batch: Annotated[
        str, typer.Option("--batch", help="With --models: samples of a batch, by comma.")
    ] = "32,128,1024",
    seconds: Annotated[
        float, typer.Option("--seconds", help="Longest for one answer of a system.")
    ] = 400.0,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", help="Folder for what is deleted again.")
    ] = None,
) -> None:
    """Measure training stores on a generated trace, each in a process of its own."""
    from tierbed.bench import ModelOptions, TrainingOptions, run_models, run_training

    if models:
        wanted = ModelOptions(
            models=_words(models), batch_lens=_numbers(batch), quick=quick, seed=seed
        )
        _told(run_models(out, wanted, json))
        return
    options = TrainingOptions(
        scale=scale,
        seed=seed,
        quick=quick,
        repeats=repeats,
        systems=_words(systems),
        scratch=scratch,
        seconds_max=seconds,
    )
    _told(run_training(out, options, json))


@suites.command()
def lookup(quick: Quick = False, out: Out = OUT, seed: Seed = 1) -> None:
    """Measure lookups from a snapshot on disk, next to memory."""
    from tierbed.bench import run_lookup

    _told(run_lookup(out, quick, seed))


@suites.command()
def precision(
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Criteo file to train and score on; else generated samples."),
    ] = None,
    quick: Quick = False,
    out: Out = OUT,
    seed: Seed = 1,
    json: JsonOut = None,
) -> None:
    """Measure codecs: their errors, the time to decode, and what they cost a model's AUC."""
    from tierbed.bench import PrecisionOptions, run_precision

    _told(run_precision(out, PrecisionOptions(log=log, quick=quick, seed=seed), json))


def _told(path: Path) -> None:
    print(f"wrote {path} and {path.with_suffix('.png')}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError as error:
        raise InvalidError(f"--batch must be numbers with commas between, not {text!r}") from error


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.add_typer(suites, name="bench")
