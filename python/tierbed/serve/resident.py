"""Choice of the rows that stay in memory, by how often a log used them.

:func:`plan_tiers` chooses by measured errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tierbed.codec import Codec, train_product
from tierbed.errors import InvalidError
from tierbed.serve.cache import TierPlan, TierTable

__all__ = ["plan_tiers"]


def plan_tiers(
    rows: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    *,
    dram_bytes: int,
    heads: Sequence[str] = ("gauss4", "int8", "f16"),
    tails: Sequence[str] = ("product2", "product4", "default"),
    seed: int = 0,
) -> TierPlan:
    """Chooses who is kept in how many bytes.

    For every pair of a head and a tail codec, rows go to the head in the order of what that saves:
    their uses times the squared error the tail would make, less the head's, per byte. The pair
    with the least error, weighted by use, wins. One threshold for all tables is what Lagrange's
    rule says for one budget. Source: the offline choice of EVStore §4.5; differs: by measured
    error and per row.

    Args:
        rows: ``[N, D]`` f32 per table.
        counts: ``[N]``, uses of each row in a log.
        dram_bytes: Bytes for everything that is kept.
        heads: Codecs to try for the most used rows.
        tails: What to try for the others: ``product2`` is 2 bytes per row, ``default`` one row per
            table.
        seed: Of the codebooks.

    Raises:
        InvalidError: Nothing fits the budget.

    Examples:
        >>> rows, counts = {"item": torch.rand(1000, 8)}, {"item": torch.arange(1000)}
        >>> len(tb.plan_tiers(rows, counts, dram_bytes=20_000).tables)
        1
    """
    best: tuple[float, TierPlan] | None = None
    for tail in tails:
        books, tail_codes, tail_rows = _tails(rows, counts, tail, seed)
        for head in heads:
            found = _fill(rows, counts, (head, tail), dram_bytes, (books, tail_codes, tail_rows))
            if found is not None and (best is None or found[0] < best[0]):
                best = found
    if best is None:
        raise InvalidError(
            f"no plan fits {dram_bytes} bytes; the smallest has {tails[0]} for "
            f"{sum(table.shape[0] for table in rows.values())} rows",
            {"dram_bytes": str(dram_bytes)},
        )
    return best[1]


_Tails = tuple[dict[int, Tensor], dict[str, Tensor], dict[str, Tensor]]


def _tails(
    rows: Mapping[str, Tensor], counts: Mapping[str, Tensor], tail: str, seed: int
) -> _Tails:
    """Returns codebooks by dim, codes by table (none for ``default``), and the rows they give."""
    books: dict[int, Tensor] = {}
    codes: dict[str, Tensor] = {}
    if tail == "default":
        return (
            books,
            codes,
            {name: _mean(rows[name], counts[name]).expand_as(rows[name]) for name in rows},
        )
    parts = int(tail.removeprefix("product"))
    found: dict[str, Tensor] = {}
    for dim in sorted({int(table.shape[1]) for table in rows.values()}):
        names = [name for name, table in rows.items() if table.shape[1] == dim]
        every = torch.cat([rows[name] for name in names])
        # Rows used often will be in the head: all others count alike, nearly.
        weights = torch.cat([counts[name] for name in names]).clamp_max(4.0) + 0.1
        codec = train_product(every, parts, weights=weights, seed=seed)
        books[dim] = codec.codebooks
        for name in names:
            codes[name] = codec.encode(rows[name])
            found[name] = codec.decode(codes[name])
    return books, codes, found


def _fill(
    rows: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    codecs: tuple[str, str],
    dram_bytes: int,
    tails: _Tails,
) -> tuple[float, TierPlan] | None:
    """Returns the error by use and the plan of one pair of codecs, or None if it does not fit."""
    head, tail = codecs
    books, tail_codes, tail_rows = tails
    coders = {name: Codec(head, int(table.shape[1])) for name, table in rows.items()}
    codes = {name: coders[name].encode(table) for name, table in rows.items()}
    before, gains, sizes = {}, [], []
    for name, table in rows.items():
        used = counts[name].double()
        before[name] = used * (table - tail_rows[name]).double().pow(2).sum(1)
        after = used * (table - coders[name].decode(codes[name])).double().pow(2).sum(1)
        gains.append(before[name] - after)
        sizes.append(torch.full_like(used, coders[name].code_bytes))
    left = dram_bytes - _fixed_bytes(rows, tail_codes, books)
    if left < 0:
        return None
    every, size = torch.cat(gains), torch.cat(sizes)
    order = (every / size).argsort(descending=True, stable=True)
    is_kept = (size[order].cumsum(0) <= left) & (every[order] > 0)
    is_head = torch.zeros(every.numel(), dtype=torch.bool, device="cpu")
    is_head[order[is_kept]] = True
    error = sum(float(part.sum()) for part in before.values()) - float(every[is_head].sum())
    norm = sum(
        float((counts[n].double() * t.double().pow(2).sum(1)).sum()) for n, t in rows.items()
    )
    chosen = dict(zip(rows, torch.split(is_head, [t.shape[0] for t in rows.values()]), strict=True))
    tables = tuple(
        TierTable(
            name=name,
            row_count=int(table.shape[0]),
            dim=int(table.shape[1]),
            head_codec=head,
            head_rows=chosen[name].nonzero().flatten(),
            head_codes=codes[name][chosen[name]],
            tail_codes=tail_codes.get(name),
            default_row=_mean(table, counts[name].masked_fill(chosen[name], 0.0)),
        )
        for name, table in rows.items()
    )
    about = {
        "head": head,
        "tail": tail,
        "head_rows": int(is_head.sum()),
        "head_share": float(is_head.double().mean()),
        "relative_error_by_use": (max(error, 0.0) / norm) ** 0.5 if norm > 0 else 0.0,
    }
    return error, TierPlan(tables=tables, codebooks=books, about=about)


def _fixed_bytes(
    rows: Mapping[str, Tensor], tail_codes: Mapping[str, Tensor], books: Mapping[int, Tensor]
) -> int:
    """Bytes of everything but the head's codes: bits and ranks, tails, codebooks, small change."""
    total = sum(4 * table.numel() for table in books.values())
    total += sum(codes.numel() for codes in tail_codes.values())
    for table in rows.values():
        words = -(-table.shape[0] // 64)
        total += 8 * words + 4 * -(-words // 8) + 4 * int(table.shape[1]) + 512
    return total


def _mean(rows: Tensor, weights: Tensor) -> Tensor:
    weights = weights + 1e-3
    mean: Tensor = (rows * weights[:, None]).sum(0) / weights.sum()
    return mean
