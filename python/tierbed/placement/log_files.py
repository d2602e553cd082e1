"""Query logs of every format, told by name or by option.

Logs of row ids are read by the native module. The samples of click logs become queries too: one
over all features, whose rows are numbered through.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

from tierbed._util.progress import Progress
from tierbed.config.words import DataFormat, LogFormat, check_word
from tierbed.data.source import DataOptions, open_source
from tierbed.errors import InvalidError
from tierbed.placement.build import LogOptions, QueryLog

__all__ = ["LOG_FORMATS", "format_of", "read_log"]

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
