"""Recorded queries in a store of objects: files that are whole are uploaded, one by one."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tierbed._util.arrow import arrow_modules
from tierbed.data.file_parts import store_of
from tierbed.errors import InvalidError

__all__ = ["RecordUpload"]

INTERVAL_S = 5.0


class RecordUpload:
    """Uploads what a server records, while it records and when that ends.

    Queries are recorded into :attr:`folder` of this machine. Each file there appears whole, and so
    it does in the store: an upload that breaks leaves nothing. Servers share an address, because
    each has a folder of its own there. What cannot be uploaded is tried again; files that the
    recorder removed before count as lost.

    Args:
        address: Such as ``s3://logs/queries``; a folder for each group of tables is made there.
        interval_s: Between two looks for new files.

    Raises:
        InvalidError: There is no store of objects at the address.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(self, address: str, *, interval_s: float = INTERVAL_S) -> None:
        arrow_modules()
        self._interval_s = interval_s
        self._scratch = tempfile.TemporaryDirectory(prefix="tierbed-queries-")
        self.folder = Path(self._scratch.name)
        #: Of this run: numbers of files begin again with each.
        self.name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.uploaded_count = 0
        self._done: dict[Path, int] = {}
        self._seen: dict[Path, int] = {}
        self._uploaded: dict[Path, int] = {}
        self._told = ""
        self._ends = threading.Event()
        try:
            self._store, [self._base] = store_of([address])
            self._store.get_file_info(self._base)
        except (OSError, ValueError, NotImplementedError) as error:
            self._scratch.cleanup()
            raise InvalidError(
                f"--record: no store of objects at {_public(address)} ({type(error).__name__}); "
                "name one that may be written, as s3://logs/queries, or a folder"
            ) from error
        self._scheme = address.partition("://")[0]
        self._thread = threading.Thread(target=self._keep, name="record-upload", daemon=True)

    def __enter__(self) -> RecordUpload:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lost_count(self) -> int:
        """Files that were removed for want of space before they were uploaded."""
        lost = 0
        for group, last in self._seen.items():
            kept = sum(_number(path) > self._done.get(group, 0) for path in _files(group))
            lost += last - self._uploaded.get(group, 0) - kept
        return lost

    def place(self, group: str) -> str:
        """Returns the address that the files of a group of tables come to.

        Args:
            group: Name of the group's folder.
        """
        return f"{self._scheme}://{self._base}/{group}/{self.name}"

    def close(self) -> None:
        """Uploads what is left, after the snapshot is closed; tells what could not be."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look()
        left = sum(
            _number(path) > self._done.get(group, 0)
            for group in self._groups()
            for path in _files(group)
        )
        if left:
            print(f"{left} files of recorded queries were not uploaded", file=sys.stderr)
        self._scratch.cleanup()

    def _keep(self) -> None:
        while not self._ends.wait(self._interval_s):
            self._look()

    def _groups(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_dir())

    def _look(self) -> None:
        """Uploads new files, the oldest first; stops at one that cannot be uploaded."""
        for group in self._groups():
            for path in _files(group):
                number = _number(path)
                self._seen[group] = max(number, self._seen.get(group, 0))
                if number <= self._done.get(group, 0):
                    continue
                try:
                    is_up = self._upload(path, f"{self._base}/{group.name}/{self.name}/{path.name}")
                except OSError as error:
                    if self._told != str(error):
                        self._told = str(error)
                        print(f"recorded queries wait: {error}", file=sys.stderr, flush=True)
                    return
                if is_up:
                    self._done[group] = number
                    self._uploaded[group] = self._uploaded.get(group, 0) + 1
                    self.uploaded_count += 1

    def _upload(self, path: Path, target: str) -> bool:
        """Uploads a file; tells whether it was there still."""
        import pyarrow.fs

        try:
            queries = path.read_bytes()
        except FileNotFoundError:
            return False
        if isinstance(self._store, pyarrow.fs.LocalFileSystem):
            _write_local(Path(target), queries)
            return True
        # An object is there when its stream is closed, and only whole.
        stream: Any = self._store.open_output_stream(target)
        stream.write(queries)
        stream.close()
        return True


def _public(address: str) -> str:
    """The address without what gives access."""
    scheme, _, place = address.partition("?")[0].partition("://")
    return f"{scheme}://{place.rpartition('@')[2]}"


def _files(group: Path) -> list[Path]:
    return sorted(group.glob("queries-*.txt"), key=_number)


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _write_local(target: Path, queries: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_bytes(queries)
    os.replace(partial, target)
