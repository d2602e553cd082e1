"""Checkpoints that are written while training goes on.

Each rank keeps a checkpoint of its store, which is quick; a thread opens it to be read only and
writes its rows. Threads of several ranks make no collective call: each puts a small object beside
its files, which says what it wrote, or why it failed. Rank 0 waits for all of them, and writes the
manifest.

```text
rank 0  keep │ train ...    thread: files          │ waits for all parts │ manifest │ parts go
rank 1  keep │ train ...    thread: files, part-1  │ waits for the manifest
```
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tierbed import _native
from tierbed._util import state
from tierbed.dist.checkpoint import (
    RankTables,
    begun_place,
    commit,
    manifest_of,
    steps_of,
    together,
    write_extra,
    written_of,
)
from tierbed.dist.checkpoint_places import MANIFEST, ObjectsPlace, PathLike, place_of
from tierbed.errors import ClosedError, InvalidError, TierbedError, UnsupportedError
from tierbed.train.store import Store

__all__ = ["async_save_rows"]

_KEPT = "saving-"
_PART_BYTES_MAX = 1 << 30
_PAUSE_S, _PAUSE_S_MAX = 0.05, 1.0
# What a reader of a kept checkpoint gets to begin with, and at most.
_READ_BYTES, _READ_BYTES_MAX = 16 << 20, 64 << 30
_SAVING: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save on its way.

    Args:
        number: What tells it from every other.
        own: Who this rank is, and what it holds.
        store: The store whose kept checkpoint is written.
        steps: Steps of its tables at that checkpoint.
        extra: On rank 0, what belongs to the run beside the tables.
        timeout_s: How long to wait for the other ranks.
    """

    number: str
    own: RankTables
    store: Store
    steps: dict[str, int]
    extra: bytes | None
    timeout_s: float

    @property
    def kept(self) -> str:
        """Name of the kept checkpoint."""
        return f"{_KEPT}{self.number}"

    def part(self, rank: int) -> str:
        """Name of what ``rank`` says of its files."""
        return f"part-{self.number}-{rank}.json"


def async_save_rows(
    path: PathLike, own: RankTables, extra: Mapping[str, Any] | None, timeout_s: float
) -> Future[None]:
    """Begins a checkpoint together with all ranks; ``extra`` is that of rank 0.

    Raises:
        InvalidError: A checkpoint is there; nothing was kept.
        TierbedError: Another rank failed.
        UnsupportedError: A store that keeps no checkpoints.
    """
    ranks, store = own.ranks, own.store
    place = begun_place(ranks, lambda: _place(path, store))
    assert isinstance(place, ObjectsPlace), "made there"
    assert isinstance(store, Store), "checked with the place"
    number = str(together(ranks, lambda: uuid.uuid4().hex)[0])
    kept = f"{_KEPT}{number}"
    _SAVING.add(kept)

    def keep() -> None:
        _drop_left(store)
        store.checkpoint_rows(kept, keep=True)
        is_first = ranks.rank == 0 and extra is not None
        packed = state.pack(extra) if is_first and extra is not None else None
        steps = steps_of(own)
        saves.append(
            _Save(
                number=number, own=own, store=store, steps=steps, extra=packed, timeout_s=timeout_s
            )
        )

    saves: list[_Save] = []
    try:
        together(ranks, keep)
    except BaseException:
        _forget(store, kept)
        raise
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()
    # Not a daemon: a program that ends waits for what is on its way.
    threading.Thread(
        target=_run, args=(done, place, saves[0]), name="tierbed-checkpoint", daemon=False
    ).start()
    return done


def _place(path: PathLike, store: object) -> ObjectsPlace:
    if not isinstance(store, Store) or store.path is None:
        raise UnsupportedError(
            "only a store with a path keeps a checkpoint that is written while training goes on; "
            "use save, or open the store with a path"
        )
    place = place_of(path, is_renamed=False)
    assert isinstance(place, ObjectsPlace), "no folder is renamed here"
    return place


def _run(done: Future[None], place: ObjectsPlace, save: _Save) -> None:
    try:
        try:
            _write(place, save)
        finally:
            _forget(save.store, save.kept)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _write(place: ObjectsPlace, save: _Save) -> None:
    rank = save.own.ranks.rank
    try:
        with _opened(save) as frozen:
            written = written_of(place, save.own, frozen, save.steps)
        if rank != 0:
            _tell(place, save, written)
            _wait(save, lambda: _is_there(place, save), lambda: "rank 0")
            return
        parts = [written, *_parts_of_others(place, save)]
        kept = None if save.extra is None else write_extra(place, save.extra)
        commit(place, manifest_of(save.own, parts, kept))
    except BaseException as error:
        # Who waits for this rank learns why it waits in vain.
        _tell(place, save, {"failure": str(error)})
        raise
    place.tidy([save.part(other) for other in range(1, save.own.ranks.count)])


def _opened(save: _Save) -> Store:
    """Opens the kept checkpoint, with as much memory as that needs."""
    budget = _READ_BYTES
    while True:
        try:
            return Store.open(
                save.store.path,
                checkpoint=save.kept,
                read_only=True,
                dram_budget=budget,
                seed=save.store.seed,
            )
        except InvalidError as error:
            if "minimum_bytes" not in error.context or budget >= _READ_BYTES_MAX:
                raise
            budget *= 2


def _tell(place: ObjectsPlace, save: _Save, what: dict[str, Any]) -> None:
    place.put(save.part(save.own.ranks.rank), json.dumps(what).encode())


def _told(place: ObjectsPlace, save: _Save, rank: int) -> dict[str, Any] | None:
    """Returns what ``rank`` says; None as long as it says nothing.

    Raises:
        TierbedError: It failed.
    """
    raw = place.get(save.part(rank), _PART_BYTES_MAX)
    if raw is None:
        return None
    what: dict[str, Any] = json.loads(raw)
    if "failure" in what:
        raise TierbedError(f"rank {rank} failed: {what['failure']}")
    return what


def _parts_of_others(place: ObjectsPlace, save: _Save) -> list[dict[str, Any]]:
    missing = set(range(1, save.own.ranks.count))
    parts: dict[int, dict[str, Any]] = {}

    def look() -> bool:
        for rank in sorted(missing):
            what = _told(place, save, rank)
            if what is not None:
                parts[rank] = what
                missing.remove(rank)
        return not missing

    _wait(save, look, lambda: f"rank {min(missing)}")
    return [parts[rank] for rank in sorted(parts)]


def _is_there(place: ObjectsPlace, save: _Save) -> bool:
    return place.has(MANIFEST) or _told(place, save, 0) is not None


def _wait(save: _Save, look: Callable[[], bool], of: Callable[[], str]) -> None:
    ends_s, pause_s = time.monotonic() + save.timeout_s, _PAUSE_S
    while not look():
        if time.monotonic() > ends_s:
            raise TierbedError(
                f"{of()} did not write its part of the checkpoint in {save.timeout_s:g} s; look "
                "why, then save again: what was sent is not sent twice"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def _drop_left(store: Store) -> None:
    """Drops what saves kept that a kill ended."""
    for kept in store.checkpoints():
        if kept.name.startswith(_KEPT) and kept.name not in _SAVING:
            store.drop_checkpoint(kept.name)


def _forget(store: Store, kept: str) -> None:
    _SAVING.discard(kept)
    if all(one.name != kept for one in store.checkpoints()):
        return
    try:
        store.drop_checkpoint(kept)
    except ClosedError:
        _native.drop_checkpoint(str(store.path), kept)
