"""Lookups and steps of rows on devices, by kernels.

A step of all ranks: publish ids, signal; pool for everybody's samples straight into everybody's
outputs, signal. Its backward: put the gradients into the holders' matrices, signal; each holder
sums per row in the order of samples across ranks and steps its rows. Buffers are taken in turn: a
rank writes the outputs of step ``i + 2`` only after the signal of ids of that step, which their
reader gives when it has done with step ``i``.

Source: PGAS §III. Differs: ids travel within the step; gradients are put and not added; the host
waits for each signal, so that a rank that is silent has a name, and no kernel waits for long.

Everything runs on the stream that is current at the lookup. Which others may read an output is told
in ``tierbed.dist.lending``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer
from tierbed.dist.device.batch import PublishedBatches
from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.pad import Channel, SignalPad
from tierbed.dist.device.plan import DevicePlan, Group
from tierbed.dist.device.row_wise import RowInbox, RowWiseRows, rows_of
from tierbed.dist.device.steps import DeviceSteps, KeptStep
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.exchange import ExchangeOptions
from tierbed.dist.joined import RankBatch, join_batches
from tierbed.dist.kernels.launch import compiling
from tierbed.dist.kernels.put_grads import put_grads
from tierbed.dist.lending import Lender

__all__ = ["DeviceExchange"]


class DeviceExchange(DeviceSteps):
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
        super().__init__(store, plan, options, heap.device)
        self._heap = heap
        self._rank = heap.rank
        with self._on_device():
            own = plan.groups[heap.rank]
            self._launches = [
                rows_of(
                    group, store.add_tables(group.tables, optimizer), plan.output_dim, heap.rank
                )
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
            dims = [group.dim for group in own if group.is_row_wise]
            self._rows = RowInbox(heap, options.indices_max, dims) if dims else None
            self._pad = SignalPad(heap, options.timeout_s)
        is_cuda = heap.device.type == "cuda"
        stream = functools.partial(torch.cuda.current_stream, heap.device) if is_cuda else None
        self._lender = Lender(plan.output_dim, torch.float32, self._outputs, stream)
        self._grads_step = 0
        self._compile(is_weighted)

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
            grads = self._grads.local(0)
            for launch in self._launches:
                begins = self._outputs.peer_ptrs(0)
                launch.compile(begins, grads, width, is_weighted=is_weighted)
            self._compile_puts(self._grads.peer_ptrs(0)[self._run_holders])
            self._pad.signal(Channel.IDS, 0)
            self._pad.wait(Channel.IDS, 0)
        self._heap.gather(None)

    def _begin(self) -> None:
        self._lender.begin()

    def _forward(self, own: RankBatch, wants_weights: bool) -> tuple[KeptStep, Tensor]:
        step = self._step
        self._batches.write(step, own, wants_weights)
        self._pad.signal(Channel.IDS, step)
        self._pad.wait(Channel.IDS, step)
        batches, is_wanted = self._batches.read(step)
        firsts = [0, *itertools.accumulate(batch.samples for batch in batches)]
        first_samples = torch.tensor(firsts, device=self._heap.device)
        kept = KeptStep(step, firsts, [], [] if is_wanted else None)
        asked = []
        for launch in self._launches:
            joined = join_batches(batches, launch.group.features)
            kept.bags.append(joined)
            if kept.places is not None:
                kept.places.append(self._places(batches, launch.group, step))
            if isinstance(launch, RowWiseRows):
                asked.append(launch.ask(batches, joined))
                kept.keep_held(asked[-1])
            elif launch.group.is_mirrored:
                launch.pool_own(batches[self._rank], self._outputs.peer_ptrs(step), self._rank)
            else:
                launch.pool(joined, self._outputs.peer_ptrs(step), first_samples)
        if self._rows is not None:
            self._rows.send(asked, step)
        self._pad.signal(Channel.OUTPUTS, step)
        self._pad.wait(Channel.OUTPUTS, step)
        if self._rows is not None:
            self._rows.pool(asked, step, self._outputs.peer_ptrs(step)[self._rank :][:1])
        local = self._outputs.local(step)
        (out,) = self._lender.lend(local.data_ptr(), [(0, own.samples)], local.device)
        return kept, out.clone() if self._options.copies_outputs else out

    def _backward(self, step: KeptStep, grad: Tensor, weights_grad: Tensor | None) -> None:
        self._grads_step += 1
        turn = self._grads_step
        matrices = self._grads.peer_ptrs(turn)[self._run_holders]
        first = step.first_samples[self._rank]
        is_aligned = self._are_runs_aligned(grad)
        put_grads(grad, self._runs, matrices, first, self._dim_max, is_aligned=is_aligned)
        self._pad.signal(Channel.GRADS, turn)
        self._pad.wait(Channel.GRADS, turn)
        width = self._plan.widths[self._rank]
        # Each use of a row reads a gradient: those in memory of the host are copied once.
        grads = self._heap.near(self._grads.local(turn)[: step.first_samples[-1] * width])
        self._step_rows(step, grads, width)
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
