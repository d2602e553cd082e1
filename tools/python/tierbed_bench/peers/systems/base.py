"""What every system can do: take all rows once, and read the rows of a query."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from tierbed.errors import UnsupportedError
from tierbed_bench.peers.table import Ids, Rows, Table

__all__ = ["UNPACKED", "Peer", "bring"]

# Where scripts/bench-deps puts programs and packages that are not installed.
UNPACKED = Path(__file__).parents[5] / ".tools" / "peers"


class Peer(ABC):
    """One system.

    The constructor brings what it needs into the process, so that this does not count as memory of
    reading.

    Args:
        table: The rows.
        folder: Where it keeps them.

    Raises:
        UnsupportedError: It is not installed; the message says how to.
    """

    #: It has no form on disk: with less memory than rows it refuses them.
    is_in_memory: ClassVar[bool] = False

    def __init__(self, table: Table, folder: Path) -> None:
        self.table, self.folder = table, folder

    @abstractmethod
    def load(self) -> None:
        """Writes all rows into :attr:`folder`."""

    @abstractmethod
    def open(self, memory_bytes: int, clients: int) -> None:
        """Opens what was loaded, for reading by threads at once.

        Args:
            memory_bytes: For rows and for all that finds them; 0 is no limit.
            clients: Threads that will ask.
        """

    @abstractmethod
    def read(self, ids: Ids) -> Rows:
        """Reads rows ``[n, dim]`` in the order of ``ids`` ``[n]``, which are distinct.

        Threads call it at the same time.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes it, from the thread that opened it."""

    def rows_of(self, packed: bytes | bytearray | memoryview) -> Rows:
        """Views bytes of rows as ``[n, dim]``."""
        import numpy as np

        return np.frombuffer(packed, np.float32).reshape(-1, self.table.dim)


def bring(module: str, package: str) -> Any:
    """Imports an optional module.

    Args:
        module: Its name.
        package: What to install.

    Raises:
        UnsupportedError: It is not there.
    """
    unpacked = str(UNPACKED / "python")
    if unpacked not in sys.path:
        # Last: what is installed comes first.
        sys.path.append(unpacked)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{package} is not here ({error}); run scripts/bench-deps, or pip install {package}"
        ) from error
