"""Retrieval: logits against sampled negatives, and the best rows of a whole table.

To train, the logit of a positive stands beside those of a few negatives, corrected by how likely
each was drawn. To retrieve, a table is scanned in order of its rows, a chunk at a time, so that
memory does not depend on its size; the same scan feeds an index of approximate search.

Source: Yi et al., RecSys 2019 (in-batch negatives, correction by log q).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierbed.errors import InvalidError, UnsupportedError
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor
from tierbed.nn.embedding import RowSource

__all__ = ["RowChunk", "TopK", "row_chunks", "sampled_logits", "top_k"]

CHUNK_ROWS = 65536


def sampled_logits(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    positive_ids: Tensor,
    negative_ids: Tensor,
    positive_log_q: Tensor | None = None,
    negative_log_q: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Scores every query with its positive and with negatives that all share.

    ``cross_entropy(logits, zeros)`` of it is the sampled softmax. With the positives as negatives,
    too, these are in-batch negatives. Take all rows from one lookup: positives and negatives are
    two features of one table, which is then stepped once.

    Args:
        queries: ``[B, D]``.
        positives: ``[B, D]``, one per query.
        negatives: ``[N, D]``.
        positive_ids: ``[B]``, ids of the positives.
        negative_ids: ``[N]``, ids of the negatives. Where one is the query's positive its logit is
            minus infinity.
        positive_log_q: ``[B]``, logarithm of the probability that a draw yields this item;
            subtracted from its logit. None: all items are drawn alike.
        negative_log_q: ``[N]``, the same of the negatives.
        temperature: Divides the products, not the corrections.

    Returns:
        Logits ``[B, 1 + N]``; those of the positives first.

    Raises:
        InvalidError: Shapes that do not fit each other, or one correction without the other.

    Examples:
        >>> ids = torch.tensor([7, 8, 7])
        >>> users, items = torch.ones(3, 4), torch.ones(3, 4)
        >>> tb.nn.sampled_logits(users, items, items, positive_ids=ids, negative_ids=ids)
        tensor([[4., -inf, 4., -inf],
                [4., 4., -inf, 4.],
                [4., -inf, 4., -inf]])
    """
    fits = (
        queries.dim() == negatives.dim() == 2
        and queries.shape == positives.shape
        and queries.shape[1] == negatives.shape[1]
        and positive_ids.shape == queries.shape[:1]
        and negative_ids.shape == negatives.shape[:1]
    )
    if not fits:
        raise InvalidError(
            "sampled_logits takes queries and positives [B, D], negatives [N, D] and their ids [B] "
            f"and [N], not {[tuple(each.shape) for each in (queries, positives, negatives)]} and "
            f"{[tuple(each.shape) for each in (positive_ids, negative_ids)]}"
        )
    if (positive_log_q is None) != (negative_log_q is None):
        raise InvalidError(
            "either both positives and negatives are corrected or none; give positive_log_q and "
            "negative_log_q"
        )
    of_positives = (queries * positives).sum(dim=1, keepdim=True) / temperature
    of_negatives = queries @ negatives.T / temperature
    if positive_log_q is not None and negative_log_q is not None:
        of_positives = of_positives - positive_log_q[:, None]
        of_negatives = of_negatives - negative_log_q
    is_positive = positive_ids[:, None] == negative_ids
    of_negatives = of_negatives.masked_fill(is_positive, -torch.inf)
    return torch.cat([of_positives, of_negatives], dim=1)


class RowChunk(NamedTuple):
    """Some rows of a table.

    Args:
        ids: ``[N]`` i64.
        rows: ``[N, D]`` f32.
    """

    ids: Tensor
    rows: Tensor


def row_chunks(
    source: RowSource, table: str, *, chunk_rows: int = CHUNK_ROWS
) -> Iterator[RowChunk]:
    """Yields all rows of a table in memory for one chunk, to score or to index them.

    In forward order a store reads everything for each chunk: raise ``chunk_rows``, open it with
    ``order="window"``, or scan what it published.

    Args:
        source: A store, a snapshot or a coded store.
        table: Name of the table. Of one with open vocabulary the rows that ids have.
        chunk_rows: Most rows at a time.

    Raises:
        InvalidError: No such table, or ``chunk_rows`` below 1.
        UnsupportedError: A snapshot's table of open vocabulary, which does not list its ids.
    """
    if chunk_rows < 1:
        raise InvalidError(f"chunk_rows must be at least 1, not {chunk_rows}")
    schema = {known["name"]: known for known in source.tables()}
    if table not in schema:
        raise InvalidError(f"no table {table!r}; there are {sorted(schema)}", {"table": table})
    owner: Any = source
    if table in source.vocabularies():
        if not hasattr(owner, "ids"):
            raise UnsupportedError(
                f"table {table!r} of a snapshot has an open vocabulary, whose ids are not listed; "
                "scan it in the training store",
                {"table": table},
            )
        ids, rows = owner.ids(table)
        for first in range(0, len(ids), chunk_rows):
            some = slice(first, first + chunk_rows)
            yield RowChunk(ids[some], owner.gather_rows(table, rows[some].contiguous()))
        return
    row_count = int(schema[table]["row_count"])
    for first in range(0, row_count, chunk_rows):
        count = min(chunk_rows, row_count - first)
        ids = torch.arange(first, first + count, device="cpu")
        if hasattr(owner, "read_rows"):
            yield RowChunk(ids, owner.read_rows(table, first, count))
        else:
            one_each = torch.ones(count, dtype=torch.int64, device="cpu")
            bags = KeyedJaggedTensor([table], ids, lengths=one_each)
            yield RowChunk(ids, owner.lookup(bags).values())


class TopK(NamedTuple):
    """The best rows of each query, the best first.

    Args:
        scores: ``[B, k]`` f32.
        ids: ``[B, k]`` i64.
    """

    scores: Tensor
    ids: Tensor


@torch.no_grad()
def top_k(
    queries: Tensor,
    source: RowSource,
    table: str,
    k: int,
    *,
    encode: Callable[[Tensor], Tensor] | None = None,
    excluded: JaggedTensor | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> TopK:
    """Finds the rows with the largest dot products, exactly, over a table of any size.

    The table is read once, in order. Memory is that of a chunk and its ``B * chunk_rows`` scores.

    Args:
        queries: ``[B, D]``.
        source: As for :func:`row_chunks`.
        table: Name of the table.
        k: How many, at most the table's rows.
        encode: Maps rows ``[N, D']`` to vectors ``[N, D]``, such as a tower.
        excluded: Ids that a query shall not find, a bag per query, such as what a user has seen.
        chunk_rows: Most rows at a time.

    Returns:
        Scores and ids. Equal scores are in no order; where ``excluded`` leaves fewer than ``k``
        rows the last scores are minus infinity.

    Raises:
        InvalidError: A ``k`` that the table does not have, or not one bag per query.

    Examples:
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     emb = tb.EmbeddingCollection([tb.EmbeddingConfig(4, 2, "item")], store=store)
        ...     store.write_rows("item", 0, torch.tensor([[1.0, 0], [0, 3], [2, 0], [0, 4]]))
        ...     tb.nn.top_k(torch.tensor([[1.0, 0], [0, 1]]), store, "item", 2).ids
        tensor([[2, 0],
                [3, 1]])
    """
    if excluded is not None and excluded.lengths().numel() != len(queries):
        raise InvalidError(
            f"excluded needs a bag per query, {len(queries)}, not {excluded.lengths().numel()}"
        )
    best: TopK | None = None
    row_count = 0
    for chunk in row_chunks(source, table, chunk_rows=chunk_rows):
        row_count += len(chunk.ids)
        rows = chunk.rows.to(queries.device)
        vectors = rows if encode is None else encode(rows)
        scores = queries @ vectors.T
        ids = chunk.ids.to(queries.device)
        if excluded is not None:
            _leave_out(scores, ids, excluded)
        ids = ids.expand_as(scores)
        if best is not None:
            scores, ids = torch.cat([best.scores, scores], dim=1), torch.cat([best.ids, ids], dim=1)
        values, at = scores.topk(min(k, scores.shape[1]), dim=1)
        best = TopK(values, ids.gather(1, at))
    if best is None or not 1 <= k <= row_count:
        raise InvalidError(
            f"k must be from 1 to the {row_count} rows of table {table!r}, not {k}",
            {"table": table, "k": str(k)},
        )
    return best


def _leave_out(scores: Tensor, ids: Tensor, excluded: JaggedTensor) -> None:
    """Gives ids of ``excluded`` that are among ``ids`` the lowest score."""
    lengths, wanted = excluded.lengths().to(ids.device), excluded.values().to(ids.device)
    queries = torch.arange(len(scores), device=ids.device).repeat_interleave(lengths)
    # Ids of an open vocabulary come in the order of their rows.
    order = ids.argsort()
    at = order[torch.searchsorted(ids, wanted, sorter=order).clamp_max(len(ids) - 1)]
    is_here = ids[at] == wanted
    scores[queries[is_here], at[is_here]] = -torch.inf
