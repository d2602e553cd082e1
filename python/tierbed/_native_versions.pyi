"""Functions of the native module: publishing beside training, versions and objects at a location.

A stub: there is no such module. The latter return structs of ``tierbed_remote``: Listing, Head,
Pushed, Pulled, Pruned. A push expects ``"anything"``, ``"nothing"`` or ``{"head": head}``; a pull
wants ``{"channel": name}`` or ``{"version": seq}``.
"""

from collections.abc import Callable
from typing import Any, final

from typing_extensions import Self

from tierbed._native import NativeStore
from tierbed._native_shards import PublishedShards

__all__ = [
    "NativeObjects",
    "begin_publish",
    "channel_head",
    "finish_publish",
    "list_versions",
    "pin_version",
    "promote_channel",
    "prune_versions",
    "published_identity",
    "pull_versions",
    "push_version",
    "roll_back_channel",
    "unpin_version",
]

_Told = Callable[[int, int], None] | None

def begin_publish(
    store: NativeStore, path: str, attachments: list[tuple[str, bytes]], base: list[str] | None,
    changes: str, placements: list[tuple[list[int], str]], codecs: list[tuple[int, str]],
    heads: list[tuple[int, str]], shards: PublishedShards | None,
) -> bool:
    """Freezes what the tables are now; whether the store can publish while it trains."""

def finish_publish(store: NativeStore, progress: _Told) -> dict[str, Any]:
    """Copies what was frozen, while others use the store, and writes it; returns a report."""

def published_identity(folder: str) -> dict[str, Any]: ...
def list_versions(location: str) -> dict[str, Any]: ...
def channel_head(location: str, channel: str) -> dict[str, Any] | None: ...
def push_version(
    location: str, folder: str, channel: str, expected: str | dict[str, Any], now_s: int,
    progress: _Told,
) -> dict[str, Any]: ...
def pull_versions(
    location: str, want: dict[str, str | int], to: str, bandwidth_bytes: int, progress: _Told
) -> dict[str, Any]: ...
def promote_channel(location: str, source: str, to: str, now_s: int) -> dict[str, Any]: ...
def roll_back_channel(location: str, channel: str, seq: int, now_s: int) -> dict[str, Any]: ...
def prune_versions(location: str, keep_s: int, now_s: int, progress: _Told) -> dict[str, Any]: ...
def pin_version(location: str, seq: int) -> None: ...
def unpin_version(location: str, seq: int) -> bool: ...

@final
class NativeObjects:
    """Objects in a folder or a bucket; calls come from any thread."""

    def __new__(cls, location: str) -> Self: ...
    def list(self) -> list[tuple[str, int]]: ...
    def get(self, name: str, bytes_max: int) -> bytes | None: ...
    def get_range(self, name: str, start: int, end: int) -> bytes | None: ...
    def put(self, name: str, raw: bytes, is_new: bool) -> bool:
        """Writes an object whole; false when it should be absent and is not."""

    def put_large(self, name: str, raw: bytes, chunk_bytes: int) -> None: ...
    def remove(self, name: str) -> None: ...
