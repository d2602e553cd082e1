"""``models``: versions of a served model at a location, and the channels that name them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.cli.fields import add
from tierbed.cli.options import JsonOut, finish, shows_tables
from tierbed.results import Channel
from tierbed.serve.versions import Versions

__all__ = ["register"]

Location = Annotated[
    str,
    typer.Argument(metavar="LOCATION", help="Where versions lie: a folder, or s3://bucket/prefix."),
]
Version = Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Number of the version.")]
ToMove = Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel that moves.")]


def list_(location: Location, json_path: JsonOut = None) -> None:
    """List versions and channels."""
    found = Versions(location).list()
    if shows_tables(json_path):
        versions = [
            {
                "version": one.version,
                "state": one.state,
                "bytes": one.file_bytes,
                "written": _when(one.written_at_s),
                "channels": ", ".join(one.channels),
                "needed by": ", ".join(one.needed_by),
                "pinned": "yes" if one.is_pinned else "",
            }
            for one in found.versions
        ]
        channels = [
            {
                "channel": one.name,
                "version": one.version,
                "chain": _chain(one.chain),
                "moved": None if one.written_at_s is None else _when(one.written_at_s),
                "damage": one.damage or "",
            }
            for one in found.channels
        ]
        print_table(f"versions at {location}", versions)
        print_table(f"channels at {location}", channels)
    if json_path is not None:
        write_json(json_path, {"location": location, **asdict(found)})


def push(
    location: Location,
    folder: Annotated[Path, typer.Argument(help="What was published: a snapshot or a delta.")],
    channel: Annotated[str, typer.Option("--channel", help="The channel that moves to it.")],
    json_path: JsonOut = None,
) -> None:
    """Make a published folder the next version."""
    with Progress("pushing", None, "bytes") as bar:
        version = Versions(location).push(folder, channel=channel, progress=bar.set)
    told = {**asdict(version), "chain": _chain(version.chain), "channel": channel}
    _finish(told, {**told, **asdict(version)}, json_path, f"pushed {folder}")


def pull(
    location: Location,
    to: Annotated[Path, typer.Option("--to", help="Gets a folder for each version.")],
    channel: Annotated[
        str | None, typer.Option("--channel", help="The channel whose versions are wanted.")
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="In place of a channel: this version.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", help="Most bytes a second: 200MiB.")
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """Bring versions to this machine, verified; started again, it goes on."""
    with Progress("pulling", None, "bytes") as bar:
        pulled = Versions(location).pull(
            to, channel=channel, version=version, bandwidth=bandwidth, progress=bar.set
        )
    told = {**asdict(pulled), "folders": ", ".join(pulled.folders)}
    _finish(told, asdict(pulled), json_path, f"pulled from {location}")


def promote(
    location: Location,
    source: Annotated[str, typer.Argument(metavar="FROM", help="The channel with the version.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The channel that moves there.")],
    json_path: JsonOut = None,
) -> None:
    """Move a channel where another one is."""
    _moved(Versions(location).promote(source, to), json_path)


def rollback(
    location: Location,
    channel: ToMove,
    to: Annotated[int, typer.Option("--to", min=1, help="Number of the version.")],
    json_path: JsonOut = None,
) -> None:
    """Move a channel to an earlier version."""
    _moved(Versions(location).rollback(channel, to=to), json_path)


def prune(
    location: Location,
    keep: Annotated[
        str, typer.Option("--keep", help="Versions this young stay, and those in use since.")
    ] = "72h",
    json_path: JsonOut = None,
) -> None:
    """Remove versions that no channel needs."""
    with Progress("pruning", None, "versions") as bar:
        pruned = Versions(location).prune(keep, progress=bar.set)
    told = {
        "removed": ", ".join(map(str, pruned.removed)) or "none",
        "kept": ", ".join(map(str, pruned.kept)) or "none",
        "bytes_removed": pruned.bytes_removed,
    }
    _finish(told, asdict(pruned), json_path, f"pruned {location}")


def pin(location: Location, version: Version, json_path: JsonOut = None) -> None:
    """Keep a version, and what it is a delta on."""
    Versions(location).pin(version)
    _finish({"version": version, "pinned": True}, None, json_path, f"pinned at {location}")


def unpin(location: Location, version: Version, json_path: JsonOut = None) -> None:
    """Let a version be pruned again."""
    was_pinned = Versions(location).unpin(version)
    told = {"version": version, "pinned": False, "was_pinned": was_pinned}
    _finish(told, None, json_path, f"unpinned at {location}")


def _moved(channel: Channel, json_path: Path | None) -> None:
    told = {
        "channel": channel.name,
        "version": channel.version,
        "chain": _chain(channel.chain),
    }
    whole = {**asdict(channel), "version": channel.version}
    _finish(told, whole, json_path, f"moved {channel.name}")


def _finish(
    told: dict[str, Any], whole: dict[str, Any] | None, json_path: Path | None, title: str
) -> None:
    """Shows ``told``, and writes ``whole``, by default the same, as JSON."""
    if shows_tables(json_path):
        finish(told, None, title)
    if json_path is not None:
        write_json(json_path, told if whole is None else whole)


def _chain(versions: tuple[int, ...]) -> str:
    return " > ".join(map(str, versions))


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file, under ``models``."""
    models = typer.Typer(
        help="List, push, pull, promote and prune versions of a model.",
        no_args_is_help=True,
    )
    add(models, "list", list_)
    add(models, "push", push)
    add(models, "pull", pull)
    add(models, "promote", promote)
    add(models, "rollback", rollback)
    add(models, "prune", prune)
    add(models, "pin", pin)
    add(models, "unpin", unpin)
    app.add_typer(models, name="models")
