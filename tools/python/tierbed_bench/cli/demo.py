"""``demo``: the main job, end to end, and online learning."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tierbed.cli.fields import Fields, add
from tierbed_bench.demo import DemoOptions, run_demo
from tierbed_bench.online import OnlineOptions, run_online

__all__ = ["register"]

DEFAULT = "lifecycle"


class _Demos(TyperGroup):
    """Demos by name; without a name it is the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name before options that come without one."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


demos = typer.Typer(
    cls=_Demos,
    short_help="Show the main job, or online learning, end to end.",
    help="Show the main job (lifecycle, also without a name) or online learning, end to end.",
)


def lifecycle(options: Annotated[DemoOptions, Fields(skip=("scale",))]) -> None:
    """Train, kill, resume, compare, publish, serve, ask and verify; ends with a report."""
    run_demo(options)


def online(options: Annotated[OnlineOptions, Fields()]) -> None:
    """Train on a drifting stream, publish deltas, and ask servers that follow and one that stays.

    Ends with AUC and age of the answers over time.
    """
    run_online(options)


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    app.add_typer(demos, name="demo")


add(demos, DEFAULT, lifecycle, "Train, kill, resume, publish, serve, and report.")
add(demos, "online", online, "Train on a stream; servers follow it by deltas.")
