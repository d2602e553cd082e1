"""Sums the gradients of each row's uses in order, and steps the row, in one kernel.

Uses are sorted by row, then by position; a program takes some rows, adds the gradients of their
uses one after the other and applies one optimizer step each. One writer per row and one order of
additions: the bits are those of the engine's update (``tierbed-kernels``), whatever the number of
ranks. Source: FBGEMM, exact fused optimizers. Differs: no atomic additions.

A row that is used very often is one program's long loop; dividing it would change the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import OPTIONS, launch, tile
from tierbed.dist.kernels.sums import LANES, sum_products
from tierbed.dist.kernels.uses import Uses
from tierbed.errors import InvalidError

__all__ = [
    "KINDS",
    "StepNumbers",
    "product_tile",
    "step_rows",
    "step_rows_kernel",
    "step_tile",
]

# Optimizers that the kernel knows.
KINDS = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 2}
# Most rows of a program.
ROWS_MAX = 4


def step_tile(dim: int) -> tuple[int, int]:
    """Returns rows of a program, and warps for them: gradient, row and state are held together."""
    return product_tile(dim, ROWS_MAX)


def product_tile(dim: int, items_max: int) -> tuple[int, int]:
    """As :func:`~tierbed.dist.kernels.launch.tile`, for a kernel that sums products of its items.

    The parts of a wide sum take as many registers again.
    """
    width = max(LANES.value, triton.next_power_of_2(dim))
    return tile(width, items_max, 8 if width <= 128 else 4)


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What an optimizer steps by.

    Args:
        kind: One of :data:`KINDS`.
        lr: Learning rate.
        eps: Added to square roots.
        weight_decay: Times the weight, added to its gradient.
    """

    kind: str
    lr: float
    eps: float
    weight_decay: float


@triton.jit(do_not_specialize=["use_total"])
def step_rows_kernel(
    weights,
    state,
    use_counts,
    rows,
    bounds,
    row_of_use,
    grads_at,
    scales,
    counts,
    grads,
    use_total,
    lr,
    eps,
    weight_decay,
    dim: tl.constexpr,
    width: tl.constexpr,
    kind: tl.constexpr,
    is_aligned: tl.constexpr,
    is_weighted: tl.constexpr,
    is_mean: tl.constexpr,
    has_decay: tl.constexpr,
    rows_per_program: tl.constexpr,
):
    """Steps ``rows_per_program`` rows; see :func:`step_rows`."""
    # There are programs for as many rows as could be; most have nothing to do.
    row_total = tl.load(row_of_use + use_total - 1) + 1
    first = tl.program_id(0) * rows_per_program
    if first >= row_total:
        return
    at_row = first + tl.arange(0, rows_per_program)
    is_row = at_row < row_total
    start = tl.load(bounds + at_row, mask=is_row, other=0)
    end = tl.load(bounds + at_row + 1, mask=is_row, other=0)
    column = tl.arange(0, width)
    is_column = (column < dim)[None, :]
    grad = tl.zeros((rows_per_program, width), tl.float32)
    for at in range(tl.max(end - start, axis=0)):
        is_use = start + at < end
        place = tl.load(grads_at + start + at, mask=is_use, other=0).to(tl.int64)
        is_there = is_use[:, None] & is_column
        source = grads + place[:, None] + column[None, :]
        if is_aligned:
            # The compiler cannot see that places from memory are multiples of 4.
            source = tl.max_contiguous(tl.multiple_of(source, (1, 16)), (1, width))
        values = tl.load(source, mask=is_there, other=0.0)
        if is_weighted:
            values = tl.load(scales + start + at, mask=is_use, other=0.0)[:, None] * values
        if is_mean:
            count = tl.load(counts + start + at, mask=is_use, other=1.0)
            values = tl.div_rn(values, tl.broadcast_to(count[:, None], (rows_per_program, width)))
        grad = tl.where(is_there, grad + values, grad)
    row = tl.load(rows + at_row, mask=is_row, other=0).to(tl.int64)
    is_there = is_row[:, None] & is_column
    place = row[:, None] * dim + column[None, :]
    weight = tl.load(weights + place, mask=is_there, other=0.0)
    if has_decay:
        grad = grad + weight_decay * weight
    if kind == 0:
        weight = weight - lr * grad
    elif kind == 1:
        total = tl.load(state + place, mask=is_there, other=0.0) + grad * grad
        tl.store(state + place, total, mask=is_there)
        weight = weight - lr * tl.div_rn(grad, tl.sqrt_rn(total) + eps)
    else:
        sum_of_row = tl.load(state + row, mask=is_row, other=0.0)
        squares = sum_products(grad, grad, dim, width, rows_per_program)
        sum_of_row += tl.div_rn(squares, tl.full((rows_per_program,), dim, tl.float32))
        tl.store(state + row, sum_of_row, mask=is_row)
        bottom = tl.sqrt_rn(sum_of_row) + eps
        rate = tl.div_rn(tl.zeros((rows_per_program,), tl.float32) + lr, bottom)
        weight = weight - rate[:, None] * grad
    tl.store(weights + place, weight, mask=is_there)
    count = tl.load(use_counts + row, mask=is_row, other=0)
    tl.store(use_counts + row, count + 1, mask=is_row)


def step_rows(
    weights: Tensor,
    state: Tensor,
    use_counts: Tensor,
    uses: Uses,
    grads: Tensor,
    numbers: StepNumbers,
    *,
    is_aligned: bool = False,
) -> None:
    """Applies one optimizer step to every used row.

    Args:
        weights: ``[N, dim]`` f32.
        state: ``[N, S]`` f32, ``S`` of the optimizer.
        use_counts: ``[N]`` i32, one more for each row that is stepped.
        uses: Which rows, and where their gradients are.
        grads: f32, the matrix that ``uses.grads_at`` counts in.
        numbers: The optimizer.
        is_aligned: Whether ``dim`` and all of ``uses.grads_at`` are multiples of 4: loads of
            gradients have 128 bits then.

    Raises:
        InvalidError: ``is_aligned`` is said of a dim that is not.
    """
    (row_total, dim), use_total = weights.shape, uses.rows.numel()
    if is_aligned and dim % 4:
        raise InvalidError(f"dim {dim} is no multiple of 4")
    rows_per_program, warps = step_tile(dim)
    launch(
        step_rows_kernel,
        triton.cdiv(min(use_total, row_total), rows_per_program),
        weights,
        weights if state.numel() == 0 else state,
        use_counts,
        uses.rows,
        uses.bounds,
        uses.row_of_use,
        uses.grads_at,
        grads if uses.scales is None else uses.scales,
        grads if uses.counts is None else uses.counts,
        grads,
        use_total,
        numbers.lr,
        numbers.eps,
        numbers.weight_decay,
        dim=dim,
        width=max(16, triton.next_power_of_2(dim)),
        kind=KINDS[numbers.kind],
        is_aligned=is_aligned,
        is_weighted=uses.scales is not None,
        is_mean=uses.counts is not None,
        has_decay=numbers.weight_decay != 0.0,
        rows_per_program=rows_per_program,
        num_warps=warps,
        **OPTIONS,
    )
