"""Lookups of several ranks in an autograd graph; their backward steps the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tierbed.dist.exchange import Exchange, RankBatch, Serving
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.jagged import KeyedJaggedTensor

__all__ = ["Lookup", "LookupParts", "batch_of"]


class Lookup(torch.autograd.Function):
    """A lookup in an autograd graph; its backward steps the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: Tensor,
        weights: Tensor | None,
        bags: KeyedJaggedTensor,
        exchange: Exchange,
        is_training: bool,
    ) -> Tensor:
        """Looks up a batch together with all ranks."""
        wants = (is_training, is_training and ctx.needs_input_grad[1])
        ctx.step, out = exchange.forward(*batch_of(bags, weights), wants)
        _keep(ctx, exchange, bags, weights, is_training)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Steps the rows together with all ranks."""
        return _step_rows(ctx, grads[0])


class LookupParts(torch.autograd.Function):
    """As :class:`Lookup`, with an output for each part: one backward for all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: Tensor,
        weights: Tensor | None,
        bags: KeyedJaggedTensor,
        exchange: Exchange,
        how: tuple[bool, int, list[Serving]],
    ) -> tuple[Tensor, ...]:
        """Begins the lookup of a batch together with all ranks."""
        is_training, parts, begun = how
        wants = (is_training, is_training and ctx.needs_input_grad[1])
        ctx.step, outputs, serving = exchange.forward_parts(*batch_of(bags, weights), wants, parts)
        begun.append(serving)
        _keep(ctx, exchange, bags, weights, is_training)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Steps the rows together with all ranks."""
        # A part that nobody used has zeros.
        return _step_rows(ctx, torch.cat(grads))


def batch_of(bags: KeyedJaggedTensor, weights: Tensor | None) -> RankBatch:
    """Returns a batch as the engine takes it."""
    indices = bags.values().detach().to(torch.int64).contiguous()
    offsets = bags.offsets().detach().to(torch.int64).contiguous()
    of_ids = None if weights is None else weights.detach().to(torch.float32).contiguous()
    return indices, offsets, of_ids


def _keep(
    ctx: Any,
    exchange: Exchange,
    bags: KeyedJaggedTensor,
    weights: Tensor | None,
    is_training: bool,
) -> None:
    """Keeps what the backward needs, beside the step's number."""
    ctx.exchange = exchange
    ctx.is_training = is_training
    ctx.index_count = bags.values().numel()
    ctx.weights_device = None if weights is None else weights.device


def _step_rows(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.exchange.is_trainable:
        raise UnsupportedError(
            "rows of a CodedStore do not train; call eval() on the collection to train what is "
            "above it, or keep these tables in a tierbed.Store"
        )
    if not ctx.is_training:
        raise InvalidError("this lookup was not made in training mode; call train() first")
    wants_weights = ctx.needs_input_grad[1]
    weights_grad = None
    if wants_weights:
        weights_grad = torch.empty(ctx.index_count, device=ctx.weights_device)
    ctx.exchange.backward(ctx.step, grad.to(torch.float32).contiguous(), weights_grad)
    return torch.zeros(1), weights_grad, None, None, None
