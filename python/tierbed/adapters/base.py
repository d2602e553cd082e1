"""Classes of other libraries that adapters derive from, where those are installed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["base_of"]


def base_of(module: str, name: str) -> Any:
    """Returns class ``name`` of ``module``, or ``object`` where its library is not installed.

    Args:
        module: Full name of the module.
        name: Of the class.

    Raises:
        ModuleNotFoundError: The library is installed, and lacks something itself.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        library = module.partition(".")[0]
        if missing.name is None or missing.name.partition(".")[0] != library:
            raise
        return object
