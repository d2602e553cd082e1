"""A publish that goes on beside training: a thread copies what was frozen, and writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from tierbed import _native
from tierbed._native import NativeStore
from tierbed.errors import UnsupportedError
from tierbed.results import SnapshotReport

__all__ = ["Request", "publish_async"]

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is published, as the engine takes it.

    Attributes:
        path: A new folder.
        attachments: Named bytes.
        base: Paths of a snapshot and of deltas upon it; None for a whole snapshot.
        changes: How a delta finds what changed.
        placements: Ids of tables, and the file of their placement.
        codecs: Ids of tables, and the codec of each.
        heads: Ids of tables, and the head of each that has a tail.
    """

    path: str
    attachments: list[tuple[str, bytes]]
    base: list[str] | None
    changes: str
    placements: list[tuple[list[int], str]]
    codecs: list[tuple[int, str]]
    heads: list[tuple[int, str]]


def publish_async(
    native: NativeStore, request: Request, progress: Progress | None
) -> Future[SnapshotReport]:
    """Begins to publish what the tables are now.

    Raises:
        UnsupportedError: The store cannot while it trains.
    """
    begun = _native.begin_publish(
        native,
        request.path,
        request.attachments,
        request.base,
        request.changes,
        request.placements,
        request.codecs,
        request.heads,
    )
    if not begun:
        raise UnsupportedError(
            "this store publishes only while training stands still: it follows a plan, has several "
            "shards, or nothing was written to it yet; call publish"
        )
    future: Future[SnapshotReport] = Future()
    future.set_running_or_notify_cancel()

    def finish() -> None:
        try:
            future.set_result(SnapshotReport(**_native.finish_publish(native, progress)))
        except BaseException as error:
            future.set_exception(error)

    # Not a daemon: a program that ends waits for what it publishes.
    threading.Thread(target=finish, name="tierbed-publish", daemon=False).start()
    return future
