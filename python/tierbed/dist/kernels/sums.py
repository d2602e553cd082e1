"""Sums in the order of the CPU kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LANES", "sum_products"]

# Lanes of the fixed order in which products are added (`Kernels::dot`).
LANES = tl.constexpr(16)


@triton.jit
def sum_products(left, right, dim: tl.constexpr, width: tl.constexpr, row_count: tl.constexpr):
    """Returns sums of products in the order of the CPU kernels: lane by lane, then a tree."""
    column = tl.arange(0, width)
    products = tl.where(column[None, :] < dim, left * right, 0.0)
    by_part = tl.reshape(products, (row_count, width // LANES, LANES))
    part = tl.arange(0, width // LANES)
    lanes = tl.zeros((row_count, LANES), tl.float32)
    for at in tl.static_range(width // LANES):
        # One part among zeros: whatever order they are added in, that is the part.
        lanes += tl.sum(tl.where((part == at)[None, :, None], by_part, 0.0), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (row_count, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (row_count, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (row_count, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1)
