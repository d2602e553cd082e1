"""Checks of arguments that must be tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tierbed.errors import InvalidError


def check_tensors(**given: Any) -> None:
    """Refuses arguments, by name, that are neither tensors nor None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            found = type(value).__name__
            raise InvalidError(
                f"{name} must be a torch.Tensor, not {found}", {"argument": name, "found": found}
            )


def as_int64(tensor: Tensor) -> Tensor:
    """Returns ids or offsets as i64.

    Raises:
        InvalidError: Not i64 or i32.
    """
    if tensor.dtype == torch.int64:
        return tensor
    if tensor.dtype == torch.int32:
        return tensor.to(torch.int64)
    raise InvalidError(
        f"ids and offsets must be int64 or int32, not {tensor.dtype}; give tensor.long()",
        {"dtype": str(tensor.dtype)},
    )
