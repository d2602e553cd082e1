"""``demo``: the main job, end to end."""

from __future__ import annotations

from typing import Annotated

import typer

from tierbed.cli.fields import Fields, add
from tierbed_bench.demo import DemoOptions, run_demo

__all__ = ["register"]


def demo(options: Annotated[DemoOptions, Fields(skip=("scale",))]) -> None:
    """Train, kill, resume, compare, publish, serve, ask and verify; ends with a report."""
    run_demo(options)


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    add(app, "demo", demo, "Train, kill, resume, publish, serve, and report.")
