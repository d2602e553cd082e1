"""Tiles that were measured on a GPU, kept in a file of the user's cache folder.

A formula knows a tile for every kernel and dim. ``python -m tierbed.dist.kernels.tune`` measures
others on the GPU at hand and keeps the best; from then on launches on GPUs of that name take
these. A tile changes how long a kernel takes, never its bits.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from tierbed.errors import CorruptionError, IoError

__all__ = ["FIELDS", "MeasuredTile", "Tiles", "keep_tiles", "tiles_file"]

# What is said of a tile of each kernel; all are powers of two.
FIELDS = {
    "pool_to_ranks": ("bags", "rows_at_once", "warps"),
    "pool_to_ranks_single": ("bags", "rows_at_once", "warps"),
    "step_rows": ("rows", "uses_at_once", "warps"),
    "step_rows_many": ("rows", "uses_at_once", "warps"),
}
VERSION = 1
# What a kernel calls its tile.
Tile = TypeVar("Tile")
# Most of anything in a tile: as many warps make the largest program that a GPU takes.
NUMBER_MAX = 64


@dataclass(frozen=True, kw_only=True)
class MeasuredTile:
    """The best tile of a kernel on a GPU.

    Args:
        gpu: Name of the GPU, as CUDA tells it.
        kernel: One of :data:`FIELDS`.
        width: Numbers of a row, rounded up to a power of two.
        tile: A number for each field of the kernel.
    """

    gpu: str
    kernel: str
    width: int
    tile: Mapping[str, int]


class Tiles:
    """The measured tiles of one GPU.

    Args:
        tiles: Those of this GPU.
    """

    def __init__(self, tiles: tuple[MeasuredTile, ...] = ()) -> None:
        self._tiles = {(tile.kernel, tile.width): tile.tile for tile in tiles}

    @classmethod
    def of(cls, device: torch.device) -> Tiles:
        """Returns what is known of a device; the file is read once.

        Raises:
            CorruptionError: The file is damaged.
            IoError: It cannot be read.
        """
        return _known(os.environ.get("XDG_CACHE_HOME", ""), device)

    def pick(self, kernel: str, dim: int, otherwise: Tile) -> Tile:
        """Returns the tile of ``kernel`` for rows of ``dim`` numbers, or ``otherwise``."""
        found = self._tiles.get((kernel, triton.next_power_of_2(dim))) if self._tiles else None
        return otherwise if found is None else replace(otherwise, **found)  # type: ignore[type-var]


def tiles_file() -> Path | None:
    """Returns where tiles are kept, or None where the user has no folder.

    That is ``tierbed/kernel-tiles.json`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The standard: a path that is not absolute counts for nothing.
        folder = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "tierbed" / "kernel-tiles.json"


def gpu_name(device: torch.device) -> str:
    """Returns the name of a GPU; a CPU only interprets."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def keep_tiles(measured: list[MeasuredTile]) -> Path:
    """Writes tiles beside those of other kernels, widths and GPUs; returns where.

    Raises:
        CorruptionError: The file that is there is damaged.
        IoError: It cannot be written, or the user has no folder.
    """
    path = tiles_file()
    if path is None:
        raise IoError("there is no home folder for measured tiles; set XDG_CACHE_HOME")
    kept = {(tile.gpu, tile.kernel, tile.width): tile for tile in (*_read(path), *measured)}
    told = {"version": VERSION, "tiles": [asdict(tile) for tile in kept.values()]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(told, indent=1) + "\n")
        os.replace(file.name, path)
    except OSError as error:
        raise IoError(f"cannot write {path} ({error})", {"path": str(path)}) from error
    _known.cache_clear()
    return path


@functools.lru_cache(maxsize=16)
def _known(_named: str, device: torch.device) -> Tiles:
    """Reads the file once for each value of ``XDG_CACHE_HOME`` and device."""
    path, gpu = tiles_file(), gpu_name(device)
    return Tiles(tuple(tile for tile in ([] if path is None else _read(path)) if tile.gpu == gpu))


def _read(path: Path) -> list[MeasuredTile]:
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise IoError(f"cannot read {path} ({error})", {"path": str(path)}) from error
    try:
        told = json.loads(text)
        if not isinstance(told, dict) or told.get("version") != VERSION:
            raise _damaged(path, f"it is not of version {VERSION}")
        return [_checked(path, tile) for tile in told["tiles"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error


def _checked(path: Path, told: dict[str, Any]) -> MeasuredTile:
    measured = MeasuredTile(**told)
    numbers = [measured.width, *measured.tile.values()]
    is_right = (
        isinstance(measured.gpu, str)
        and set(measured.tile) == set(FIELDS[measured.kernel])
        and all(type(number) is int and number > 0 for number in numbers)
        and all(number & (number - 1) == 0 for number in numbers)
        and max(measured.tile.values()) <= NUMBER_MAX
        and (measured.kernel != "step_rows_many" or measured.tile["rows"] == 1)
    )
    if not is_right:
        raise _damaged(path, f"{told} is no tile")
    return measured


def _damaged(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"measured tiles of kernels in {path} are damaged ({why}); delete that file, and measure "
        "again by `python -m tierbed.dist.kernels.tune`",
        {"path": str(path)},
    )
