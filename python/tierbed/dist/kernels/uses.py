"""The uses of a batch, sorted by row, without a word to the host.

How many rows a batch uses is known on the device only: tensors have room for as many rows as uses,
and kernels look at how many there are. So the host never waits, and launches what comes behind.
Numbers that fit have 32 bits: half the passes of the sort, half the bytes of what it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import launch

__all__ = ["Uses", "leave_out", "list_uses_kernel", "sort_uses"]

# Uses of a program.
USES = 1024


@dataclass(frozen=True, kw_only=True)
class Uses:
    """The uses of a batch, sorted by row, then by position.

    ``R`` rows are used, of which the host knows only that they are not more than uses.

    Args:
        rows: ``[E]`` i32 or i64, the rows; the first ``R`` count.
        bounds: ``[E+1]`` i32 or i64, where the uses of each begin and end; the first ``R + 1``.
        row_of_use: ``[E]`` i32 or i64, which of ``rows``; the last one is ``R - 1``.
        grads_at: ``[E]`` i32 or i64, where the gradient of each use's bag begins in the matrix.
        scales: ``[E]`` f32, weights of the uses, or None.
        counts: ``[E]`` f32, ids of each use's bag for a mean, or None.
    """

    rows: Tensor
    bounds: Tensor
    row_of_use: Tensor
    grads_at: Tensor
    scales: Tensor | None
    counts: Tensor | None


@triton.jit(do_not_specialize=["use_total"])
def list_uses_kernel(
    keys,
    row_of_use,
    order,
    grads_at,
    scales,
    counts,
    rows,
    bounds,
    sorted_at,
    sorted_scales,
    sorted_counts,
    use_total,
    is_weighted: tl.constexpr,
    is_mean: tl.constexpr,
    uses_per_program: tl.constexpr,
):
    """Writes where rows begin, and brings what uses have into their order."""
    use = tl.program_id(0) * uses_per_program + tl.arange(0, uses_per_program)
    is_use = use < use_total
    row = tl.load(row_of_use + use, mask=is_use, other=0)
    before = tl.load(row_of_use + use - 1, mask=is_use & (use > 0), other=-1)
    is_first = is_use & (row != before)
    tl.store(rows + row, tl.load(keys + use, mask=is_first, other=0), mask=is_first)
    tl.store(bounds + row, use, mask=is_first)
    tl.store(bounds + row + 1, use + 1, mask=use == use_total - 1)
    source = tl.load(order + use, mask=is_use, other=0)
    tl.store(sorted_at + use, tl.load(grads_at + source, mask=is_use, other=0), mask=is_use)
    if is_weighted:
        scale = tl.load(scales + source, mask=is_use, other=0.0)
        tl.store(sorted_scales + use, scale, mask=is_use)
    if is_mean:
        count = tl.load(counts + source, mask=is_use, other=0.0)
        tl.store(sorted_counts + use, count, mask=is_use)


def sort_uses(
    row_of_use: Tensor,
    grads_at: Tensor,
    scales: Tensor | None,
    counts: Tensor | None,
    *,
    row_total: int,
    grad_total: int,
) -> Uses:
    """Sorts uses given in the order of their positions; the host waits for nothing.

    Args:
        row_of_use: ``[E]`` i64, the rows.
        grads_at: ``[E]`` i64, as in :class:`Uses`.
        scales: ``[E]`` f32, or None.
        counts: ``[E]`` f32, or None.
        row_total: Rows that there are.
        grad_total: Numbers of the matrix of gradients.
    """
    use_total = row_of_use.numel()
    keys, order = torch.sort(row_of_use.to(_word(row_total)), stable=True)
    is_next = torch.zeros(use_total, dtype=torch.bool, device=keys.device)
    torch.ne(keys[1:], keys[:-1], out=is_next[1:])
    word = _word(use_total)
    uses = Uses(
        rows=torch.empty_like(keys),
        bounds=torch.empty(use_total + 1, dtype=word, device=keys.device),
        row_of_use=torch.cumsum(is_next, dim=0, dtype=word),
        grads_at=torch.empty(use_total, dtype=_word(grad_total), device=keys.device),
        scales=None if scales is None else torch.empty_like(scales),
        counts=None if counts is None else torch.empty_like(counts),
    )
    launch(
        list_uses_kernel,
        triton.cdiv(use_total, USES),
        keys,
        uses.row_of_use,
        order,
        grads_at,
        keys if scales is None else scales,
        keys if counts is None else counts,
        uses.rows,
        uses.bounds,
        uses.grads_at,
        keys if uses.scales is None else uses.scales,
        keys if uses.counts is None else uses.counts,
        use_total,
        is_weighted=scales is not None,
        is_mean=counts is not None,
        uses_per_program=USES,
        num_warps=4,
    )
    return uses


def leave_out(uses: Uses, is_allowed: Tensor) -> None:
    """Lets ``uses`` be none where ``is_allowed`` ``[1]`` bool is false; the host waits for nothing.

    No row is stepped then, and no use is counted.
    """
    uses.bounds.mul_(is_allowed)
    last = uses.row_of_use[-1:]
    last.copy_(torch.where(is_allowed, last, -1))


def _word(total: int) -> torch.dtype:
    """Returns the type that counts to ``total``."""
    return torch.int32 if total < 1 << 31 else torch.int64
