"""Ratings as MovieLens publishes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierbed._util.arrow import arrow_modules
from tierbed.data.column_data import ColumnData
from tierbed.data.columns import columns
from tierbed.data.dataset import Paths, expand_paths
from tierbed.data.ids import Rows
from tierbed.errors import InvalidError

__all__ = ["movielens", "read_ratings"]

_NAMES = ("user", "item", "rating", "time")


def read_ratings(paths: Paths) -> Any:
    r"""Reads ratings into a table sorted by time: ``user``, ``item``, ``rating`` and ``time``.

    Lines have user, item, rating and, if known, seconds, with tabs (``u.data`` of 100k), ``::``
    (``ratings.dat`` of 1M and 10M), commas (``ratings.csv`` of 20M and later) or blanks between.
    A line of names comes first or not. Equal times keep the order of the files.

    Args:
        paths: The files, plain or gzip.

    Returns:
        A ``pyarrow.Table``; 28 bytes of memory a rating.

    Raises:
        InvalidError: A file that holds no ratings.

    Examples:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "ratings.dat")
        ...     _ = file.write_text("1::1193::5::978300760\n1::661::3::978302109\n")
        ...     ratings = tb.data.read_ratings(file)
        >>> ratings["item"].to_pylist()
        [1193, 661]
    """
    arrow, compute, _ = arrow_modules()
    table = arrow.concat_tables([_read(path) for path in expand_paths(paths)])
    return table.take(compute.sort_indices(table["time"]))


def _read(path: Path) -> Any:
    arrow, _, _ = arrow_modules()
    import pyarrow.csv

    with arrow.input_stream(str(path)) as file:
        first = file.read(1 << 10).split(b"\n", 1)[0].decode(errors="replace").strip()
    sign = next((one for one in ("::", "\t", ",", " ") if one in first), None)
    fields = [] if sign is None else first.split(sign)
    if len(fields) < 3:
        raise InvalidError(
            f"{path} holds no ratings; a line has user, item, rating and seconds",
            {"path": str(path)},
        )
    assert sign is not None
    has_names = not fields[0].strip().isdigit()
    names = list(_NAMES[: len(fields)]) + [f"more_{at}" for at in range(len(fields) - len(_NAMES))]
    if sign == "::":
        # Every second field lies between two colons.
        names = [
            name for pair in zip(names, map("_{}".format, names), strict=True) for name in pair
        ]
        names.pop()
    kept = [name for name in names if name in _NAMES]
    kinds = (arrow.int64(), arrow.int64(), arrow.float32(), arrow.int64())
    try:
        table = pyarrow.csv.read_csv(
            str(path),
            read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=int(has_names)),
            parse_options=pyarrow.csv.ParseOptions(delimiter=sign[0]),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=kept, column_types=dict(zip(_NAMES, kinds, strict=True))
            ),
        )
    except arrow.ArrowInvalid as error:
        raise InvalidError(f"{path} holds a line that is no rating: {error}") from error
    if "time" not in table.column_names:
        table = table.append_column("time", arrow.nulls(len(table), arrow.int64()).fill_null(0))
    return table


def movielens(paths: Paths, batch_size: int, *, like: float | None = None) -> ColumnData:
    """Returns the ratings of MovieLens by time; ids are those of the files.

    Features are ``user`` and ``item``. The label is the rating, or whether it is at least ``like``.
    See :func:`read_ratings` for the files, and :meth:`Dataset.split_last` for the last ones.

    Args:
        paths: The files.
        batch_size: Samples of a batch, ``B``.
        like: Least rating of the label 1; others are 0.
    """
    arrow, compute, _ = arrow_modules()
    table = read_ratings(paths)
    if like is not None:
        liked = compute.greater_equal(table["rating"], like).cast(arrow.float32())
        table = table.set_column(2, "rating", liked)
    ids = {name: Rows(int(compute.max(table[name]).as_py()) + 1) for name in ("user", "item")}
    return columns(table, label="rating", ids=ids, batch_size=batch_size)
