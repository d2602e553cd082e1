"""Launches of kernels: on the device's stream, or interpreted, one at a time.

Threads take turns. Triton's interpreter keeps the running program in globals of its own; and two
threads that launch a kernel for the first time would both compile it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime import JITFunction

from tierbed.errors import InvalidError

__all__ = ["OPTIONS", "check_device", "compiling", "is_interpreted", "launch", "tile"]

_TURNS = threading.Lock()
_THREAD = threading.local()
# Products are rounded before they are added: no fused multiply-add. Subnormal numbers stay what
# they are in quotients and roots, whatever Triton's library does by default.
OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


def is_interpreted(kernel: Any) -> bool:
    """Returns whether ``kernel`` was made for the interpreter."""
    return not isinstance(kernel, JITFunction)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launches ``programs`` programs on the current stream; none when there is nothing to do.

    Within :func:`compiling` it compiles the kernel for these arguments instead.
    """
    if getattr(_THREAD, "compiles", False):
        with _TURNS:
            kernel.warmup(*arguments, grid=(1,), **constants)
        return
    if programs == 0:
        return
    with _TURNS:
        kernel[(programs,)](*arguments, **constants)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compiles what this thread would launch, and launches nothing.

    A kernel that is first launched in a step is compiled there, for seconds, while other ranks
    wait.
    """
    _THREAD.compiles = True
    try:
        yield
    finally:
        _THREAD.compiles = False


def tile(width: int, items_max: int, values_max: int, warps: int | None = None) -> tuple[int, int]:
    """Returns how many items a program takes together, and by how many warps.

    Registers are few: a thread holds at most ``values_max`` numbers of the items.

    Args:
        width: Numbers of an item, a power of two.
        items_max: Most items.
        values_max: Most numbers of a thread.
        warps: Of a program; by default as many as the width asks for.
    """
    if warps is None:
        warps = 2 if width <= 128 else 4 if width <= 512 else 8
    return max(1, min(items_max, values_max * 32 * warps // width)), warps


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
