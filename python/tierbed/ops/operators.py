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
import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import once_differentiable

from tierbed._native import FeaturePlan, NativeStore
from tierbed.errors import ClosedError, InvalidError
from tierbed.ops.collected import CollectedGradients, CollectedTable, LookupGradient
from tierbed.ops.flat import FlatLayout, bounds_of
from tierbed.ops.steps import StepGuard

if TYPE_CHECKING:
    from tierbed.report.observer import Observer

__all__ = [
    "Binding",
    "checked_minutes",
    "is_observed",
    "lookup_op",
    "minutes_now",
    "new_hook",
    "translate",
    "update",
]

# What makes outputs: one call of it is cheaper than naming the dtype to torch.empty.
_FLOATS = torch.empty(0, dtype=torch.float32, device="cpu")
# Of a lookup that no gradient goes through.
_STILL_HOOK = torch.zeros(1, dtype=torch.float32, device="cpu")
# The gradient of every hook.
_HOOK_GRAD = torch.zeros(1, dtype=torch.float32, device="cpu")


class Readable(Protocol):
    """What a lookup needs: a training store or a snapshot."""

    def plan(self, tables: list[int], poolings: list[str]) -> FeaturePlan:
        """Makes the plan of a batch's features."""

    def lookup(
        self,
        plan: FeaturePlan,
        indices: Any,
        offsets: Any,
        weights: Any | None,
        out: Any,
    ) -> None:
        """Pools rows into ``out``."""


def checked_minutes(now_mins: int | None) -> int:
    """Returns minutes since 1970, by default those of now.

    Raises:
        InvalidError: No number of minutes from 0 to 2^32 - 1.
    """
    now = minutes_now() if now_mins is None else now_mins
    if not 0 <= now < 1 << 32:
        raise InvalidError("now_mins must be from 0 to 2^32 - 1", {"now_mins": str(now)})
    return now


def minutes_now() -> int:
    """Returns minutes since 1970: the time evictions by age go by."""
    return int(time.time() // 60)


class Binding:
    """A store and a feature plan, known to the operators by ``handle``.

    Args:
        native: The engine's store or snapshot.
        tables: Table id of each feature, in output order.
        poolings: ``"sum"``, ``"mean"`` or ``"none"`` of each feature.
        dims: Columns of each feature.
        guard: What is done before rows are stepped.
        observer: What sees lookups.
    """

    def __init__(
        self,
        native: Readable,
        tables: list[int],
        poolings: list[str],
        dims: list[int],
        guard: StepGuard | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.native = native
        self.observer = observer
        self.guard = StepGuard({}, None) if guard is None else guard
        self.tables = tables
        self.poolings = poolings
        self.dims = dims
        self.plan = native.plan(tables, poolings)
        self.is_pooled = "none" not in poolings
        self.feature_count = len(tables)
        self.output_dim = sum(dims) if self.is_pooled else dims[0]
        self.is_open = False
        """Whether a table has an open vocabulary."""
        self.hook = _STILL_HOOK
        """What requires a gradient while the rows train."""
        self.frozen: frozenset[int] = frozenset()
        """Tables whose rows do not train."""
        self.position: tuple[int, int] | None = None
        """Epochs and batches of the epoch done behind the last step; None without a plan."""
        self.handle = next(_HANDLES)
        _BINDINGS[self.handle] = self

    def lookup(
        self,
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
                self.handle,
                self.feature_count,
                self.output_dim,
                self.is_pooled,
                is_training,
            )
        elif _wants_grad(hook, weights):
            rows = _EagerLookup.apply(  # type: ignore[no-untyped-call]
                hook, indices, offsets, weights, self, is_training
            )
        else:
            rows, _ = self.read(indices, offsets, weights, is_training)
        return rows

    def read(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, is_training: bool
    ) -> tuple[Tensor, int | None]:
        """Reads and pools rows at once, past torch; arguments as for :func:`lookup_op`.

        Returns the token of the batch, too, for :meth:`step` along a plan. The engine checks ids,
        offsets and shapes, so that nothing is checked here.
        """
        rows = (offsets.numel() - 1) // self.feature_count if self.is_pooled else indices.numel()
        out = _FLOATS.new_empty(rows, self.output_dim)
        bags = (_on_cpu(indices), _on_cpu(offsets), None if weights is None else _on_cpu(weights))
        token = None
        if is_training:
            store: NativeStore = self.native  # type: ignore[assignment]
            token = store.lookup(self.plan, *bags, out, is_training)
        else:
            self.native.lookup(self.plan, *bags, out)
        if self.observer is not None:
            self.observer.note(self.tables, bags[0], bags[1])
        return out if indices.is_cpu else out.to(indices.device), token

    def step(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        trains_rows: bool,
        wants_weights_grad: bool,
        token: int | None = None,
    ) -> Tensor | None:
        """Applies one optimizer step to the rows of a lookup; arguments as for :func:`update`.

        With the ``token`` of :meth:`read` the engine does not check the ids again.
        Returns the gradient of the weights, where it is wanted.
        """
        device = indices.device
        indices, offsets, grad = _on_cpu(indices), _on_cpu(offsets), _on_cpu(grad)
        collector = self.guard.collector if trains_rows else None
        if collector is not None:
            weights_grad = self.weights_grad(grad, indices, offsets) if wants_weights_grad else None
            weights = None if weights is None else _on_cpu(weights)
            collector.add(self, LookupGradient(grad, indices, offsets, weights))
            return None if weights_grad is None else weights_grad.to(device)
        if not trains_rows or self.guard.skips(grad):
            if not wants_weights_grad:
                return None
            return self.weights_grad(grad, indices, offsets).to(device)
        scale = self.guard.scale()
        if self.frozen:
            weights_grad = self.weights_grad(grad, indices, offsets) if wants_weights_grad else None
            grad = grad if scale == 1.0 else grad * (1.0 / scale)
            weights = None if weights is None else _on_cpu(weights)
            self._step_thawed(LookupGradient(grad, indices, offsets, weights))
            return None if weights_grad is None else weights_grad.to(device)
        weights_grad = _FLOATS.new_empty(indices.numel()) if wants_weights_grad else None
        store: NativeStore = self.native  # type: ignore[assignment]
        self.position = store.update(
            self.plan,
            indices,
            offsets,
            None if weights is None else _on_cpu(weights),
            (grad if scale == 1.0 else grad * (1.0 / scale)).contiguous(),
            weights_grad,
            token,
        )
        self.guard.note_step()
        if weights_grad is None:
            return None
        # The weights' gradient goes on to parameters, whose optimizer undoes the scale itself.
        return (weights_grad if scale == 1.0 else weights_grad * scale).to(device)

    def _step_thawed(self, lookup: LookupGradient) -> None:
        """Steps the rows of the tables that are not frozen."""
        dims = dict(zip(self.tables, self.dims, strict=True))
        thawed = {
            table: CollectedTable(self.guard.tables[table], dim)
            for table, dim in dims.items()
            if table not in self.frozen
        }
        collected = CollectedGradients(self.native, thawed)  # type: ignore[arg-type]
        collected.add(self, lookup)
        collected.step()

    def translate(self, indices: Tensor, offsets: Tensor, is_training: bool) -> Tensor:
        """Finds the rows of ids of open vocabularies; as :func:`translate` says."""
        ids = indices.detach().cpu().contiguous()
        rows = torch.empty_like(ids)
        now = minutes_now() if is_training else None
        native: Any = self.native
        native.translate(self.plan, ids, offsets.detach().cpu(), now, rows)
        return rows.to(indices.device)

    @functools.cached_property
    def flat(self) -> FlatLayout:
        """The same features with a vector per id."""
        return FlatLayout(self.native, self.tables, self.dims)

    def weights_grad(self, grad: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Computes the gradient of the weights ``[E]`` without touching the rows.

        ``grad`` is that of the lookup's output, ``indices`` and ``offsets`` its inputs.
        """
        samples = (offsets.numel() - 1) // self.feature_count
        bounds = bounds_of(offsets, self.feature_count)
        matrix = self.flat.matrix(bounds)
        self.native.lookup(self.flat.plan, indices, self.flat.offsets(bounds), None, matrix)
        parts = []
        column = 0
        for at, (pooling, dim, rows) in enumerate(
            zip(self.poolings, self.dims, self.flat.views(matrix, bounds), strict=True)
        ):
            if self.is_pooled:
                lengths = torch.diff(offsets[at * samples : (at + 1) * samples + 1])
                of_bag = grad[:, column : column + dim]
                if pooling == "mean":
                    of_bag = of_bag / lengths.clamp(min=1)[:, None]
                of_index = of_bag.repeat_interleave(lengths, dim=0)
                column += dim
            else:
                of_index = grad[bounds[at] : bounds[at + 1]]
            parts.append((rows * of_index).sum(dim=1))
        return torch.cat(parts)


_HANDLES = itertools.count(1)
_BINDINGS: weakref.WeakValueDictionary[int, Binding] = weakref.WeakValueDictionary()


def _binding(handle: int) -> Binding:
    binding = _BINDINGS.get(handle)
    if binding is None:
        raise ClosedError(
            "the collection of this lookup no longer exists; keep the module alive while a "
            "compiled graph of it is used",
            {"handle": str(handle)},
        )
    return binding


def new_hook() -> Tensor:
    """Makes the one-element tensor that carries autograd through a lookup."""
    return torch.zeros(1, dtype=torch.float32, requires_grad=True)


def _on_cpu(tensor: Tensor) -> Tensor:
    # A call of torch takes a microsecond even where there is nothing to do.
    return tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()


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
        ctx.has_weights = weights is not None
        ctx.save_for_backward(indices, offsets, *([] if weights is None else [weights]))
        # The graph keeps the collection's store usable until its backward.
        ctx.binding = binding
        out, ctx.token = binding.read(indices, offsets, weights, is_training)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, *rest = ctx.saved_tensors
        weights = rest[0] if ctx.has_weights else None
        trains_rows, wants_weights_grad = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        weights_grad = ctx.binding.step(
            grad, indices, offsets, weights, trains_rows, wants_weights_grad, ctx.token
        )
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
    return _binding(handle).read(indices, offsets, weights, is_training)[0]


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
    return torch.empty((rows, output_dim), dtype=torch.float32, device=indices.device)


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
    binding = _binding(handle)
    weights_grad = binding.step(grad, indices, offsets, weights, trains_rows, wants_weights_grad)
    if weights_grad is None:
        weights_grad = torch.empty(0, device=indices.device)
    return torch.zeros(1, dtype=torch.float32), weights_grad


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
    return (
        torch.empty(1, dtype=torch.float32),
        torch.empty(size, dtype=torch.float32, device=indices.device),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _hook, indices, offsets, weights, handle, *_ = inputs
    ctx.has_weights = weights is not None
    ctx.save_for_backward(indices, offsets, *([weights] if ctx.has_weights else []))
    ctx.handle = handle
    # In eager mode the graph keeps the collection's store usable until its backward.
    ctx.binding = _BINDINGS.get(handle)


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
