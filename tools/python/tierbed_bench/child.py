"""One measured system in a process of its own, without torch: only the native module is loaded.

Run as a file, not as a module: importing the package would bring torch into the memory that is
to be measured. The first argument is the path of the native module.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from typing import Any


def load_native(path: str) -> Any:
    """Loads the native module without its package."""
    loader = ExtensionFileLoader("_native", path)
    spec = importlib.util.spec_from_file_location("_native", path, loader=loader)
    if spec is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    load_native(sys.argv[1]).bench_worker()
