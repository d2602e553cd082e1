"""pyarrow, which is optional."""

from __future__ import annotations

from typing import Any

from tierbed.errors import UnsupportedError

__all__ = ["arrow_modules"]


def arrow_modules() -> tuple[Any, Any, Any]:
    """Returns ``pyarrow``, its ``compute`` and its ``parquet``.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            "Parquet needs pyarrow; install it with: pip install 'tierbed[data]'"
        ) from error
    return pyarrow, pyarrow.compute, pyarrow.parquet
