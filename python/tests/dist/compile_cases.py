"""That a collection on devices has compiled all that its steps launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

Key = tuple[Any, ...]


def key_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Key:
    """Returns what Triton compiles a kernel of its own for."""
    kept: list[Any] = [kernel.__name__]
    for name, value in zip(kernel.arg_names, arguments, strict=False):
        if isinstance(value, torch.Tensor):
            is_free = name in (kernel.kwargs.get("do_not_specialize_on_alignment") or ())
            kept.append((value.dtype, is_free or value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in (kernel.kwargs.get("do_not_specialize") or ()):
            kept.append((value == 1, value % 16 == 0))
        else:
            kept.append(type(value))
    return (*kept, *sorted(constants.items()))


@contextmanager
def watched() -> Iterator[tuple[set[Key], set[Key]]]:
    """Gives what was compiled, and what was launched, in Triton's interpreter."""
    compiled: set[Key] = set()
    launched: set[Key] = set()
    run = InterpretedFunction.run

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        (compiled if warmup else launched).add(key_of(self, arguments, constants))
        return run(self, *arguments, grid=grid, warmup=warmup, **constants)

    InterpretedFunction.run = note
    try:
        yield compiled, launched
    finally:
        InterpretedFunction.run = run
