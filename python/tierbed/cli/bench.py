"""``bench``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed.errors import InvalidError

__all__ = ["register"]


def bench(
    suite: Annotated[str, typer.Argument(help="training or lookup.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, about a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for JSON and PNG.")] = Path(
        "bench-out"
    ),
    seed: Annotated[int, typer.Option("--seed")] = 1,
) -> None:
    """Measure all systems of a suite; writes OUT/SUITE.json and OUT/SUITE.png."""
    from tierbed.bench import SUITES

    if suite not in SUITES:
        raise InvalidError(f"unknown suite {suite!r}; there are {', '.join(sorted(SUITES))}")
    path = SUITES[suite](out, quick, seed)
    print(f"wrote {path} and {path.with_suffix('.png')}")


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.command("bench")(bench)
