"""Columns of Arrow as numbers and ids, without a loop over values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tierbed._util.arrow import arrow_modules
from tierbed.data.hashing import hash_bytes, hash_integers, rows_of_hashes
from tierbed.data.ids import Hashed, IdKind, OpenIds, Rows, Tokens
from tierbed.data.vocabulary import Vocabulary
from tierbed.errors import InvalidError

__all__ = ["Bags", "Missing", "bags_of", "ids_of", "numbers_of", "tokens_of"]

Missing = Literal["fail", "fill"]
"""What a missing value is: an error, or 0 as a number and no id in a bag."""


@dataclass(frozen=True)
class Bags:
    """The items of a column, and how many of them each sample has.

    Args:
        items: The items, an Arrow array of ``E`` without nulls, unless tokens may be missing.
        lengths: ``[B]`` i64; their sum is ``E``.
        missing_count: Samples without a value, and items of lists that are null.
        null_lists: Samples whose list is null.
    """

    items: Any
    lengths: Any
    missing_count: int
    null_lists: int = 0


def _whole(column: Any) -> Any:
    arrow, _, _ = arrow_modules()
    if not isinstance(column, arrow.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if arrow.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks()


def _is_list(kind: Any) -> bool:
    arrow, _, _ = arrow_modules()
    is_of = arrow.types
    return bool(is_of.is_list(kind) or is_of.is_large_list(kind) or is_of.is_fixed_size_list(kind))


def bags_of(column: Any, keeps_null: bool) -> Bags:
    """Splits a column into items and lengths; a column without lists has an item per sample.

    Args:
        column: A column of a table, single values or lists.
        keeps_null: Leave missing items in, as a vocabulary has a row for them; a list that is null
            is empty in any case.
    """
    arrow, compute, _ = arrow_modules()
    array = _whole(column)
    if not _is_list(array.type):
        lengths = np.ones(len(array), dtype=np.int64)
        missing = array.null_count
        if missing and not keeps_null:
            lengths = np.array(array.is_valid()).astype(np.int64)
            array = array.drop_null()
        return Bags(array, lengths, missing)
    counted = compute.list_value_length(array)
    lengths = np.array(compute.fill_null(counted, 0), dtype=np.int64)
    null_lists = array.null_count
    missing = null_lists
    items = _whole(array.flatten())
    if _is_list(items.type) or arrow.types.is_struct(items.type):
        raise InvalidError(
            f"lists of {items.type} hold no ids; flatten them to one list per sample"
        )
    if items.null_count:
        missing += items.null_count
        if not keeps_null:
            sample = np.repeat(np.arange(len(lengths)), lengths)
            absent = np.bincount(sample[np.array(items.is_null())], minlength=len(lengths))
            lengths = lengths - absent
            items = items.drop_null()
    return Bags(items, lengths, missing, null_lists)


def numbers_of(column: Any, name: str, missing: Missing) -> tuple[Any, int]:
    """Returns a column as numbers ``[B, K]`` f32, and how many are missing.

    Args:
        column: A column of numbers, or of lists of ``K`` numbers each.
        name: Its name.
        missing: What a missing number is, null or nan.

    Raises:
        InvalidError: Something else than numbers, lists of several lengths, or missing numbers.
    """
    arrow, compute, _ = arrow_modules()
    array = _whole(column)
    width = 1
    if arrow.types.is_fixed_size_list(array.type):
        width = array.type.list_size
        filled = array.null_count
        if filled:
            raise InvalidError(f"column {name} has {filled} lists that are null; fill them")
        array = array.flatten()
    try:
        array = array.cast(arrow.float32(), safe=False)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
        raise InvalidError(f"column {name} is not numeric: {error}") from error
    absent = array.null_count
    values = np.array(compute.fill_null(array, 0.0), dtype=np.float32)
    nan = np.isnan(values)
    if nan.any():
        absent += int(nan.sum())
        values[nan] = 0.0
    if absent and missing == "fail":
        raise _missing(name, absent)
    return values.reshape(-1, width), absent


def _missing(name: str, count: int) -> InvalidError:
    return InvalidError(
        f'column {name} has {count} missing values in a batch; give missing="fill" to take a '
        "missing number as 0 and a missing id as none, or fill the column",
        {"column": name, "missing": str(count)},
    )


def ids_of(
    column: Any, name: str, kind: IdKind, vocabulary: Vocabulary | None, missing: Missing
) -> Bags:
    """Returns the ids of a column as bags, ``items`` being ``[E]`` i64 of numpy.

    Args:
        column: A column of integers or texts, single or lists.
        name: The feature.
        kind: What its ids are.
        vocabulary: Rows of tokens.
        missing: What a missing id is; tokens have row 0 for it.

    Raises:
        InvalidError: Values that are no such ids, or missing ones.
    """
    bags = bags_of(column, keeps_null=isinstance(kind, Tokens))
    refused = bags.null_lists if isinstance(kind, Tokens) else bags.missing_count
    if refused and missing == "fail":
        raise _missing(str(kind.column), refused)
    return Bags(_ids(bags.items, name, kind, vocabulary), bags.lengths, bags.missing_count)


def _ids(items: Any, name: str, kind: IdKind, vocabulary: Vocabulary | None) -> Any:
    arrow, _, _ = arrow_modules()
    if arrow.types.is_dictionary(items.type):
        # Each value of the dictionary once; not the check of rows, which may be of unused ones.
        if isinstance(kind, Hashed | OpenIds):
            return _ids(items.dictionary, name, kind, vocabulary)[np.array(items.indices)]
        items = items.dictionary_decode()
    if isinstance(kind, Tokens):
        assert vocabulary is not None
        return _rows_of_tokens(items, str(kind.table), vocabulary)
    if isinstance(kind, Rows):
        return _checked(_integers(items, name, kind), name, kind.rows)
    if arrow.types.is_null(items.type):
        return np.empty(0, dtype=np.int64)
    is_open = isinstance(kind, OpenIds)
    if _is_integer(items.type) and is_open:
        return _integers(items, name, kind)
    seed = kind.seed if isinstance(kind, Hashed) else 0
    hashes = _hashes(items, name, kind, seed)
    return rows_of_hashes(hashes, kind.rows) if isinstance(kind, Hashed) else hashes.view(np.int64)


def _is_integer(kind: Any) -> bool:
    arrow, _, _ = arrow_modules()
    return bool(arrow.types.is_integer(kind) or arrow.types.is_boolean(kind))


def _integers(items: Any, name: str, kind: IdKind) -> Any:
    arrow, _, _ = arrow_modules()
    if not _is_integer(items.type) and not arrow.types.is_null(items.type):
        raise InvalidError(
            f"column {kind.column} of feature {name} holds {items.type}, not integers; take Hashed "
            "or Tokens for it"
        )
    if arrow.types.is_uint64(items.type):
        return np.array(items, dtype=np.uint64).view(np.int64)
    return np.array(items.cast(arrow.int64()), dtype=np.int64)


def _checked(ids: Any, name: str, rows: int) -> Any:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise InvalidError(
            f"feature {name} holds row ids from {int(ids.min())} to {int(ids.max())}, "
            f"its table has rows 0 to {rows - 1}; give it more rows, or take Hashed or Tokens"
        )
    return ids


def _as_bytes(items: Any, name: str, kind: IdKind) -> Any:
    """Returns texts as an array of ``large_binary``; integers as their digits."""
    arrow, _, _ = arrow_modules()
    found, is_of = items.type, arrow.types
    is_text = is_of.is_string(found) or is_of.is_large_string(found) or _is_view(found, "string")
    is_raw = is_of.is_binary(found) or is_of.is_large_binary(found) or _is_view(found, "binary")
    is_raw = is_raw or is_of.is_fixed_size_binary(found)
    if not (is_text or is_raw or _is_integer(found) or is_of.is_null(found)):
        raise InvalidError(
            f"column {kind.column} of feature {name} holds {found}, neither integers nor texts; "
            "cast it to one of them"
        )
    return items.cast(arrow.large_string() if not is_raw else arrow.large_binary()).cast(
        arrow.large_binary()
    )


def _is_view(kind: Any, of: str) -> bool:
    return str(kind) == f"{of}_view"


def _hashes(items: Any, name: str, kind: IdKind, seed: int) -> Any:
    if _is_integer(items.type):
        return hash_integers(_integers(items, name, kind), seed)
    array = _as_bytes(items, name, kind)
    _, offsets, raw = array.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(array) + 1, 8 * array.offset) if offsets else None
    if bounds is None or raw is None or not len(array):
        bounds, data = np.zeros(len(array) + 1, np.int64), np.empty(0, np.uint8)
    else:
        first, last = int(bounds[0]), int(bounds[-1])
        data = np.frombuffer(raw, np.uint8, last - first, first)
        bounds = bounds - first
    return hash_bytes(data, bounds, seed)


def tokens_of(items: Any, name: str, kind: IdKind) -> list[bytes]:
    """Returns items as bytes, what a vocabulary counts and looks up; a missing one is empty.

    Args:
        items: An Arrow array of integers or texts.
        name: The feature.
        kind: What its ids are.
    """
    arrow, compute, _ = arrow_modules()
    if arrow.types.is_dictionary(items.type):
        items = items.dictionary_decode()
    filled = compute.fill_null(_as_bytes(items, name, kind), b"")
    tokens: list[bytes] = filled.to_numpy(zero_copy_only=False).tolist()
    return tokens


def _rows_of_tokens(items: Any, table: str, vocabulary: Vocabulary) -> Any:
    """Looks each different token up once."""
    coded = items.dictionary_encode(null_encoding="encode")
    different = tokens_of(coded.dictionary, table, Tokens(column=table))
    rows = vocabulary.look_up(table, different).numpy()
    return rows[np.array(coded.indices)]
