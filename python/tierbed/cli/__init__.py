"""The command line: one verb per thing a user wants done.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the
work failed (a disk, damaged data), 2 the call was wrong, 3 a server ended although some work
had not, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Annotated

import typer

from tierbed._native import version
from tierbed.cli import (
    doctor,
    folders,
    lab,
    models,
    place,
    plan,
    ray_servers,
    serving,
    tables,
    top,
    training,
)
from tierbed.errors import ClosedError, InvalidError, TierbedError, UnsupportedError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="tierbed",
    help="Embedding tables bigger than memory on NVMe SSDs, for PyTorch recommender models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # As wide as the screen, up to where lines are hard to read.
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tierbed {version()}")
        raise typer.Exit


@app.callback()
def _tierbed(
    is_asked: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_tell_version, is_eager=True, help="Tell the version."
        ),
    ] = False,
) -> None:
    """Embedding tables bigger than memory on NVMe SSDs, for PyTorch recommender models."""


@functools.cache
def _register() -> None:
    serves = (serving, top, models, ray_servers)
    for module in (training, plan, *serves, folders, tables, place, doctor, lab):
        module.register(app)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: What follows the program's name; by default the process's own, and then the
            process ends with that code.
    """
    _register()
    return run(app, "tierbed", arguments)


def run(commands: typer.Typer, name: str, arguments: list[str] | None = None) -> int:
    """Runs commands, prints their errors, and returns the exit code.

    Args:
        commands: What to run.
        name: The program's name in messages.
        arguments: As of :func:`main`.
    """
    code = 0
    try:
        commands(args=arguments, prog_name=name)
    except SystemExit as exit_:  # how typer ends: 0, or 2 with a message for a wrong call
        code = exit_.code if isinstance(exit_.code, int) else 0
    except (InvalidError, UnsupportedError, ClosedError) as error:
        code = _told(error, 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (TierbedError, OSError) as error:
        code = _told(error, 2 if isinstance(error, FileNotFoundError) else 1)
    if arguments is None:
        sys.exit(code)
    return code


def _told(error: BaseException, code: int) -> int:
    print(f"tierbed: {error}", file=sys.stderr)
    return code
