"""Batches whose features have bags of their own numbers, TorchRec's variable batch (VBE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierbed.errors import InvalidError

__all__ = ["VariableBatch"]


class VariableBatch:
    """Numbers of bags by feature, and which of them samples share.

    A :class:`tierbed.KeyedJaggedTensor` of one has as many bags for each feature as the one with
    most; the last of them are empty.

    Args:
        bag_counts: Bags of each feature.
        inverse: By feature ``[B]`` i64, the bag of each sample; None where samples are not told.
    """

    def __init__(self, bag_counts: dict[str, int], inverse: dict[str, Tensor] | None) -> None:
        self.bag_counts = bag_counts
        self._inverse = inverse

    @staticmethod
    def of(features: Any) -> VariableBatch | None:
        """Returns that of TorchRec's ``features``; None where every feature has a bag per sample.

        Raises:
            InvalidError: Samples name bags that are not there.
        """
        given = _call_or_none(features, "inverse_indices_or_none")
        has_inverse = given is not None and given[1].numel() > 0
        is_variable = bool(_call_or_none(features, "variable_stride_per_key"))
        if not has_inverse and not is_variable:
            return None
        keys = features.keys()
        strides = _call_or_none(features, "stride_per_key") or [features.stride()] * len(keys)
        counts = dict(zip(keys, strides, strict=True))
        if not has_inverse:
            return None if len(set(counts.values())) < 2 else VariableBatch(counts, None)
        inverse = dict(zip(given[0], given[1].unbind(), strict=True))
        if not torch.compiler.is_compiling():
            for key in keys:
                if key in inverse and inverse[key].numel():
                    _check_bags(key, inverse[key], counts[key])
        return VariableBatch(counts, inverse)

    def lengths(self, given: Tensor) -> Tensor:
        """Returns the lengths of all bags, ``given`` and as many 0 as fill the features up."""
        counts = list(self.bag_counts.values())
        most = self.stride
        parts = [
            nn.functional.pad(part, (0, most - part.numel())) for part in torch.split(given, counts)
        ]
        return torch.cat(parts)

    @property
    def stride(self) -> int:
        """Bags of the feature with most."""
        return max(self.bag_counts.values(), default=0)

    def check(self, features: Sequence[str]) -> None:
        """Refuses what cannot become one vector for each of ``features`` and sample.

        Raises:
            InvalidError: Samples are not told, or not for a feature.
        """
        known = self._inverse or {}
        missing = [key for key in features if key not in known]
        if missing:
            raise InvalidError(
                f"the features {missing} have bags of their own number {self.bag_counts} and no "
                "inverse_indices, which tell the bag of each sample; give inverse_indices, or a "
                "bag for each sample",
                {"features": ",".join(missing)},
            )

    def of_samples(self, pooled: Tensor, features: Sequence[str], dims: Sequence[int]) -> Tensor:
        """Returns the vectors of samples ``[B, D]``, of those of bags, ``[most bags, D]``."""
        self.check(features)
        assert self._inverse is not None
        columns = torch.split(pooled, list(dims), dim=1)
        return torch.cat(
            [
                part.index_select(0, self._inverse[key].to(part.device))
                for key, part in zip(features, columns, strict=True)
            ],
            dim=1,
        )


def _check_bags(key: str, inverse: Tensor, bag_count: int) -> None:
    low, high = int(inverse.min()), int(inverse.max())
    if low < 0 or high >= bag_count:
        raise InvalidError(
            f"inverse_indices of feature {key!r} must be from 0 to {bag_count - 1}, its bags; "
            f"found {low} to {high}",
            {"feature": key},
        )


def _call_or_none(features: Any, name: str) -> Any:
    call = getattr(features, name, None)
    return None if call is None else call()
