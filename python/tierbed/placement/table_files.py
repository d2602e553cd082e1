"""Snapshots of tables in files: npy, safetensors, torch and Parquet, larger than memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from tierbed.errors import CorruptionError, InvalidError, IoError
from tierbed.placement.files import (
    HeadRows,
    PathLike,
    PlacementFiles,
    TableCodecs,
    import_tables,
)
from tierbed.results import SnapshotReport

__all__ = ["import_files"]

Progress = Callable[[int, int], None]


def import_files(
    files: Mapping[str, PathLike],
    out: PathLike,
    *,
    keys: Mapping[str, str] | None = None,
    placement: PlacementFiles | None = None,
    codec: TableCodecs | None = None,
    head_rows: HeadRows | None = None,
    dram_budget: int | str = "1GiB",
    scratch: PathLike | None = None,
    progress: Progress | None = None,
) -> SnapshotReport:
    """Writes a serving snapshot of tables that lie in files; no training store is needed.

    A ``.npy`` file of float32 is read where it lies. Rows of all others stream into an unnamed
    file, four bytes an element, which is gone afterwards. Memory stays bounded either way.

    Args:
        files: Table name and file ``[N, D]``; an id is the number of its row. Parquet has rows as a
            column of fixed-size lists.
        out: A new folder.
        keys: By table, the tensor or column of a file that holds several.
        placement: As for :meth:`tierbed.Store.publish`.
        codec: As for :meth:`tierbed.Store.publish`.
        head_rows: As for :func:`import_tables`.
        dram_budget: Bytes for indexes and buffers.
        scratch: Folder of the unnamed files; by default that of ``out``.
        progress: Called with (rows read, rows of all such files) while rows stream.

    Raises:
        InvalidError: No table, an unknown format, several tensors and no key, or a placement that
            does not fit.
        CorruptionError: A file is not whole.
        IoError: The scratch folder is full.

    Examples:
        >>> import numpy
        >>> numpy.save("item.npy", numpy.random.rand(1000, 16).astype("float16"))
        >>> tb.placement.import_files({"item": "item.npy"}, "ads", codec="int8").row_count
        1000
    """
    if not files:
        raise InvalidError("no table: give a file for each")
    keys = keys or {}
    if unknown := sorted(set(keys) - set(files)):
        raise InvalidError(f"keys of tables that have no file: {unknown}", {"tables": str(unknown)})
    folder = Path(out).absolute().parent if scratch is None else Path(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        name: _mapped(Path(path), keys.get(name), folder, progress) for name, path in files.items()
    }
    return import_tables(
        tables,
        out,
        placement=placement,
        codec=codec,
        head_rows=head_rows,
        dram_budget=dram_budget,
    )


def _mapped(path: Path, key: str | None, scratch: Path, progress: Progress | None) -> Tensor:
    """Maps a table's rows, float32, from its file or from a copy that has no name."""
    # `tierbed.train` itself publishes by placements.
    from tierbed.tables.sources import find_tables

    found = find_tables(path).pick(key)
    rows, dim = found.rows, found.dim
    if path.suffix.lower() == ".npy":
        # A copy-on-write map: torch takes no array that cannot be written to.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        if array.dtype == np.dtype("<f4") and array.flags.c_contiguous:
            return torch.from_numpy(array)
    done = 0
    with tempfile.TemporaryFile(dir=scratch) as file:
        # Written, not through the map: a full disk is an error then, not the end of the process.
        for chunk in found.weight.chunks():
            _write(file, chunk, path, scratch)
            done += len(chunk)
            if progress is not None:
                progress(done, rows)
        if done != rows:
            raise CorruptionError(
                f"{path} says that it has {rows} rows and has {done}", {"path": str(path)}
            )
        if not rows * dim:
            return torch.empty(rows, dim)
        return torch.from_numpy(np.memmap(file, np.dtype("<f4"), "c", shape=(rows, dim)))


def _write(file: IO[bytes], chunk: Tensor, path: Path, scratch: Path) -> None:
    try:
        file.write(chunk.to(torch.float32).contiguous().numpy().data)
        file.flush()
    except OSError as error:
        raise IoError(
            f"the rows of {path} do not fit into {scratch}: {error.strerror}; free some space "
            "there, or give another folder: scratch=, --scratch on the command line",
            {"path": str(path), "scratch": str(scratch)},
            error.errno,
        ) from error
