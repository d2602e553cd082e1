"""Datasets of Hugging Face and frames of Polars, which are not imported here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierbed._util.arrow import arrow_modules
from tierbed.data.arrow_parts import (
    PART_ROWS,
    Parts,
    ReaderStream,
    ScannedStream,
    TableParts,
    ranges,
)
from tierbed.data.file_parts import FileParts, open_files
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["parts_of"]


class HuggingFaceParts(Parts):
    """A ``datasets.Dataset``, in ranges of rows, in the order that it has."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format("arrow")
        self.schema = dataset.features.arrow_schema
        self.part_rows = ranges(len(dataset))

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches.

        Args:
            parts: Numbers of parts.
            columns: The columns that are read.
            step: About how many rows a record batch has at most.
        """
        picked = self.dataset.select_columns(list(dict.fromkeys(columns)))
        for at in parts:
            table = picked[at * PART_ROWS : (at + 1) * PART_ROWS]
            yield from table.select(columns).to_batches(max_chunksize=step)

    def identity(self) -> dict[str, Any]:
        """Returns rows and columns."""
        return {"rows": len(self.dataset), "columns": self.schema.names}

    def order_identity(self) -> dict[str, Any] | str:
        """Returns the fingerprint that the library gives the rows, too."""
        return {**self.identity(), "fingerprint": self.dataset._fingerprint}


class HuggingFaceStream(Parts):
    """A ``datasets.IterableDataset``."""

    part_rows = None

    def __init__(self, dataset: Any) -> None:
        if dataset.features is None:
            dataset = dataset._resolve_features()
        # What a generator or a map of the user yields are values of Python, which Arrow guesses at.
        examples = getattr(dataset, "_ex_iterable", None)
        self.is_arrow = getattr(examples, "iter_arrow", None) is not None
        self.dataset = dataset.with_format("arrow") if self.is_arrow else dataset
        self.schema = dataset.features.arrow_schema

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches.

        Args:
            parts: ``[0]``.
            columns: The columns that are read.
            step: Rows of a record batch.
        """
        arrow, _, _ = arrow_modules()
        for read in self.dataset.iter(step):
            table = read if self.is_arrow else arrow.Table.from_pydict(read, self.schema)
            yield from table.select(columns).to_batches()

    def identity(self) -> dict[str, Any]:
        """Returns the columns."""
        return {"columns": self.schema.names}

    def order_identity(self) -> dict[str, Any] | str:
        """Tells that there is no known order."""
        return "an IterableDataset of Hugging Face does not tell its order"


class PolarsStream(Parts):
    """A ``polars.LazyFrame``, run anew at every pass."""

    part_rows = None

    def __init__(self, frame: Any) -> None:
        if not hasattr(frame, "collect_batches"):
            raise UnsupportedError(
                "this Polars streams no LazyFrame; collect() it, or install a newer one"
            )
        self.frame = frame
        self.schema = frame.clear().collect().to_arrow().schema

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches.

        Args:
            parts: ``[0]``.
            columns: The columns that are read.
            step: Rows of a record batch.
        """
        frames = self.frame.select(list(dict.fromkeys(columns)))
        for frame in frames.collect_batches(chunk_size=step, maintain_order=True, lazy=True):
            yield from frame.to_arrow().select(columns).to_batches(max_chunksize=step)

    def identity(self) -> dict[str, Any]:
        """Returns what the columns are."""
        return {"schema": str(self.schema.remove_metadata())}

    def order_identity(self) -> dict[str, Any] | str:
        """Tells that there is no known order."""
        return "a LazyFrame does not tell its order"


def parts_of(source: Any, filesystem: Any = None, file_format: str | None = None) -> Parts:
    """Opens a source.

    Args:
        source: As of :func:`tierbed.data.columns`.
        filesystem: Where paths lie.
        file_format: Of files; by default told by their names.

    Raises:
        InvalidError: No file, a file of another format, or a source of no known kind.
    """
    arrow, _, _ = arrow_modules()
    import pyarrow.dataset

    library = type(source).__module__.partition(".")[0]
    if isinstance(source, str | Path) or (
        isinstance(source, list | tuple) and all(isinstance(one, str | Path) for one in source)
    ):
        return FileParts(open_files(source, filesystem, file_format))
    if isinstance(source, pyarrow.dataset.FileSystemDataset) and not getattr(
        source, "_scan_options", None
    ):
        return FileParts(source)
    if library == "datasets" and hasattr(source, "with_format"):
        if hasattr(source, "keys"):
            raise InvalidError(
                f"a {type(source).__name__} has the splits {', '.join(source.keys())}; give one of "
                'them, such as source["train"]'
            )
        has_length = hasattr(source, "__len__")
        return HuggingFaceParts(source) if has_length else HuggingFaceStream(source)
    if library == "polars" and hasattr(source, "collect_schema"):
        if hasattr(source, "collect"):
            return PolarsStream(source)
        return TableParts(source.to_arrow())
    if isinstance(source, arrow.RecordBatchReader):
        return ReaderStream(source)
    if isinstance(source, pyarrow.dataset.Dataset):
        return ScannedStream(source)
    if isinstance(source, arrow.Table):
        return TableParts(source)
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        return TableParts(arrow.table(source))
    raise InvalidError(
        f"a {type(source).__name__} holds no columns; give paths, a table or dataset of pyarrow, "
        "Polars, pandas or Hugging Face, or a RecordBatchReader"
    )
