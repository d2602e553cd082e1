"""``doctor``: does this machine, with this folder, suit Tierbed, and what to change?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from tierbed._util.report import print_table, write_json
from tierbed.cli.doctor import disk, packages, system
from tierbed.cli.doctor.findings import Finding
from tierbed.cli.doctor.system import System
from tierbed.cli.fields import add
from tierbed.cli.options import JsonOut, shows_tables
from tierbed.cli.stop import StopSignal
from tierbed.errors import InvalidError, TierbedError

__all__ = ["examine", "register"]


def examine(folder: Path, *, is_timed: bool, machine: System | None = None) -> list[Finding]:
    """Returns what there is to say of this machine and a folder for tables.

    Args:
        folder: Where tables would be.
        is_timed: Measure how fast it is, which takes some seconds and 64 MiB of room.
        machine: Where facts of the machine come from.
    """
    machine = machine or System()
    found = system.findings(machine)
    try:
        with TemporaryDirectory(dir=folder, prefix="tierbed-doctor-") as scratch:
            found += disk.findings(machine, folder, Path(scratch), is_timed=is_timed)
    except (OSError, TierbedError) as error:
        found.append(disk.file_system(machine.mounts(), folder))
        cause = getattr(error, "strerror", None) or error
        told = f"files cannot be written and read in {folder}: {cause}"
        advice = "a folder that this user may write, on a file system with room"
        found.append(Finding("folder", "problem", told, advice))
    return found + packages.findings(machine, packages.Torch.ask())


def doctor(
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="The folder where tables would be.")
    ] = Path("."),
    speed: Annotated[
        bool,
        typer.Option(
            "--speed/--no-speed",
            help="Measure the folder's disk: some seconds, with at most 64 MiB.",
        ),
    ] = True,
    json_path: JsonOut = None,
) -> None:
    """Check what this machine and a folder offer, and say what to change.

    The exit code is 1 where something stops Tierbed from working. Warnings are of what makes it
    slow or risky. Files that are written in the folder are removed.
    """
    if not path.is_dir():
        raise InvalidError(f"no such folder: {path}; make it first", {"path": str(path)})
    with StopSignal("the files of doctor are gone"):
        found = examine(path, is_timed=speed)
    _tell(path, found, json_path)
    if any(one.state == "problem" for one in found):
        raise typer.Exit(1)


def _tell(path: Path, found: Sequence[Finding], json_path: Path | None) -> None:
    counts = {
        f"{state}_count": sum(one.state == state for one in found)
        for state in ("problem", "warning")
    }
    if shows_tables(json_path):
        rows = [
            {"check": one.name, "": one.state, "found": one.found, "change": one.advice}
            for one in found
        ]
        print_table(f"{path.resolve()}", rows)
    if json_path is not None:
        checks = [one.to_dict() for one in found]
        write_json(json_path, {"path": str(path.resolve()), **counts, "checks": checks})


def register(app: typer.Typer) -> None:
    """Adds the verb of this package."""
    add(app, "doctor", doctor, "Check machine and folder, and say what to change.")
