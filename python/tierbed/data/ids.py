"""What the values of a column are as ids: rows, hashes, tokens of a vocabulary, or open ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

from tierbed.errors import InvalidError

__all__ = ["Hashed", "IdKind", "OpenIds", "Rows", "Tokens", "id_kinds"]


@dataclass(frozen=True)
class Rows:
    """Integers that are row ids already; others than ``0..rows`` are refused.

    Args:
        rows: Rows of the table.
        column: The column; by default it is called like the feature.
        table: The table; by default it is called like the feature. Features of one table are of one
            kind, such as the items of a history and the item that follows.

    Raises:
        InvalidError: No rows.
    """

    rows: int
    _: KW_ONLY
    column: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        _check(self.rows)


@dataclass(frozen=True)
class Hashed:
    """Integers or texts, hashed into a table; see :func:`hash_ids`. Some share a row.

    Args:
        rows: Rows of the table.
        seed: Another seed, other rows.
        column: The column; by default it is called like the feature.
        table: The table; by default it is called like the feature.

    Raises:
        InvalidError: No rows.
    """

    rows: int
    seed: int = 0
    _: KW_ONLY
    column: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        _check(self.rows)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Integers or texts with a row each, by a vocabulary file.

    Row 0 is for missing, rare and unknown ones.

    Args:
        column: The column; by default it is called like the feature.
        table: The table, and the vocabulary's feature; by default it is called like the feature.
    """

    column: str | None = None
    table: str | None = None


@dataclass(frozen=True, kw_only=True)
class OpenIds:
    """Integers as they are, texts as their 64-bit hash, for a table with an open vocabulary.

    Args:
        column: The column; by default it is called like the feature.
        table: The table; by default it is called like the feature.
    """

    column: str | None = None
    table: str | None = None


IdKind = Rows | Hashed | Tokens | OpenIds


def _check(rows: object) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InvalidError(f"rows of a table must be an integer of at least 1, not {rows!r}")


def id_kinds(ids: Mapping[str, IdKind | int]) -> dict[str, IdKind]:
    """Returns the kind of each feature's ids, with column and table; a number is :class:`Rows`.

    Args:
        ids: By feature.

    Raises:
        InvalidError: No feature, something else, or features of a table that differ in kind.
    """
    if not ids:
        raise InvalidError('no ids given; name the columns, such as ids={"user": 1000}')
    kinds: dict[str, IdKind] = {}
    of_table: dict[str, IdKind] = {}
    for feature, given in ids.items():
        kind = Rows(given) if isinstance(given, int) else given
        if not isinstance(kind, Rows | Hashed | Tokens | OpenIds):
            raise InvalidError(
                f"ids of feature {feature} are {given!r}; give a number of rows, Rows, Hashed, "
                "Tokens or OpenIds"
            )
        kind = replace(kind, column=kind.column or feature, table=kind.table or feature)
        kinds[feature] = kind
        table = str(kind.table)
        first = of_table.setdefault(table, kind)
        if replace(kind, column=first.column) != first:
            raise InvalidError(
                f"features of table {table} differ in kind: {first} and {kind}; give them the same "
                "kind and rows, or a table each"
            )
    return kinds
