"""Tensors of state dictionaries and of checkpoints, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)

from tierbed.errors import CorruptionError, InvalidError

__all__ = [
    "CheckpointTensors",
    "Parts",
    "Piece",
    "StateTensors",
    "Tensors",
    "rows_of",
    "whole",
]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Args:
        offsets: Where it begins, a number per dimension.
        sizes: How long it is.
        read: Returns it, on the CPU.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Parts:
    """A tensor in pieces.

    Args:
        size: Of the whole.
        dtype: Of its numbers.
        pieces: They do not overlap.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]

    def check_whole(self, name: str) -> None:
        """Refuses a tensor of which other processes have parts.

        Raises:
            InvalidError: It is not whole here.
        """
        held = sum(_product(piece.sizes) for piece in self.pieces)
        if held != _product(self.size):
            raise InvalidError(
                f"{name} has {_product(self.size)} numbers, {held} of them in this process; save "
                "it by torch.distributed.checkpoint, and load that with load_checkpoint",
                {"name": name},
            )


class Tensors(Protocol):
    """Named tensors, of which one piece at a time is in memory."""

    def names(self) -> list[str]:
        """The names of all tensors."""

    def parts(self, name: str) -> Parts:
        """The tensor of that name."""


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())


def _piece(offsets: Sequence[int], tensor: Tensor) -> Piece:
    return Piece(tuple(offsets), tuple(tensor.shape), lambda: tensor.detach().cpu())


class StateTensors:
    """The tensors of a state dictionary, sharded ones among them.

    Args:
        state: By name.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._state)

    def parts(self, name: str) -> Parts:
        """Returns the tensor of that name, or the parts of it that this process has."""
        value = self._state[name]
        if hasattr(value, "local_shards") and hasattr(value, "metadata"):  # ShardedTensor
            shards = value.local_shards()
            if not shards:
                return Parts(tuple(value.size()), torch.float32, [])
            pieces = [_piece(shard.metadata.shard_offsets, shard.tensor) for shard in shards]
            return Parts(tuple(value.size()), shards[0].tensor.dtype, pieces)
        if not hasattr(value, "to_local"):
            whole_piece = _piece([0] * value.dim(), value)
            return Parts(tuple(value.shape), value.dtype, [whole_piece])
        local = value.to_local()  # DTensor
        if hasattr(local, "local_shards"):  # TorchRec's shards in one
            held = zip(local.local_offsets(), local.local_shards(), strict=True)
            shared = [_piece(at, part) for at, part in held]
            return Parts(tuple(value.shape), value.dtype, shared)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        return Parts(tuple(value.shape), value.dtype, [_piece(offsets, local)])


class CheckpointTensors:
    """The tensors of a distributed checkpoint (DCP), read one stored shard at a time.

    Args:
        path: Its folder.

    Raises:
        InvalidError: No checkpoint is there.
        CorruptionError: What tells its tensors is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._reader = FileSystemReader(self._path)
        try:
            self._metadata = self._reader.read_metadata()
        except FileNotFoundError:
            raise InvalidError(
                f"{self._path} has no distributed checkpoint of torch, whose folder has a file "
                ".metadata; give the folder that torch.distributed.checkpoint.save wrote",
                {"path": self._path},
            ) from None
        except Exception as error:
            raise CorruptionError(
                f"{self._path}/.metadata cannot be read: {error}", {"path": self._path}
            ) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        found = self._metadata.state_dict_metadata
        return [name for name, kind in found.items() if isinstance(kind, TensorStorageMetadata)]

    def parts(self, name: str) -> Parts:
        """Returns the tensor of that name."""
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata), name
        pieces = []
        for chunk in stored.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            pieces.append(Piece(offsets, sizes, self._reading(name, chunk, stored)))
        return Parts(tuple(stored.size), stored.properties.dtype, pieces)

    def _reading(
        self, name: str, chunk: Any, stored: TensorStorageMetadata
    ) -> Callable[[], Tensor]:
        def read() -> Tensor:
            target = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
            index = MetadataIndex(name, chunk.offsets)
            start = torch.Size([0] * len(chunk.sizes))
            item = ReadItem(LoadItemType.TENSOR, index, start, index, start, chunk.sizes)
            try:
                self._reader.read_data(LoadPlan([item]), _Into(target)).wait()
            except Exception as error:
                raise CorruptionError(
                    f"{name} of {self._path} cannot be read: {error}",
                    {"path": self._path, "name": name},
                ) from error
            return target

        return read


class _Into(LoadPlanner):
    """Lets one tensor be read into ``target``."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Does nothing: the plan is there."""

    def create_local_plan(self) -> LoadPlan:
        """Is not called."""
        raise AssertionError("the plan is made by whoever reads")

    create_global_plan: Any = create_local_plan
    finish_plan: Any = create_local_plan
    load_bytes: Any = create_local_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns where the tensor goes."""
        return self._target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing: it is there."""


def whole(parts: Parts, name: str) -> Tensor:
    """Returns a tensor in one piece.

    Raises:
        InvalidError: Other processes have parts of it.
    """
    parts.check_whole(name)
    made: Tensor | None = None
    for piece in parts.pieces:
        read = piece.read()
        if made is None:
            made = torch.empty(parts.size, dtype=read.dtype)
        spans = zip(piece.offsets, piece.sizes, strict=True)
        made[tuple(slice(at, at + size) for at, size in spans)] = read
    return torch.empty(parts.size) if made is None else made


def rows_of(piece: Piece, chunk_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yields first row and ``[<= chunk_rows, C]`` of a piece ``[N, C]``, or ``[N]``."""
    read = piece.read()
    read = read.view(-1, 1) if read.dim() == 1 else read
    for first in range(0, read.shape[0], chunk_rows):
        yield piece.offsets[0] + first, read[first : first + chunk_rows]
