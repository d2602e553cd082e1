"""Commands of the package tierbed-bench: ``demo``, ``bench``, ``sim``, ``tco``, ``generate``.

Where it is installed they are commands like all others; otherwise they name what to install.
"""

from __future__ import annotations

import importlib
import importlib.util

import typer

from tierbed import _native
from tierbed.errors import UnsupportedError

__all__ = ["register"]

PACKAGE = "tierbed_bench"
COMMANDS = ("demo", "bench", "sim", "tco", "generate")


def register(app: typer.Typer) -> None:
    """Adds the commands of tierbed-bench, or commands in their place that say what is missing."""
    if importlib.util.find_spec(PACKAGE) is not None and hasattr(_native, "bench_worker"):
        importlib.import_module(f"{PACKAGE}.cli").register(app)
        return
    for name in COMMANDS:
        app.command(
            name,
            short_help="Not installed: pip install tierbed-bench.",
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_missing)


def _missing(context: typer.Context) -> None:
    """Is part of the package tierbed-bench, which is not installed."""
    raise UnsupportedError(
        f"`tierbed {context.info_name}` is part of the package tierbed-bench, which is not"
        " installed; pip install tierbed-bench"
    )
