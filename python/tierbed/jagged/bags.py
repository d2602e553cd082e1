"""Bags of ids: what those of one feature and of several have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack

from tierbed._native import fill_offsets
from tierbed.errors import InvalidError

__all__ = ["Bags", "check_bags", "offsets_of"]


def offsets_of(lengths: Tensor) -> Tensor:
    """Returns the offsets ``[N+1]`` i64 of bags of ``lengths`` ``[N]``."""
    if _is_plain(lengths):
        # Threads that look rows up take turns in Python: operators of torch let another one in.
        offsets = torch.from_numpy(np.empty(lengths.numel() + 1, np.int64))
        fill_offsets(lengths, lengths.dtype == torch.int32, offsets)
        return offsets
    ends = torch.cumsum(lengths, dim=0, dtype=torch.int64)
    return torch.nn.functional.pad(ends, (1, 0))


def _is_plain(lengths: Tensor) -> bool:
    """Whether the memory of ``lengths`` may be read past torch."""
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or not lengths.is_cpu:
        return False
    is_known = lengths.dtype in (torch.int32, torch.int64) and lengths.is_contiguous()
    if not is_known or _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        return False
    return _get_tracing_state() is None


_COUNTS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def check_bags(values: Tensor, lengths: Tensor | None, offsets: Tensor | None, what: str) -> None:
    """Refuses what cannot be the ids and bags of a batch."""
    if lengths is None and offsets is None:
        raise InvalidError(f"a {what} needs lengths or offsets")
    if not isinstance(values, Tensor):
        raise _not_a_tensor(values, "values", what)
    if lengths is not None and lengths is not values:
        _check_counts(lengths, "lengths", what)
    if offsets is not None and offsets is not values:
        _check_counts(offsets, "offsets", what)


def _check_counts(tensor: Tensor, name: str, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise _not_a_tensor(tensor, name, what)
    if tensor.dtype not in _COUNTS:
        raise InvalidError(
            f"{name} of a {what} must be integers, not {tensor.dtype}", {"argument": name}
        )


def _not_a_tensor(found: object, name: str, what: str) -> InvalidError:
    return InvalidError(
        f"{name} of a {what} must be a torch.Tensor, not {type(found).__name__}; "
        "torch.as_tensor makes one",
        {"argument": name},
    )


class Bags:
    """What bags of one feature and of several have in common; lengths or offsets are given."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """Returns the ids of all bags ``[E]``, or rows ``[E, D]``."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Returns the weights ``[E]``, if any."""
        return self._weights

    def lengths(self) -> Tensor:
        """Returns the length of each bag, ``[B]``, of ``F`` features ``[F*B]``."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Tensor:
        """Returns the bounds of the bags, ``[B+1]``, of ``F`` features ``[F*B+1]``."""
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths())
        return self._offsets

    def lengths_or_none(self) -> Tensor | None:
        """Returns the lengths, if they were given or computed."""
        return self._lengths

    def offsets_or_none(self) -> Tensor | None:
        """Returns the offsets, if they were given or computed."""
        return self._offsets

    def weights(self) -> Tensor:
        """Returns the weights ``[E]``.

        Raises:
            InvalidError: There are none.
        """
        weights = self.weights_or_none()
        if weights is None:
            raise InvalidError(f"the {type(self).__name__} has no weights; give it weights=")
        return weights

    def device(self) -> torch.device:
        """Returns where the ids are."""
        return self.values().device

    def size_in_bytes(self) -> int:
        """Returns the bytes of all its tensors."""
        return sum(part.element_size() * part.numel() for part in self._tensors())

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory of all its tensors until ``stream`` has used them.

        Args:
            stream: A ``torch.cuda.Stream``.
        """
        for part in self._tensors():
            part.record_stream(stream)

    def _tensors(self) -> list[Tensor]:
        parts = (self.values(), self._weights, self._lengths, self._offsets)
        return [part for part in parts if part is not None]
