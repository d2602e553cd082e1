"""Distributed checkpoints of torch (DCP) of models whose collections lie in a store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from tierbed.errors import InvalidError
from tierbed.torchrec.int8 import Int8Layout
from tierbed.torchrec.pieces import CheckpointTensors, Parts, whole
from tierbed.torchrec.states import (
    Held,
    held_by,
    load_rows,
    plan_rows,
    read_state,
    state_size,
)

__all__ = ["load_checkpoint", "save_checkpoint"]


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    optimizer_prefix: str | None = None,
    steps: int | None = None,
    int8: Int8Layout | None = None,
    strict: bool = True,
    chunk_rows: int = 65536,
) -> None:
    """Loads a distributed checkpoint (DCP) of TorchRec's model: rows go into the store.

    One stored shard is in memory at a time, twice; checkpoints of any number of ranks are read.
    Everything is checked before anything changes.

    Args:
        model: A model with collections over a store, of the same modules.
        path: The folder.
        prefix: What stands before the names of the model, such as ``"model"`` where
            ``{"model": model.state_dict(), ...}`` was saved.
        optimizer_prefix: What stands before the state of the fused optimizer, such as ``"optim"``;
            by default the state of the rows starts anew.
        steps: Steps that optimizer did, for Adam, whose state does not tell them.
        int8: As of :func:`load_state_dict`.
        strict: Whether every row and every tensor of the model must be there.
        chunk_rows: Rows written at a time.

    Raises:
        InvalidError: No checkpoint, or one without these tensors, or of other shapes.
        UnsupportedError: State that rows do not have.
        CorruptionError: It cannot be read.
    """
    stored = CheckpointTensors(path)
    start = f"{prefix}." if prefix else ""
    there = set(stored.names())
    tables = held_by(model)
    dense = model.state_dict()
    missing = [f"{start}{name}" for name in dense if f"{start}{name}" not in there]
    if strict and missing:
        known = ", ".join(sorted(there)[:10])
        raise InvalidError(
            f"{os.fspath(path)} lacks {missing[:10]}, it has {known}, ...; give prefix= where "
            "names begin with more than the model's, or strict=False",
            {"path": os.fspath(path)},
        )
    state = None
    if optimizer_prefix is not None:
        state = {held.name: _stored_state(stored, held, optimizer_prefix) for held in tables}
    names = {held.name: f"{start}{held.name}" for held in tables}
    loads = plan_rows(tables, stored, state, steps, int8=int8, strict=strict, name_of=names)
    found = [name for name in dense if f"{start}{name}" in there]
    model.load_state_dict(
        {name: whole(stored.parts(f"{start}{name}"), name) for name in found}, strict=strict
    )
    load_rows(loads, chunk_rows)


def _stored_state(stored: CheckpointTensors, held: Held, prefix: str) -> dict[str, Parts]:
    """Returns the state of a table, by what follows the name of its rows."""
    start = ".".join([*([prefix] if prefix else []), "state", held.name, ""])
    return {
        name[len(start) :]: stored.parts(name) for name in stored.names() if name.startswith(start)
    }


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    optimizer_prefix: str | None = None,
    chunk_rows: int = 65536,
) -> None:
    """Writes a distributed checkpoint (DCP) that TorchRec's model of the same modules loads.

    ``chunk_rows`` rows of each table are in memory at a time.

    Args:
        model: A model with collections over a store.
        path: A new folder.
        prefix: What to put before the names of the model, such as ``"model"``.
        optimizer_prefix: What to put before the state of the rows, such as ``"optim"``; by default
            it is left out. Its names are those of a fused optimizer of TorchRec.
        chunk_rows: Rows of a table written as one shard.

    Raises:
        InvalidError: The folder has something in it, or ``chunk_rows`` is less than 1.
    """
    target = Path(path)
    if target.exists() and any(target.iterdir()):
        raise InvalidError(
            f"{target} is not empty; give a new folder for the checkpoint", {"path": str(target)}
        )
    if chunk_rows < 1:
        raise InvalidError(f"chunk_rows must be at least 1, not {chunk_rows}")
    dense: dict[str, Any] = dict(model.state_dict())
    planner = _RowsPlanner(_Rows.of(held_by(model), prefix, optimizer_prefix), chunk_rows)
    save(
        {prefix: dense} if prefix else dense,
        storage_writer=FileSystemWriter(target),
        planner=planner,
        no_dist=True,
    )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor of a checkpoint that is read from a store while it is written.

    Args:
        held: The table.
        part: Of the state; None for the rows.
        where: The keys that lead to it in nested dictionaries.
    """

    held: Held
    part: str | None
    where: tuple[str, ...]

    @staticmethod
    def of(tables: list[Held], prefix: str, optimizer_prefix: str | None) -> list[_Rows]:
        """Returns rows of all tables, and their state where it has a prefix."""
        found = []
        for held in tables:
            found.append(_Rows(held, None, (*([prefix] if prefix else []), held.name)))
            if optimizer_prefix is None:
                continue
            start = (*([optimizer_prefix] if optimizer_prefix else []), "state", held.name)
            found += [
                _Rows(held, part, (*start, f"{held.table}.{part}"))
                for part, _, _ in held.state_columns()
            ]
        return found

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return ".".join(self.where)

    @property
    def size(self) -> torch.Size:
        """Its size."""
        schema = self.held.schema
        if self.part is not None:
            return state_size(self.held, self.part)
        return torch.Size([int(schema["row_count"]), int(schema["dim"])])

    def read(self, first: int, count: int) -> Tensor:
        """Reads some of its rows."""
        if self.part is None:
            return self.held.store.read_rows(self.held.table, first, count)
        return read_state(self.held, self.part, first, count)

    def items(self, chunk_rows: int) -> list[WriteItem]:
        """Returns its shards, of ``chunk_rows`` rows each."""
        size = self.size
        properties = TensorProperties(dtype=torch.float32)
        items = []
        for first in range(0, size[0], chunk_rows):
            offsets = torch.Size([first, *([0] * (len(size) - 1))])
            sizes = torch.Size([min(chunk_rows, size[0] - first), *size[1:]])
            chunk = ChunkStorageMetadata(offsets, sizes)
            data = TensorWriteData(chunk, properties, size)
            index = MetadataIndex(self.name, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


class _RowsPlanner(DefaultSavePlanner):
    """Saves a state dictionary, and rows of stores that no dictionary holds."""

    def __init__(self, rows: list[_Rows], chunk_rows: int) -> None:
        super().__init__()
        self._rows: Mapping[str, _Rows] = {one.name: one for one in rows}
        self._chunk_rows = chunk_rows

    def create_local_plan(self) -> SavePlan:
        """Returns the plan of the dictionary and of the rows."""
        self.mappings.update({name: one.where for name, one in self._rows.items()})
        plan = super().create_local_plan()
        added = [item for one in self._rows.values() for item in one.items(self._chunk_rows)]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *added])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns a tensor of the dictionary, or reads a shard of rows."""
        rows = self._rows.get(index.fqn)
        if rows is None:
            return super().lookup_object(index)
        assert index.offset is not None
        first = index.offset[0]
        return rows.read(first, min(self._chunk_rows, rows.size[0] - first))
