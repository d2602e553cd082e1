"""Sums the gradients of each row's uses in order, and steps the row, in one kernel.

Uses are sorted by row, then by position; a program takes some rows, adds the gradients of their
uses one after the other and applies one optimizer step each. One writer per row and one order of
additions: the bits are those of the engine's update (``tierbed-kernels``), whatever the number of
ranks. Source: FBGEMM, exact fused optimizers. Differs: no atomic additions.

A row that is used very often is one program's long loop; dividing it would change the bits. Such
rows have a launch of their own, a row per program, in which a thread loads the gradients of many
uses before it adds the first. No list of them is made: some use of theirs stands at a multiple of
:data:`MANY`, and the program of the first such multiple takes the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import OPTIONS, launch, tile
from tierbed.dist.kernels.sums import LANES, sum_products
from tierbed.dist.kernels.tiles import Tiles
from tierbed.dist.kernels.uses import Uses
from tierbed.errors import InvalidError

__all__ = [
    "KINDS",
    "StepNumbers",
    "StepTile",
    "product_tile",
    "step_rows",
    "step_rows_kernel",
    "step_tile",
]

# Optimizers that the kernel knows.
KINDS = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 2}
# Most rows of a program.
ROWS_MAX = 4
# Uses that make a row one of those with a program of their own.
MANY = 64
# Uses that are loaded together: of a row with few, and of one with many.
FEW_AT_ONCE = 2
MANY_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class StepTile:
    """What a program of the kernel takes at a time.

    Args:
        rows: Rows of a program.
        uses_at_once: Uses of each row whose gradients are loaded together.
        warps: Warps of a program.
    """

    rows: int
    uses_at_once: int
    warps: int


def step_tile(dim: int, *, is_many: bool = False) -> StepTile:
    """Returns what a program takes: gradient, row and state are held together."""
    if is_many:
        width = max(LANES.value, triton.next_power_of_2(dim))
        # Two numbers of a row for each thread: those of many uses fit into registers.
        warps = min(16, max(1, width // 64))
        return StepTile(rows=1, uses_at_once=MANY_AT_ONCE, warps=warps)
    rows, warps = product_tile(dim, ROWS_MAX)
    return StepTile(rows=rows, uses_at_once=FEW_AT_ONCE, warps=warps)


def product_tile(dim: int, items_max: int) -> tuple[int, int]:
    """As :func:`~tierbed.dist.kernels.launch.tile`, for a kernel that sums products of its items.

    The lanes of a sum are :data:`~tierbed.dist.kernels.sums.LANES` at least.
    """
    return tile(max(LANES.value, triton.next_power_of_2(dim)), items_max, 8)


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


@triton.jit
def add_uses(
    grad,
    grads,
    grads_at,
    scales,
    counts,
    start,
    end,
    column,
    dim: tl.constexpr,
    width: tl.constexpr,
    row_count: tl.constexpr,
    is_aligned: tl.constexpr,
    is_weighted: tl.constexpr,
    is_mean: tl.constexpr,
    uses_at_once: tl.constexpr,
):
    """Adds the gradients of the next ``uses_at_once`` uses of each row to ``grad``, in order."""
    places, factors, sizes, loaded = (), (), (), ()
    for ahead in tl.static_range(uses_at_once):
        at = start + ahead
        place = tl.load(grads_at + at, mask=at < end, other=0, eviction_policy="evict_first")
        places = places + (place.to(tl.int64),)
        if is_weighted:
            factor = tl.load(scales + at, mask=at < end, other=0.0, eviction_policy="evict_first")
            factors = factors + (factor,)
        if is_mean:
            size = tl.load(counts + at, mask=at < end, other=1.0, eviction_policy="evict_first")
            sizes = sizes + (size,)
    for ahead in tl.static_range(uses_at_once):
        source = grads + places[ahead][:, None] + column[None, :]
        if is_aligned:
            # The compiler cannot see that places from memory are multiples of 4.
            source = tl.max_contiguous(tl.multiple_of(source, (1, 16)), (1, width))
        is_there = (start + ahead < end)[:, None] & (column < dim)[None, :]
        loaded = loaded + (tl.load(source, mask=is_there, other=0.0, cache_modifier=".cg"),)
    for ahead in tl.static_range(uses_at_once):
        values = loaded[ahead]
        if is_weighted:
            values = factors[ahead][:, None] * values
        if is_mean:
            size = tl.broadcast_to(sizes[ahead][:, None], (row_count, width))
            values = tl.div_rn(values, size)
        is_there = (start + ahead < end)[:, None] & (column < dim)[None, :]
        grad = tl.where(is_there, grad + values, grad)
    return grad


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
    uses_at_once: tl.constexpr,
    many: tl.constexpr,
    is_many: tl.constexpr,
):
    """Steps ``rows_per_program`` rows; see :func:`step_rows`."""
    # There are programs for as many rows as could be; most have nothing to do.
    if is_many:
        use = tl.program_id(0) * many
        first = tl.load(row_of_use + use)
        begin = tl.load(bounds + first)
        is_idle = (tl.load(bounds + first + 1) - begin < many) | (use - begin >= many)
    else:
        first = tl.program_id(0) * rows_per_program
        is_idle = first > tl.load(row_of_use + use_total - 1)
    if is_idle:
        return
    at_row = first + tl.arange(0, rows_per_program)
    is_row = at_row <= tl.load(row_of_use + use_total - 1)
    start = tl.load(bounds + at_row, mask=is_row, other=0)
    end = tl.load(bounds + at_row + 1, mask=is_row, other=0)
    if not is_many:
        is_row = is_row & (end - start < many)
        end = tl.where(is_row, end, start)
    column = tl.arange(0, width)
    is_column = (column < dim)[None, :]
    grad = tl.zeros((rows_per_program, width), tl.float32)
    for ahead in range(0, tl.max(end - start, axis=0), uses_at_once):
        grad = add_uses(
            grad, grads, grads_at, scales, counts, start + ahead, end, column,
            dim, width, rows_per_program, is_aligned, is_weighted, is_mean, uses_at_once,
        )  # fmt: skip
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
    tiles: Tiles | None = None,
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
        tiles: By default the measured ones of the device, or those of :func:`step_tile`.

    Raises:
        InvalidError: ``is_aligned`` is said of a dim that is not.
    """
    (row_total, dim), use_total = weights.shape, uses.rows.numel()
    if is_aligned and dim % 4:
        raise InvalidError(f"dim {dim} is no multiple of 4")
    constants = {
        "dim": dim,
        "width": max(LANES.value, triton.next_power_of_2(dim)),
        "kind": KINDS[numbers.kind],
        "is_aligned": is_aligned,
        "is_weighted": uses.scales is not None,
        "is_mean": uses.counts is not None,
        "has_decay": numbers.weight_decay != 0.0,
        "many": MANY,
    }
    tiles = Tiles.of(weights.device) if tiles is None else tiles
    for is_many in (True, False):
        name = "step_rows_many" if is_many else "step_rows"
        chosen = tiles.pick(name, dim, step_tile(dim, is_many=is_many))
        if is_many:
            programs = 0 if use_total < MANY else triton.cdiv(use_total, MANY)
        else:
            programs = triton.cdiv(min(use_total, row_total), chosen.rows)
        launch(
            step_rows_kernel,
            programs,
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
            rows_per_program=chosen.rows,
            uses_at_once=chosen.uses_at_once,
            is_many=is_many,
            num_warps=chosen.warps,
            **constants,
            **OPTIONS,
        )
