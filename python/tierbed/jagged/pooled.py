"""One vector per feature and sample: what a pooled lookup returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierbed.errors import InvalidError

__all__ = ["KeyedTensor"]


class KeyedTensor:
    """One vector per feature and sample, side by side.

    Args:
        keys: Feature names, ``F`` of them.
        length_per_key: Columns of each feature.
        values: ``[B, sum(length_per_key)]``.
        key_dim: Dimension along which the features lie; 1.

    Examples:
        >>> pooled = tb.KeyedTensor(["user", "item"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> pooled["item"]
        tensor([[3.]])
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1
    ) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Joins one tensor per feature.

        Args:
            keys: Feature names, ``F``.
            tensors: ``[B, D]`` of each feature.
            key_dim: Dimension along which the features lie.
            cat_dim: Dimension along which the tensors are joined.
        """
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """Puts features of several of them side by side, group by group.

        Args:
            keyed_tensors: Of the same samples.
            groups: Feature names of each group; a feature may be in several.

        Returns:
            ``[B, D]`` per group.

        Raises:
            InvalidError: A feature that is missing, or that several of them have.
        """
        found: dict[str, Tensor] = {}
        for keyed in keyed_tensors:
            for key, tensor in keyed.to_dict().items():
                if key in found:
                    raise InvalidError(f"several of the tensors have the feature {key!r}")
                found[key] = tensor
        missing = [key for group in groups for key in group if key not in found]
        if missing:
            raise InvalidError(f"no tensor has the features {missing}; there are {sorted(found)}")
        dims = {keyed.key_dim() for keyed in keyed_tensors}
        return [torch.cat([found[key] for key in group], dim=max(dims)) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor],
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
    ) -> dict[str, Tensor]:
        """As :meth:`regroup`, by name of the group.

        Args:
            keyed_tensors: As of :meth:`regroup`.
            groups: As of :meth:`regroup`.
            keys: Names of the groups.
        """
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """Returns the feature names."""
        return self._keys

    def values(self) -> Tensor:
        """Returns all columns, ``[B, sum(length_per_key)]``."""
        return self._values

    def device(self) -> torch.device:
        """Returns where the vectors are."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Returns the bytes of the vectors."""
        return self._values.element_size() * self._values.numel()

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory of the vectors until ``stream`` has used them.

        Args:
            stream: A ``torch.cuda.Stream``.
        """
        self._values.record_stream(stream)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """Returns a copy on ``device``.

        Args:
            device: Where the copy is.
            non_blocking: As of ``torch.Tensor.to``.
        """
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim)

    def key_dim(self) -> int:
        """Returns the dimension along which the features lie."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Returns the columns of each feature."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Returns the first column of each feature, and the end of the last."""
        bounds = [0]
        for length in self._length_per_key:
            bounds.append(bounds[-1] + length)
        return bounds

    def to_dict(self) -> dict[str, Tensor]:
        """Returns the columns ``[B, D]`` of every feature."""
        parts = torch.split(self._values, self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        at = self._keys.index(key) if key in self._keys else -1
        if at < 0:
            raise KeyError(key)
        return self._values.narrow(
            self._key_dim, self.offset_per_key()[at], self._length_per_key[at]
        )

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, values={tuple(self._values.shape)})"
