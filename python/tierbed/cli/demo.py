"""``demo``: the main job, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed.cli.options import Model
from tierbed.recipes.demo import DemoOptions, run_demo

__all__ = ["register"]


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of report, run and snapshot.")] = Path(
        "demo-out"
    ),
    data: Annotated[
        Path | None, typer.Option("--data", help="A file in Criteo's layout; else generated.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=5000, help="To generate.")] = 120_000,
    model: Model = "dlrm",
    seed: Annotated[int, typer.Option("--seed")] = 1,
) -> None:
    """Train, kill, resume, compare, publish, serve, ask and verify; ends with a report."""
    run_demo(DemoOptions(out, data, samples=samples, model=model, seed=seed))


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.command("demo", short_help="Train, kill, resume, publish, serve, and report.")(demo)
