"""``inspect`` and ``verify`` of what was published in shards."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tierbed._util.progress import Progress
from tierbed._util.report import print_table
from tierbed.cli.options import finish, shows_tables
from tierbed.errors import CorruptionError
from tierbed.serve.shard_map import ShardMap
from tierbed.serve.snapshot import Snapshot

__all__ = ["SHARDS_FILE", "inspect_shards", "verify_shards"]

SHARDS_FILE = "shards.json"


def inspect_shards(folder: Path, json_path: Path | None) -> None:
    """Shows the shards of a folder and how its tables are divided."""
    where = ShardMap.open(folder)
    tables = [
        {
            **asdict(table),
            "rows_of_shards": [
                where.rows_of(table.name, shard) for shard in range(len(where.shards))
            ],
        }
        for table in where.tables
    ]
    shards = [{"shard": at, **asdict(shard)} for at, shard in enumerate(where.shards)]
    if shows_tables(json_path):
        print_table(
            "tables", [{k: v for k, v in one.items() if k[:5] != "rows_"} for one in tables]
        )
        print_table("shards", shards)
    result: dict[str, Any] = {
        "kind": "shards",
        "path": str(folder),
        "publish": where.publish,
        "replicas": where.replicas,
        "map_bytes": where.memory_bytes,
        "file_bytes": sum(shard.file_bytes for shard in where.shards),
        "tables": tables,
        "shards": shards,
    }
    finish(result, json_path, str(folder))


def verify_shards(folder: Path, dram_budget: str) -> int:
    """Checks every checksum of all shards and maps; returns the number of pages.

    Raises:
        CorruptionError: Naming the place, or a shard that is another snapshot than was published.
    """
    where, pages = ShardMap.open(folder), 0
    with Progress("verifying", len(where.shards), "shards") as bar:
        for shard in where.shards:
            with Snapshot.open(folder / shard.folder, dram_budget=dram_budget) as snapshot:
                if snapshot.identity != shard.identity:
                    raise CorruptionError(
                        f"{folder / shard.folder} is another snapshot than was published",
                        {"expected": shard.identity, "found": snapshot.identity},
                    )
                pages += snapshot.verify()
            bar.advance(1, shard.folder)
    return pages
