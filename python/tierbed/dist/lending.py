"""Outputs that are lent from the exchange until the lookup after the next."""

from __future__ import annotations

import ctypes
import weakref
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
    """

    def __init__(self, dim: int, dtype: torch.dtype, owner: object) -> None:
        self._dim = dim
        self._dtype = dtype
        self._owner = owner
        self._lent: list[weakref.ref[Any]] = []

    def begin(self) -> None:
        """Begins a lookup, which needs the memory of the output of two lookups ago.

        Raises:
            InvalidError: That output is still in use.
        """
        if len(self._lent) == LENT_MAX and self._lent.pop(0)() is not None:
            raise InvalidError(
                "the output of two lookups ago is still in use, and its memory is needed; clone "
                "what is kept, or pass copies_outputs=True"
            )

    def lend(
        self, address: int, parts: list[tuple[int, int]], device: torch.device
    ) -> list[Tensor]:
        """Wraps samples of the output at ``address``, ``[b, dim]`` for each part."""
        row_bytes = self._dim * self._dtype.itemsize
        whole = parts[-1][1] * row_bytes
        if whole == 0:
            return [self._empty(end - first, device) for first, end in parts]
        values: Any = (ctypes.c_uint8 * whole).from_address(address)
        if device.type == "cuda":
            values = _DeviceBytes(address, whole)
        values._owner = self._owner
        self._lent.append(weakref.ref(values))
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
