"""Sums in the order of the CPU kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LANES", "sum_products"]

# Lanes of the fixed order in which products are added (`Kernels::dot`).
LANES = tl.constexpr(16)


@triton.jit
def add_parts(lanes, parts, row_count: tl.constexpr, part_count: tl.constexpr):
    """Adds ``parts``, ``[rows, lanes, parts]``, to ``lanes``, one after the other.

    Halves are taken off until one is left. A thread holds all parts of its lanes, so that each
    product is moved once and added once.
    """
    if part_count == 1:
        lanes += tl.reshape(parts, (row_count, LANES))
    else:
        half: tl.constexpr = part_count // 2
        halves = tl.permute(tl.reshape(parts, (row_count, LANES, 2, half)), (0, 1, 3, 2))
        first, second = tl.split(halves)
        lanes = add_parts(lanes, first, row_count, half)
        lanes = add_parts(lanes, second, row_count, half)
    return lanes


@triton.jit
def sum_products(left, right, dim: tl.constexpr, width: tl.constexpr, row_count: tl.constexpr):
    """Returns sums of products in the order of the CPU kernels: lane by lane, then a tree."""
    column = tl.arange(0, width)
    products = tl.where(column[None, :] < dim, left * right, 0.0)
    parts = tl.reshape(products, (row_count, width // LANES, LANES))
    lanes = tl.full((row_count, LANES), 0.0, tl.float32)
    lanes = add_parts(lanes, tl.permute(parts, (0, 2, 1)), row_count, width // LANES)
    lanes = tl.sum(tl.reshape(lanes, (row_count, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (row_count, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (row_count, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1)
