"""A publish that goes on beside training: a thread copies what was frozen, and writes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tierbed import _native
from tierbed._native import NativeStore
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.results import SnapshotReport

if TYPE_CHECKING:
    import torch

    from tierbed._native_shards import PublishedShards
    from tierbed.train.store import Store

__all__ = ["Request", "base_paths", "compiled_parts", "publish_async"]

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
        shards: How rows are divided; None for one snapshot.
    """

    path: str
    attachments: list[tuple[str, bytes]]
    base: list[str] | None
    changes: str
    placements: list[tuple[list[int], str]]
    codecs: list[tuple[int, str]]
    heads: list[tuple[int, str]]
    shards: PublishedShards | None


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
        request.shards,
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


def compiled_parts(model: torch.nn.Module | None, store: Store) -> dict[str, bytes]:
    """Compiles the dense part of ``model`` for servers of what ``store`` publishes.

    Raises:
        InvalidError: There is no model.
        UnsupportedError: It cannot be compiled, or there is no compiler.
    """
    if model is None:
        raise InvalidError("there is no model to compile; give it, or leave out compiled")
    # Few programs compile, and servers are loaded with it.
    from tierbed.serve.compiled import compile_dense

    return compile_dense(model, store)


def base_paths(
    base: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> list[str] | None:
    """Returns the paths of a snapshot and of deltas upon it; None for none.

    Args:
        base: One path, or several.
    """
    if base is None:
        return None
    given = [base] if isinstance(base, (str, os.PathLike)) else list(base)
    return [os.fspath(path) for path in given]
