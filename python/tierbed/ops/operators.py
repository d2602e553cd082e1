"""Lookups as parts of an autograd graph, eager or compiled.

In eager mode a lookup is a ``torch.autograd.Function``, or a plain call where no gradient is
wanted. Compilers, tracers, modes and tensor subclasses get custom operators, which do the same:
``tierbed::lookup`` reads rows and pools them, and its backward calls ``tierbed::update``, which
hands the gradient to the store, where the fused optimizer runs. (Torch imports its whole compiler
for the first call of an operator defined in Python, which takes seconds.)

Rows are not tensors, so nothing in the graph would ask for their gradient: a tensor of one
element, the *hook*, takes part in every lookup, and the update returns the hook's gradient, a
zero. So the update runs exactly when backward reaches the lookup, and no compiler removes it.
(A hook without elements would do in eager mode; but sums of empty tensors are nothing to
compute, and a compiler drops what they depend on.)

A handle (an integer, constant in a compiled graph) names the store and the plan; the registry
holds them weakly, so that a collection's end frees its store.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import once_differentiable

from tierbed.errors import ClosedError
from tierbed.ops.binding import Bags, Binding, find_binding

__all__ = [
    "is_observed",
    "lookup",
    "lookup_op",
    "new_hook",
    "translate",
    "update",
]

# Of a lookup that no gradient goes through.
_STILL_HOOK = torch.zeros(1, dtype=torch.float32, device="cpu")
# The gradient of every hook.
_HOOK_GRAD = torch.zeros(1, dtype=torch.float32, device="cpu")


def _binding(handle: int) -> Binding:
    binding = find_binding(handle)
    if binding is None:
        raise ClosedError(
            "the collection of this lookup no longer exists; keep the module alive while a "
            "compiled graph of it is used",
            {"handle": str(handle)},
        )
    return binding


def new_hook() -> Tensor:
    """Makes the one-element tensor that carries autograd through a lookup."""
    return torch.zeros(1, dtype=torch.float32, requires_grad=True, device="cpu")


def is_observed(hook: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> bool:
    """Whether a compiler, a tracer, a mode or a tensor subclass has to see the operator."""
    if torch.compiler.is_compiling():
        return True
    if _len_torch_dispatch_stack() or _len_torch_function_stack():
        return True
    if peek_interpreter_stack() is not None or _get_tracing_state() is not None:
        return True
    # Other classes may do something of their own when an operator takes them.
    if type(indices) is not Tensor or type(offsets) is not Tensor or type(hook) is not Tensor:
        return True
    return weights is not None and type(weights) not in (Tensor, torch.nn.Parameter)


def _wants_grad(hook: Tensor, weights: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return hook.requires_grad or (weights is not None and weights.requires_grad)


def lookup(
    binding: Binding,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    hook: Tensor = _STILL_HOOK,
    is_training: bool = False,
) -> Tensor:
    """Reads and pools rows; past the operator, where nothing in torch has to see it.

    Arguments and result are those of :func:`lookup_op`.
    """
    if is_observed(hook, indices, offsets, weights):
        rows: Tensor = lookup_op(
            hook,
            indices,
            offsets,
            weights,
            binding.handle,
            binding.feature_count,
            binding.output_dim,
            binding.is_pooled,
            is_training,
        )
    elif _wants_grad(hook, weights):
        rows = _EagerLookup.apply(  # type: ignore[no-untyped-call]
            hook, indices, offsets, weights, binding, is_training
        )
    else:
        rows, _ = binding.read(Bags.of(indices, offsets, weights), indices.device, is_training)
    return rows


class _EagerLookup(torch.autograd.Function):
    """A lookup whose backward steps the rows, without an operator."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        binding: Binding,
        is_training: bool,
    ) -> Tensor:
        bags = Bags.of(indices, offsets, weights)
        ctx.weights_device = None if weights is None else weights.device
        ctx.save_for_backward(*(part for part in bags if part is not None))
        # The graph keeps the collection's store usable until its backward.
        ctx.binding = binding
        out, ctx.token = binding.read(bags, indices.device, is_training)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, *rest = ctx.saved_tensors
        bags = Bags(indices, offsets, rest[0] if rest else None)
        trains_rows, wants_weights_grad = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        weights_grad = ctx.binding.step(grad, bags, trains_rows, wants_weights_grad, ctx.token)
        if weights_grad is not None:
            weights_grad = weights_grad.to(ctx.weights_device)
        return _HOOK_GRAD if trains_rows else None, None, None, weights_grad, None, None


@torch.library.custom_op("tierbed::lookup", mutates_args=())
def lookup_op(
    hook: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    handle: int,
    feature_count: int,
    output_dim: int,
    is_pooled: bool,
    is_training: bool = False,
) -> Tensor:
    """Reads and pools rows.

    Args:
        hook: From :func:`new_hook`; rows are trained when it requires a gradient.
        indices: ``[E]`` i64, feature by feature.
        offsets: ``[F*B+1]`` i64.
        weights: ``[E]`` f32 or None.
        handle: Names a :class:`Binding`.
        feature_count: ``F``.
        output_dim: Columns of the output, ``D``.
        is_pooled: One row per sample (all features side by side), or one per index.
        is_training: Whether a step on this batch follows; a plan then insists on its batch.

    Returns:
        ``[B, D]`` f32, or ``[E, D]`` when not pooled.
    """
    bags = Bags.of(indices, offsets, weights)
    return _binding(handle).read(bags, indices.device, is_training)[0]


@lookup_op.register_fake
def _(
    hook: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    handle: int,
    feature_count: int,
    output_dim: int,
    is_pooled: bool,
    is_training: bool = False,
) -> Tensor:
    rows = (offsets.numel() - 1) // feature_count if is_pooled else indices.numel()
    device = _binding(handle).output_device(indices.device)
    return torch.empty((rows, output_dim), dtype=torch.float32, device=device)


def translate(indices: Tensor, offsets: Tensor, handle: int, is_training: bool) -> Tensor:
    """Finds the rows of ids of open vocabularies; ids of other tables are rows already.

    Args:
        indices: ``[E]`` i64, feature by feature.
        offsets: ``[F*B+1]`` i64.
        handle: Names a :class:`Binding`.
        is_training: Whether this is a step of training, which counts ids and gives them rows.

    Returns:
        ``[E]`` i64.
    """
    if not is_observed(_STILL_HOOK, indices, offsets, None):
        return _binding(handle).translate(indices, offsets, is_training)
    rows: Tensor = translate_op(indices, offsets, handle, is_training)
    return rows


@torch.library.custom_op("tierbed::translate", mutates_args=())
def translate_op(indices: Tensor, offsets: Tensor, handle: int, is_training: bool) -> Tensor:
    """Finds rows as :func:`translate` does, as an operator."""
    return _binding(handle).translate(indices, offsets, is_training)


@translate_op.register_fake
def _(indices: Tensor, offsets: Tensor, handle: int, is_training: bool) -> Tensor:
    return torch.empty_like(indices)


@torch.library.custom_op("tierbed::update", mutates_args=())
def update(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    handle: int,
    trains_rows: bool,
    wants_weights_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Applies one optimizer step to the rows of a lookup.

    Args:
        grad: Gradient of the lookup's output, of its shape.
        indices: As given to the lookup.
        offsets: As given to the lookup.
        weights: As given to the lookup.
        handle: As given to the lookup.
        trains_rows: Whether to step the rows; False only computes the gradient of ``weights``.
        wants_weights_grad: Whether to compute the gradient of ``weights``.

    Returns:
        The gradient of the hook, ``[1]`` and zero, and of the weights, ``[E]`` (``[0]`` if not
        wanted).
    """
    bags = Bags.of(indices, offsets, weights)
    weights_grad = _binding(handle).step(grad, bags, trains_rows, wants_weights_grad)
    if weights_grad is None:
        weights_grad = torch.empty(0, device="cpu")
    device = indices.device if weights is None else weights.device
    return torch.zeros(1, dtype=torch.float32, device="cpu"), weights_grad.to(device)


@functools.cache
def _keep_equal_updates_apart() -> None:
    """Tells the compiler that two updates with equal arguments are two steps.

    ``torch.compile`` merges equal calls of functional operators. When a batch is looked up
    twice and the results are added, both updates have the same gradient: one would be lost.
    """
    # Nothing but a compiler comes here.
    from torch._functorch import compile_utils

    never_merged = getattr(compile_utils, "rand_ops", None)
    if isinstance(never_merged, list):
        never_merged.append(torch.ops.tierbed.update)


@update.register_fake
def _(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    handle: int,
    trains_rows: bool,
    wants_weights_grad: bool,
) -> tuple[Tensor, Tensor]:
    _keep_equal_updates_apart()
    size = indices.numel() if wants_weights_grad else 0
    device = indices.device if weights is None else weights.device
    return (
        torch.empty(1, dtype=torch.float32, device="cpu"),
        torch.empty(size, dtype=torch.float32, device=device),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _hook, indices, offsets, weights, handle, *_ = inputs
    ctx.has_weights = weights is not None
    ctx.save_for_backward(indices, offsets, *([weights] if ctx.has_weights else []))
    ctx.handle = handle
    # In eager mode the graph keeps the collection's store usable until its backward.
    ctx.binding = find_binding(handle)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, offsets, *rest = ctx.saved_tensors
    weights = rest[0] if ctx.has_weights else None
    wants_weights_grad = ctx.has_weights and ctx.needs_input_grad[3]
    hook_grad, weights_grad = update(
        grad,
        indices,
        offsets,
        weights,
        ctx.handle,
        ctx.needs_input_grad[0],
        wants_weights_grad,
    )
    return (
        hook_grad if ctx.needs_input_grad[0] else None,
        None,
        None,
        weights_grad if wants_weights_grad else None,
        None,
        None,
        None,
        None,
        None,
    )


lookup_op.register_autograd(_backward, setup_context=_setup_context)
