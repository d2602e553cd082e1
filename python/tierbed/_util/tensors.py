"""Arguments that must be tensors."""

from __future__ import annotations

from typing import Any

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
