"""Checkpoints that do not depend on the number of ranks.

Each rank writes the rows it holds that were ever written, in files of at most ``CHUNK_ROWS``;
then rank 0 writes a manifest that names them all, and gives the folder its name. A checkpoint is
there whole or not at all. Loading reads every file and keeps what the new plan gives this rank,
rows and columns; rows that were never written are initial rows again, from the same seed. Rows that
are kept in fewer bytes are written as their codes, all of them. Format:
``docs/reference/formats/ranks.md``.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tierbed._util import state
from tierbed.config.optim import Optimizer
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.held import CHUNK_ROWS, Held, Target, coded_runs, held_tables, target_of
from tierbed.dist.ranks import Rank
from tierbed.dist.sharding import ShardingPlan
from tierbed.errors import CorruptionError, InvalidError, TierbedError
from tierbed.train.coded_store import CodedStore
from tierbed.train.store import Store

__all__ = ["RankTables", "load_rows", "save_rows"]

FORMAT = "tierbed-ranks"
VERSION = 3
MANIFEST = "manifest.json"
EXTRA = "extra.pt"
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


def save_rows(folder: Path, own: RankTables, extra: Mapping[str, Any] | None) -> None:
    """Writes a checkpoint together with all ranks; ``extra`` is that of rank 0.

    Raises:
        InvalidError: ``folder`` exists; nothing was written.
        TierbedError: Another rank failed; the folder is not there then.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    ranks = own.ranks

    def begin() -> None:
        if folder.exists():
            raise InvalidError(f"a checkpoint must be a new folder, and {folder} exists")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    together(ranks, begin if ranks.rank == 0 else None)
    found = together(ranks, lambda: (_write_files(temporary, own), _steps(own)))

    def finish() -> None:
        if extra is not None:
            _write(temporary / EXTRA, state.pack(extra))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "rank_count": ranks.count,
            "tables": own.identities(),
            # All holders of a table step together.
            "steps": {name: steps for _, of_rank in found for name, steps in of_rank.items()},
            "files": [file for files, _ in found for file in files],
            "has_extra": extra is not None,
        }
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary)
        temporary.rename(folder)
        _sync_folder(folder.parent)

    together(ranks, finish if ranks.rank == 0 else None)


def load_rows(folder: Path, own: RankTables) -> dict[str, Any] | None:
    """Reads what this rank holds of a checkpoint into its store; returns the ``extra``.

    Raises:
        InvalidError: Other tables, another optimizer or seed, or a store that was trained.
        CorruptionError: A file is missing or has other bytes than were written.
    """
    extra: dict[str, Any] | None = None

    def load() -> None:
        nonlocal extra
        manifest = _read_manifest(folder)
        _check_tables(manifest, own)
        if not isinstance(own.store, CodedStore):
            _check_new(own.store)
        held = own.held()
        for one in held:
            files = [file for file in manifest["files"] if one.overlaps(file)]
            target = target_of(own.store, one, files)
            for file in files:
                _load_file(folder, file, one, target)
            target.finish()
        if not isinstance(own.store, CodedStore):
            # Version 1 had optimizers only that do not look at the number of their step.
            steps = manifest.get("steps", {})
            for one in held:
                if one.config.name in steps:
                    own.store.set_steps_done(one.name, steps[one.config.name])
        if manifest["has_extra"]:
            extra = state.unpack((folder / EXTRA).read_bytes())

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


def _steps(own: RankTables) -> dict[str, int]:
    """Returns how many steps each table held here did."""
    if isinstance(own.store, CodedStore):
        return {}
    return {one.config.name: own.store.steps_done(one.name) for one in own.held()}


def _write_files(folder: Path, own: RankTables) -> list[dict[str, Any]]:
    rank = own.ranks.rank
    held = {one.name: one for one in own.held()}
    if rank != 0:
        mirrored = {c.name for c in own.tables if own.plan.sharding(c)["kind"] == "mirrored"}
        held = {name: one for name, one in held.items() if one.config.name not in mirrored}
    files: list[dict[str, Any]] = []

    def write(of: Held, parts: Mapping[str, Tensor], kept: Mapping[str, Any]) -> None:
        name = f"rank{rank}-{len(files)}.safetensors"
        raw = save({part: tensor.contiguous() for part, tensor in parts.items()})
        _write(folder / name, raw)
        files.append(
            {
                "name": name,
                "table": of.config.name,
                "columns": [of.columns.start, of.columns.stop],
                "row_count": parts["rows"].numel(),
                "bytes": len(raw),
                "crc32": zlib.crc32(raw),
                **kept,
            }
        )

    def visit(
        table: str, rows: Tensor, weights: Tensor, rows_state: Tensor, counts: Tensor
    ) -> None:
        if table in held and rows.numel() > 0:
            parts = {"rows": rows, "weights": weights, "state": rows_state, "use_counts": counts}
            write(held[table], parts, {})

    if isinstance(own.store, CodedStore):
        for one in held.values():
            for rows, codes in coded_runs(own.store, one):
                parts = {"rows": torch.arange(rows.start, rows.stop), "codes": codes}
                write(one, parts, {"codec": one.config.codec_name()})
    else:
        own.store.scan(visit, chunk_rows=CHUNK_ROWS)
    return files


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise InvalidError(f"{folder} is no checkpoint of ranks: it has no {MANIFEST}") from error
    except ValueError as error:
        raise CorruptionError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if manifest.get("format") != FORMAT or manifest.get("version") not in (1, 2, VERSION):
        raise InvalidError(f"{folder} is no checkpoint of ranks, version 1 to {VERSION}")
    return manifest


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


def _load_file(folder: Path, file: Mapping[str, Any], held: Held, target: Target) -> None:
    path = folder / file["name"]
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing") from error
    if len(raw) != file["bytes"] or zlib.crc32(raw) != file["crc32"]:
        raise CorruptionError(f"{path} has other bytes than were written")
    try:
        parts = load(raw)
    except SafetensorError as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from error
    rows, order = torch.sort(parts["rows"])
    is_held = (rows >= held.rows.start) & (rows < held.rows.stop)
    rows, order = rows[is_held], order[is_held]
    if rows.numel() == 0:
        return
    found = {name: tensor[order] for name, tensor in parts.items() if name != "rows"}
    breaks = (torch.diff(rows) != 1).nonzero().view(-1) + 1
    starts = [0, *breaks.tolist(), rows.numel()]
    for start, end in itertools.pairwise(starts):
        run = {name: tensor[start:end] for name, tensor in found.items()}
        target.write(file, int(rows[start]), run)


def _write(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
