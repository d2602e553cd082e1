"""Launches of kernels: on the device's stream, or interpreted, one at a time.

Triton's interpreter keeps the running program in globals of its own, so threads take turns.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from triton.runtime import JITFunction

from tierbed.errors import InvalidError

__all__ = ["check_device", "is_interpreted", "launch"]

_TURNS = threading.Lock()


def is_interpreted(kernel: Any) -> bool:
    """Returns whether ``kernel`` was made for the interpreter."""
    return not isinstance(kernel, JITFunction)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launches ``programs`` programs on the current stream; none when there is nothing to do."""
    if programs == 0:
        return
    if is_interpreted(kernel):
        with _TURNS:
            kernel[(programs,)](*arguments, **constants)
    else:
        kernel[(programs,)](*arguments, **constants)


def check_device(device: torch.device, kernel: Any) -> None:
    """Refuses a device that ``kernel`` cannot run on.

    Raises:
        InvalidError: No such GPU here, or a CPU without the interpreter.
    """
    if device.type == "cpu":
        if not is_interpreted(kernel):
            raise InvalidError(
                "kernels run on a CPU only in Triton's interpreter, for tests: set "
                "TRITON_INTERPRET=1 before Triton is imported, or keep rows in a tierbed.Store"
            )
        return
    if device.type != "cuda":
        raise InvalidError(f"kernels run on CUDA devices, not on {device.type!r}")
    if not torch.cuda.is_available():
        raise InvalidError(
            "this machine has no CUDA device, or torch does not see it; keep rows in a "
            "tierbed.Store, which needs none"
        )
    if is_interpreted(kernel):
        raise InvalidError("TRITON_INTERPRET=1 is for CPUs; unset it to run on a CUDA device")
