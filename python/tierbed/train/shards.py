"""A publish in shards: what is asked for, and how the shards go to a location."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tierbed._util.bytes import parse_bytes
from tierbed.config.words import Positive
from tierbed.errors import InvalidError
from tierbed.placement.files import PlacementFiles, placement_files
from tierbed.results import PushedVersion
from tierbed.serve.shard_map import ShardMap
from tierbed.serve.versions import Versions

if TYPE_CHECKING:
    from tierbed._native_shards import PublishedShards

__all__ = ["Shards", "parse_by", "published_shards", "push_shards", "shard_location"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Into which shards a model is published.

    Each shard is a snapshot in a sub-folder, and ``shards.json`` says which has a row. A table of
    random initial values that is divided is written whole, rows never trained included, because a
    shard numbers its rows anew.

    Args:
        count: How many shards.
        replicas: Servers of each that are wanted; a note for those who start them.
        by: ``hash`` of the id; ``rows``, ranges of ids; or placements that have shards
            (``tierbed place --shards``), as of :meth:`tierbed.Store.publish`. Tables that no
            placement has are divided by hash.
        everywhere: Tables of at most so many bytes, as float32, are on every shard.

    Examples:
        >>> store = tb.Store.open("run/store", dram_budget="64MiB")
        >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=99, embedding_dim=16)]
        >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        >>> store.write_rows("item", 0, torch.ones(99, 16))
        >>> shards = tb.Shards(count=2, everywhere="1KiB")
        >>> store.publish("run/shards", shards=shards).shard_count
        2
        >>> store.close()
    """

    count: Positive
    replicas: Positive = 1
    by: Literal["hash", "rows"] | PlacementFiles = "hash"
    everywhere: int | str = "1MiB"


@dataclass(frozen=True)
class _Published:
    """As the engine takes it."""

    count: int
    replicas: int
    by: Literal["hash", "rows"]
    placed: Sequence[tuple[list[int], str]]
    everywhere_bytes: int


def published_shards(
    shards: Shards | None,
    tables: Sequence[Mapping[str, Any]],
    table_id: Callable[[str], int],
) -> PublishedShards | None:
    """Returns what the engine is told of shards; None for one snapshot.

    Args:
        shards: What is asked for.
        tables: The tables there are, each with its ``name``.
        table_id: Gives the id of a name.

    Raises:
        InvalidError: One placement for several tables.
    """
    if shards is None:
        return None
    placed: list[tuple[list[int], str]] = []
    by: Literal["hash", "rows"] = "hash"
    if shards.by == "hash" or shards.by == "rows":
        by = "rows" if shards.by == "rows" else "hash"
    else:
        placed = placement_files(shards.by, tables, table_id)
    return _Published(
        count=shards.count,
        replicas=shards.replicas,
        by=by,
        placed=placed,
        everywhere_bytes=parse_bytes(shards.everywhere, "everywhere"),
    )


def shard_location(location: str, folder: str) -> str:
    """Returns where the versions of a shard lie below a location.

    Args:
        location: A folder, or a bucket: ``s3://bucket/prefix``.
        folder: Folder of the shard, as ``shards.json`` names it.
    """
    return f"{location.rstrip('/')}/{folder}"


def push_shards(
    folder: str | os.PathLike[str],
    location: str | os.PathLike[str],
    *,
    channel: str,
    progress: Progress | None = None,
) -> PushedVersion:
    """Pushes what was published in shards: each shard is a model of its own at the location.

    ``shards.json`` and its maps go last, as a version of the location itself. Who follows the
    channel there finds shards that are all whole.

    Args:
        folder: What :meth:`tierbed.Store.publish` wrote with ``shards``.
        location: A folder, or a bucket: ``s3://bucket/prefix``.
        channel: The channel that moves, of the location and of every shard.
        progress: Called with (bytes done, bytes in all).

    Returns:
        The version of the location, with the bytes of all.

    Raises:
        InvalidError: The folder holds no shards, or another publisher moved a channel meanwhile.
        NoSpaceError: The location is full.
    """
    where, path = os.fspath(location), Path(folder)
    shards = ShardMap.open(path).shards
    total, done, moved = sum(shard.file_bytes for shard in shards), 0, 0

    def tell(now: int, _: int) -> None:
        if progress is not None:
            progress(min(done + now, total), total)

    for shard in shards:
        versions = Versions(shard_location(where, shard.folder))
        version = versions.push(path / shard.folder, channel=channel, progress=tell)
        done, moved = done + shard.file_bytes, moved + version.file_bytes
    last = Versions(where).push(path, channel=channel)
    return PushedVersion(version=last.version, file_bytes=moved + last.file_bytes, chain=last.chain)


def parse_by(given: Sequence[str]) -> Literal["hash", "rows"] | PlacementFiles:
    """Reads what a command line says of :attr:`Shards.by`.

    Args:
        given: ``hash``, ``rows``, a file, or ``TABLE=FILE`` and ``TABLE+TABLE=FILE`` for several.

    Raises:
        InvalidError: A word with others beside it.
    """
    if not given or list(given) == ["hash"]:
        return "hash"
    if list(given) == ["rows"]:
        return "rows"
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    files: dict[str | tuple[str, ...], str | os.PathLike[str]] = {}
    for one in given:
        names, sign, file = one.partition("=")
        group = tuple(names.split("+"))
        if not (sign and file and all(group)):
            raise InvalidError(
                f"--shard-by is hash, rows, a placement, or TABLE=PLACEMENT for each, not {one!r}"
            )
        files[group] = file
    return files
