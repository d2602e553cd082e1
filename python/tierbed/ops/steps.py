"""Steps of backward passes: which gradients step the rows.

Rows are stepped inside backward, where no optimizer of torch sees them, unless a RowOptimizer
collects their gradients. What a training loop does
around its optimizer does not reach them: scaled losses, gradients that are not finite,
accumulation. A :class:`StepGuard` of each collection makes the step right where it was told how,
and one :class:`StepWatch` of each store says so, once, where a loop seems to mean something else.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from tierbed.config.words import OnNonfinite, check_word
from tierbed.errors import InvalidError

__all__ = ["StepGuard", "StepWatch"]

_GUIDE = "see the guide 'In your training loop'"


def _no_collector() -> None:
    """Returns that nobody collects."""


class StepWatch:
    """The steps of a store's tables, seen together."""

    def __init__(self) -> None:
        self._task_of: dict[int, int] = {}
        self._step_of: dict[int, int] = {}
        self._first_step: int | None = None
        self._told: set[str] = set()
        self.collector: Callable[[], Any] = _no_collector
        """Returns the :class:`CollectedGradients` that gradients go to; None: rows are stepped."""

    def note(self, tables: dict[int, str]) -> None:
        """Notes a step of ``tables``, names by id, within a backward."""
        self.tell_ranks()
        task = torch._C._current_graph_task_id()
        steps = _STEPS.count
        if self._first_step is None:
            self._first_step = steps
        twice = [table for table in tables if task >= 0 and self._task_of.get(table) == task]
        if twice:
            self._tell(
                "twice",
                f"one backward stepped the tables {[tables[table] for table in twice]} more than "
                "once, an optimizer step per lookup; step them by a tierbed.RowOptimizer, or look "
                "up all ids of a table in one call (a table may have several features), for one "
                f"step; {_GUIDE}",
            )
        elif steps > self._first_step:
            again = [table for table in tables if self._step_of.get(table) == steps]
            if again:
                self._tell(
                    "accumulated",
                    f"the tables {[tables[table] for table in again]} were stepped by two backward "
                    "passes and no optimizer.step() between them: gradients are not accumulated "
                    "for rows, each backward steps them; step them by a tierbed.RowOptimizer to "
                    f"accumulate; {_GUIDE}",
                )
        for table in tables:
            self._task_of[table], self._step_of[table] = task, steps

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, stacklevel=2)

    def tell_copied(self) -> None:
        """Tells once what a copy of a collection is."""
        self._tell(
            "copied",
            "a deep copy shares the store of its original, whose rows are not copied and go on "
            "training; a copied collection steps none, unless its requires_grad_(True) is called; "
            f"{_GUIDE}",
        )

    def tell_ranks(self) -> None:
        """Tells once that ranks of torch share no rows, where there are several."""
        if "ranks" in self._told:
            return
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._tell(
                "ranks",
                f"torch.distributed has {dist.get_world_size()} ranks, and this collection trains "
                "the rows of its own store only: nothing keeps the tables of the ranks equal; use "
                "tierbed.dist.ShardedEmbeddingBagCollection or ShardedEmbeddingCollection",
            )


class StepGuard:
    """What a collection does before its rows are stepped.

    Args:
        tables: Names of its tables, by id.
        watch: That of the store; None where rows are not trained.
        on_nonfinite: ``"error"`` or ``"skip"``.
    """

    def __init__(
        self, tables: dict[int, str], watch: StepWatch | None, on_nonfinite: OnNonfinite = "error"
    ) -> None:
        check_word("on_nonfinite", on_nonfinite, OnNonfinite)
        self.tables = tables
        self.skipped_steps = 0
        self._watch = watch
        self._on_nonfinite = on_nonfinite
        self._scaler: Any = None
        self._knows_scaling = False
        self._noted_at = -1

    def set_scaler(self, scaler: Any) -> None:
        """Tells by which scaler losses are scaled; None: they are not."""
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise InvalidError(
                f"expected a torch.amp.GradScaler or None, not {type(scaler).__name__}"
            )
        if scaler is not None and self.collector is not None:
            raise scales_twice()
        self._scaler, self._knows_scaling = scaler, True

    @property
    def has_scaler(self) -> bool:
        """Whether gradients are divided by the scale of a scaler."""
        return self._scaler is not None

    @property
    def collector(self) -> Any:
        """What collects gradients until an optimizer steps, or None: a backward steps the rows."""
        return None if self._watch is None else self._watch.collector()

    def scale(self) -> float:
        """Returns what the gradients are to be divided by."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def skips(self, grad: Tensor) -> bool:
        """Whether the step of ``grad`` is left out, which is counted and told."""
        if self._scaler is None and self._on_nonfinite == "error":
            return False  # the engine refuses what is not finite
        if bool(torch.isfinite(grad).all()):
            return False
        self.skipped_steps += 1
        return True

    def note_step(self) -> None:
        """Notes that the rows are stepped now."""
        if self._watch is not None:
            self._watch.note(self.tables)
            if not self._knows_scaling and self._noted_at != _STEPS.count:
                self._noted_at = _STEPS.count
                _STEPS.unscaled.add(self)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with nan or inf is left out."""
        return self._on_nonfinite == "skip"

    def note_collected(self) -> None:
        """Notes that the rows are stepped now, by what was collected."""
        if self._watch is None:
            return
        self._watch.tell_ranks()
        if not self._knows_scaling and not _is_scaled():
            _STEPS.unscaled.add(self)


def scales_twice() -> InvalidError:
    """Returns why a collection with a RowOptimizer takes no scaler."""
    return InvalidError(
        "the gradients of rows that a RowOptimizer steps are unscaled by the scaler that steps it; "
        "call set_grad_scaler(None), and scaler.step(optimizer) with the RowOptimizer"
    )


class _OptimizerSteps:
    """The steps of torch's optimizers in this process."""

    def __init__(self) -> None:
        self.count = 0
        # Guards whose rows were stepped since, and that know of no scaling.
        self.unscaled: weakref.WeakSet[StepGuard] = weakref.WeakSet()
        register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.count += 1
        # The step of the rows itself tells nothing about the scale of the loss.
        if not self.unscaled or getattr(optimizer, "steps_rows_only", False):
            return
        guards = list(self.unscaled)
        self.unscaled.clear()
        if _is_scaled():
            tables = sorted({name for guard in guards for name in guard.tables.values()})
            raise InvalidError(
                f"rows of {tables} were stepped by the gradient of a loss that a GradScaler had "
                "scaled; call set_grad_scaler(scaler) on the collection before training (or "
                "set_grad_scaler(None) if its loss is not scaled), or scaler.step with its "
                "RowOptimizer, and go back to the last checkpoint",
                {"tables": ",".join(tables)},
            )


def _is_scaled() -> bool:
    """Whether the step that runs now was called by a scaler that scales."""
    wanted = GradScaler.step.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is wanted:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


_STEPS = _OptimizerSteps()
