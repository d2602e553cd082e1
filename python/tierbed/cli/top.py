"""``top``: a live view of a training run or of a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierbed.cli.fields import add
from tierbed.cli.folders import tables_folder
from tierbed.cli.serving import ask
from tierbed.errors import InvalidError, IoError
from tierbed.report.history import is_alive, progress_path, read_progress

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["register"]

# Makes the frame of a terminal with so many columns.
Look = Callable[[int], "RenderableType"]


def top(
    of: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL",
            help="Folder of a run or a store that trains, or a server's --admin-address.",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end; so without a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 1.0,
) -> None:
    """Show a training run or a server as it works, until Ctrl-C.

    Training tells its progress in a file beside the store's folder, once a second, and does not
    notice who looks. A server is asked for its statistics, as its live page does.
    """
    from rich.console import Console

    look = _look_at_server(of) if of.startswith(("http://", "https://")) else _look_at_run(of)
    console = Console()
    first = look(console.width)
    if once or not console.is_terminal:
        console.print(first)
        return
    _watch(console, look, first, interval)


def _watch(console: Any, look: Look, first: RenderableType, interval: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = first
    live = Live(first, console=console, screen=True, auto_refresh=False)
    # Not a `with`: Ctrl-C may come while the first frame is drawn, and the screen goes back too.
    try:
        live.start(refresh=True)
        while True:
            time.sleep(interval)
            try:
                shown = look(console.width)
                live.update(shown, refresh=True)
            except (IoError, InvalidError) as error:  # a server restarts, a run begins anew
                live.update(Group(Text(str(error), style="red"), shown), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        live.stop()


def _look_at_run(of: str) -> Look:
    from tierbed.report.frames import training_frame

    place = Path(of)
    inner = tables_folder(place) if place.is_dir() else place

    def look(width: int) -> RenderableType:
        told = read_progress(inner)
        if told is None:
            raise _nothing_told(place, inner)
        return training_frame(told, of, time.time(), is_alive(told), width)

    return look


def _nothing_told(place: Path, inner: Path) -> InvalidError:
    if (inner / "snapshot.json").is_file():
        return InvalidError(
            f"{place} is a snapshot, which does not train; name the admin address of a server "
            "instead: tierbed serve SNAPSHOT --admin-address 127.0.0.1:8082, then tierbed top "
            "http://127.0.0.1:8082",
            {"path": str(place)},
        )
    return InvalidError(
        f"no training tells of itself in {place} ({progress_path(inner).name} is not beside it); "
        "name the folder of a store on disk that trains, a second after its first step, or the "
        "admin address of a server, such as http://127.0.0.1:8082",
        {"path": str(place)},
    )


def _look_at_server(url: str) -> Look:
    from tierbed.report.frames import server_frame

    def look(width: int) -> RenderableType:
        try:
            stats = ask(url, "/stats")
        except InvalidError as error:
            if "answered 404" in str(error):
                raise InvalidError(
                    f"{url} has no statistics; start the server with --admin-address and name "
                    "that address",
                    {"url": url},
                ) from error
            raise
        if not isinstance(stats, dict) or "tiers" not in stats:
            raise InvalidError(
                f"{url} is no server of Tierbed; name the --admin-address of one", {"url": url}
            )
        return server_frame(stats, url, width)

    return look


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    add(app, "top", top, "Watch a training run or a server at work.")
