"""Hashes of ids and tokens: 64 bits, the same on every machine and from every source.

An id is hashed as one word of 64 bits, a token as its bytes in words of eight, the last one filled
up with zeros. The state begins with the number of bytes; each word is added by exclusive or and
mixed. Nothing loops over values.

Source: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierbed.errors import InvalidError

__all__ = ["hash_bytes", "hash_ids", "hash_integers", "rows_of_hashes"]

_WORD = 8
# As many as Python's own SplitMix64: the increment, and the two multipliers of the finalizer.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mixed(state: Any) -> Any:
    state = state + _STEP
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _begin(lengths: Any, seed: int) -> Any:
    with np.errstate(over="ignore"):
        return lengths.astype(np.uint64) + _mixed(np.uint64(seed % (1 << 64)))


def hash_integers(ids: Any, seed: int = 0) -> Any:
    """Returns the hashes ``[E]`` u64 of ids.

    Args:
        ids: ``[E]`` i64 or u64.
        seed: Another seed, other hashes.
    """
    words = ids.view(np.uint64) if ids.dtype == np.int64 else ids.astype(np.uint64)
    with np.errstate(over="ignore"):
        return _mixed(_begin(np.full(len(words), _WORD), seed) ^ words)


def hash_bytes(raw: Any, offsets: Any, seed: int = 0) -> Any:
    """Returns the hashes ``[E]`` u64 of tokens that lie one behind the other.

    Args:
        raw: ``[N]`` u8, the bytes of all tokens.
        offsets: ``[E + 1]`` i64, where each begins.
        seed: Another seed, other hashes.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    state = _begin(lengths, seed)
    # A word at every byte; those at the end reach into zeros.
    padded = np.concatenate([raw, np.zeros(_WORD, dtype=np.uint8)])
    words = np.ndarray((len(raw) + 1,), "<u8", padded, 0, (1,))
    left = np.flatnonzero(lengths)
    at = 0
    with np.errstate(over="ignore"):
        while len(left):
            rest = lengths[left] - at
            unused = np.uint64(8) * (_WORD - np.minimum(rest, _WORD)).astype(np.uint64)
            found = (words[starts[left] + at].astype(np.uint64) << unused) >> unused
            state[left] = _mixed(state[left] ^ found)
            at += _WORD
            left = left[rest > _WORD]
        return _mixed(state)


def rows_of_hashes(hashes: Any, rows: int) -> Any:
    """Returns the rows ``[E]`` i64 of hashes in a table of ``rows`` rows."""
    return (hashes % np.uint64(rows)).astype(np.int64)


def hash_ids(ids: Sequence[int] | Sequence[str] | Tensor, rows: int, seed: int = 0) -> Tensor:
    """Returns the rows ``[E]`` i64 that :class:`Hashed` gives ids or tokens, to look them up later.

    Args:
        ids: Ids, or tokens; all of one kind.
        rows: Rows of the table.
        seed: As of :class:`Hashed`.

    Raises:
        InvalidError: No rows, or something else among the ids.

    Examples:
        >>> tb.data.hash_ids(["a7", "never seen"], rows=1000)
        tensor([505, 904])
        >>> tb.data.hash_ids([7], rows=1000) == tb.data.hash_ids(torch.tensor([7]), rows=1000)
        tensor([True])
    """
    if rows < 1:
        raise InvalidError(f"rows must be at least 1, got {rows}")
    if isinstance(ids, Tensor):
        hashes = hash_integers(ids.to(torch.int64).contiguous().view(-1).numpy(), seed)
    elif all(isinstance(one, str) for one in ids):
        tokens = [str(one).encode() for one in ids]
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        hashes = hash_bytes(np.frombuffer(b"".join(tokens), dtype=np.uint8), offsets, seed)
    else:
        try:
            hashes = hash_integers(np.array(ids, dtype=np.int64), seed)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidError(f"ids must all be integers, or all texts: {error}") from error
    return torch.from_numpy(rows_of_hashes(hashes, rows))
