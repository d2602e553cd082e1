"""Samples that a run trains on and evaluates on, and their ids.

:class:`Source` joins a dataset of :mod:`tierbed.data` with a split in time: the first samples
train, the last evaluate. The vocabulary is built from the training samples only, once, and kept
with the run; later scoring uses the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tierbed import _native
from tierbed._util.arrow import arrow_modules
from tierbed._util.progress import Progress
from tierbed.config.words import DataFormat, Positive, Range, check_word
from tierbed.data import (
    AvazuData,
    Batch,
    ColumnData,
    CriteoData,
    CriteoMultiHotData,
    Dataset,
    Hashed,
    Rows,
    Tokens,
    build_column_vocabulary,
    build_vocabulary,
    columns,
    read_ratings,
)
from tierbed.data.dataset import expand_paths
from tierbed.data.multi_hot import MLPERF_ROWS
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["DataOptions", "Source", "open_source"]

SYNTHETIC_SAMPLES = 100_000
_SKIP_SAMPLES = 1 << 16


@dataclass(frozen=True)
class DataOptions:
    """Which samples to read. Kept with a run, so that it can be continued and scored.

    Without ``samples`` they are all that the files hold, or 100,000 synthetic ones.

    Args:
        format: What the files hold.
        paths: The files, oldest first; of ``criteo_multi_hot`` their folder; none for
            ``synthetic``.
        samples: Use only the first samples.
        eval_share: Share of the samples, the last ones, kept for evaluation.
        min_count: Rarer tokens share one row per feature.
        seed: synthetic: another seed, another log.
        scale: synthetic: share of Criteo's published cardinalities.
        first_sample: synthetic: number of the first sample.
        label: parquet, arrow: column of the label.
        dense: parquet, arrow: columns of numbers, a,b,c.
        categorical: parquet, arrow: columns of tokens, single or lists, a,b,c.
        hash_rows: parquet, arrow: hash tokens into so many rows each, without a vocabulary.
        like: movielens: least rating of the label 1.
        table_rows: criteo_multi_hot: rows of each table; those of MLPerf by default.
    """

    format: DataFormat = "criteo"
    paths: tuple[str, ...] = ()
    samples: Positive | None = None
    eval_share: Annotated[float, Range(0.0, 0.9)] = 0.0
    min_count: Positive = 1
    seed: int = 0
    scale: float = 0.01
    first_sample: int = 0
    label: str = "label"
    dense: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    hash_rows: Positive | None = None
    like: float = 4.0
    table_rows: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataOptions:
        """Rebuilds options from JSON."""
        lists = {"paths", "dense", "categorical", "table_rows"}
        fields: dict[str, Any] = {
            name: tuple(value) if name in lists else value for name, value in values.items()
        }
        return cls(**fields)


@dataclass
class Source:
    """Samples ``0..train_samples`` train, the ``eval_samples`` behind them evaluate.

    Args:
        dataset: All samples, from its first one on.
        options: Where they come from.
        train_samples: Samples to train on.
        eval_samples: Samples to evaluate on.
        files: Name and size of every file, to recognise them.
    """

    dataset: Dataset
    options: DataOptions
    train_samples: int
    eval_samples: int
    files: list[list[Any]] = field(default_factory=list)

    @property
    def dense_count(self) -> int:
        """Numerical features."""
        return self.dataset.dense_count

    @property
    def table_sizes(self) -> dict[str, int]:
        """Rows of the table of each categorical feature."""
        return dict(self.dataset.table_sizes())

    def batches(self, first: int, last: int, batch_size: int) -> Iterator[Batch]:
        """Yields samples ``first..last``, counted from the source's first one.

        Raises:
            InvalidError: A label that is not 0 or 1.
        """
        start = self.dataset.first
        for batch in self.dataset.batches(start + first, start + last, batch_size):
            if bool(((batch.label != 0) & (batch.label != 1)).any()):
                raise InvalidError("the label holds other values than 0 and 1; name another column")
            yield batch

    def identity(self) -> dict[str, Any]:
        """Returns what the ids of every sample depend on (JSON values)."""
        kind = type(self.dataset).__qualname__
        return {"kind": kind, "first": self.dataset.first, **self.dataset.identity()}

    def about(self) -> dict[str, Any]:
        """Returns what a run keeps to recognise and reopen its data (JSON values)."""
        return {**asdict(self.options), "files": self.files}


def open_source(options: DataOptions, vocabulary: Path, *, must_exist: bool = False) -> Source:
    """Opens samples; builds the vocabulary first where there is none.

    Args:
        options: Which samples.
        vocabulary: The vocabulary file of the run.
        must_exist: The run is trained: never build a vocabulary.

    Raises:
        InvalidError: A missing file, or a line that is not of the format, with its number.
    """
    check_word("--format", options.format, DataFormat)
    if options.format == "synthetic" and options.paths:
        raise InvalidError("synthetic samples are made, not read: leave out --data")
    if options.format == "synthetic":
        return _synthetic(options)
    if not options.paths:
        raise InvalidError(f"name the {options.format} file with --data")
    files = expand_paths(list(options.paths))
    for file in files:
        if not file.is_file() and options.format != "criteo_multi_hot":
            raise InvalidError(f"no such file: {file}", {"path": str(file)})
    read = _Reading(options, files)
    total = read.count()
    if total == 0:
        raise InvalidError(f"no samples in {', '.join(map(str, files))}")
    evaluated = round(total * options.eval_share)
    trained = total - evaluated
    if read.has_vocabulary and not vocabulary.is_file():
        if must_exist:
            raise InvalidError(f"the run has no vocabulary ({vocabulary} is missing)")
        read.build_vocabulary(vocabulary, trained)
    return Source(
        read.dataset(vocabulary),
        options,
        trained,
        evaluated,
        [[file.name, file.stat().st_size] for file in files],
    )


def _synthetic(options: DataOptions) -> Source:
    try:
        # What generates and compares is a package of its own.
        from tierbed_bench.generator import GeneratedData
    except ImportError as error:
        raise UnsupportedError(
            "samples are generated by the package tierbed-bench, which is not installed; read a"
            " log of your own with --data"
        ) from error
    samples = SYNTHETIC_SAMPLES if options.samples is None else options.samples
    dataset = GeneratedData(options.scale, samples, 1024, options.seed, options.first_sample)
    evaluated = round(samples * options.eval_share)
    return Source(dataset, options, samples - evaluated, evaluated)


class _Reading:
    """How the files of some options are counted and read."""

    def __init__(self, options: DataOptions, files: Sequence[Path]) -> None:
        self.options, self.files = options, files
        self.is_text = options.format in ("criteo", "avazu")
        self.has_vocabulary = options.format != "criteo_multi_hot" and options.hash_rows is None
        self._table = _liked(files, options.like) if options.format == "movielens" else None

    @property
    def layout(self) -> Literal["criteo", "avazu"]:
        """Layout of a text log."""
        return "avazu" if self.options.format == "avazu" else "criteo"

    def count(self) -> int:
        """Counts the samples; lines are passed over, not parsed."""
        most = self.options.samples
        if not self.is_text:
            found = self._unnamed().count()
            return found if most is None else min(found, most)
        reader = _native.CriteoReader(
            [str(file) for file in self.files], {"format": self.layout, "bad_lines": "fail"}
        )
        total = 0
        with Progress("counting samples", None, "bytes") as bar:
            while step := reader.skip(
                _SKIP_SAMPLES if most is None else min(_SKIP_SAMPLES, most - total)
            ):
                total += step
                bar.set(*reader.progress())
        return total

    def build_vocabulary(self, path: Path, samples: int) -> None:
        """Builds the vocabulary of the first samples."""
        path.parent.mkdir(parents=True, exist_ok=True)
        min_count = self.options.min_count
        if self.is_text:
            with Progress("building the vocabulary", None, "bytes") as bar:
                build_vocabulary(
                    list(self.files),
                    path,
                    layout=self.layout,
                    min_count=min_count,
                    samples=samples,
                    progress=bar.set,
                )
            return
        with Progress("building the vocabulary", None, "samples") as bar:
            build_column_vocabulary(
                self._source(),
                path,
                dict.fromkeys(self._features(), Tokens()),
                min_count=min_count,
                samples=samples,
                file_format=self._file_format(),
                progress=bar.set,
            )

    def dataset(self, vocabulary: Path) -> Dataset:
        """Returns all samples."""
        if self.is_text:
            kind = AvazuData if self.options.format == "avazu" else CriteoData
            return kind(list(self.files), vocabulary, 1024)
        if not self.has_vocabulary:
            return self._unnamed()
        return self._columns(dict.fromkeys(self._features(), Tokens()), vocabulary)

    def _unnamed(self) -> Dataset:
        """Returns samples whose ids need no vocabulary."""
        options = self.options
        if options.format == "criteo_multi_hot":
            if len(self.files) != 1:
                raise InvalidError("criteo_multi_hot takes one folder; name it with --data")
            rows = options.table_rows or MLPERF_ROWS
            return CriteoMultiHotData(self.files[0], 1024, rows=rows)
        rows_of = Rows(1) if options.hash_rows is None else Hashed(options.hash_rows)
        return self._columns(dict.fromkeys(self._features(), rows_of), None)

    def _columns(self, ids: dict[str, Any], vocabulary: Path | None) -> ColumnData:
        is_rating = self._table is not None
        return columns(
            self._source(),
            ids=ids,
            label="rating" if is_rating else self.options.label,
            dense=() if is_rating else self.options.dense,
            batch_size=1024,
            vocabulary=vocabulary,
            missing="fill",
            log_dense=True,
            file_format=self._file_format(),
        )

    def _features(self) -> Sequence[str]:
        if self._table is None and not self.options.categorical:
            raise InvalidError("name at least one column of tokens with --categorical")
        return self.options.categorical if self._table is None else ("user", "item")

    def _source(self) -> Any:
        return list(self.files) if self._table is None else self._table

    def _file_format(self) -> str | None:
        return {"parquet": "parquet", "arrow": "ipc"}.get(self.options.format)


def _liked(files: Sequence[Path], least: float) -> Any:
    """Returns ratings by time; a rating is 1 from ``least`` on, else 0."""
    arrow, compute, _ = arrow_modules()
    table = read_ratings(list(files))
    liked = compute.greater_equal(table["rating"], least).cast(arrow.float32())
    return table.set_column(table.column_names.index("rating"), "rating", liked)
