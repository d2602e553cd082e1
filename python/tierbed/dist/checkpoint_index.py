"""Indexes of open vocabularies in a checkpoint of ranks.

The rank that keeps an index writes it: its ids in the order of their hashes, and the rows that are
free in the order in which they are given again. So whoever loads it gives the same rows to the same
ids from then on. Format: ``docs/reference/formats/ranks.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tierbed.config.tables import EmbeddingBagConfig
from tierbed.dist.checkpoint_files import Writer, encode, fetched
from tierbed.dist.checkpoint_places import Place
from tierbed.dist.open_index import OpenTable, open_tables_of
from tierbed.dist.sharding import ShardingPlan
from tierbed.errors import CorruptionError
from tierbed.train.store import Store

__all__ = ["load_indexes", "write_indexes"]

#: Ids of a file: 28 bytes each.
CHUNK_IDS = 1 << 18


def write_indexes(
    place: Place, tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, rank: int, store: Store
) -> dict[str, Any]:
    """Writes the indexes that ``rank`` keeps; returns what the manifest says of them, by table.

    Args:
        place: Where to.
        tables: All tables.
        plan: Who holds what.
        rank: This rank.
        store: Its store, or that store as of a kept checkpoint.
    """
    found: dict[str, Any] = {}
    for table in _open_tables(tables, plan, rank, store):
        if table.index_rank == rank:
            name = table.config.name
            next_row = store.vocabularies()[name]["next_row"]
            found[name] = {"next_row": next_row, "files": _write(place, table, f"rank{rank}")}
    return found


def _write(place: Place, table: OpenTable, prefix: str) -> list[dict[str, Any]]:
    assert table.index is not None, "the rank of the index has the table"
    with Writer(place, prefix) as writer:

        def write_ids(ids: bytearray, rows: bytearray, counts: bytearray, seen: bytearray) -> None:
            parts = {"ids": _longs(ids), "rows": _longs(rows), "seen": _longs(seen)}
            parts["counts"] = torch.frombuffer(counts, dtype=torch.float32)
            writer.write(encode(parts), ".safetensors", kind="ids")

        def write_free(rows: bytearray) -> None:
            writer.write(encode({"rows": _longs(rows)}), ".safetensors", kind="free")

        table.index.entries(CHUNK_IDS, write_ids)
        table.index.free_rows(CHUNK_IDS, write_free)
        return writer.finish()


def load_indexes(
    place: Place,
    manifest: Mapping[str, Any],
    tables: Sequence[EmbeddingBagConfig],
    plan: ShardingPlan,
    rank: int,
    store: Store,
) -> None:
    """Reads the indexes that ``rank`` keeps, and makes room for the rows that it holds.

    Args:
        place: Where from.
        manifest: That of the checkpoint.
        tables: All tables.
        plan: Who holds what.
        rank: This rank.
        store: Its store, which knows no ids yet.

    Raises:
        InvalidError: The store knows ids already.
        CorruptionError: An index is missing, or is none.
    """
    for table in _open_tables(tables, plan, rank, store):
        kept = manifest.get("indexes", {}).get(table.config.name)
        if kept is None:
            raise CorruptionError(
                f"{place.name} has no index of table {table.config.name!r}",
                {"table": table.config.name},
            )
        if table.index is None:
            continue
        table.index.grow(kept["next_row"])
        if table.index_rank == rank:
            _load(place, kept, table)


def _load(place: Place, kept: Mapping[str, Any], table: OpenTable) -> None:
    assert table.index is not None, "the rank of the index has the table"
    table.index.begin_copy(kept["next_row"])
    for file, parts in fetched(place, kept["files"]):
        if file["kind"] == "ids":
            table.index.copy_entries(
                *(parts[name].contiguous() for name in ("ids", "rows", "counts", "seen"))
            )
        else:
            table.index.copy_free(parts["rows"].contiguous())
    table.index.end_copy()


def _open_tables(
    tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, rank: int, store: Store
) -> list[OpenTable]:
    names = [table["name"] for table in store.tables()]
    held = {name: store.table_id(name) for name in names}
    return open_tables_of(tables, plan, rank, store.native, held)


def _longs(raw: bytearray) -> Tensor:
    return torch.frombuffer(raw, dtype=torch.int64)
