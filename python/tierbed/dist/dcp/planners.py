"""Planners by which torch reads and writes tensors that lie in stores, a chunk at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from tierbed.dist.dcp.tensors import Chunk, StepsDone, TableState
from tierbed.dist.dcp.written import OfWritten, RowNumbers
from tierbed.errors import InvalidError, TierbedError

__all__ = ["LoadPlanner", "SavePlanner", "load", "save"]

#: Bytes of a chunk, and of the chunks that torch's writer keeps: the last one of each tensor.
CHUNK_BYTES, _KEPT_BYTES, _CHUNK_BYTES_MIN = 16 << 20, 256 << 20, 1 << 20


def save(state_dict: dict[str, Any], *, chunk_bytes: int | None = None, **options: Any) -> None:
    """Writes a distributed checkpoint, as ``torch.distributed.checkpoint.save``.

    Tables pass through memory a chunk at a time. Torch's writer keeps the last chunk of each tensor
    until a file is finished: memory is chunk times tensors.

    Args:
        state_dict: What to save, with objects of :class:`TableState`.
        chunk_bytes: As of :class:`SavePlanner`.
        options: As of ``torch.distributed.checkpoint.save``: ``checkpoint_id``,
            ``storage_writer``, ``process_group``, ``no_dist``.
    """
    with _own_errors():
        torch_save(state_dict, planner=SavePlanner(chunk_bytes=chunk_bytes), **options)


def load(state_dict: dict[str, Any], *, steps: int | None = None, **options: Any) -> None:
    """Reads a distributed checkpoint in place, as ``torch.distributed.checkpoint.load``.

    Ranks that saved may be others. One stored shard is in memory at a time. Weights and state that
    the dictionary does not name stay as they are.

    Args:
        state_dict: What to load, with objects of :class:`TableState`; those of the compact layout
            are of stores that trained nothing.
        steps: Steps that optimizers did, for Adam, where the checkpoint does not tell them.
        options: As of ``torch.distributed.checkpoint.load``: ``checkpoint_id``,
            ``storage_reader``, ``process_group``, ``no_dist``.

    Raises:
        InvalidError: A tensor is missing or has another size; or rows were trained already.
        CorruptionError: Rows of the compact layout do not ascend.
    """
    numbers = {
        name: state
        for name, state in flatten_state_dict(state_dict)[0].items()
        if isinstance(state, RowNumbers)
    }
    with _own_errors():
        if numbers:
            # Which rows there are is known before the first one comes.
            torch_load(dict(numbers), planner=LoadPlanner(), **options)
        torch_load(state_dict, planner=_OfRows(steps=steps), **options)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises the first error of this package that torch tells of some rank."""
    try:
        yield
    except CheckpointException as told:
        for rank, (error, _) in sorted(told.failures.items()):
            if isinstance(error, TierbedError):
                raise type(error)(f"rank {rank} failed: {error}", error.context) from told
        raise


class SavePlanner(DefaultSavePlanner):
    """Saves a state dictionary in which objects of :class:`TableState` stand for tensors.

    Args:
        chunk_bytes: Most bytes of a table in memory at a time. By default 16 MiB, and less where
            there are more than 16 tensors.
    """

    def __init__(self, *, chunk_bytes: int | None = None) -> None:
        super().__init__()
        self._chunk_bytes = chunk_bytes
        self._tables: dict[str, TableState] = {}
        self._chunks: dict[MetadataIndex, Chunk] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes the tables out of the dictionary.

        Args:
            state_dict: What to save.
            storage_meta: Of the writer.
            is_coordinator: Whether this rank plans for all.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._tables = _tables_of(self.state_dict)
        self.state_dict = {k: v for k, v in self.state_dict.items() if k not in self._tables}

    def create_local_plan(self) -> SavePlan:
        """Returns the plan of the dictionary, and an item for each chunk of a table."""
        plan = super().create_local_plan()
        chunk_bytes = self._chunk_bytes or max(
            _CHUNK_BYTES_MIN, min(CHUNK_BYTES, _KEPT_BYTES // max(len(self._tables), 1))
        )
        added = []
        for name, state in self._tables.items():
            properties = TensorProperties(dtype=state.dtype)
            for held in state.chunks():
                for chunk in held.split(chunk_bytes, state.dtype.itemsize):
                    offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                    index = MetadataIndex(name, offsets)
                    self._chunks[index] = chunk
                    data = TensorWriteData(
                        ChunkStorageMetadata(offsets, sizes), properties, torch.Size(state.size)
                    )
                    added.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=[*plan.items, *added])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns a value of the dictionary, or reads a chunk of a table.

        Args:
            index: Which.
        """
        state = self._tables.get(index.fqn)
        if state is None:
            return super().lookup_object(index)
        return state.read(self._chunks[MetadataIndex(index.fqn, index.offset)])


class LoadPlanner(DefaultLoadPlanner):
    """Loads a state dictionary in which objects of :class:`TableState` stand for tensors.

    The compact layout is loaded by :func:`load`, which looks at the numbers of rows first.

    Args:
        steps: As of :func:`load`.
    """

    def __init__(self, *, steps: int | None = None) -> None:
        super().__init__()
        self._steps = steps
        self._tables: dict[str, TableState] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the tables out of the dictionary.

        Args:
            state_dict: What to load.
            metadata: Of the checkpoint.
            is_coordinator: Whether this rank plans for all.
        """
        flat, mappings = flatten_state_dict(state_dict)
        tables = _tables_of(flat)
        # What is no tensor of a store is torch's, which looks at every value.
        super().set_up_planner(
            {k: v for k, v in flat.items() if k not in tables}, metadata, is_coordinator
        )
        self.original_state_dict, self.mappings = state_dict, mappings
        self._tables = {name: state for name, state in tables.items() if self._takes(state)}

    def create_local_plan(self) -> LoadPlan:
        """Returns the plan of the dictionary and of the tables.

        Raises:
            InvalidError: A tensor is missing or has another size.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        numbers = sum(isinstance(state, RowNumbers) for state in self._tables.values())
        if 0 < numbers < len(self._tables):
            raise InvalidError(
                "numbers of rows come before the rows of a compact layout; load it by "
                "tierbed.dist.dcp.load"
            )
        plan = create_default_local_load_plan(self.state_dict, self.metadata, True)
        stored = self.metadata.state_dict_metadata
        added: list[ReadItem] = []
        for name, state in self._tables.items():
            if isinstance(state, OfWritten) and _is_empty(name, stored):
                continue
            if isinstance(state, StepsDone) and name not in stored:
                self._set_steps(name, state)
                continue
            found = stored.get(name)
            if not isinstance(found, TensorStorageMetadata):
                known = ", ".join(sorted(stored)[:10])
                raise InvalidError(
                    f"the checkpoint has no tensor {name!r}, it has {known}, ...; give prefix= "
                    "where its names begin with more than the collection's",
                    {"name": name},
                )
            added += _items(name, state, found)
        return LoadPlan([*plan.items, *added])

    def _takes(self, state: TableState) -> bool:
        return True

    def _set_steps(self, name: str, state: StepsDone) -> None:
        if self._steps is not None:
            state.set(self._steps)
        elif state.is_needed:
            raise InvalidError(
                f"the checkpoint does not tell {name!r}, on which the optimizer's next step "
                "depends; give load its steps=",
                {"name": name},
            )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns where a tensor goes: of a table, memory for what was stored of it.

        Args:
            read_item: Which.
        """
        state = self._tables.get(read_item.dest_index.fqn)
        if state is None:
            target: Tensor = super().resolve_tensor(read_item)
            return target
        return torch.empty(read_item.lengths, dtype=state.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Writes what came of a table to its store.

        Args:
            read_item: Which.
            tensor: What came.
        """
        state = self._tables.get(read_item.dest_index.fqn)
        if state is None:
            super().commit_tensor(read_item, tensor)
            return
        start = read_item.dest_index.offset
        assert start is not None, "chunks have offsets"
        offsets = tuple(a + b for a, b in zip(start, read_item.dest_offsets, strict=True))
        state.write(Chunk(offsets, tuple(read_item.lengths)), tensor)


class _OfRows(LoadPlanner):
    """Loads all but the numbers of rows, which were looked at before."""

    def _takes(self, state: TableState) -> bool:
        return not isinstance(state, RowNumbers)


def _tables_of(flat: Mapping[str, Any]) -> dict[str, TableState]:
    return {name: state for name, state in flat.items() if isinstance(state, TableState)}


def _is_empty(name: str, stored: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has a table of the compact layout, and no row of it."""
    return name not in stored and f"{name.rpartition('.')[0]}.steps" in stored


def _items(name: str, state: TableState, stored: TensorStorageMetadata) -> Iterator[ReadItem]:
    size = tuple(stored.size)
    state.begin_load(size)
    if size != state.size:
        raise InvalidError(
            f"{name!r} has size {size} in the checkpoint, not {state.size}", {"name": name}
        )
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in state.chunks()
    ]
    yield from create_read_items_for_chunk_list(name, stored, chunks)
