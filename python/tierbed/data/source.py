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
from tierbed._util.progress import Progress
from tierbed.config.words import DataFormat, Positive, Range, check_word
from tierbed.data import (
    AvazuData,
    Batch,
    CriteoData,
    Dataset,
    ParquetColumns,
    ParquetData,
    build_parquet_vocabulary,
    build_vocabulary,
)
from tierbed.data.dataset import expand_paths
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
        paths: The files, oldest first; none for ``synthetic``.
        samples: Use only the first samples.
        eval_share: Share of the samples, the last ones, kept for evaluation.
        min_count: Rarer tokens share one row per feature.
        seed: synthetic: another seed, another log.
        scale: synthetic: share of Criteo's published cardinalities.
        first_sample: synthetic: number of the first sample.
        label: parquet: column of the label.
        dense: parquet: columns of numbers, a,b,c.
        categorical: parquet: columns of tokens, a,b,c.
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataOptions:
        """Rebuilds options from JSON."""
        lists = {"paths", "dense", "categorical"}
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
        """Yields samples ``first..last``, counted from the source's first one."""
        start = self.dataset.first
        return self.dataset.batches(start + first, start + last, batch_size)

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
        if not file.is_file():
            raise InvalidError(f"no such file: {file}", {"path": str(file)})
    total = _count(options, files)
    if total == 0:
        raise InvalidError(f"no samples in {', '.join(map(str, files))}")
    evaluated = round(total * options.eval_share)
    trained = total - evaluated
    if not vocabulary.is_file():
        if must_exist:
            raise InvalidError(f"the run has no vocabulary ({vocabulary} is missing)")
        _build_vocabulary(options, files, vocabulary, trained)
    return Source(
        _dataset(options, files, vocabulary),
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


def _count(options: DataOptions, files: Sequence[Path]) -> int:
    """Counts the samples; lines are passed over, not parsed."""
    if options.format == "parquet":
        found = _parquet(options, files, dict.fromkeys(options.categorical, 1)).count()
        return found if options.samples is None else min(found, options.samples)
    layout: Literal["avazu", "criteo"] = "avazu" if options.format == "avazu" else "criteo"
    reader = _native.CriteoReader(
        [str(file) for file in files], {"format": layout, "bad_lines": "fail"}
    )
    total = 0
    most = options.samples
    with Progress("counting samples", None, "bytes") as bar:
        while step := reader.skip(
            _SKIP_SAMPLES if most is None else min(_SKIP_SAMPLES, most - total)
        ):
            total += step
            bar.set(*reader.progress())
    return total


def _build_vocabulary(
    options: DataOptions, files: Sequence[Path], vocabulary: Path, samples: int
) -> None:
    vocabulary.parent.mkdir(parents=True, exist_ok=True)
    with Progress("building the vocabulary", None, "bytes") as bar:
        if options.format == "parquet":
            build_parquet_vocabulary(
                list(files),
                vocabulary,
                options.categorical,
                min_count=options.min_count,
                samples=samples,
                progress=bar.set,
            )
        else:
            build_vocabulary(
                list(files),
                vocabulary,
                layout="avazu" if options.format == "avazu" else "criteo",
                min_count=options.min_count,
                samples=samples,
                progress=bar.set,
            )


def _dataset(options: DataOptions, files: Sequence[Path], vocabulary: Path) -> Dataset:
    if options.format == "parquet":
        return _parquet(options, files, vocabulary)
    kind = AvazuData if options.format == "avazu" else CriteoData
    return kind(list(files), vocabulary, 1024)


def _parquet(
    options: DataOptions, files: Sequence[Path], vocabulary: Path | dict[str, int]
) -> ParquetData:
    columns = ParquetColumns(
        label=options.label, dense=options.dense, categorical=options.categorical
    )
    return ParquetData(list(files), columns, vocabulary, 1024)
