"""Outputs that are lent from the exchange until the lookup after the next.

On a GPU an output may be read on the stream of the lookup, and on any stream that waited for it.
Where the last reference to it goes, the stream that is current there is marked: the lookup that
needs the memory waits for that mark, before other ranks may write. So who reads on several streams
lets go of the output on the last of them, behind the others.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tierbed.errors import InvalidError

__all__ = ["Lender"]

# Outputs that may be in use when a lookup begins; the exchange has a buffer for each.
LENT_MAX = 2


class Lender:
    """Wraps memory of an exchange as tensors, and knows while somebody uses them.

    Args:
        dim: Columns of an output.
        dtype: What its numbers are.
        owner: What must outlive the tensors.
        stream: Returns the current stream of the device, as ``torch.cuda.current_stream`` does;
            None where there are no streams.
    """

    def __init__(
        self,
        dim: int,
        dtype: torch.dtype,
        owner: object,
        stream: Callable[[], Any] | None = None,
    ) -> None:
        self._dim = dim
        self._dtype = dtype
        self._owner = owner
        self._stream = stream
        self._lent: list[_Lent] = []

    def begin(self) -> None:
        """Begins a lookup, which needs the memory of the output of two lookups ago.

        Raises:
            InvalidError: That output is still in use.
        """
        if len(self._lent) < LENT_MAX:
            return
        oldest = self._lent[0]
        if oldest.is_used:
            raise InvalidError(
                "the output of two lookups ago is still in use, and its memory is needed; clone "
                "what is kept, or pass copies_outputs=True"
            )
        self._lent.pop(0)
        oldest.wait_for_reader()

    def lend(
        self, address: int, parts: list[tuple[int, int]], device: torch.device
    ) -> list[Tensor]:
        """Wraps samples of the output at ``address``, ``[b, dim]`` for each part."""
        row_bytes = self._dim * self._dtype.itemsize
        whole = parts[-1][1] * row_bytes
        lent = _Lent(self._stream)
        # Memory is taken in turn, by outputs of no samples too.
        self._lent.append(lent)
        if whole == 0:
            return [self._empty(end - first, device) for first, end in parts]
        values: Any = (ctypes.c_uint8 * whole).from_address(address)
        if device.type == "cuda":
            values = _DeviceBytes(address, whole)
        values._owner = self._owner
        lent.watch(values)
        return [self._wrap(values, first, end - first, device) for first, end in parts]

    def _empty(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, self._dim), dtype=self._dtype, device=device)

    def _wrap(self, values: Any, first: int, samples: int, device: torch.device) -> Tensor:
        if samples == 0:
            return self._empty(0, device)
        count, skipped = samples * self._dim, first * self._dim * self._dtype.itemsize
        if device.type == "cuda":
            raw = torch.as_tensor(values, device=device)
            flat = raw[skipped : skipped + count * self._dtype.itemsize].view(self._dtype)
        else:
            flat = torch.frombuffer(values, dtype=self._dtype, count=count, offset=skipped)
        return flat.view(samples, self._dim)


class _Lent:
    """The memory of one output.

    Args:
        stream: As of :class:`Lender`.
    """

    def __init__(self, stream: Callable[[], Any] | None) -> None:
        self._stream = stream
        self._values: weakref.ref[Any] | None = None
        self._mark: Any = None

    @property
    def is_used(self) -> bool:
        """Whether a tensor of it is left."""
        return self._values is not None and self._values() is not None

    def watch(self, values: object) -> None:
        """Notes when the last tensor over ``values`` goes."""
        self._values = weakref.ref(values, self._let_go)

    def wait_for_reader(self) -> None:
        """Lets the current stream wait for the one on which the last tensor went."""
        if self._mark is not None and self._stream is not None:
            self._stream().wait_event(self._mark)

    def _let_go(self, _: object) -> None:
        if self._stream is not None:
            self._mark = self._stream().record_event()


class _DeviceBytes:
    """Bytes of a GPU's memory, as torch takes those of others."""

    _owner: object

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
