"""Files and folders that hold tables: which format they have, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tierbed.errors import InvalidError
from tierbed.tables.dynamicemb import is_dynamicemb, read_dynamicemb
from tierbed.tables.faiss import read_faiss
from tierbed.tables.found import FoundTable, TableFile, tables_of
from tierbed.tables.hugectr import is_hugectr, read_hugectr
from tierbed.tables.hugectr_collections import collections_in, read_collections
from tierbed.tables.parquet import read_parquet
from tierbed.tables.rows import Rows
from tierbed.tables.state import STATE_NAMES
from tierbed.tables.tensors import read_npy, read_safetensors, read_torch

if TYPE_CHECKING:
    from tierbed.torchrec.pieces import Parts

__all__ = ["READERS", "StoredRows", "find_tables"]

INDEX = ".safetensors.index.json"
#: What reads a file, by the end of its name.
READERS: dict[str, Callable[[Path], TableFile]] = {
    ".npy": read_npy,
    ".safetensors": read_safetensors,
    INDEX: read_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), read_torch),
    ".parquet": read_parquet,
    **dict.fromkeys((".faiss", ".index"), read_faiss),
}


def find_tables(path: str | os.PathLike[str]) -> TableFile:
    """Opens a file or a folder, and finds the tables in it; rows are not read.

    Files: npy, safetensors or their index, what ``torch.save`` wrote, Parquet, flat indexes of
    faiss. Folders: distributed checkpoints of torch, dumps of dynamicemb, sparse models of HugeCTR,
    models of Hugging Face, and folders of such files.

    Args:
        path: The file or folder.

    Examples:
        >>> torch.save({"model": torch.nn.EmbeddingBag(1000, 16).state_dict()}, "model.pt")
        >>> found = tb.tables.find_tables("model.pt").tables[0]
        >>> found.name, found.rows, found.dim
        ('model.weight', 1000, 16)

    Raises:
        InvalidError: Nothing is there, or an unknown format.
        CorruptionError: It is not whole.
    """
    place = Path(path)
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        raise InvalidError(f"no such file: {place}", {"path": str(place)})
    ending = INDEX if place.name.lower().endswith(INDEX) else place.suffix.lower()
    if ending not in READERS:
        raise InvalidError(
            f"cannot tell the format of {place}; use one of {sorted(READERS)}", {"path": str(place)}
        )
    return READERS[ending](place)


def _folder(folder: Path) -> TableFile:
    if (folder / ".metadata").is_file():
        return _distributed(folder)
    indexes = sorted(folder.glob(f"*{INDEX}"))
    if len(indexes) == 1:
        return replace(read_safetensors(indexes[0]), path=folder)
    if is_hugectr(folder):
        return read_hugectr(folder)
    if collections_in(folder):
        return read_collections(folder)
    files = sorted(path for path in folder.iterdir() if _is_table_file(path))
    # A model of Hugging Face may lie there in both formats.
    files = [path for path in files if path.name == "model.safetensors"] or files
    if not files and is_dynamicemb(folder):
        return read_dynamicemb(folder)
    if not files:
        raise InvalidError(
            f"{folder} holds no tables in a format that is known; name a file, or a folder with a "
            "checkpoint of torch, a dump of dynamicemb or a model of HugeCTR",
            {"path": str(folder)},
        )
    opened = [find_tables(path) for path in files]
    return TableFile(
        folder,
        [_named(table, one.path) for one in opened for table in one.tables],
        {name: rows for one in opened for name, rows in one.tensors.items()},
    )


def _is_table_file(path: Path) -> bool:
    start, _, leaf = path.stem.rpartition(".")
    is_beside = path.suffix == ".npy" and bool(start) and leaf in STATE_NAMES | {"ids", "shared"}
    return path.is_file() and path.suffix.lower() in READERS and not is_beside


def _named(table: FoundTable, path: Path) -> FoundTable:
    """Names a table ``weight`` after its file."""
    return replace(table, name=f"{path.stem}.weight") if table.name == "weight" else table


# ---------------------------------------------------------------- distributed checkpoints


def _distributed(folder: Path) -> TableFile:
    from tierbed.torchrec.pieces import CheckpointTensors

    stored = CheckpointTensors(folder)
    tensors = {name: StoredRows(stored.parts(name)).rows() for name in stored.names()}
    return TableFile(folder, tables_of(tensors), tensors)


class StoredRows:
    """Rows of a tensor of a checkpoint; the shards of the rows read last stay in memory.

    Args:
        parts: The shards.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._held: dict[int, Tensor] = {}

    def rows(self) -> Rows:
        """Returns it as rows."""
        return Rows(self._parts.size, self._parts.dtype, self.read)

    def read(self, first: int, count: int) -> Tensor:
        """Reads rows, each from the shards that have its columns."""
        size = self._parts.size or (1,)
        made = torch.empty((count, *size[1:]), dtype=self._parts.dtype, device="cpu")
        held: dict[int, Tensor] = {}
        for at, piece in enumerate(self._parts.pieces):
            starts, sizes = piece.offsets or (0,), piece.sizes or (1,)
            low, high = max(first, starts[0]), min(first + count, starts[0] + sizes[0])
            if low >= high:
                continue
            held[at] = self._held[at] if at in self._held else piece.read().reshape(sizes)
            beside = [
                slice(start, start + size)
                for start, size in zip(starts[1:], sizes[1:], strict=True)
            ]
            part = held[at][low - starts[0] : high - starts[0]]
            place = (slice(low - first, high - first), *beside)
            made[place] = part
        self._held = held
        return made
