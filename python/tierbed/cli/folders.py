"""``inspect``, ``verify``, ``checkpoints``, ``repair``, ``snapshot``: folders and files."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed._util.report import print_table
from tierbed.cli.fields import add
from tierbed.cli.options import (
    Codec,
    DramBudget,
    HeadRows,
    JsonOut,
    LogFormat,
    finish,
    pairs,
    shows_tables,
)
from tierbed.cli.place import inspect_placement, placement_file
from tierbed.cli.shards import SHARDS_FILE, inspect_shards, verify_shards
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.placement import import_files
from tierbed.report import Report
from tierbed.serve.snapshot import Snapshot
from tierbed.train.checkpoints import Commit, find_commits, put_in_force
from tierbed.train.store import Store

__all__ = ["open_folder", "register", "tables_folder"]

Folder = Annotated[Path, typer.Argument(help="A run, a store, a snapshot or shards.")]


def tables_folder(folder: Path) -> Path:
    """Returns the store's folder of a run, or the folder itself."""
    if not folder.is_dir():
        raise InvalidError(f"no such folder: {folder}", {"path": str(folder)})
    inner = folder / "tables"
    return inner if inner.is_dir() else folder


def open_folder(folder: Path, dram_budget: str) -> Store | Snapshot:
    """Opens a run's store, a store or a snapshot to be read; nothing is written there.

    Raises:
        InvalidError: The folder is none of them.
        CorruptionError: It holds files of a store, and nothing says which commit is in force.
    """
    place = tables_folder(folder)
    if not (place / "snapshot.json").exists() and _is_store(place):
        try:
            return Store.open(place, dram_budget=dram_budget, read_only=True)
        except UnsupportedError:  # RocksDB opens its own files
            return Store.open(place, dram_budget=dram_budget)
    if not (place / "snapshot.json").exists():
        raise InvalidError(
            f"{place} holds neither a store with a checkpoint nor a snapshot; name the folder "
            "of a run, a store or a snapshot",
            {"path": str(place)},
        )
    return Snapshot.open(place, dram_budget=dram_budget)


def _is_store(place: Path) -> bool:
    """Whether files of a store lie there, or their pointer does, whole or not."""
    endings = (".rows", ".sst", ".wal", ".dense", ".bucket", ".manifest")
    return any(
        name in ("CURRENT", "SHARDS", "RESTORE", "window") or name.endswith(endings)
        for name in os.listdir(place)
    )


def inspect(
    folder: Folder,
    dram_budget: DramBudget = "256MiB",
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Of a placement: a query log to count page reads of."),
    ] = None,
    log_format: LogFormat = "auto",
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Of a run, a store or a snapshot: write its report here."),
    ] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            "--queries",
            help="Of a snapshot, with --html: recorded queries, to ask what other budgets bring.",
        ),
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """Show what is in a run, a store, a snapshot or a placement."""
    placed = placement_file(folder)
    if placed is not None:
        if html is not None:
            raise InvalidError("a placement has no report; leave out --html")
        inspect_placement(placed, log, log_format, json_path)
        return
    if (folder / SHARDS_FILE).is_file():
        inspect_shards(folder, json_path)
        return
    if queries is not None and html is None:
        raise InvalidError("--queries is for the report of a snapshot; add --html FILE")

    with open_folder(folder, dram_budget) as opened:
        stats = opened.stats()
        is_store = isinstance(opened, Store)
        result: dict[str, Any] = {
            "kind": "store" if is_store else "snapshot",
            "path": str(opened.path),
            "tables_count": len(opened.tables()),
            "rows": sum(int(table["row_count"]) for table in opened.tables()),
        }
        if isinstance(opened, Store):
            last = opened.last_checkpoint()
            result["checkpoint"] = None if last is None else last[0]
            result["checkpoint_name"] = None if last is None else last[1]
        else:
            result["attachments"] = opened.attachment_names()
        result["disk_bytes"] = stats.get("disk_bytes")
        result["tables"] = opened.tables()
        result["stats"] = stats
        if html is not None:
            _report(opened, queries).save(html)
    if shows_tables(json_path):
        print_table(
            f"tables of {folder}",
            [{**table, "init": _short(table.get("init"))} for table in result["tables"]],
        )
        budget = stats.get("budget", {})
        parts = [{"part": name, **values} for name, values in budget.get("parts", {}).items()]
        if parts:
            print_table("memory", parts)
    finish(result, json_path, str(folder))


def _report(opened: Store | Snapshot, queries: Path | None) -> Report:
    if isinstance(opened, Snapshot):
        return opened.report(queries)
    if queries is not None:
        raise InvalidError(
            "--queries is for snapshots; call store.record() in the program that trains"
        )
    return opened.report()


def checkpoints(
    folder: Folder,
    drop: Annotated[str | None, typer.Option("--drop", help="Forget this one.")] = None,
    json_path: JsonOut = None,
) -> None:
    """List the kept checkpoints of a run or a store, or drop one."""
    place = str(tables_folder(folder))
    if drop is not None:
        _native.drop_checkpoint(place, drop)
    kept = [
        {"number": number, "name": name, "bytes": size}
        for number, name, size in _native.kept_checkpoints(place)
    ]
    if shows_tables(json_path):
        print_table(f"kept checkpoints of {folder}", kept)
    finish({"path": place, "checkpoints": kept}, json_path, str(folder))


def repair(
    folder: Folder,
    commit: Annotated[
        int | None, typer.Option("--commit", help="Put the commit of this number in force.")
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """List the commits of a store that are whole, or put one in force."""
    place = tables_folder(folder)
    if commit is not None:
        chosen = put_in_force(place, commit)
        print(f"commit {chosen.number} ({chosen.name}) is in force", file=sys.stderr)
    commits = find_commits(place)
    if shows_tables(json_path):
        rows = [
            {
                "number": found.number,
                "last": found.last_number,
                "name": found.name,
                "state": _state(found),
                "steps": max((table.steps or 0 for table in found.tables), default=0),
                "tables": len(found.tables),
                "rows": sum(table.row_count for table in found.tables),
                "attachments": ", ".join(found.attachments),
            }
            for found in commits
        ]
        print_table(f"commits of {folder}", rows)
    told = {
        "path": str(place),
        "whole": sum(found.is_whole for found in commits),
        "damaged": sum(not found.is_whole for found in commits),
        "in_force": next((found.number for found in commits if found.is_in_force), None),
    }
    commits_json = [asdict(found) for found in commits]
    finish({**told, "commits": commits_json}, json_path, str(folder))
    if told["in_force"] is None and shows_tables(json_path):
        print("put one in force: tierbed repair FOLDER --commit NUMBER", file=sys.stderr)


def _state(found: Commit) -> str:
    if found.damage is not None:
        return f"damaged: {found.damage}"
    if found.is_kept:
        return "kept"
    return "in force" if found.is_in_force else "whole"


def _short(init: Any) -> str:
    if not isinstance(init, dict):
        return ""
    values = ", ".join(f"{v:g}" for k, v in init.items() if k != "kind")
    return f"{init.get('kind')}({values})"


def verify(folder: Folder, dram_budget: DramBudget = "256MiB", json_path: JsonOut = None) -> None:
    """Check every checksum of a run, a store or a snapshot."""
    started_s = time.perf_counter()
    if (folder / SHARDS_FILE).is_file():
        pages = verify_shards(folder, dram_budget)
    else:
        with open_folder(folder, dram_budget) as opened:
            pages = opened.verify()
    seconds = time.perf_counter() - started_s
    finish({"verified": True, "pages": pages, "seconds": seconds}, json_path, f"verify {folder}")


def snapshot(
    out: Annotated[Path, typer.Option("--out", help="The snapshot: a new folder.")],
    tables: Annotated[
        list[str], typer.Option("--table", help="NAME=FILE: npy, safetensors, pt or parquet.")
    ],
    keys: Annotated[
        list[str] | None,
        typer.Option("--key", help="NAME=KEY: the tensor or column of a file with several."),
    ] = None,
    codec: Codec = None,
    head_rows: HeadRows = None,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", help="Folder for rows on their way; else of --out.")
    ] = None,
    dram_budget: DramBudget = "1GiB",
    json_path: JsonOut = None,
) -> None:
    """Write a serving snapshot of tables in files, in bounded memory and without a store.

    An id is the number of its row.
    """
    files = {name: Path(file) for name, file in pairs("--table", tables).items()}
    with Progress("reading", None, "rows") as bar:
        report = import_files(
            files,
            out,
            keys=pairs("--key", keys or []),
            codec=codec,
            head_rows=head_rows,
            dram_budget=dram_budget,
            scratch=scratch,
            progress=bar.set,
        )
    finish({**asdict(report), "snapshot": str(out)}, json_path, f"snapshot {out}")


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    add(app, "inspect", inspect)
    add(app, "verify", verify)
    add(app, "checkpoints", checkpoints)
    add(app, "repair", repair, "List the whole commits of a store, or go back to one.")
    add(app, "snapshot", snapshot, "Write a serving snapshot of tables in files.")
