"""Command line: suites by ``tierbed-bench``; ``tierbed bench``, ``sim`` and the others."""

from __future__ import annotations

import typer

from tierbed import cli
from tierbed_bench.cli import bench, demo, generate, sim, tco

__all__ = ["main", "register"]


def register(app: typer.Typer) -> None:
    """Adds the commands of this package to those of ``tierbed``."""
    for module in (demo, tco, bench, sim, generate):
        module.register(app)


def main(arguments: list[str] | None = None) -> int:
    """Runs ``tierbed-bench`` and returns its exit code.

    Args:
        arguments: What follows the program's name; by default the process's own.
    """
    for module in (sim, tco, generate, demo):
        module.register(bench.suites)
    return cli.run(bench.suites, "tierbed-bench", arguments)
