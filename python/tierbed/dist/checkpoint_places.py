"""Places of checkpoints: a folder that is renamed when it is whole, or objects of a store.

A store of objects knows no rename. There the manifest is the commit: it is written last, and only
where there is none. Files are named after their digests, so that what an interrupted save left is
known again by its name and its length, and is not sent twice.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from tierbed._native import NativeObjects
from tierbed.errors import CorruptionError, InvalidError, IoError, UnsupportedError

__all__ = [
    "MANIFEST",
    "FolderPlace",
    "ObjectsPlace",
    "PathLike",
    "Place",
    "find_checkpoints",
    "place_of",
]

PathLike = str | os.PathLike[str]
MANIFEST = "manifest.json"
#: Longest manifest that is read: one of some five million files.
MANIFEST_BYTES_MAX = 2 << 30
#: A larger object is sent in chunks, which a request has the time for.
_WHOLE_BYTES_MAX = 64 << 20
_CHUNK_BYTES = 16 << 20
#: Tries of a request, on top of those of the client.
_TRIES = 3
_PAUSE_S = 0.2
# What a save may leave, and nobody else writes: nothing else is ever removed.
_LEFT = re.compile(
    r"(rank\d+-[0-9a-f]{32}\.safetensors|extra-[0-9a-f]{32}\.pt"
    r"|part-[0-9a-f]{32}-\d+\.json|probe-[0-9a-f]{32})"
)
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*):/(/?)(.*)", re.DOTALL)
_T = TypeVar("_T")


class Place(Protocol):
    """Where a checkpoint lies, or comes to lie."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def begin(self, *, replaces: bool) -> dict[str, int]:
        """Makes room, on rank 0; returns names and bytes of files that are there already.

        Args:
            replaces: Whether a checkpoint that is there is given up.

        Raises:
            InvalidError: A checkpoint is there.
        """

    def take_over(self, there: Mapping[str, int]) -> None:
        """Takes what :meth:`begin` returned on rank 0."""

    def put(self, name: str, raw: bytes) -> bool:
        """Writes a file durably; false where it is there already. Any thread may call this."""

    def below(self) -> list[str]:
        """Returns the names of checkpoints that lie below."""

    def commit(self, manifest: bytes, names: Collection[str]) -> None:
        """Makes the checkpoint be there, on rank 0; ``names`` are those of all its files.

        Raises:
            InvalidError: Another checkpoint is there by now.
        """

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """Reads a file; None where there is none. Any thread may call this."""


def place_of(path: PathLike, *, is_renamed: bool = True) -> Place:
    """Returns the place that a path or an address names.

    Args:
        path: A folder, or ``s3://bucket/name``; ``file:///folder`` is a folder of objects.
        is_renamed: Whether a folder gets its name when it is whole; else it is one of objects.

    Raises:
        InvalidError: An address that went through :class:`pathlib.Path`, or leads nowhere.
        UnsupportedError: A store that cannot be reached.
    """
    text = os.fspath(path)
    address = _ADDRESS.fullmatch(text)
    if address is None:
        return FolderPlace(Path(text)) if is_renamed else ObjectsPlace(text, text)
    if not address[2]:
        raise InvalidError(
            f"{text!r} was an address before pathlib.Path took a slash away; give the "
            "address as a string",
            {"path": text},
        )
    return ObjectsPlace(f"/{address[3].lstrip('/')}" if address[1] == "file" else text, text)


def find_checkpoints(path: PathLike) -> list[str]:
    """Returns the whole checkpoints of ranks below a folder or an address, by name.

    Numbers in names count as numbers: ``step-9`` comes before ``step-10``. Each has a name of its
    own: ``<path>/<name>``. The objects below an address are listed, all of them.

    Args:
        path: What the checkpoints lie below: ``runs/ads`` or ``s3://runs/ads``.

    Returns:
        What ``load`` takes of each, the last one last.

    Raises:
        InvalidError: An address that leads nowhere.
        IoError: The store of the address refuses, or cannot be reached.
    """
    place = place_of(path)
    start = os.fspath(path).rstrip("/")
    return [f"{start}/{name}" for name in sorted(place.below(), key=_by_number)]


def _by_number(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


class FolderPlace:
    """A folder, which is called ``.NAME.tmp`` until it is whole.

    Args:
        folder: Its name at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = folder.with_name(f".{folder.name}.tmp")

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self._folder)

    def begin(self, *, replaces: bool) -> dict[str, int]:
        """As :meth:`Place.begin`; what an interrupted save left goes."""
        if self._folder.exists() and not replaces:
            raise InvalidError(f"a checkpoint must be a new folder, and {self._folder} exists")
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._folder.exists():
            # Under its own name it is whole, until it is gone.
            self._folder.rename(self._temporary)
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        return {}

    def take_over(self, there: Mapping[str, int]) -> None:
        """As :meth:`Place.take_over`."""

    def put(self, name: str, raw: bytes) -> bool:
        """As :meth:`Place.put`."""
        with (self._temporary / name).open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        return True

    def below(self) -> list[str]:
        """As :meth:`Place.below`; what is not whole has a name with a dot before it."""
        found = [manifest.parent.name for manifest in self._folder.glob(f"*/{MANIFEST}")]
        return [name for name in found if not name.startswith(".")]

    def commit(self, manifest: bytes, names: Collection[str]) -> None:
        """As :meth:`Place.commit`."""
        self.put(MANIFEST, manifest)
        _sync_folder(self._temporary)
        self._temporary.rename(self._folder)
        _sync_folder(self._folder.parent)

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """As :meth:`Place.get`."""
        try:
            return (self._folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


class ObjectsPlace:
    """Objects of a bucket, or of a folder that is used as one.

    Args:
        location: Where they are.
        name: What messages call it.
    """

    def __init__(self, location: str, name: str) -> None:
        self._objects = NativeObjects(location)
        self._name = name
        self._there: dict[str, int] = {}

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    def begin(self, *, replaces: bool) -> dict[str, int]:
        """As :meth:`Place.begin`; files of what is replaced are not sent again."""
        listed = dict(_tried(self._objects.list))
        if MANIFEST in listed and replaces:
            _tried(lambda: self._objects.remove(MANIFEST))
        elif MANIFEST in listed:
            raise InvalidError(
                f"a checkpoint must be new, and {self._name} has one; give it another name",
                {"path": self._name},
            )
        self._check_conditions()
        return {name: size for name, size in listed.items() if _LEFT.fullmatch(name)}

    def take_over(self, there: Mapping[str, int]) -> None:
        """As :meth:`Place.take_over`."""
        self._there = dict(there)

    def put(self, name: str, raw: bytes) -> bool:
        """As :meth:`Place.put`."""
        if len(raw) > _WHOLE_BYTES_MAX:
            # In a folder it may have its length before all its bytes are durable: sent every time.
            _tried(lambda: self._objects.put_large(name, raw, _CHUNK_BYTES))
        elif self._there.get(name) == len(raw):
            return False
        else:
            _tried(lambda: self._objects.put(name, raw, False))
        return True

    def below(self) -> list[str]:
        """As :meth:`Place.below`."""
        names = [name.split("/") for name, _ in _tried(self._objects.list)]
        return [parts[0] for parts in names if len(parts) == 2 and parts[1] == MANIFEST]

    def commit(self, manifest: bytes, names: Collection[str]) -> None:
        """As :meth:`Place.commit`; then removes what interrupted saves left."""
        is_written = _tried(lambda: self._objects.put(MANIFEST, manifest, True))
        # A client that asked again finds its own first write.
        if not is_written and self.get(MANIFEST, MANIFEST_BYTES_MAX) != manifest:
            raise InvalidError(
                f"another checkpoint was saved to {self._name} meanwhile; give each another name",
                {"path": self._name},
            )
        self.tidy(self._there.keys() - {*names, MANIFEST})

    def tidy(self, names: Collection[str]) -> None:
        """Removes files that no checkpoint needs; those that stay are told by a warning."""
        for name in sorted(names):
            assert _LEFT.fullmatch(name), f"{name} is no file of a save"
            try:
                self._objects.remove(name)
            except IoError as error:
                warnings.warn(
                    f"{name} of {self._name} is needed no more and cannot be removed: {error}",
                    stacklevel=2,
                )

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """As :meth:`Place.get`."""
        found: bytes | None = _tried(lambda: self._objects.get(name, bytes_max))
        return found

    def has(self, name: str) -> bool:
        """Returns whether there is a file."""
        return _tried(lambda: self._objects.get_range(name, 0, 1)) is not None

    def _check_conditions(self) -> None:
        """Checks that of two who write the manifest one is told that it lost."""
        name = f"probe-{uuid.uuid4().hex}"
        _tried(lambda: self._objects.put(name, b"first", True))
        is_ignored = _tried(lambda: self._objects.put(name, b"second", True))
        _tried(lambda: self._objects.remove(name))
        if is_ignored:
            raise UnsupportedError(
                f"the store of {self._name} does not compare before it writes; use a store that "
                "has conditional writes: If-None-Match",
                {"path": self._name},
            )


def _tried(work: Callable[[], _T]) -> _T:
    """Runs a request that may be made again, some times.

    Reads and writes here are of names that have one content: made twice they change nothing.
    """
    for tried in range(1, _TRIES):
        try:
            return work()
        except (IoError, CorruptionError):
            time.sleep(_PAUSE_S * 2**tried)
    return work()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
