"""Flat layout: one vector per id instead of one per bag, whatever the features' poolings.

A batch of a plan is known by its ids and by how many each feature has, not by its bags. So a
gradient per id steps the rows of a planned batch, too, where the gradient of its bags will not do:
after clipping, say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["FlatLayout", "bounds_of"]


def bounds_of(offsets: Tensor, feature_count: int) -> list[int]:
    """Returns the bounds ``[F+1]`` of the features among the ids of ``offsets`` ``[F*B+1]``."""
    samples = (offsets.numel() - 1) // feature_count
    bounds: list[int] = offsets[::samples].tolist() if samples else [0] * (feature_count + 1)
    return bounds


class FlatLayout:
    """Features with a vector per id.

    With equal dims the matrix is ``[E, D]``. Otherwise every id is a bag of its own, features lie
    side by side, and shorter ones end in empty bags: ``[E_max, D_1 + ... + D_F]``.

    Args:
        native: The engine's store or snapshot.
        tables: Table id of each feature.
        dims: Columns of each feature.
    """

    def __init__(self, native: Any, tables: Sequence[int], dims: Sequence[int]) -> None:
        self._dims = list(dims)
        self._is_even = len(set(dims)) == 1
        pooling = "none" if self._is_even else "sum"
        self.plan = native.plan(list(tables), [pooling] * len(tables))

    def offsets(self, bounds: Sequence[int]) -> Tensor:
        """Returns the offsets of ids that lie between ``bounds``, feature by feature."""
        counts = [end - first for first, end in pairwise(bounds)]
        if self._is_even:
            return torch.tensor(list(bounds), dtype=torch.int64, device="cpu")
        ramp = torch.arange(max(counts), device="cpu")
        parts = [
            first + ramp.clamp(max=count) for first, count in zip(bounds, counts, strict=False)
        ]
        return torch.cat([*parts, torch.tensor([bounds[-1]], device="cpu")])

    def matrix(self, bounds: Sequence[int]) -> Tensor:
        """Returns a matrix of zeros for ids between ``bounds``."""
        if self._is_even:
            return torch.zeros(bounds[-1], self._dims[0], device="cpu")
        counts = [end - first for first, end in pairwise(bounds)]
        return torch.zeros(max(counts), sum(self._dims), device="cpu")

    def views(self, matrix: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """Returns the vectors of each feature's ids, ``[E_f, D_f]``, as views of ``matrix``."""
        views = []
        column = 0
        for dim, first, end in zip(self._dims, bounds, bounds[1:], strict=False):
            if self._is_even:
                views.append(matrix[first:end])
            else:
                views.append(matrix[: end - first, column : column + dim])
            column += dim
        return views
