"""Lookups and steps of rows on devices whose ranks cannot write each other's memory.

A step of all ranks: gather the ids of all; pool for everybody's samples, each rank's into its part
of one buffer; swap the parts in one collective call; copy the columns of each holder into the
output. Its backward: put the gradients into one buffer, the columns of each holder together, and
swap: what comes is the holder's matrix as it is. Kernels, groups and orders of additions are those
of the one-sided exchange (``exchange.py``), and so are the bits. Kernels write the buffers in the
layout in which they travel: nothing is packed before a call.

Source: TorchRec's exchange of pooled vectors. Differs: gradients need no unpacking, and the host
waits for each call, so that it returns in time when a rank is lost.

Never run over NCCL so far: tests interpret the kernels and have gloo.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer
from tierbed.dist.device.batch import GatheredBatches
from tierbed.dist.device.messages import Messages
from tierbed.dist.device.plan import DevicePlan, Group
from tierbed.dist.device.row_wise import AskedRows, RowWiseRows, rows_of
from tierbed.dist.device.steps import DeviceSteps, KeptStep
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.device.weight_swap import WeightSwap
from tierbed.dist.exchange import ExchangeOptions
from tierbed.dist.joined import RankBatch, join_batches
from tierbed.dist.kernels.launch import compiling
from tierbed.dist.kernels.put_grads import put_grads
from tierbed.dist.nodes import Nodes

__all__ = ["CollectiveExchange"]

WORD_BYTES = 4


class CollectiveExchange(DeviceSteps):
    """One rank's part; all ranks make the same calls in the same order.

    Outputs are tensors like others: they are kept for as long as somebody has them.

    Args:
        store: Where this rank's rows go; their tables are added.
        plan: The groups of all ranks.
        nodes: Every rank as a node of its own.
        messages: Between them; closed with this.
        optimizer: What steps the rows.
        options: How large batches may be.
        is_weighted: Whether batches have weights.
    """

    def __init__(
        self,
        store: DeviceStore,
        plan: DevicePlan,
        nodes: Nodes,
        messages: Messages,
        optimizer: Optimizer,
        options: ExchangeOptions,
        *,
        is_weighted: bool,
    ) -> None:
        super().__init__(store, plan, options, store.device)
        self._rank = nodes.rank
        self._messages = messages
        self._batches = GatheredBatches(messages, store.device, is_weighted=is_weighted)
        self._sent = dict.fromkeys(("ids", "vectors", "gradients", "weights", "numbers"), 0)
        # What each rank pools for all, as columns of an output, in the order of its buffer.
        columns = [_pooled_columns(groups) for groups in plan.groups]
        self._pooled = [torch.tensor(of_rank, device=self._device).long() for of_rank in columns]
        self._pooled_widths = [len(of_rank) for of_rank in columns]
        width = self._pooled_widths[nodes.rank]
        with self._on_device():
            for group in _as_sent(plan.groups[nodes.rank]):
                arena = store.add_tables(group.tables, optimizer)
                stride = width if group.is_pooled_for_all else plan.output_dim
                self._launches.append(rows_of(group, arena, stride, nodes.rank))
            self._compile(len(plan.groups), is_weighted)

    def sent_bytes(self) -> dict[str, int]:
        """As :meth:`tierbed.dist.exchange.Exchange.sent_bytes`."""
        return {**self._sent, **self._batches.sent_bytes()}

    def close(self) -> None:
        """As :meth:`tierbed.dist.exchange.Exchange.close`."""
        if self._failure is None:
            # Nobody leaves while a message to another rank is under way.
            with self._on_device():
                self._messages.gather(torch.zeros(1, device=self._device))
        self._messages.close()

    def _compile(self, ranks: int, is_weighted: bool) -> None:
        """Compiles all kernels of a step before other ranks wait for one."""
        places = torch.zeros(ranks, dtype=torch.int64, device=self._device)
        width = self._plan.widths[self._rank]
        with compiling():
            for launch in self._launches:
                grads = torch.zeros(width * ranks, device=self._device)
                launch.compile(places, grads, width, is_weighted=is_weighted)
            self._compile_puts(places[self._run_holders])

    def _begin(self) -> None:
        return

    def _fail(self) -> None:
        self._messages.abort()

    def _forward(self, own: RankBatch, wants_weights: bool) -> tuple[KeptStep, Tensor]:
        batches, is_wanted = self._batches.share(own, wants_weights=wants_weights)
        firsts = [0, *itertools.accumulate(batch.samples for batch in batches)]
        first_samples = torch.tensor(firsts, device=self._device)
        weights = WeightSwap.of(self._plan, self._rank, batches) if is_wanted else None
        kept = KeptStep(self._step, firsts, [], None if weights is None else [], weights)
        width = self._pooled_widths[self._rank]
        sent = torch.empty(firsts[-1] * width, device=self._device)
        parts = sent.data_ptr() + WORD_BYTES * width * first_samples[:-1]
        out = torch.empty((own.samples, self._plan.output_dim), device=self._device)
        output = torch.tensor([out.data_ptr()], device=self._device)
        asked = []
        for at, launch in enumerate(self._launches):
            joined = join_batches(batches, launch.group.features)
            kept.bags.append(joined)
            if weights is not None and kept.places is not None:
                kept.places.append(weights.places[at])
            if isinstance(launch, RowWiseRows):
                asked.append(launch.ask(batches, joined))
                kept.keep_held(asked[-1])
            elif launch.group.is_mirrored:
                launch.pool_own(batches[self._rank], output, 0)
            else:
                launch.pool(joined, parts, first_samples)
        sends = [width * batch.samples for batch in batches]
        comes = [of_rank * own.samples for of_rank in self._pooled_widths]
        came = self._swap("vectors", sent, sends, comes)
        for columns, part in zip(self._pooled, torch.split(came, comes), strict=True):
            out.index_copy_(1, columns, part.view(own.samples, columns.numel()))
        for of_group in asked:
            self._swap_rows(of_group, output)
        return kept, out

    def _swap_rows(self, asked: AskedRows, output: Tensor) -> None:
        """Sends the rows that other ranks asked for, and pools those that come."""
        dim = asked.launch.group.dim
        sends = [dim * count for count in asked.sends(self._rank)]
        comes = [dim * count for count in asked.counts[self._rank]]
        sent = torch.empty(sum(sends), device=self._device)
        begins = torch.tensor([0, *itertools.accumulate(sends)][:-1], device=self._device)
        asked.launch.send(asked, sent.data_ptr() + WORD_BYTES * begins, is_aligned=True)
        came = self._swap("vectors", sent, sends, comes)
        asked.launch.pool_arrived(asked, came.view(-1, dim), output)

    def _backward(self, step: KeptStep, grad: Tensor, weights_grad: Tensor | None) -> None:
        samples, widths = grad.shape[0], self._plan.widths
        sends = [samples * width for width in widths]
        sent = torch.empty(sum(sends), device=self._device)
        begins = [0, *itertools.accumulate(sends)]
        parts = sent.data_ptr() + WORD_BYTES * torch.tensor(begins, device=self._device)
        is_aligned = self._are_runs_aligned(grad)
        matrices = parts[self._run_holders]
        put_grads(grad, self._runs, matrices, 0, self._dim_max, is_aligned=is_aligned)
        width = widths[self._rank]
        counts = [end - first for first, end in itertools.pairwise(step.first_samples)]
        grads = self._swap("gradients", sent, sends, [width * count for count in counts])
        self._step_rows(step, grads, width)
        if step.weights is None:
            return
        swap = step.weights
        came = self._swap("weights", swap.sent, swap.sends, swap.comes)
        if weights_grad is not None:
            weights_grad[swap.order.to(weights_grad.device)] = came.to(weights_grad.device)

    def _swap(self, kind: str, sent: Tensor, sends: list[int], comes: list[int]) -> Tensor:
        self._sent[kind] += sent.dtype.itemsize * (sum(sends) - sends[self._rank])
        return self._messages.swap(sent, sends, comes)


def _pooled_columns(groups: Sequence[Group]) -> list[int]:
    """Returns what a rank pools for all ranks, as columns of an output, in its buffer's order."""
    return [
        first + column
        for group in groups
        if group.is_pooled_for_all
        for first in group.output_columns
        for column in range(group.dim)
    ]


def _as_sent(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups of a rank; those pooled for all have the columns of its buffer."""
    found, width = [], 0
    for group in groups:
        if not group.is_pooled_for_all:
            found.append(group)
            continue
        columns = tuple(width + group.dim * at for at in range(len(group.features)))
        found.append(dataclasses.replace(group, output_columns=columns))
        width += group.dim * len(group.features)
    return found
