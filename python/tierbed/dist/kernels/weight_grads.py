"""Writes the gradients of weights straight to the ranks whose weights they are.

The gradient of a weight is its row, before the step, times the gradient of its bag. Who holds the
row computes it, in the order of additions of the CPU kernels, and stores one number where the
weight's rank reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import OPTIONS, launch
from tierbed.dist.kernels.step_rows import product_tile
from tierbed.dist.kernels.sums import sum_products

__all__ = ["uses_tile", "weight_grads", "weight_grads_kernel"]

# Most uses of a program.
USES_MAX = 8


def uses_tile(dim: int) -> tuple[int, int]:
    """Returns uses of a program, and warps for them: row and gradient are held together."""
    return product_tile(dim, USES_MAX)


@triton.jit(do_not_specialize=["use_total"])
def weight_grads_kernel(
    weights,
    rows,
    grads_at,
    counts,
    grads,
    places,
    use_total,
    dim: tl.constexpr,
    width: tl.constexpr,
    is_mean: tl.constexpr,
    uses_per_program: tl.constexpr,
):
    """Writes the gradients of ``uses_per_program`` weights; see :func:`weight_grads`."""
    use = tl.program_id(0) * uses_per_program + tl.arange(0, uses_per_program)
    is_use = use < use_total
    column = tl.arange(0, width)
    is_there = is_use[:, None] & (column < dim)[None, :]
    row = tl.load(rows + use, mask=is_use, other=0)
    values = tl.load(weights + row[:, None] * dim + column[None, :], mask=is_there, other=0.0)
    at = tl.load(grads_at + use, mask=is_use, other=0)
    of_bag = tl.load(grads + at[:, None] + column[None, :], mask=is_there, other=0.0)
    product = sum_products(values, of_bag, dim, width, uses_per_program)
    if is_mean:
        product = tl.div_rn(product, tl.load(counts + use, mask=is_use, other=1.0))
    place = tl.load(places + use, mask=is_use, other=0)
    tl.store(place.to(tl.pointer_type(tl.float32)), product, mask=is_use & (place != 0))


def weight_grads(
    weights: Tensor,
    rows: Tensor,
    grads_at: Tensor,
    counts: Tensor | None,
    grads: Tensor,
    places: Tensor,
) -> None:
    """Writes the gradient of the weight of every use.

    Args:
        weights: ``[N, dim]`` f32, the rows.
        rows: ``[E]`` i64, the row of each use.
        grads_at: ``[E]`` i64, where the gradient of its bag begins in ``grads``.
        counts: ``[E]`` f32, ids of its bag for a mean, or None.
        grads: f32, the matrix of gradients.
        places: ``[E]`` i64, the address to write to, or 0 for none.
    """
    dim, use_total = weights.shape[1], rows.numel()
    uses_per_program, warps = uses_tile(dim)
    launch(
        weight_grads_kernel,
        triton.cdiv(use_total, uses_per_program),
        weights,
        rows,
        grads_at,
        grads if counts is None else counts,
        grads,
        places,
        use_total,
        dim=dim,
        width=max(16, triton.next_power_of_2(dim)),
        is_mean=counts is not None,
        uses_per_program=uses_per_program,
        num_warps=warps,
        **OPTIONS,
    )
