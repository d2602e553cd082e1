"""Criteo's 1 TB log with bags of ids, as MLPerf's DLRM-DCNv2 reads it.

Of each day there are three files of numpy: ``day_0_sparse_multi_hot.npz`` with an array ``[N, K]``
i32 per feature, called ``0`` to ``25``, ``day_0_dense.npy`` ``[N, 13]`` f32 and
``day_0_labels.npy`` ``[N, 1]`` i32. They are mapped, and only the rows of a batch are read.

Source: MLPerf Training, recommendation_v2, ``materialize_synthetic_multihot_dataset.py``.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy

from tierbed.data.batch import Batch
from tierbed.data.dataset import Dataset
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor

__all__ = ["MLPERF_ROWS", "CriteoMultiHotData"]

# fmt: off
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)
"""Rows of the 26 tables of MLPerf Training."""
# fmt: on

_SPARSE = re.compile(r"day_(\d+)_sparse_multi_hot\.npz$")
_LOCAL_HEADER_BYTES = 30


def _header(file: Any) -> Any:
    """Reads shape, order and kind of an array of numpy."""
    functions: Any = npy
    is_first = functions.read_magic(file) == (1, 0)
    read = functions.read_array_header_1_0 if is_first else functions.read_array_header_2_0
    return read(file)


@dataclass(frozen=True)
class _Array:
    """An array that lies in a file; mapped when it is read, so that it can be sent to workers."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def at(cls, path: Path, begin: int = 0, name: str = "") -> _Array:
        """Reads the header of an array of numpy that begins at byte ``begin``."""
        with path.open("rb") as file:
            file.seek(begin)
            try:
                shape, is_fortran, dtype = _header(file)
            except ValueError as error:
                raise InvalidError(f"{path} {name} is no array of numpy: {error}") from error
            if (is_fortran and len(shape) > 1) or dtype.hasobject:
                raise InvalidError(f"{path} {name} is not an array of numbers by rows")
            return cls(path, file.tell(), dtype.str, shape)

    def rows(self, first: int, stop: int) -> Any:
        """Returns rows as an array that lies in the file."""
        whole = np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        return whole[first:stop]


def _members(path: Path) -> list[_Array]:
    """Returns the arrays ``0``, ``1``, ... of a file of ``numpy.savez``."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except zipfile.BadZipFile as error:
        raise InvalidError(f"{path} is no file of numpy.savez: {error}") from error
    found: dict[int, _Array] = {}
    for info in infos:
        number = info.filename.removesuffix(".npy")
        if not number.isdigit():
            raise InvalidError(f"{path} has an array {number}, where features have numbers")
        if info.compress_type != zipfile.ZIP_STORED:
            raise InvalidError(
                f"array {number} of {path} is compressed and cannot be mapped; write the file with "
                "numpy.savez"
            )
        with path.open("rb") as file:
            file.seek(info.header_offset)
            local = file.read(_LOCAL_HEADER_BYTES)
        begin = info.header_offset + _LOCAL_HEADER_BYTES
        begin += int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        found[int(number)] = _Array.at(path, begin, number)
    return [found[number] for number in sorted(found)]


class CriteoMultiHotData(Dataset):
    """Samples of Criteo's days in the layout of MLPerf's DLRM-DCNv2, with several ids per feature.

    Features are called ``cat_0`` to ``cat_25``, as in TorchRec. Dense features and ids are taken as
    they lie in the files.

    Args:
        folder: Where the files of sparse features lie.
        batch_size: Samples of a batch, ``B``.
        days: Numbers of the days, in the order to read them; by default all.
        dense_folder: Where dense features and labels lie; by default in ``folder``.
        rows: Rows of each table; ids beyond are refused.
        first: First sample of the range.
        stop: Sample after the last; None is the end of the files.

    Raises:
        InvalidError: A file is missing, or holds other arrays.

    Examples:
        >>> import numpy, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     day = folder + "/day_0_"
        ...     ids = {"0": [[4, 5], [6, 7]], "1": [[1], [0]]}
        ...     arrays = {name: numpy.array(one, dtype="i4") for name, one in ids.items()}
        ...     numpy.savez(day + "sparse_multi_hot.npz", **arrays)
        ...     numpy.save(day + "dense.npy", numpy.zeros((2, 13), dtype="f4"))
        ...     numpy.save(day + "labels.npy", numpy.array([[1], [0]], dtype="i4"))
        ...     (batch,) = tb.data.CriteoMultiHotData(folder, batch_size=2, rows=[10, 2])
        >>> batch.sparse["cat_0"].values()
        tensor([4, 5, 6, 7])
    """

    def __init__(
        self,
        folder: str | Path,
        batch_size: int,
        *,
        days: Sequence[int] | None = None,
        dense_folder: str | Path | None = None,
        rows: Sequence[int] = MLPERF_ROWS,
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        found = {
            int(match.group(1)): path
            for path in Path(folder).glob("day_*_sparse_multi_hot.npz")
            if (match := _SPARSE.search(path.name))
        }
        picked = sorted(found) if days is None else list(days)
        absent = [day for day in picked if day not in found]
        if absent or not picked:
            told = f"day_{absent[0] if absent else 0}_sparse_multi_hot.npz"
            raise InvalidError(f"{folder} has no {told}; name the folder where the days lie")
        beside = Path(folder if dense_folder is None else dense_folder)
        self._days = [_Day.of(found[day], beside, day, len(rows)) for day in picked]
        self._rows = list(rows)
        end = sum(day.samples for day in self._days)
        super().__init__(batch_size, min(first, end), end if stop is None else min(stop, end))

    @property
    def feature_names(self) -> list[str]:
        """Names of the ``F`` features."""
        return [f"cat_{at}" for at in range(len(self._rows))]

    @property
    def dense_count(self) -> int:
        """Number of dense features, ``N``."""
        return self._days[0].dense.shape[1]

    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of the table each feature needs."""
        return list(zip(self.feature_names, self._rows, strict=True))

    def identity(self) -> dict[str, Any]:
        """Returns what a state must agree with to be resumed."""
        paths = [day.sparse[0].path for day in self._days]
        files = [[path.name, path.stat().st_size] for path in paths]
        return {"files": files, "row_counts": self._rows}

    def batches(self, first: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """Yields batches of the samples ``first..stop`` of the source.

        Args:
            first: First sample.
            stop: Sample after the last; None reads to the end.
            batch_size: Samples of a batch.
        """
        end = sum(day.samples for day in self._days)
        end = end if stop is None else min(stop, end)
        for start in range(first, end, batch_size):
            yield self._batch(start, min(start + batch_size, end))

    def _batch(self, first: int, stop: int) -> Batch:
        pieces, begin = [], 0
        for day in self._days:
            low, high = max(first - begin, 0), min(stop - begin, day.samples)
            if low < high:
                pieces.append((day, low, high))
            begin += day.samples
        dense = np.concatenate([day.dense.rows(a, b) for day, a, b in pieces], dtype=np.float32)
        label = np.concatenate([day.labels.rows(a, b) for day, a, b in pieces], dtype=np.float32)
        ids, lengths = [], []
        for at, rows in enumerate(self._rows):
            for day, a, b in pieces:
                found = day.sparse[at].rows(a, b).astype(np.int64)
                if found.size and not 0 <= int(found.min()) <= int(found.max()) < rows:
                    raise InvalidError(
                        f"feature cat_{at} has ids from {int(found.min())} to {int(found.max())}, "
                        f"its table has rows 0 to {rows - 1}; give the rows of each table"
                    )
                ids.append(found.ravel())
                lengths.append(np.full(b - a, found.shape[1], dtype=np.int64))
        sparse = KeyedJaggedTensor(
            self.feature_names,
            torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(label.reshape(-1)))


@dataclass(frozen=True)
class _Day:
    """The arrays of one day."""

    sparse: list[_Array]
    dense: _Array
    labels: _Array

    @property
    def samples(self) -> int:
        return self.labels.shape[0]

    @classmethod
    def of(cls, sparse: Path, beside: Path, number: int, features: int) -> _Day:
        """Opens the files of a day, and compares their shapes."""
        parts = []
        for part in ("dense", "labels"):
            path = beside / f"day_{number}_{part}.npy"
            if not path.is_file():
                raise InvalidError(
                    f"no such file: {path}; name the folder of dense features and labels as "
                    "dense_folder",
                    {"path": str(path)},
                )
            parts.append(_Array.at(path))
        day = cls(_members(sparse), *parts)
        if len(day.sparse) != features:
            raise InvalidError(
                f"{sparse} has {len(day.sparse)} features, rows are given for {features}; give the "
                "rows of each table"
            )
        wrong = [one for one in day.sparse if len(one.shape) != 2 or one.shape[0] != day.samples]
        is_label = day.labels.shape in ((day.samples,), (day.samples, 1))
        if (
            wrong
            or not is_label
            or day.dense.shape[:1] != (day.samples,)
            or len(day.dense.shape) != 2
        ):
            shapes = sorted({one.shape for one in [*wrong, day.dense, day.labels]})
            raise InvalidError(f"the arrays of day {number} do not fit together: {shapes}")
        return day
