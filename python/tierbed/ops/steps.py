"""Steps of backward passes: which gradients step the rows.

Rows are stepped inside backward, where no optimizer of torch sees them. What a training loop does
around its optimizer does not reach them: scaled losses, gradients that are not finite,
accumulation. A :class:`StepGuard` of each collection makes the step right where it was told how,
and one :class:`StepWatch` of each store says so, once, where a loop seems to mean something else.
"""

from __future__ import annotations

import sys
import warnings
import weakref
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


class StepWatch:
    """The steps of a store's tables, seen together."""

    def __init__(self) -> None:
        self._task_of: dict[int, int] = {}
        self._step_of: dict[int, int] = {}
        self._first_step: int | None = None
        self._told: set[str] = set()

    def note(self, tables: dict[int, str]) -> None:
        """Notes a step of ``tables``, names by id, within a backward."""
        self._tell_ranks()
        task = torch._C._current_graph_task_id()
        steps = _STEPS.count
        if self._first_step is None:
            self._first_step = steps
        twice = [table for table in tables if task >= 0 and self._task_of.get(table) == task]
        if twice:
            self._tell(
                "twice",
                f"one backward stepped the tables {[tables[table] for table in twice]} more than "
                "once, an optimizer step per lookup; look up all ids of a table in one call (a "
                f"table may have several features) for one step; {_GUIDE}",
            )
        elif steps > self._first_step:
            again = [table for table in tables if self._step_of.get(table) == steps]
            if again:
                self._tell(
                    "accumulated",
                    f"the tables {[tables[table] for table in again]} were stepped by two backward "
                    "passes and no optimizer.step() between them: gradients are not accumulated "
                    f"for rows, each backward steps them; {_GUIDE}",
                )
        for table in tables:
            self._task_of[table], self._step_of[table] = task, steps

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, stacklevel=2)

    def _tell_ranks(self) -> None:
        if "ranks" in self._told:
            return
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._tell(
                "ranks",
                f"torch.distributed has {dist.get_world_size()} ranks, and this collection trains "
                "the rows of its own store only: nothing keeps the tables of the ranks equal; use "
                "tierbed.dist.ShardedEmbeddingBagCollection",
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
        self._scaler, self._knows_scaling = scaler, True

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


class _OptimizerSteps:
    """The steps of torch's optimizers in this process."""

    def __init__(self) -> None:
        self.count = 0
        # Guards whose rows were stepped since, and that know of no scaling.
        self.unscaled: weakref.WeakSet[StepGuard] = weakref.WeakSet()
        register_optimizer_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.count += 1
        if not self.unscaled:
            return
        guards = list(self.unscaled)
        self.unscaled.clear()
        if _is_scaled():
            tables = sorted({name for guard in guards for name in guard.tables.values()})
            raise InvalidError(
                f"rows of {tables} were stepped by the gradient of a loss that a GradScaler had "
                "scaled; call set_grad_scaler(scaler) on the collection before training (or "
                "set_grad_scaler(None) if its loss is not scaled), and go back to the last "
                "checkpoint",
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
