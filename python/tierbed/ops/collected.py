"""Gradients of rows, collected over backward passes until an optimizer steps.

Of each table the rows of the step and the sum of their gradients are kept, ``[R]`` and ``[R, D]``,
so memory grows with the distinct rows of a step, not with its batches. The sum is the ``grad`` of
a *stand-in*: a parameter of the shape ``[R, D]`` without memory, which changes its length with
every step. What torch does to gradients of parameters it so does to those of rows: clipping,
unscaling, setting to None.

Gradients are added in the order of lookups, features and ids. One lookup has the bits of a step
within backward; several have those of one lookup of all their ids.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tierbed._native import NativeStore
from tierbed.errors import InvalidError
from tierbed.ops.flat import FlatLayout, bounds_of

if TYPE_CHECKING:
    from tierbed.ops.binding import Binding

__all__ = ["CollectedGradients", "CollectedTable", "LookupGradient"]

_NO_GRADIENT = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class LookupGradient:
    """What a backward brings to a lookup.

    Args:
        grad: Gradient of the output: ``[B, D]``, or ``[E, D]`` when not pooled.
        indices: ``[E]`` i64, as given to the lookup.
        offsets: ``[F*B+1]`` i64, as given to the lookup.
        weights: ``[E]`` f32, as given to the lookup, or None.
    """

    grad: Tensor
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None


class CollectedTable:
    """The collected gradient of one table.

    Args:
        name: Name of the table.
        dim: Elements of a row.
    """

    def __init__(self, name: str, dim: int) -> None:
        self.name = name
        self.dim = dim
        self.rows = torch.empty(0, dtype=torch.int64, device="cpu")
        """Rows ``[R]`` with a gradient, ascending."""
        self.parameter = nn.Parameter(torch.empty(0, dim, device="cpu"))
        """The stand-in, whose ``grad`` ``[R, D]`` is theirs."""
        self.is_touched = False
        """Whether a lookup's backward came, of no ids, too."""

    def add(self, rows: Tensor, which: Tensor, source: Tensor) -> None:
        """Adds ``source[which]`` ``[E, D]`` to the gradients of ``rows`` ``[E]``."""
        self.is_touched = True
        old = self.parameter.grad
        if old is not None:
            rows = torch.cat([self.rows, rows])
            which = torch.cat([torch.arange(len(old), device="cpu"), which + len(old)])
            source = torch.cat([old, source])
        if not len(rows):
            return
        self.rows, order, starts = _grouped(rows)
        # A bag per row: its gradients are added in their order.
        sums = nn.functional.embedding_bag(which[order], source.contiguous(), starts, mode="sum")
        self.parameter.grad = None
        self.parameter.data = torch.zeros(1, 1, device="cpu").expand_as(sums)
        self.parameter.grad = sums

    def gradient(self) -> Tensor:
        """Returns the gradient ``[R, D]``; without rows where someone set it to None."""
        grad = self.parameter.grad
        if grad is None:
            self.rows = self.rows[:0]
            return torch.empty(0, self.dim, device="cpu")
        return grad.detach().to(torch.float32).contiguous()

    def clear(self) -> None:
        """Forgets the gradient."""
        self.is_touched = False
        self.parameter.grad = None
        self.parameter.data = torch.empty(0, self.dim, device="cpu")
        self.rows = self.rows[:0]


class CollectedGradients:
    """The collected gradients of a store's tables, and the step that they make.

    Args:
        native: The engine's store.
        tables: By table id.
    """

    def __init__(self, native: NativeStore, tables: dict[int, CollectedTable]) -> None:
        self.tables = tables
        self._native = native
        self._bindings: list[Binding] = []
        # Of each collection its lookup; None where there were several.
        self._lookups: dict[Binding, LookupGradient | None] = {}

    @property
    def is_pending(self) -> bool:
        """Whether a backward came since the last step."""
        return bool(self._bindings)

    def add(self, binding: Binding, lookup: LookupGradient) -> None:
        """Adds what a backward brought to a lookup of ``binding``."""
        named = binding.guard.tables.items()
        known = self.tables.keys() | binding.frozen
        unknown = [name for table, name in named if table not in known]
        if unknown:
            raise InvalidError(
                f"a backward reached the tables {unknown}, which the RowOptimizer of their store "
                "does not have; make it after all collections, as RowOptimizer(store)",
                {"tables": ",".join(unknown)},
            )
        # A plan knows the batch by its ids; the gradient itself goes to the tables.
        ids_only = dataclasses.replace(lookup, grad=_NO_GRADIENT, weights=None)
        self._lookups[binding] = None if binding in self._lookups else ids_only
        self._bindings.append(binding)
        parts = _parts(binding, lookup)
        for table in dict.fromkeys(binding.tables):
            if table in binding.frozen:
                continue
            rows, which, source = (list(part) for part in zip(*parts[table], strict=True))
            shift = 0
            for at, vectors in enumerate(source):
                which[at] = which[at] + shift
                shift += len(vectors)
            self.tables[table].add(torch.cat(rows), torch.cat(which), torch.cat(source))

    def are_finite(self) -> bool:
        """Tells whether no gradient holds nan or inf."""
        return all(bool(torch.isfinite(one.gradient()).all()) for one in self.tables.values())

    def step(self) -> None:
        """Makes one optimizer step of all rows that have a gradient, and forgets it.

        Raises:
            InvalidError: A gradient with nan or inf, several lookups in an order that must be
                followed, or more rows than fit the memory budget; no row is changed then.
        """
        if not any(table.is_touched for table in self.tables.values()):
            self.clear()
            return
        if not self.are_finite():
            if self._skips():
                return
            raise InvalidError(
                "gradient of rows holds nan or inf, no row was changed; find where the loss "
                "overflows, or skip such steps with set_grad_scaler or on_nonfinite='skip'"
            )
        position = self._native.position()
        planned = [] if position is None else self._planned()
        for binding, only in planned:
            position = self._step_planned(binding, only)
        if not planned:
            position = self._step_rows()
        for one in self._bindings:
            one.position = position
            one.guard.note_collected()
        self.clear()

    def clear(self) -> None:
        """Forgets all gradients."""
        self._bindings.clear()
        self._lookups.clear()
        for table in self.tables.values():
            table.clear()

    def _planned(self) -> list[tuple[Binding, LookupGradient]]:
        """Returns the lookups that a step along a plan may be of: one of each collection."""
        once = [(one, only) for one, only in self._lookups.items() if only is not None]
        owned = [table for one, _ in once for table in set(one.tables)]
        is_right = len(once) == len(self._lookups) and len(owned) == len(set(owned))
        return once if is_right and not any(one.frozen for one, _ in once) else []

    def _skips(self) -> bool:
        """Leaves the step out, where every collection wants that, and counts it there."""
        guards = {id(one.guard): one.guard for one in self._bindings}.values()
        if not all(guard.skips_nonfinite for guard in guards):
            return False
        for guard in guards:
            guard.skipped_steps += 1
        self.clear()
        return True

    def _step_planned(self, binding: Binding, only: LookupGradient) -> tuple[int, int] | None:
        # Along a plan the engine takes the batch as it was planned: a row's gradient stands at its
        # first id, the others have none.
        bounds = bounds_of(only.offsets, binding.feature_count)
        flat = binding.flat
        matrix = flat.matrix(bounds)
        views = flat.views(matrix, bounds)
        for table in dict.fromkeys(binding.tables):
            features = [at for at, of in enumerate(binding.tables) if of == table]
            ids = [only.indices[bounds[at] : bounds[at + 1]] for at in features]
            grad = self.tables[table].gradient()
            if not len(grad):
                continue
            _, order, starts = _grouped(torch.cat(ids))
            first = order[starts]
            begin = 0
            for at, of_feature in zip(features, ids, strict=True):
                here = (first >= begin) & (first < begin + len(of_feature))
                views[at][first[here] - begin] = grad[here]
                begin += len(of_feature)
        # Without the token of the lookup, which is one of the batch's own bags.
        return self._native.update(
            flat.plan, only.indices, flat.offsets(bounds), None, matrix, None
        )

    def _step_rows(self) -> tuple[int, int] | None:
        by_dim: dict[int, list[int]] = {}
        for at, table in self.tables.items():
            if table.is_touched:
                by_dim.setdefault(table.dim, []).append(at)
        position = None
        for dim, ids in by_dim.items():
            grads = [self.tables[at].gradient() for at in ids]
            rows = [self.tables[at].rows for at in ids]
            counts = torch.tensor([0, *(len(part) for part in rows)], device="cpu")
            position = self._native.update(
                FlatLayout(self._native, ids, [dim] * len(ids)).plan,
                torch.cat(rows),
                counts.cumsum(0),
                None,
                torch.cat(grads),
                None,
            )
        return position


_Part = tuple[Tensor, Tensor, Tensor]


def _grouped(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns distinct rows, ascending, an order that groups ``rows``, and each group's start.

    Uses of a row keep their order.
    """
    ordered, order = rows.sort(stable=True)
    is_start = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    is_start[1:] = ordered[1:] != ordered[:-1]
    starts = is_start.nonzero().view(-1)
    return ordered[starts], order, starts


def _parts(binding: Binding, lookup: LookupGradient) -> dict[int, list[_Part]]:
    """Returns ids ``[E_f]``, and ``which`` of the vectors of a ``source`` is the gradient of each.

    By table, feature after feature. The products are those of the engine, to the last bit.
    """
    grad, offsets = lookup.grad, lookup.offsets
    samples = (offsets.numel() - 1) // binding.feature_count
    bounds = bounds_of(offsets, binding.feature_count)
    parts: dict[int, list[Any]] = {}
    column = 0
    for at, (table, pooling, dim) in enumerate(
        zip(binding.tables, binding.poolings, binding.dims, strict=True)
    ):
        ids = lookup.indices[bounds[at] : bounds[at + 1]]
        which = torch.arange(len(ids), device="cpu")
        if not binding.is_pooled:
            source = grad[bounds[at] : bounds[at + 1]]
        else:
            source = grad[:, column : column + dim]
            lengths = torch.diff(offsets[at * samples : (at + 1) * samples + 1])
            bag = torch.arange(samples, device="cpu").repeat_interleave(lengths)
            if lookup.weights is not None:
                weights = lookup.weights[bounds[at] : bounds[at + 1]]
                source = source[bag] * weights[:, None]
                if pooling == "mean":
                    source = source / lengths[bag][:, None]
            else:
                which = bag
                if pooling == "mean":
                    source = source / lengths.clamp(min=1)[:, None]
            column += dim
        parts.setdefault(table, []).append((ids, which, source))
    return parts
