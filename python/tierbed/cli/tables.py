"""``import``, ``export``: tables in the formats of other tools."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.progress import Progress
from tierbed._util.report import print_table
from tierbed.cli.fields import add
from tierbed.cli.folders import open_folder, tables_folder
from tierbed.cli.options import (
    DramBudget,
    JsonOut,
    RowOptimizer,
    finish,
    pairs,
    shows_tables,
)
from tierbed.cli.settings import numbers
from tierbed.config.optim import OPTIMIZERS
from tierbed.config.tables import Constant, Init, Normal, Uniform
from tierbed.config.words import OptimizerKind, TableFormat
from tierbed.errors import InvalidError
from tierbed.tables import ImportedTable, export_tables, find_tables, import_tables
from tierbed.train.store import Store

__all__ = ["register"]

_INITS: dict[str, tuple[type[Any], tuple[int, ...]]] = {
    "uniform": (Uniform, (2,)),
    "normal": (Normal, (0, 1, 2)),
    "constant": (Constant, (0, 1)),
}


def import_(
    file: Annotated[
        Path,
        typer.Option(
            "--file",
            help="npy, safetensors or its index, pt, ckpt, parquet, faiss; or a folder: a "
            "distributed checkpoint, dynamicemb, HugeCTR, Hugging Face.",
        ),
    ],
    store: Annotated[Path | None, typer.Option("--store", help="The store or run.")] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="Name, or NAME=NAME IN THE FILE: item=model.item.weight."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All tables of the store; with --create, of the file.")
    ] = False,
    ids: Annotated[
        list[str] | None, typer.Option("--ids", help="NAME=FILE: npy with the ids of a table.")
    ] = None,
    state: Annotated[
        bool | None,
        typer.Option("--state/--no-state", help="Optimizer state; if not said, where it is there."),
    ] = None,
    state_keys: Annotated[
        list[str] | None,
        typer.Option("--state-key", help="NAME=WHERE: item=optimizer.state.0."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=0, help="That the optimizer did, for Adam.")
    ] = None,
    allow_fewer: Annotated[
        bool, typer.Option("--allow-fewer", help="Leave rows that the file lacks as they are.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make tables that the store lacks.")
    ] = False,
    optimizer: Annotated[OptimizerKind | None, RowOptimizer] = None,
    init: Annotated[
        str | None,
        typer.Option("--init", help="Rows not in the file: uniform:-0.1,0.1, normal:0,0.01."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the store, from which initial rows come.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what the file holds, and what would be read.")
    ] = False,
    dram_budget: DramBudget = "256MiB",
    json_path: JsonOut = None,
) -> None:
    """Read tables from a file or folder into a store, and checkpoint."""
    if create and optimizer is None:
        raise InvalidError(
            "--create needs --optimizer, that of the model that will train the table: its "
            f"state lies beside the rows; one of {', '.join(sorted(OPTIMIZERS))}"
        )
    if optimizer is not None and not create:
        raise InvalidError("--optimizer is that of new tables; say --create too, or leave it out")
    if dry_run:
        held = _listed(file, json_path)
        if store is None or not (tables or every):
            finish({"path": str(file), **held}, json_path, str(file))
            return
    if store is None or not (tables or every):
        raise InvalidError("name a store by --store and tables by --table, or --all of them")
    options: dict[str, Any] = {
        "tables": None if every else dict(map(_named, tables or ())),
        "ids": pairs("--ids", ids or []),
        "state": state,
        "state_keys": pairs("--state-key", state_keys or []),
        "steps": steps,
        "allow_fewer": allow_fewer,
        "optimizer": OPTIMIZERS[optimizer]() if create and optimizer else None,
        "init": None if init is None else _init(init),
        "dry_run": dry_run,
    }
    place = tables_folder(store) if store.is_dir() else store
    number = None
    with (
        _opened(place, dram_budget, seed, dry_run) as opened,
        Progress(f"import {file}", None, "rows") as bar,
    ):
        done: list[ImportedTable] = import_tables(opened, file, progress=bar.set, **options)
        if not dry_run:
            number = opened.checkpoint_rows(f"import-{file.name}")
    _show(f"read from {file}", [asdict(one) for one in done], json_path)
    told = {"rows": sum(one.rows for one in done), "checkpoint": number}
    finish({**told, "tables": [asdict(one) for one in done]}, json_path, f"import {file}")


def _opened(place: Path, dram_budget: str, seed: int, dry_run: bool) -> Store:
    """Opens the store; only to be looked at where nothing is to change and it is there."""
    if not dry_run:
        return Store.open(place, dram_budget=dram_budget, seed=seed)
    if not place.is_dir() or not os.listdir(place):
        return Store.open(backend="memory", dram_budget=dram_budget, seed=seed)
    return Store.open(place, dram_budget=dram_budget, seed=seed, read_only=True)


def _named(text: str) -> tuple[str, str | None]:
    name, sign, key = text.partition("=")
    if not name or (sign and not key):
        raise InvalidError(f"--table is NAME or NAME=KEY, not {text!r}: item=model.item.weight")
    return name, key or None


def _init(text: str) -> Init:
    kind, _, rest = text.partition(":")
    made, counts = _INITS.get(kind, (None, ()))
    values = numbers("--init", rest, float)
    if made is None or len(values) not in counts:
        raise InvalidError(
            f"--init is not {text!r}; say uniform:LOW,HIGH or normal:MEAN,STD or constant:VALUE"
        )
    init: Init = made(*values)
    return init


def _listed(file: Path, json_path: Path | None) -> dict[str, Any]:
    """Shows the tables of a file, and state that is no table's by name; returns both."""
    opened = find_tables(file)
    held = [
        {
            "name": table.name,
            "rows": table.rows,
            "dim": table.dim,
            "kind": str(table.weight.dtype).removeprefix("torch."),
            "ids": "row numbers" if table.ids is None or table.has_row_numbers else "own",
            "state": ", ".join(table.state) or ("beside" if table.has_state else ""),
            "steps": table.steps,
        }
        for table in opened.tables
    ]
    _show(f"tables of {file}", held, json_path)
    loose = [
        {"state key": key, "holds": ", ".join(parts)}
        for key, parts in opened.numbered_state().items()
    ]
    if loose:
        _show("optimizer state for --state-key", loose, json_path)
    return {"tables": held, "state_keys": [one["state key"] for one in loose]}


def _show(title: str, rows: list[dict[str, Any]], json_path: Path | None) -> None:
    if shows_tables(json_path):
        print_table(title, rows)


def export(
    store: Annotated[Path, typer.Option("--store", help="The store or run.")],
    file: Annotated[
        Path,
        typer.Option("--file", help="safetensors, npy, pt, parquet or faiss; or a new folder."),
    ],
    tables: Annotated[
        list[str] | None, typer.Option("--table", help="Name of a table; repeat for several.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All tables of the store.")] = False,
    file_format: Annotated[
        TableFormat | None, typer.Option("--format", help="Of a folder; of a file its name says.")
    ] = None,
    state: Annotated[bool, typer.Option("--state", help="Optimizer state too.")] = False,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="A safetensors file of more is split.")
    ] = "5GB",
    dram_budget: DramBudget = "256MiB",
    json_path: JsonOut = None,
) -> None:
    """Write tables of a store to a file or folder, in bounded memory."""
    if not (tables or every):
        raise InvalidError("name tables by --table, or --all of them")
    with (
        open_folder(store, dram_budget) as opened,
        Progress(f"export {file}", None, "rows") as bar,
    ):
        if not isinstance(opened, Store):
            raise InvalidError(
                f"{store} is a snapshot, which is only looked up; export the tables of its run"
            )
        done = export_tables(
            opened,
            file,
            None if every else tables,
            file_format=file_format,
            state=state,
            shard_bytes=shard_size,
            progress=bar.set,
        )
    _show(f"written to {file}", [asdict(one) for one in done], json_path)
    told = {"rows": sum(one.rows for one in done), "tables": [asdict(one) for one in done]}
    finish(told, json_path, f"export {file}")


def register(app: typer.Typer) -> None:
    """Adds the verbs of this file."""
    add(app, "import", import_, "Read tables of files into a store.")
    add(app, "export", export, "Write tables of a store to files.")
