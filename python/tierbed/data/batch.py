"""Batches: what a model takes at one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.jagged import KeyedJaggedTensor

__all__ = ["Batch", "NativeParts", "batch_of"]

NativeParts = tuple[bytearray, bytearray, bytearray, bytearray]
"""Dense f32, label f32, values i64, offsets i64, as the native readers hand them out."""


@dataclass(frozen=True)
class Batch:
    """One batch of ``B`` samples.

    Args:
        dense: ``[B, N]`` f32 dense features; ``N`` may be 0.
        sparse: The ids of ``F`` features, feature-major.
        label: ``[B]`` f32, 0 or 1.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor

    def __len__(self) -> int:
        return self.label.shape[0]


def _tensor(raw: bytearray, dtype: torch.dtype) -> Tensor:
    # frombuffer shares the bytearray's memory and keeps it alive; it refuses an empty one.
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")


def batch_of(feature_names: Sequence[str], parts: NativeParts) -> Batch:
    """Wraps what a native reader handed out, without copying.

    Args:
        feature_names: Names of the ``F`` features.
        parts: ``[B, N]`` f32, ``[B]`` f32, ``[E]`` i64 and ``[F*B+1]`` i64 as bytes.
    """
    raw_dense, raw_label, raw_values, raw_offsets = parts
    label = _tensor(raw_label, torch.float32)
    dense = _tensor(raw_dense, torch.float32).view(label.shape[0], -1)
    values = _tensor(raw_values, torch.int64)
    offsets = _tensor(raw_offsets, torch.int64)
    sparse = KeyedJaggedTensor(list(feature_names), values, offsets=offsets)
    return Batch(dense, sparse, label)
