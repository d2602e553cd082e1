"""Checkpoints that do not depend on the number of ranks.

Each rank writes the rows it holds that were ever written, in files of some MiB; then rank 0 writes
a manifest that names them all. A checkpoint is there whole or not at all. Loading reads the files
that have rows and columns which the new plan gives this rank; rows that were never written are
initial rows again, from the same seed. Rows that are kept in fewer bytes are written as their
codes, all of them. Format: ``docs/reference/formats/ranks.md``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierbed._util import state
from tierbed.config.optim import Optimizer, state_words
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.dist.checkpoint_files import Writer, encode, fetched, read_file, rows_per_file
from tierbed.dist.checkpoint_index import load_indexes, write_indexes
from tierbed.dist.checkpoint_places import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    PathLike,
    Place,
    place_of,
)
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.held import Held, Target, coded_runs, held_tables, target_of
from tierbed.dist.ranks import Rank
from tierbed.dist.sharding import ShardingPlan, in_blocks
from tierbed.errors import CorruptionError, InvalidError, TierbedError
from tierbed.train.coded_store import CodedStore
from tierbed.train.store import Store

__all__ = [
    "RankTables",
    "begun_place",
    "commit",
    "load_rows",
    "manifest_of",
    "save_rows",
    "steps_of",
    "together",
    "write_extra",
    "write_files",
    "written_of",
]

FORMAT = "tierbed-ranks"
VERSION = 5
#: The file of ``extra`` up to version 3, which had no digest of it.
EXTRA = "extra.pt"
EXTRA_BYTES_MAX = 1 << 40
# What says which rows those are that were never written.
WITHOUT_STEPS = frozenset({"row_count", "dim", "init", "seed"})


@dataclass(frozen=True, kw_only=True)
class RankTables:
    """The tables of a collection, and this rank's share of them.

    Args:
        ranks: Who this rank is.
        store: Its store, its tables of codes, or its rows on a device.
        tables: All tables.
        plan: Who holds what.
        optimizer: The optimizer of all tables.
    """

    ranks: Rank
    store: Store | CodedStore | DeviceStore
    tables: Sequence[EmbeddingBagConfig]
    plan: ShardingPlan
    optimizer: Optimizer

    def held(self) -> list[Held]:
        """Returns what this rank holds."""
        return list(held_tables(self.tables, self.plan, self.ranks.rank))

    def identities(self) -> dict[str, Any]:
        """Returns what makes two tables the same one: shape, initial rows, optimizer."""
        of_store = self.optimizer, self.store.seed
        known = {config.name: dict(config.schema(*of_store)) for config in self.tables}
        if isinstance(self.store, CodedStore):
            for config in self.tables:
                known[config.name]["codec"] = config.codec_name()
        return known


def save_rows(
    path: PathLike, own: RankTables, extra: Mapping[str, Any] | None, *, replaces: bool = False
) -> None:
    """Writes a checkpoint together with all ranks; ``extra`` is that of rank 0.

    With ``replaces`` one that is there is given up first.

    Raises:
        InvalidError: A checkpoint is there; nothing was written.
        TierbedError: Another rank failed; there is no checkpoint then.
    """
    ranks = own.ranks
    place = begun_place(ranks, lambda: place_of(path), replaces=replaces)
    found = together(ranks, lambda: written_of(place, own, own.store, steps_of(own)))

    def finish() -> None:
        kept = None if extra is None else write_extra(place, state.pack(extra))
        commit(place, manifest_of(own, found, kept))

    together(ranks, finish if ranks.rank == 0 else None)


def begun_place(ranks: Rank, opened: Callable[[], Place], *, replaces: bool = False) -> Place:
    """Returns a place that all ranks may write to; all call this together."""
    places: list[Place] = []

    def begin() -> dict[str, int]:
        places.append(opened())
        return places[0].begin(replaces=replaces) if ranks.rank == 0 else {}

    there = together(ranks, begin)[0]
    places[0].take_over(there)
    return places[0]


def written_of(
    place: Place,
    own: RankTables,
    store: Store | CodedStore | DeviceStore,
    steps: Mapping[str, int],
) -> dict[str, Any]:
    """Writes what this rank has to; returns its part of the manifest, which JSON can tell.

    Args:
        place: Where to.
        own: Who this rank is, and what it holds.
        store: Its store, or that store as of a kept checkpoint.
        steps: Steps that tables did.
    """
    indexes: dict[str, Any] = {}
    if isinstance(store, Store):
        indexes = write_indexes(place, own.tables, own.plan, own.ranks.rank, store)
    return {"files": write_files(place, own, store), "steps": dict(steps), "indexes": indexes}


def commit(place: Place, manifest: dict[str, Any]) -> None:
    """Makes a checkpoint of what was written: from now on it is there."""
    of_indexes = (file for index in manifest["indexes"].values() for file in index["files"])
    files = [*manifest["files"], *of_indexes]
    if manifest["extra"] is not None:
        files.append(manifest["extra"])
    place.commit(json.dumps(manifest, indent=1).encode(), {file["name"] for file in files})


def manifest_of(
    own: RankTables, found: Sequence[Mapping[str, Any]], extra: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the manifest of what each rank :func:`wrote <written_of>`, and ``extra``."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank_count": own.ranks.count,
        "tables": own.identities(),
        # All holders of a table step together.
        "steps": {name: steps for part in found for name, steps in part["steps"].items()},
        "files": [file for part in found for file in part["files"]],
        "indexes": {name: index for part in found for name, index in part["indexes"].items()},
        "extra": extra,
    }


def write_extra(place: Place, raw: bytes) -> dict[str, Any]:
    """Writes what belongs to the run beside the tables; returns what the manifest says of it."""
    digest = hashlib.sha256(raw).hexdigest()
    name = f"extra-{digest[:32]}.pt"
    place.put(name, raw)
    return {"name": name, "bytes": len(raw), "sha256": digest}


def load_rows(path: PathLike, own: RankTables) -> dict[str, Any] | None:
    """Reads what this rank holds of a checkpoint into its store; returns the ``extra``.

    Raises:
        InvalidError: Other tables, another optimizer or seed, or a store that was trained.
        CorruptionError: A file is missing or has other bytes than were written.
    """
    extra: dict[str, Any] | None = None

    def load() -> None:
        nonlocal extra
        place = place_of(path)
        manifest = _read_manifest(place)
        _check_tables(manifest, own)
        if not isinstance(own.store, CodedStore):
            _check_new(own.store)
        if isinstance(own.store, Store):
            load_indexes(place, manifest, own.tables, own.plan, own.ranks.rank, own.store)
        held = own.held()
        for one in held:
            files = [file for file in manifest["files"] if one.overlaps(file)]
            target = target_of(own.store, one, files)
            for file, parts in fetched(place, files):
                _load_file(file, parts, one, target)
            target.finish()
        if not isinstance(own.store, CodedStore):
            # Version 1 had optimizers only that do not look at the number of their step.
            steps = manifest.get("steps", {})
            for one in held:
                if one.config.name in steps:
                    own.store.set_steps_done(one.name, steps[one.config.name])
        extra = _read_extra(place, manifest)

    together(own.ranks, load)
    return extra


def together(ranks: Rank, work: Callable[[], Any] | None) -> list[Any]:
    """Runs ``work`` where there is some, and returns the results of all ranks.

    Raises:
        TierbedError: That of this rank, or one that names the first rank that failed.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = None if work is None else work()
    except (TierbedError, OSError, ValueError, RuntimeError) as error:
        failure = error
    told = ranks.gather((result, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise TierbedError(f"rank {rank} failed: {text}")
    return [value for value, _ in told]


def steps_of(own: RankTables) -> dict[str, int]:
    """Returns how many steps each table held here did."""
    if isinstance(own.store, CodedStore):
        return {}
    return {one.config.name: own.store.steps_done(one.name) for one in own.held()}


def write_files(
    place: Place, own: RankTables, store: Store | CodedStore | DeviceStore
) -> list[dict[str, Any]]:
    """Writes the rows of ``store`` that this rank has to; returns what the manifest says of them.

    Args:
        place: Where to.
        own: Who this rank is, and what it holds.
        store: Its store, or that store as of a kept checkpoint.
    """
    rank = own.ranks.rank
    held = {one.name: one for one in own.held()}
    if rank != 0:
        mirrored = {c.name for c in own.tables if own.plan.sharding(c)["kind"] == "mirrored"}
        held = {name: one for name, one in held.items() if one.config.name not in mirrored}

    with Writer(place, f"rank{rank}") as writer:

        def write(of: Held, parts: Mapping[str, Tensor], kept: Mapping[str, Any]) -> None:
            first, last = torch.aminmax(parts["rows"])
            writer.write(
                encode(parts),
                ".safetensors",
                **of.about(),
                rows=[int(first), int(last) + 1],
                row_count=parts["rows"].numel(),
                **kept,
            )

        def visit(
            table: str, rows: Tensor, weights: Tensor, rows_state: Tensor, counts: Tensor
        ) -> None:
            if table in held and rows.numel() > 0:
                parts = {"rows": rows, "weights": weights, "state": rows_state}
                write(held[table], {**parts, "use_counts": counts}, {})

        if isinstance(store, CodedStore):
            for one in held.values():
                chunk_rows = rows_per_file(8 + len(one.columns) * 4, 1)
                for rows, codes in coded_runs(store, one, chunk_rows):
                    parts = {"rows": torch.arange(rows.start, rows.stop), "codes": codes}
                    write(one, parts, {"codec": one.config.codec_name()})
        else:
            store.scan(visit, chunk_rows=_chunk_rows(own, store))
        return writer.finish()


def _chunk_rows(own: RankTables, store: Store | DeviceStore) -> int:
    """Returns how many rows a file has; in forward order files of all tables fill together."""
    dims = [len(one.columns) for one in own.held()] or [1]
    row_bytes = max(8 + 4 * (dim + state_words(own.optimizer.kind, dim) + 1) for dim in dims)
    is_mixed = isinstance(store, Store) and store.order()["kind"] == "forward"
    return rows_per_file(row_bytes, len(dims) if is_mixed else 1)


def _read_manifest(place: Place) -> dict[str, Any]:
    raw = place.get(MANIFEST, MANIFEST_BYTES_MAX)
    if raw is None:
        raise InvalidError(f"{place.name} is no checkpoint of ranks: it has no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(raw)
    except ValueError as error:
        raise CorruptionError(f"{place.name}/{MANIFEST} cannot be read: {error}") from error
    if manifest.get("format") != FORMAT or manifest.get("version") not in range(1, VERSION + 1):
        raise InvalidError(f"{place.name} is no checkpoint of ranks, version 1 to {VERSION}")
    return manifest


def _read_extra(place: Place, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    kept = manifest.get("extra")
    if kept is not None:
        return state.unpack(read_file(place, kept))
    if not manifest.get("has_extra"):
        return None
    raw = place.get(EXTRA, EXTRA_BYTES_MAX)
    if raw is None:
        raise CorruptionError(f"{place.name}/{EXTRA} is missing")
    return state.unpack(raw)


def _check_tables(manifest: Mapping[str, Any], own: RankTables) -> None:
    found, expected = manifest["tables"], own.identities()
    if set(found) != set(expected):
        raise InvalidError(
            f"the checkpoint has tables {sorted(found)}, the collection {sorted(expected)}"
        )
    for name, table in expected.items():
        # Rows that do not train come from any optimizer, and may be coded anew.
        keys = WITHOUT_STEPS if isinstance(own.store, CodedStore) else {*table, *found[name]}
        if "codec" in keys and "codec" in found[name]:
            raise InvalidError(
                f"table {name!r} of the checkpoint has rows as {found[name]['codec']}, which do "
                "not train; load it with a tierbed.CodedStore",
                {"table": name},
            )
        if any(found[name].get(key) != table.get(key) for key in keys):
            raise InvalidError(
                f"table {name!r} of the checkpoint has another shape, optimizer, or seed: "
                f"{found[name]}, not {table}",
                {"table": name},
            )


def _check_new(store: Store | DeviceStore) -> None:
    def visit(table: str, rows: Tensor, _w: Tensor, _s: Tensor, counts: Tensor) -> None:
        if bool((counts > 0).any()):
            raise InvalidError(
                f"rows of table {table!r} were trained already; load into a new store",
                {"table": table},
            )

    store.scan(visit)


def _load_file(
    file: Mapping[str, Any], parts: Mapping[str, Tensor], held: Held, target: Target
) -> None:
    for first, run in _runs(parts, held):
        target.write(file, first, run)


def _runs(parts: Mapping[str, Tensor], held: Held) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields consecutive rows of a file that are held: the first one, and the tensors."""
    rows = parts["rows"]
    found = {name: tensor for name, tensor in parts.items() if name != "rows"}
    # Of a store in forward order they come in any order; else nothing is copied.
    if not bool((torch.diff(rows) > 0).all()):
        rows, order = torch.sort(rows)
        found = {name: tensor[order] for name, tensor in found.items()}
    first, end = torch.searchsorted(rows, torch.tensor([held.rows.start, held.rows.stop])).tolist()
    rows = rows[first:end]
    found = {name: tensor[first:end] for name, tensor in found.items()}
    if held.blocks is not None:
        is_held = in_blocks(rows, held.blocks)
        rows, found = rows[is_held], {name: tensor[is_held] for name, tensor in found.items()}
    if rows.numel() == 0:
        return
    breaks = (torch.diff(rows) != 1).nonzero().view(-1) + 1
    starts = [0, *breaks.tolist(), rows.numel()]
    for start, end in itertools.pairwise(starts):
        yield int(rows[start]), {name: tensor[start:end] for name, tensor in found.items()}
