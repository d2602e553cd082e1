"""Lookups and steps of rows on devices, by kernels.

A step of all ranks: publish ids, signal; pool for everybody's samples straight into everybody's
outputs, signal. Its backward: put the gradients into the holders' matrices, signal; each holder
sums per row in the order of samples across ranks and steps its rows. Buffers are taken in turn: a
rank writes the outputs of step ``i + 2`` only after the signal of ids of that step, which their
reader gives when it has done with step ``i``.

Source: PGAS §III. Differs: ids travel within the step; gradients are put and not added; the host
waits for each signal, so that a rank that is silent has a name, and no kernel waits for long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer
from tierbed.dist.device.batch import PublishedBatches, check_batch
from tierbed.dist.device.group_rows import WORDS_PER_STORE, GroupRows
from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.pad import Channel, SignalPad
from tierbed.dist.device.plan import DevicePlan, Group
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.exchange import ExchangeOptions, Serving
from tierbed.dist.joined import JoinedBags, RankBatch, join_batches
from tierbed.dist.kernels.launch import compiling
from tierbed.dist.kernels.put_grads import put_grads
from tierbed.dist.lending import Lender
from tierbed.errors import ClosedError, InvalidError, UnsupportedError

__all__ = ["DeviceExchange"]

# Forwards that may wait for their backward, one for each buffer.
KEPT_MAX = 2


class DeviceExchange:
    """One rank's part; all ranks make the same calls in the same order.

    Args:
        store: Where this rank's rows go; their tables are added.
        plan: The groups of all ranks.
        heap: Memory that the devices of all ranks write; closed with this.
        optimizer: What steps the rows.
        options: What memory is taken for, at once.
        is_weighted: Whether batches have weights.
    """

    def __init__(
        self,
        store: DeviceStore,
        plan: DevicePlan,
        heap: DeviceHeap,
        optimizer: Optimizer,
        options: ExchangeOptions,
        *,
        is_weighted: bool,
    ) -> None:
        self._store = store
        self._plan = plan
        self._heap = heap
        self._options = options
        self._rank = heap.rank
        with self._on_device():
            own = plan.groups[heap.rank]
            self._launches = [
                GroupRows(group, store.add_tables(group.tables, optimizer), plan.output_dim)
                for group in own
            ]
            self._batches = PublishedBatches(heap, len(plan.row_counts), options, is_weighted)
            shape = (options.samples_max, plan.output_dim)
            self._outputs = heap.alloc(shape, torch.float32)
            # Matrices of all ranks are one size, that of the widest.
            words = heap.count * options.samples_max * max(plan.widths)
            self._grads = heap.alloc((words,), torch.float32)
            self._weight_grads = (
                heap.alloc((options.indices_max,), torch.float32) if is_weighted else None
            )
            self._pad = SignalPad(heap, options.timeout_s)
            runs, holders = _runs_of(plan)
            self._runs = torch.tensor(runs, device=heap.device)
            self._run_holders = torch.tensor(holders, device=heap.device)
            columns = [plan.output_dim, *itertools.chain.from_iterable(runs)]
            self._is_aligned = all(column % WORDS_PER_STORE == 0 for column in columns)
        self._dim_max = max(group.dim for groups in plan.groups for group in groups)
        self._lender = Lender(plan.output_dim, torch.float32, self._outputs)
        self._kept: dict[int, _Step] = {}
        self._step = 0
        self._grads_step = 0
        self._failure: str | None = None
        self._compile(is_weighted)

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
            self._lender.begin()
            with self._breaking():
                return self._forward(own, wants)

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
            self._backward(self._kept.pop(step), grad.to(self._heap.device), weights_grad)

    def sent_bytes(self) -> dict[str, int]:
        """As :meth:`tierbed.dist.exchange.Exchange.sent_bytes`: nothing leaves the node."""
        return {}

    def close(self) -> None:
        """As :meth:`tierbed.dist.exchange.Exchange.close`."""
        with self._on_device():
            self._heap.close()

    def _compile(self, is_weighted: bool) -> None:
        """Compiles all kernels of a step, on all ranks, before the first one is waited for."""
        width = self._plan.widths[self._rank]
        with self._on_device(), compiling():
            for launch in self._launches:
                begins = self._outputs.peer_ptrs(0)
                launch.compile(begins, self._grads.local(0), width, is_weighted=is_weighted)
            grad = torch.zeros((1, self._plan.output_dim), device=self._heap.device)
            # A gradient that autograd made may lie anywhere.
            for is_aligned in {self._is_aligned, False}:
                matrices = self._grads.peer_ptrs(0)[self._run_holders]
                put_grads(grad, self._runs, matrices, 0, self._dim_max, is_aligned=is_aligned)
            self._pad.signal(Channel.IDS, 0)
            self._pad.wait(Channel.IDS, 0)
        self._heap.gather(None)

    def _forward(self, own: RankBatch, wants: tuple[bool, bool]) -> tuple[int, Tensor]:
        self._step += 1
        step = self._step
        self._batches.write(step, own, wants[1])
        self._pad.signal(Channel.IDS, step)
        self._pad.wait(Channel.IDS, step)
        batches, wants_weights = self._batches.read(step)
        firsts = [0, *itertools.accumulate(batch.samples for batch in batches)]
        first_samples = torch.tensor(firsts, device=self._heap.device)
        kept = _Step(step, firsts, [], [] if wants_weights else None)
        for launch in self._launches:
            joined = join_batches(batches, launch.group.features)
            kept.bags.append(joined)
            if kept.places is not None:
                kept.places.append(self._places(batches, launch.group, step))
            if launch.group.is_mirrored:
                launch.pool_own(batches[self._rank], self._outputs.peer_ptrs(step), self._rank)
            else:
                launch.pool(joined, self._outputs.peer_ptrs(step), first_samples)
        if wants[0]:
            self._kept = {step: kept, **dict(list(self._kept.items())[: KEPT_MAX - 1])}
        self._pad.signal(Channel.OUTPUTS, step)
        self._pad.wait(Channel.OUTPUTS, step)
        local = self._outputs.local(step)
        (out,) = self._lender.lend(local.data_ptr(), [(0, own.samples)], local.device)
        return step, out.clone() if self._options.copies_outputs else out

    def _backward(self, step: _Step, grad: Tensor, weights_grad: Tensor | None) -> None:
        self._grads_step += 1
        turn = self._grads_step
        matrices = self._grads.peer_ptrs(turn)[self._run_holders]
        first = step.first_samples[self._rank]
        is_aligned = self._is_aligned and grad.data_ptr() % (4 * WORDS_PER_STORE) == 0
        put_grads(grad, self._runs, matrices, first, self._dim_max, is_aligned=is_aligned)
        self._pad.signal(Channel.GRADS, turn)
        self._pad.wait(Channel.GRADS, turn)
        width = self._plan.widths[self._rank]
        grads = self._grads.local(turn)[: step.first_samples[-1] * width]
        for at, (launch, bags) in enumerate(zip(self._launches, step.bags, strict=True)):
            places = None if step.places is None else step.places[at]
            launch.step(bags, grads, width, places)
            self._store.note_step(launch.arena)
        if step.places is None:
            return
        self._pad.signal(Channel.WEIGHT_GRADS, turn)
        self._pad.wait(Channel.WEIGHT_GRADS, turn)
        if weights_grad is not None and self._weight_grads is not None:
            weights_grad.copy_(self._weight_grads.local(step.number)[: weights_grad.numel()])

    def _places(self, batches: list[RankBatch], group: Group, step: int) -> Tensor:
        """Returns where the gradient of each joined id's weight is wanted: addresses, 0 for none.

        Every holder of a mirror has all ids; the rank whose they are writes their gradients.
        """
        begins = [0] * len(batches)
        if self._weight_grads is not None:
            begins = self._weight_grads.peer_ptrs(step).tolist()
        placed = []
        for rank, batch in enumerate(batches):
            place = begins[rank] + 4 * torch.arange(batch.indices.numel(), device=self._heap.device)
            if group.is_mirrored and rank != self._rank:
                place = torch.zeros_like(place)
            placed.append(dataclasses.replace(batch, indices=place, weights=None))
        return join_batches(placed, group.features).indices

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        device = self._heap.device
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
            raise


@dataclass(frozen=True)
class _Step:
    """What a forward leaves for its backward.

    Args:
        number: Its own.
        first_samples: Where ranks' samples begin.
        bags: Of each group.
        places: Of each group, where gradients of weights go; None when nobody wants them.
    """

    number: int
    first_samples: list[int]
    bags: list[JoinedBags]
    places: list[Tensor] | None


def _runs_of(plan: DevicePlan) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Returns runs as ``put_grads`` takes them, and who holds each."""
    runs, holders = [], []
    for rank, groups in enumerate(plan.groups):
        for group in groups:
            for source, target in zip(group.output_columns, group.grad_columns, strict=True):
                runs.append((source, target, group.dim, plan.widths[rank]))
                holders.append(rank)
    return runs, holders
