"""Query logs of every format, told by name or by option.

Logs of row ids are read by the native module. The samples of click logs become queries too: one
over all features, whose rows are numbered through. So do records of columns
(:mod:`tierbed.placement.log_columns`), in files and in stores of objects.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from tierbed._util.progress import Progress
from tierbed.config.words import DataFormat, LogFormat, check_word
from tierbed.data.source import DataOptions, open_source
from tierbed.errors import InvalidError
from tierbed.placement.build import LogOptions, QueryLog
from tierbed.placement.log_columns import log_of_columns

__all__ = ["LOG_FORMATS", "format_of", "read_columns", "read_log"]

LOG_FORMATS = get_args(LogFormat)
"""``auto`` goes by the file's name: ``.tsv`` is Criteo's layout, ``.csv`` Avazu's, ``.bin``
MaxEmbed's binary log, all else text."""

_SAMPLES_AT_ONCE = 1 << 14
_BY_ENDING: dict[str, LogFormat] = {".tsv": "criteo", ".csv": "avazu", ".bin": "maxembed"}
_COMPRESSED = (".gz", ".zst")


def format_of(path: Path, log_format: LogFormat = "auto") -> LogFormat:
    """Returns the format of a log; ``auto`` goes by the name.

    Raises:
        InvalidError: There is no such format.
    """
    check_word("--log-format", log_format, LogFormat)
    if log_format != "auto":
        return log_format
    plain = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _BY_ENDING.get(plain.suffix, "text")


def read_log(
    path: Path, log_format: LogFormat = "auto", options: LogOptions | None = None
) -> QueryLog:
    """Reads a log, or the samples of a click log, and shows how far it is.

    Args:
        path: The file, plain or compressed.
        log_format: One of :data:`LOG_FORMATS`.
        options: What is read of it; by default all.

    Raises:
        InvalidError: A line is no query; rows are given for a click log, which says them.
    """
    found, given = format_of(path, log_format), options or LogOptions()
    if found == "criteo" or found == "avazu":
        if given.row_count is not None or given.query_rows_max is not None:
            raise InvalidError(f"{found} files say their rows: leave out --rows and --query-rows")
        log = _read_samples(path, found, given.query_count_max)
        share = given.sample
        return log if share >= 1.0 else log.sample(int(share * len(log)), given.seed)
    with Progress(f"read {path.name}", None, "bytes") as bar:
        return QueryLog.read(path, found, given, progress=bar.set)


def read_columns(
    address: str, columns: Mapping[str, int | None], options: LogOptions | None = None
) -> QueryLog:
    """Reads a log of columns: Parquet in a store of objects by Polars, where that is installed.

    Args:
        address: A path, a pattern, or an address such as ``s3://logs/2026-11-2*/*.parquet``.
        columns: As of :func:`tierbed.placement.log_of_columns`.
        options: What is read of it; by default all.

    Raises:
        InvalidError: Files that cannot be read, or columns that they have not.
    """
    try:
        return log_of_columns(_scanned(address), columns, options)
    except OSError as error:
        raise InvalidError(
            f"--log: cannot read {address} ({error}); name files that there are, and say by "
            "AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID who may read a bucket"
        ) from error


def _scanned(address: str) -> Any:
    # The address of a store with its own options, such as ?endpoint_override=, is pyarrow's.
    is_plain = "://" in address and "?" not in address and address.endswith(".parquet")
    if not is_plain or importlib.util.find_spec("polars") is None:
        return address
    import polars

    frame = polars.scan_parquet(address)
    return frame if hasattr(frame, "collect_batches") else address


def _read_samples(path: Path, log_format: DataFormat, samples: int | None) -> QueryLog:
    """Numbers the tokens of a file of samples; each sample is a query over all its features.

    Columns that are empty throughout are no features: their tables have row 0 alone, the row of
    fields without a token.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = DataOptions(format=log_format, paths=(str(path),), samples=samples)
        source = open_source(given, Path(folder) / "vocabulary")
        sizes = {name: rows for name, rows in source.table_sizes.items() if rows > 1}
        batches = source.batches(0, source.train_samples, _SAMPLES_AT_ONCE)
        return QueryLog.from_samples(sizes, (batch.sparse for batch in batches))
