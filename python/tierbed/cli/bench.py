"""``bench``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed.cli.options import JsonOut
from tierbed.errors import InvalidError

__all__ = ["register"]


def bench(
    suite: Annotated[str, typer.Argument(help="training or lookup.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, about a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for JSON and PNG.")] = Path(
        "bench-out"
    ),
    seed: Annotated[int, typer.Option("--seed")] = 1,
    json: JsonOut = None,
    scale: Annotated[
        float | None,
        typer.Option("--scale", help="training: share of Criteo-Kaggle's samples; 1 is all."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="training: slices a system.")] = 3,
    systems: Annotated[
        str, typer.Option("--systems", help="training: these beside the forward order, by comma.")
    ] = "",
    models: Annotated[
        str,
        typer.Option("--models", help="training: whole steps of dlrm,deepfm,pnn, part by part."),
    ] = "",
    batch: Annotated[
        str, typer.Option("--batch", help="training --models: samples of a batch, by comma.")
    ] = "32,128,1024",
    seconds: Annotated[
        float, typer.Option("--seconds", help="training: longest for one answer of a system.")
    ] = 400.0,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", help="training: folder for what is deleted again.")
    ] = None,
) -> None:
    """Measure all systems of a suite; writes OUT/SUITE.json and OUT/SUITE.png."""
    from tierbed.bench import SUITES, ModelOptions, TrainingOptions, run_models, run_training

    if suite == "training" and models:
        wanted = ModelOptions(
            models=_words(models),
            batch_lens=_numbers(batch),
            quick=quick,
            seed=seed,
        )
        path = run_models(out, wanted, json)
    elif suite == "training":
        options = TrainingOptions(
            scale=scale,
            seed=seed,
            quick=quick,
            repeats=repeats,
            systems=_words(systems),
            scratch=scratch,
            seconds_max=seconds,
        )
        path = run_training(out, options, json)
    elif suite in SUITES:
        path = SUITES[suite](out, quick, seed)
    else:
        known = ", ".join(sorted({"training", *SUITES}))
        raise InvalidError(f"unknown suite {suite!r}; there are {known}")
    print(f"wrote {path} and {path.with_suffix('.png')}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError as error:
        raise InvalidError(f"--batch must be numbers with commas between, not {text!r}") from error


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.command("bench")(bench)
