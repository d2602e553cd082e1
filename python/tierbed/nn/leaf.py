"""Calls of modules in graphs of torch.fx: nothing inside is traced."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy

from tierbed.errors import UnsupportedError

__all__ = ["as_leaf", "is_traced"]


def is_traced(*inputs: Any) -> bool:
    """Whether torch.fx traces a call with ``inputs``."""
    return any(isinstance(one, Proxy) for one in inputs)


def as_leaf(module: nn.Module, *inputs: Any) -> Any:
    """Returns a call of ``module`` in the graph that traces ``inputs``.

    Raises:
        UnsupportedError: The module itself is traced.
    """
    tracer: Any = next(one.tracer for one in inputs if isinstance(one, Proxy))
    if tracer.root is module:
        raise UnsupportedError(
            f"{type(module).__name__} is one call of a graph of torch.fx, nothing inside is "
            "traced; trace the model that holds it"
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})
