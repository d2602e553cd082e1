"""Bindings of collections to stores: how a lookup reads rows, and its backward steps them.

Past torch, where nothing has to see it; :mod:`tierbed.ops.operators` makes this a part of autograd
graphs and of compiled ones.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from concurrent import futures
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tierbed._native import FeaturePlan, NativeStore
from tierbed._util.minutes import minutes_now
from tierbed.ops.collected import CollectedGradients, CollectedTable, LookupGradient
from tierbed.ops.flat import FlatLayout, bounds_of
from tierbed.ops.links import Link, as_device, link_of
from tierbed.ops.steps import StepGuard

if TYPE_CHECKING:
    from tierbed.ops.windows.batches import WindowBatches
    from tierbed.ops.windows.device import WindowsOnDevice
    from tierbed.report.observer import Observer

__all__ = ["Bags", "Binding", "PoolsOnDevice", "Readable", "find_binding"]

# What makes outputs: one call of it is cheaper than naming the dtype to torch.empty.
_FLOATS = torch.empty(0, dtype=torch.float32, device="cpu")
# What requires no gradient.
_STILL_HOOK = torch.zeros(1, dtype=torch.float32, device="cpu")


class Bags(NamedTuple):
    """The bags of a lookup, in the memory of the host."""

    indices: Tensor
    """``[E]`` i64, feature by feature."""
    offsets: Tensor
    """``[F*B+1]`` i64."""
    weights: Tensor | None
    """``[E]`` f32."""

    @classmethod
    def of(cls, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Bags:
        """Takes tensors of any device."""
        if weights is None and indices.is_cpu and offsets.is_cpu:
            return cls(indices, offsets, None)
        return cls(
            _on_cpu(indices), _on_cpu(offsets), None if weights is None else _on_cpu(weights)
        )

    def copied(self) -> Bags:
        """Returns bags that nobody else writes."""
        weights = None if self.weights is None else self.weights.clone()
        return Bags(self.indices.clone(), self.offsets.clone(), weights)


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


class PoolsOnDevice(Protocol):
    """Rows on a device, and lookups of them."""

    def pool(self, binding: Binding, bags: Bags) -> Tensor | None:
        """Looks bags up on the device; None when the host must."""


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
        self.device: torch.device | None = None
        """Where outputs go; None: where ids are."""
        self.device_rows: PoolsOnDevice | None = None
        """Rows of a snapshot that are on the device."""
        self.windows: WindowsOnDevice | None = None
        """Windows of the forward order that are on a device."""
        self._link: Link | None = None
        self._later: futures.Future[None] | None = None
        self._position: tuple[int, int] | None = None
        self.handle = next(_HANDLES)
        _BINDINGS[self.handle] = self

    def set_device(self, device: torch.device | str | None) -> None:
        """Tells where outputs go; None: where ids are."""
        self.device = None if device is None else as_device(device)
        self._link = None if self.device is None else link_of(self.device)

    def output_device(self, ids_device: torch.device) -> torch.device:
        """Returns where the output of a lookup goes whose ids are on ``ids_device``."""
        return ids_device if self.device is None else self.device

    def _link_at(self, device: torch.device) -> Link | None:
        """Returns what copies between the host and outputs on ``device``."""
        return self._link or (None if device.type == "cpu" else link_of(device))

    def read(
        self, bags: Bags, ids_device: torch.device, is_training: bool
    ) -> tuple[Tensor, int | None]:
        """Reads and pools rows at once, past torch.

        The engine checks ids, offsets and shapes, so that nothing is checked here.

        Args:
            bags: What is looked up.
            ids_device: Where the ids came from.
            is_training: As for :func:`tierbed.ops.operators.lookup_op`.

        Returns:
            The output, and along a plan the token of the batch for :meth:`step`.
        """
        indices, offsets, weights = bags
        target = self.output_device(ids_device)
        if self.device_rows is not None:
            pooled = self.device_rows.pool(self, bags)
            if pooled is not None:
                if self.observer is not None:
                    self.observer.note(self.tables, indices, offsets)
                return pooled.to(target), None
        if self._window_batches is not None:
            found = self._window_batches.look_up(bags)
            if found is not None:
                if self.observer is not None:
                    self.observer.note(self.tables, indices, offsets)
                return found[0].to(target), found[1]
        rows = (offsets.numel() - 1) // self.feature_count if self.is_pooled else indices.numel()
        link = self._link_at(target)
        if link is None:
            # Operators of torch let another thread in, which then holds Python against this one.
            out = torch.from_numpy(np.empty((rows, self.output_dim), np.float32))
        else:
            out = link.host_floats(rows, self.output_dim)
        token = None
        if is_training:
            store: NativeStore = self.native  # type: ignore[assignment]
            token = store.lookup(self.plan, indices, offsets, weights, out, is_training)
        else:
            self.native.lookup(self.plan, indices, offsets, weights, out)
        if self.observer is not None:
            self.observer.note(self.tables, indices, offsets)
        if link is not None:
            return link.to_device(out), token
        return out if target.type == "cpu" else out.to(target), token

    def step(
        self,
        grad: Tensor,
        bags: Bags,
        trains_rows: bool,
        wants_weights_grad: bool,
        token: int | None = None,
    ) -> Tensor | None:
        """Applies one optimizer step to the rows of a lookup.

        The step of a gradient on a GPU may be made in a worker, after this returns. What is asked
        of the store next waits for it, and raises its error.

        Args:
            grad: Gradient of the lookup's output, of its shape.
            bags: As read by the lookup.
            trains_rows: Whether to step the rows; False only computes the gradient of weights.
            wants_weights_grad: Whether to compute that.
            token: From :meth:`read`: the engine does not check the ids again.

        Returns:
            The gradient of the weights ``[E]`` on the host, where it is wanted.
        """
        collector = self.guard.collector if trains_rows else None
        if trains_rows and self._window_batches is not None:
            stepped = self._step_in_window(grad, bags, wants_weights_grad, token)
            if stepped is not None:
                return stepped[1]
        link = self._link_at(grad.device)
        is_plain = trains_rows and collector is None and not self.frozen
        # Coded rows refuse within the backward.
        is_plain = is_plain and isinstance(self.native, NativeStore)
        if link is not None and is_plain and not wants_weights_grad:
            self._step_later(link, grad, bags, token)
            return None
        grad = link.to_host(grad).wait() if link is not None else _on_cpu(grad)
        if collector is not None:
            weights_grad = self._wanted(grad, bags) if wants_weights_grad else None
            collector.add(self, LookupGradient(grad, bags.indices, bags.offsets, bags.weights))
            return weights_grad
        if not trains_rows or self.guard.skips(grad):
            return self._wanted(grad, bags) if wants_weights_grad else None
        scale = self.guard.scale()
        if self.frozen:
            weights_grad = self._wanted(grad, bags) if wants_weights_grad else None
            grad = _unscaled(grad, scale)
            self._step_thawed(LookupGradient(grad, bags.indices, bags.offsets, bags.weights))
            return weights_grad
        weights_grad = _FLOATS.new_empty(bags.indices.numel()) if wants_weights_grad else None
        self._update(_unscaled(grad, scale), bags, weights_grad, token)
        self.guard.note_step()
        if weights_grad is None:
            return None
        # The weights' gradient goes on to parameters, whose optimizer undoes the scale itself.
        return weights_grad if scale == 1.0 else weights_grad * scale

    @property
    def _window_batches(self) -> WindowBatches | None:
        """What looks up and steps on a device; None where the host does."""
        if self.windows is None or self.frozen or self.guard.collector is not None:
            return None
        return self._batches_of_windows

    @functools.cached_property
    def _batches_of_windows(self) -> WindowBatches | None:
        # Triton is optional.
        from tierbed.ops.windows.batches import batches_of

        return batches_of(self)

    def _step_in_window(
        self, grad: Tensor, bags: Bags, wants_weights_grad: bool, token: int | None
    ) -> tuple[Any, Tensor | None] | None:
        """Steps rows on the device; None when they are on the host."""
        assert self._window_batches is not None, "a step in windows that are nowhere"
        scale = self.guard.scale()
        stepped = self._window_batches.step(
            _unscaled(grad, scale),
            bags,
            token,
            skips_nonfinite=self.guard.has_scaler or self.guard.skips_nonfinite,
            wants_weights_grad=wants_weights_grad,
        )
        if stepped is None:
            return None
        self._later, self._position = None, stepped[0]
        self.guard.note_step()
        weights_grad = stepped[1]
        if weights_grad is None or scale == 1.0:
            return stepped
        # The weights' gradient goes on to parameters, whose optimizer undoes the scale itself.
        return stepped[0], weights_grad * scale

    def _step_later(self, link: Link, grad: Tensor, bags: Bags, token: int | None) -> None:
        """Has the step made as soon as the gradient has come to the host."""
        arriving = link.to_host(grad)
        scale = self.guard.scale()
        # The program may write its tensors as soon as the backward has returned.
        kept = bags.copied()
        self.guard.note_step()

        def update(ticket: int) -> None:
            arrived = arriving.wait()
            if not self.guard.skips(arrived):
                self._update(_unscaled(arrived, scale), kept, None, token, ticket)

        store: NativeStore = self.native  # type: ignore[assignment]
        self._later = link.update_later(store, update)

    def _update(
        self,
        grad: Tensor,
        bags: Bags,
        weights_grad: Tensor | None,
        token: int | None,
        ticket: int | None = None,
    ) -> None:
        store: NativeStore = self.native  # type: ignore[assignment]
        self._position = store.update(
            self.plan,
            bags.indices,
            bags.offsets,
            bags.weights,
            grad.contiguous(),
            weights_grad,
            token,
            *(() if ticket is None else (ticket,)),
        )

    def _wanted(self, grad: Tensor, bags: Bags) -> Tensor:
        return self.weights_grad(grad, bags.indices, bags.offsets)

    def _settle(self) -> None:
        """Waits for the step that a worker makes; its error is the next call's."""
        later, self._later = self._later, None
        if later is not None:
            futures.wait([later])

    @property
    def position(self) -> tuple[int, int] | None:
        """Epochs and batches of the epoch done behind the last step; None without a plan."""
        self._settle()
        return self._position

    @position.setter
    def position(self, position: tuple[int, int] | None) -> None:
        self._settle()
        self._position = position

    @property
    def skipped_steps(self) -> int:
        """Steps left out because their gradient was not finite."""
        self._settle()
        left_out = 0 if self.windows is None else self.windows.left_out()
        return self.guard.skipped_steps + left_out

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
        """Finds the rows of ids of open vocabularies, as the operator of that name says."""
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


def find_binding(handle: int) -> Binding | None:
    """Returns the binding of ``handle``; None when its collection is gone."""
    return _BINDINGS.get(handle)


def _on_cpu(tensor: Tensor) -> Tensor:
    # A call of torch takes a microsecond even where there is nothing to do.
    return tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()


def _unscaled(grad: Tensor, scale: float) -> Tensor:
    return grad if scale == 1.0 else grad * (1.0 / scale)
