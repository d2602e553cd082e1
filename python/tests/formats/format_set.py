"""Which kinds of fixtures are there, and how does one lie in a set?

A set is a folder ``testdata/formats/<version>-<commit>``: ``manifest.json`` and one packed folder
per fixture. Run as a program it makes a new set with the module that is installed::

    .venv/bin/python python/tests/formats/format_set.py testdata/formats/0.2.0-1a2b3c4
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import format_files as files
import format_served as served
import format_stores as stores
import torch

import tierbed as tb

Facts = dict[str, Any]
MANIFEST = "manifest.json"
SUFFIX = ".tar.gz"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fixture that is no training store.

    Args:
        make: Writes it into a folder.
        tell: Reads it, and returns what it holds.
        check: Finds whether a folder holds what was told.
    """

    make: Callable[[Path], None]
    tell: Callable[[Path], Facts]
    check: Callable[[Path, Facts], None]


def _snapshot(make: Callable[[Path], None]) -> Kind:
    return Kind(
        make=make,
        tell=lambda folder: served.told(folder / "snapshot"),
        check=served.check_snapshot,
    )


KINDS: dict[str, Kind] = {
    "snapshot": _snapshot(served.make_plain),
    "snapshot_open": _snapshot(served.make_open),
    "snapshot_wide": _snapshot(served.make_wide),
    "snapshot_placed": _snapshot(served.make_placed),
    "snapshot_delta": Kind(
        make=served.make_delta,
        tell=lambda folder: served.told(folder / "snapshot"),
        check=served.check_delta,
    ),
    "snapshot_tiers": Kind(
        make=served.make_tiers, tell=served.tell_tiers, check=served.check_tiers
    ),
    "snapshot_neighbours": Kind(
        make=served.make_neighbours, tell=served.tell_neighbours, check=served.check_neighbours
    ),
    "logs": Kind(make=files.make_logs, tell=files.tell_logs, check=files.check_logs),
    "vocabulary": Kind(
        make=files.make_vocabulary, tell=files.tell_vocabulary, check=files.check_vocabulary
    ),
    "ranks": Kind(make=files.make_ranks, tell=files.tell_ranks, check=files.check_ranks),
}


# ---------------------------------------------------------------- packing


def pack(folder: Path, path: Path) -> None:
    """Packs ``folder`` into ``path``; equal contents make equal bytes, holes take no room."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
        member.mode = 0o755 if member.isdir() else 0o644
        return member

    raw = BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for part in sorted(folder.rglob("*")):
            archive.add(part, str(part.relative_to(folder)), recursive=False, filter=plain)
    path.write_bytes(gzip.compress(raw.getvalue(), 9, mtime=0))


def unpack(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")


# ---------------------------------------------------------------- making and checking


def make_fixture(name: str, folder: Path) -> Facts:
    """Makes fixture ``name`` in ``folder``; returns its entry of the manifest."""
    recipe = stores.RECIPES.get(name)
    if recipe is not None:
        return {"kind": "store", "recipe": recipe, "facts": stores.make(recipe, folder)}
    kind = KINDS[name]
    kind.make(folder)
    # The store that was published is no part of the fixture.
    shutil.rmtree(folder / "store", ignore_errors=True)
    return {"kind": name, "facts": kind.tell(folder)}


def check_fixture(entry: Facts, folder: Path) -> None:
    """Checks an unpacked fixture, which may be changed by it, against its entry."""
    if entry["kind"] == "store":
        stores.check(entry["recipe"], entry["facts"], folder)
    else:
        KINDS[entry["kind"]].check(folder, entry["facts"])


def make_set(out: Path) -> None:
    """Makes every fixture that can be made here into the new folder ``out``."""
    out.mkdir(parents=True)
    entries: dict[str, Facts] = {}
    left_out: dict[str, str] = {}
    for name in [*stores.RECIPES, *KINDS]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            try:
                entries[name] = make_fixture(name, folder)
            except tb.UnsupportedError as error:
                left_out[name] = str(error)
                continue
            pack(folder, out / f"{name}{SUFFIX}")
    # A line per fixture, so that a set is read and compared by eye.
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    told = f'"version": {json.dumps(tb.__version__)},\n "left_out": {json.dumps(left_out)}'
    body = ",\n".join(lines)
    (out / MANIFEST).write_text(f'{{\n {told},\n "fixtures": {{\n{body}\n }}\n}}\n')


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    make_set(Path(sys.argv[1]))
