"""The bags of one feature, and the rows of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tierbed.jagged.bags import Bags, check_bags

if TYPE_CHECKING:
    from tierbed.jagged.keyed import KeyedJaggedTensor

__all__ = ["JaggedTensor", "UnpooledRows"]

# Most bounds that are taken apart as numbers of Python.
_BOUNDS_MAX = 512


class JaggedTensor(Bags):
    """The bags of one feature.

    Args:
        values: ``[E]`` ids, or ``[E, D]`` rows.
        lengths: ``[B]`` length of each bag; or give ``offsets`` ``[B+1]``.
        weights: ``[E]`` weight of each id.
        offsets: ``[B+1]`` bounds of the bags, from 0 to ``E``.

    Examples:
        >>> rows = tb.JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 1]))
        >>> rows.offsets()
        tensor([0, 2, 2, 3])
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Tensor | None = None,
        weights: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_bags(values, lengths, offsets, "JaggedTensor")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int64,
    ) -> JaggedTensor:
        """Returns one without bags.

        Args:
            is_weighted: Whether it has weights.
            device: Where it is.
            values_dtype: Of the ids.
            weights_dtype: Of the weights.
            lengths_dtype: Of the lengths.
        """
        return JaggedTensor(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=lengths_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
        )

    @staticmethod
    def from_dense(
        values: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> JaggedTensor:
        """Joins one tensor per bag, as :meth:`to_dense` returns them.

        Args:
            values: Ids ``[N]`` or rows ``[N, D]`` of each bag.
            weights: Weights ``[N]`` of each bag.
        """
        counts = [len(part) for part in values]
        return JaggedTensor(
            torch.cat(list(values)),
            torch.tensor(counts, dtype=torch.int64, device=values[0].device),
            None if weights is None else torch.cat(list(weights)),
        )

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> JaggedTensor:
        """Takes the first ``lengths`` of each row of a padded matrix.

        Args:
            values: ``[B, N]``, or rows ``[B, N, D]``.
            lengths: ``[B]``, from 0 to ``N``.
            weights: ``[B, N]``.
        """
        at = torch.arange(values.shape[1], device=values.device)
        is_there = at < lengths[:, None]
        kept = None if weights is None else weights[is_there]
        return JaggedTensor(values[is_there], lengths, kept)

    def to_dense(self) -> list[Tensor]:
        """Returns one tensor per bag."""
        return self._of_bags(self.values())

    def to_dense_weights(self) -> list[Tensor] | None:
        """Returns the weights of each bag; None without weights."""
        weights = self.weights_or_none()
        return None if weights is None else self._of_bags(weights)

    def _of_bags(self, values: Tensor) -> list[Tensor]:
        return [values[a:b] for a, b in pairwise(self.offsets().tolist())]

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Returns a matrix with a row per bag, such as a sequence model takes.

        Gradients go to the values that are in it.

        Args:
            desired_length: Its columns ``N``; of longer bags the first ``N`` stay. By default the
                length of the longest bag.
            padding_value: Behind shorter bags.

        Returns:
            ``[B, N]``, or of rows ``[B, N, D]``.
        """
        return self._padded(self.values(), desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Returns the weights as :meth:`to_padded_dense` the values; None without weights.

        Args:
            desired_length: As there.
            padding_value: As there.
        """
        weights = self.weights_or_none()
        return None if weights is None else self._padded(weights, desired_length, padding_value)

    def _padded(self, values: Tensor, length: int | None, padding_value: float) -> Tensor:
        if length is None:
            length = max(self.lengths().tolist(), default=0)
        bounds = self.offsets()
        at = bounds[:-1, None] + torch.arange(length, device=values.device)
        is_padding = at >= bounds[1:, None]
        fill = padding_value if values.is_floating_point() else int(padding_value)
        if not len(values):
            return values.new_full((*at.shape, *values.shape[1:]), fill)
        picked = values[at.masked_fill(is_padding, 0)]
        return picked.masked_fill(is_padding.view(*at.shape, *[1] * (values.dim() - 1)), fill)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """Returns a copy on ``device``.

        Args:
            device: Where the copy is.
            non_blocking: As of ``torch.Tensor.to``.
        """

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        return JaggedTensor(
            self.values().to(device, non_blocking=non_blocking),
            move(self.lengths()),
            move(self.weights_or_none()),
            move(self.offsets_or_none()),
        )

    def __repr__(self) -> str:
        return f"JaggedTensor(values={tuple(self.values().shape)}, bags={self.lengths().numel()})"


class _FeatureRows(JaggedTensor):
    """The rows of one feature of an :class:`UnpooledRows`."""

    _weights = None
    _lengths = None
    _offsets = None

    def __init__(self, rows: UnpooledRows, at: int) -> None:
        # Nothing of the base is set: a request of one sample has one of these per feature.
        self._rows = rows
        self._at = at

    def values(self) -> Tensor:
        """Returns the rows ``[E, D]``."""
        return self._rows.values(self._at)

    def lengths(self) -> Tensor:
        """Returns the length of each bag, ``[B]``."""
        if self._lengths is None:
            self._lengths = self._rows.lengths(self._at)
        return self._lengths


class UnpooledRows:
    """The rows of a small batch of bags, which are taken apart by feature when they are asked for.

    Where a request has one sample, making the tensors of all its features takes longer than
    reading their rows. Bounds are taken at once, so that a caller may use its tensors again.

    Args:
        rows: ``[E, D]``, without gradient.
        bags: The batch that was looked up; it :meth:`fits`.
    """

    def __init__(self, rows: Tensor, bags: KeyedJaggedTensor) -> None:
        offsets = bags.offsets()
        self._values = rows
        self._stride = bags.stride()
        self._bounds: list[int] = offsets.tolist()
        self._dtype = offsets.dtype
        self._lengths = bags._lengths
        self._parts: Sequence[Tensor] | None = None if len(bags.keys()) > 1 else (rows,)

    @staticmethod
    def fits(rows: Tensor, bags: KeyedJaggedTensor) -> bool:
        """Tells whether numbers of Python are cheaper than tensors, and nothing is trained.

        Args:
            rows: Rows ``[E, D]``.
            bags: The bags they are of.
        """
        if rows.requires_grad or not bags.stride():
            return False
        offsets = bags.offsets()
        return offsets.numel() <= _BOUNDS_MAX and offsets.is_cpu and rows.is_cpu

    def to_dict(self, names: Sequence[str]) -> dict[str, JaggedTensor]:
        """Returns one :class:`JaggedTensor` per feature, called ``names``.

        Args:
            names: A name per feature.
        """
        return {name: _FeatureRows(self, at) for at, name in enumerate(names)}

    def values(self, at: int) -> Tensor:
        """Returns the rows ``[E, D]`` of the feature at position ``at``.

        Args:
            at: Position of the feature.
        """
        if self._parts is None:
            sizes = [b - a for a, b in pairwise(self._bounds[:: self._stride])]
            self._parts = torch.split(self._values, sizes)
        return self._parts[at]

    def lengths(self, at: int) -> Tensor:
        """Returns the length of each bag ``[B]`` of the feature at position ``at``.

        Args:
            at: Position of the feature.
        """
        first, end = at * self._stride, (at + 1) * self._stride
        if self._lengths is not None:
            return self._lengths[first:end]
        bounds = self._bounds[first : end + 1]
        return torch.tensor([b - a for a, b in pairwise(bounds)], dtype=self._dtype, device="cpu")
