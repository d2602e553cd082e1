"""Writes fixtures of the version at hand: ``python -m formats.write FOLDER``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from . import serving, stores
from .archive import FORMATS, pack, write_facts


def main(name: str) -> None:
    torch.set_num_threads(1)
    target = FORMATS / name
    target.mkdir(parents=True)
    for case in (*stores.CASES, *serving.CASES):
        with tempfile.TemporaryDirectory() as scratch:
            facts = case.write(Path(scratch))
            pack(Path(scratch), target / f"{case.name}.tar.gz")
        write_facts(target / f"{case.name}.json", facts)
        size = (target / f"{case.name}.tar.gz").stat().st_size
        sys.stdout.write(f"{case.name}: {size} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1])
