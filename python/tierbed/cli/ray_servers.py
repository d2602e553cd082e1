"""``ray``: servers that a Ray cluster keeps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tierbed._util.durations import parse_seconds
from tierbed._util.report import print_table, write_json, write_text
from tierbed.cli.fields import Fields, add
from tierbed.cli.options import JsonOut, shows_tables
from tierbed.config.words import SecondsText
from tierbed.errors import TierbedError
from tierbed.serve.ray_servers import (
    RayServer,
    ServerOptions,
    ray_servers,
    start_ray_servers,
    stop_ray_servers,
)

__all__ = ["register"]

Cluster = Annotated[str, typer.Option("--ray", help="Address of the cluster.")]
Name = Annotated[str, typer.Option("--name", help="Of the servers.")]
Members = Annotated[
    Path | None,
    typer.Option("--members", help="Write the addresses of ready servers here, one a line."),
]

servers = typer.Typer(
    short_help="Keep servers on the nodes of a Ray cluster.",
    help="Keep servers on the nodes of a Ray cluster. Requests do not pass through Ray.",
    no_args_is_help=True,
)


def up(
    given: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Options of the server, behind --."),
    ] = None,
    *,
    snapshot: Annotated[
        str,
        typer.Option(
            "--snapshot",
            metavar="[NAME=]SNAPSHOT",
            help="As of `tierbed serve`: a folder that all nodes have, or LOCATION@CHANNEL.",
        ),
    ],
    options: Annotated[ServerOptions, Fields()],
    ray: Cluster = "auto",
    wait: Annotated[
        SecondsText, typer.Option("--wait", metavar="TIME", help="Until all are ready, at most.")
    ] = "120s",
    members: Members = None,
    json_path: JsonOut = None,
) -> None:
    """Start a server on each of some nodes, and start it again whenever it ends."""
    words = [snapshot, *(given or ())]
    found = start_ray_servers(words, options, address=ray, wait_s=parse_seconds(wait, "--wait"))
    _show(found, members, json_path)


def status(
    *,
    name: Name = "tierbed",
    ray: Cluster = "auto",
    members: Members = None,
    json_path: JsonOut = None,
) -> None:
    """Show where servers listen and whether they are ready; exit code 1 if one is not."""
    found = ray_servers(name, address=ray)
    _show(found, members, json_path)
    if not found or not all(one.is_ready for one in found):
        raise TierbedError(
            f"{sum(one.is_ready for one in found)} of {len(found)} servers by the name {name} are "
            "ready"
        )


def down(*, name: Name = "tierbed", ray: Cluster = "auto") -> None:
    """End the servers; requests that are being answered are answered."""
    print(f"ended {stop_ray_servers(name, address=ray)} servers")


def _show(found: list[RayServer], members: Path | None, json_path: Path | None) -> None:
    rows = [asdict(one) for one in found]
    if shows_tables(json_path):
        print_table("servers", rows)
    if json_path is not None:
        write_json(json_path, rows)
    if members is not None:
        write_text(members, "".join(f"{one.address}\n" for one in found if one.is_ready))


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    add(servers, "up", up, "Start servers on nodes, and keep them.")
    add(servers, "status", status, "Show where servers listen.")
    add(servers, "down", down, "End the servers.")
    app.add_typer(servers, name="ray")
