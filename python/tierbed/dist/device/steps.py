"""What lookups and steps on devices have in common, however vectors travel."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.dist.device.batch import check_batch
from tierbed.dist.device.group_rows import WORDS_PER_STORE, GroupRows
from tierbed.dist.device.plan import DevicePlan, Group
from tierbed.dist.device.row_wise import AskedRows
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.device.weight_swap import WeightSwap
from tierbed.dist.exchange import ExchangeOptions, Serving
from tierbed.dist.joined import JoinedBags, RankBatch
from tierbed.dist.kernels.put_grads import put_grads
from tierbed.errors import ClosedError, InvalidError, UnsupportedError

__all__ = ["DeviceSteps", "KeptStep"]

# Forwards that may wait for their backward, one for each buffer.
KEPT_MAX = 2


@dataclass(frozen=True)
class KeptStep:
    """What a forward leaves for its backward.

    Args:
        number: Its own.
        first_samples: Where ranks' samples begin.
        bags: Of each group, those of them that this rank steps.
        places: Of each group, where gradients of weights go; None when nobody wants them.
        weights: What they travel in, where they travel by messages.
    """

    number: int
    first_samples: list[int]
    bags: list[JoinedBags]
    places: list[Tensor] | None
    weights: WeightSwap | None = None

    def keep_held(self, asked: AskedRows) -> None:
        """Lets the last group have only the ids that this rank holds."""
        self.bags[-1] = asked.bags
        if self.places is not None:
            self.places[-1] = self.places[-1][asked.is_held]


class DeviceSteps(abc.ABC):
    """One rank's part of an exchange; all ranks make the same calls in the same order.

    Args:
        store: Where this rank's rows are.
        plan: The groups of all ranks.
        options: How large batches may be.
        device: Where the kernels of this rank run.
    """

    def __init__(
        self, store: DeviceStore, plan: DevicePlan, options: ExchangeOptions, device: torch.device
    ) -> None:
        self._store = store
        self._plan = plan
        self._options = options
        self._device = device
        runs, holders = _runs_of(plan)
        self._runs = torch.tensor(runs, device=device)
        self._run_holders = torch.tensor(holders, device=device)
        columns = [plan.output_dim, *itertools.chain.from_iterable(runs)]
        self._has_aligned_runs = all(column % WORDS_PER_STORE == 0 for column in columns)
        self._dim_max = max(group.dim for groups in plan.groups for group in groups)
        self._launches: list[GroupRows[Group]] = []
        self._kept: dict[int, KeptStep] = {}
        self._step = 0
        self._failure: str | None = None

    @property
    def is_trainable(self) -> bool:
        """As :attr:`tierbed.dist.exchange.Exchange.is_trainable`."""
        return True

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """As :meth:`tierbed.dist.exchange.Exchange.forward`."""
        if wants[1] and self._plan.is_divided:
            raise UnsupportedError(
                "a table divided by columns brings no gradients of weights; detach the weights, or "
                "plan it TableWise"
            )
        self._check()
        with self._on_device():
            bags = (indices, offsets, weights)
            own = check_batch(bags, self._plan.row_counts, self._plan.names, self._options)
            self._begin()
            with self._breaking():
                self._step += 1
                kept, out = self._forward(own, wants[1])
        if wants[0]:
            last = dict(list(self._kept.items())[: KEPT_MAX - 1])
            self._kept = {kept.number: kept, **last}
        return kept.number, out

    def forward_parts(self, *_: object) -> tuple[int, list[Tensor], Serving]:
        """Refuses: rows on a device do not arrive one after the other."""
        raise UnsupportedError("rows on devices arrive together; call the collection itself")

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """As :meth:`tierbed.dist.exchange.Exchange.backward`."""
        self._check()
        if step not in self._kept:
            raise InvalidError(
                f"forward {step} is not waiting for its backward; run backward once, before the "
                "next forward but one",
                {"step": str(step)},
            )
        with self._on_device(), self._breaking():
            self._backward(self._kept.pop(step), grad.to(self._device), weights_grad)

    @abc.abstractmethod
    def sent_bytes(self) -> dict[str, int]:
        """As :meth:`tierbed.dist.exchange.Exchange.sent_bytes`."""

    @abc.abstractmethod
    def close(self) -> None:
        """As :meth:`tierbed.dist.exchange.Exchange.close`."""

    @abc.abstractmethod
    def _begin(self) -> None:
        """Refuses a lookup that cannot begin, before anything is sent."""

    @abc.abstractmethod
    def _forward(self, own: RankBatch, wants_weights: bool) -> tuple[KeptStep, Tensor]:
        """Looks up a batch; returns what a backward needs, and the output ``[B, D]``."""

    @abc.abstractmethod
    def _backward(self, step: KeptStep, grad: Tensor, weights_grad: Tensor | None) -> None:
        """Steps the rows of ``step``; fills ``weights_grad`` ``[E]``."""

    def _fail(self) -> None:  # noqa: B027  (nothing to do where signals tell who is silent)
        """Lets other ranks know that this one cannot go on."""

    def _step_rows(self, step: KeptStep, grads: Tensor, width: int) -> None:
        """Steps the rows of all groups; ``grads`` is this rank's matrix, ``width`` columns."""
        for at, (launch, bags) in enumerate(zip(self._launches, step.bags, strict=True)):
            places = None if step.places is None else step.places[at]
            launch.step(bags, grads, width, places)
            self._store.note_step(launch.arena)

    def _compile_puts(self, matrices: Tensor) -> None:
        """Compiles what puts gradients, within :func:`tierbed.dist.kernels.launch.compiling`."""
        grad = torch.zeros((1, self._plan.output_dim), device=self._device)
        # A gradient that autograd made may lie anywhere.
        for is_aligned in {self._are_runs_aligned(grad), False}:
            put_grads(grad, self._runs, matrices, 0, self._dim_max, is_aligned=is_aligned)

    def _are_runs_aligned(self, grad: Tensor) -> bool:
        """Returns whether gradients can be put in 128 bits."""
        return self._has_aligned_runs and grad.data_ptr() % (4 * WORDS_PER_STORE) == 0

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        device = self._device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def _check(self) -> None:
        if self._failure is not None:
            raise ClosedError(f"an earlier step failed: {self._failure}; start all ranks again")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Remembers that a step failed: ranks no longer agree on what comes next."""
        try:
            yield
        except BaseException as error:
            self._failure = str(error)
            self._fail()
            raise


def _runs_of(plan: DevicePlan) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Returns runs as ``put_grads`` takes them, and who holds each."""
    runs, holders = [], []
    for rank, groups in enumerate(plan.groups):
        for group in groups:
            for source, target in zip(group.output_columns, group.grad_columns, strict=True):
                runs.append((source, target, group.dim, plan.widths[rank]))
                holders.append(rank)
    return runs, holders
