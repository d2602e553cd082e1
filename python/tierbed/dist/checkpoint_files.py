"""Files of a checkpoint: rows as safetensors, checked by their digests, a few at a time.

A file has at most :data:`FILE_BYTES`. It is a part of an upload: it is there whole or not at all,
and what is sent again after an interruption is at most one file per stream. :data:`STREAMS` files
are on their way at the same time, and one is being made or read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tierbed.dist.checkpoint_places import Place
from tierbed.errors import CorruptionError

__all__ = ["FILE_BYTES", "STREAMS", "Writer", "encode", "fetched", "rows_per_file"]

#: Most bytes of rows in a file. With what is being made, :data:`STREAMS` of them stay below 64 MiB.
FILE_BYTES = 8 << 20
#: Files that are on their way at the same time.
STREAMS = 3
#: Most bytes of files that are being filled at the same time, a table each.
_FILLING_BYTES = 32 << 20
_ROWS_MIN, _ROWS_MAX = 256, 65536
_TYPES = {torch.int64: "I64", torch.float32: "F32", torch.uint8: "U8"}


def rows_per_file(row_bytes: int, tables: int) -> int:
    """Returns how many rows a file has, where ``tables`` may be filled at the same time."""
    most = min(FILE_BYTES, _FILLING_BYTES // max(tables, 1))
    return min(_ROWS_MAX, max(_ROWS_MIN, most // row_bytes))


def encode(parts: Mapping[str, Tensor]) -> bytes:
    """Returns tensors as a safetensors file, and copies each once, whatever its strides are."""
    header: dict[str, Any] = {}
    at = 0
    # Wider numbers first: they stay aligned.
    ordered = sorted(parts.items(), key=lambda part: -part[1].element_size())
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    # Nobody else has these bytes yet: they are filled where they lie.
    raw = bytes(len(head) + at)
    whole = np.asarray(_Shared(raw))
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    for name, tensor in ordered:
        first, end = (len(head) + offset for offset in header[name]["data_offsets"])
        # Not with torch: its threads would wait for each other, and keep a processor busy with it.
        values = tensor.detach().cpu().numpy()
        whole[first:end].view(values.dtype).reshape(values.shape)[...] = values
    return raw


class _Shared:
    """Bytes as numpy takes them without a copy, to be filled; the array holds on to this object."""

    def __init__(self, raw: bytes) -> None:
        self._owner = raw
        self.__array_interface__ = {
            "shape": (len(raw),),
            "typestr": "|u1",
            "data": (np.frombuffer(raw, np.uint8).ctypes.data, False),
            "version": 3,
        }


class Writer:
    """Sends files while the next one is made.

    Args:
        place: Where to.
        prefix: What names of files begin with.
    """

    def __init__(self, place: Place, prefix: str) -> None:
        self._place, self._prefix = place, prefix
        self._pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="tierbed-checkpoint")
        self._sent: list[Future[dict[str, Any]]] = []
        self._under_way: set[Future[dict[str, Any]]] = set()

    def write(self, raw: bytes, ending: str, **about: Any) -> None:
        """Sends a file; waits while :data:`STREAMS` are on their way.

        Args:
            raw: Its bytes.
            ending: What its name ends with.
            about: What the manifest says of it.

        Raises:
            Exception: What an earlier file failed with.
        """
        # Whichever is there first makes room: a slow one holds no other one up.
        while len(self._under_way) >= STREAMS:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for sent in done:
                sent.result()
        sent = self._pool.submit(self._send, raw, ending, about)
        self._sent.append(sent)
        self._under_way.add(sent)

    def _send(self, raw: bytes, ending: str, about: dict[str, Any]) -> dict[str, Any]:
        digest = hashlib.sha256(raw).hexdigest()
        name = f"{self._prefix}-{digest[:32]}{ending}"
        self._place.put(name, raw)
        return {"name": name, **about, "bytes": len(raw), "sha256": digest}

    def finish(self) -> list[dict[str, Any]]:
        """Waits for all files; returns what the manifest says of them, in order."""
        return [sent.result() for sent in self._sent]

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def fetched(
    place: Place, files: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], dict[str, Tensor]]]:
    """Yields files of a manifest and their tensors, and reads later ones meanwhile.

    Raises:
        CorruptionError: A file is missing, or has other bytes than were written.
    """
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="tierbed-checkpoint") as pool:
        coming: deque[Future[bytes]] = deque()
        try:
            for at, file in enumerate(files):
                while len(coming) < STREAMS and at + len(coming) < len(files):
                    coming.append(pool.submit(read_file, place, files[at + len(coming)]))
                yield file, _decoded(place, file, coming.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)


def read_file(place: Place, file: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a file of a manifest.

    Raises:
        CorruptionError: It is missing, or has other bytes than were written.
    """
    raw = place.get(file["name"], file["bytes"])
    if raw is None:
        raise CorruptionError(f"{place.name}/{file['name']} is missing")
    if len(raw) != file["bytes"] or not _has_digest(raw, file):
        raise CorruptionError(f"{place.name}/{file['name']} has other bytes than were written")
    return raw


def _has_digest(raw: bytes, file: Mapping[str, Any]) -> bool:
    """Versions 1 to 3 of the manifest have a CRC."""
    if "sha256" in file:
        return bool(hashlib.sha256(raw).hexdigest() == file["sha256"])
    return bool(zlib.crc32(raw) == file["crc32"])


def _decoded(place: Place, file: Mapping[str, Any], raw: bytes) -> dict[str, Tensor]:
    try:
        return load(raw)
    except SafetensorError as error:
        raise CorruptionError(f"{place.name}/{file['name']} cannot be read: {error}") from error
