"""Query logs of every format, told by name or by option.

Logs of row ids are read by the native module. The samples of click logs become queries too: one
over all features, whose rows are numbered through.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tierbed._util.progress import Progress
from tierbed.data.source import DataOptions, open_source
from tierbed.errors import InvalidError
from tierbed.placement.build import QueryLog

__all__ = ["LOG_FORMATS", "format_of", "read_log"]

LOG_FORMATS = ("auto", "text", "maxembed-text", "maxembed", "criteo", "avazu")
"""``auto`` goes by the file's name: ``.tsv`` is Criteo's layout, ``.csv`` Avazu's, ``.bin``
MaxEmbed's binary log, all else text."""

_SAMPLES_AT_ONCE = 1 << 14
_BY_ENDING = {".tsv": "criteo", ".csv": "avazu", ".bin": "maxembed"}
_COMPRESSED = (".gz", ".zst")


def format_of(path: Path, log_format: str = "auto") -> str:
    """Returns the format of a log; ``auto`` goes by the name.

    Raises:
        InvalidError: There is no such format.
    """
    if log_format not in LOG_FORMATS:
        raise InvalidError(f"--log-format must be one of {', '.join(LOG_FORMATS)}")
    if log_format != "auto":
        return log_format
    plain = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _BY_ENDING.get(plain.suffix, "text")


def read_log(
    path: Path,
    log_format: str = "auto",
    *,
    row_count: int | None = None,
    sample: float = 1.0,
    seed: int = 0,
    queries_max: int | None = None,
    query_rows_max: int | None = None,
) -> QueryLog:
    """Reads a log, or the samples of a click log, and shows how far it is.

    Args:
        path: The file, plain or compressed.
        log_format: One of :data:`LOG_FORMATS`.
        row_count: Rows of the table; by default one more than the largest id.
        sample: Share of the queries to keep.
        seed: Equal seeds keep equal queries.
        queries_max: Keep the first ones only.
        query_rows_max: Keep the first rows of a query only.

    Raises:
        InvalidError: A line is no query; rows are given for a click log, which says them.
    """
    found = format_of(path, log_format)
    if found in ("criteo", "avazu"):
        if row_count is not None or query_rows_max is not None:
            raise InvalidError(f"{found} files say their rows: leave out --rows and --query-rows")
        log = _read_samples(path, found, queries_max)
        return log if sample >= 1.0 else log.sample(int(sample * len(log)), seed)
    with Progress(f"read {path.name}", None, "bytes") as bar:
        return QueryLog.read(
            path,
            found,
            row_count=row_count,
            sample=sample,
            seed=seed,
            queries_max=queries_max,
            query_rows_max=query_rows_max,
            progress=bar.set,
        )


def _read_samples(path: Path, log_format: str, samples: int | None) -> QueryLog:
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
