"""Rows of FBGEMM in one byte per weight, with a scale and a bias of their own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tierbed.errors import InvalidError

__all__ = ["Int8Layout", "check_width", "decoded"]

#: Where scale and bias of a row lie: behind its codes in float32, as
#: ``torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized`` writes them, or before them in float16, as
#: the quantized modules of TorchRec keep them.
Int8Layout = Literal["scale_bias_last", "scale_bias_first"]

# Rows of quantized modules are filled up to a multiple of this, on one device or another.
_ALIGNED_MAX_BYTES = 16


def check_width(name: str, width: int, dim: int, layout: Int8Layout) -> None:
    """Refuses rows of ``width`` bytes that cannot have ``dim`` codes in that layout.

    Raises:
        InvalidError: Another width.
    """
    least = dim + 8 if layout == "scale_bias_last" else dim + 4
    most = least if layout == "scale_bias_last" else least + _ALIGNED_MAX_BYTES - 1
    if not least <= width <= most:
        told = str(least) if least == most else f"{least} to {most}"
        raise InvalidError(
            f"rows of {name} have {width} bytes, and {dim} codes with scale and bias take {told} "
            f"in the layout {layout!r}",
            {"name": name},
        )


def decoded(codes: Tensor, dim: int, layout: Int8Layout) -> Tensor:
    """Returns ``scale * code + bias`` of rows ``[N, W]`` u8, ``[N, D]`` f32."""
    if layout == "scale_bias_last":
        numbers = codes[:, dim : dim + 8].contiguous().view(torch.float32)
        weights = codes[:, :dim]
    else:
        numbers = codes[:, :4].contiguous().view(torch.float16).float()
        weights = codes[:, 4 : 4 + dim]
    return torch.addcmul(numbers[:, 1:], weights.float(), numbers[:, :1])
