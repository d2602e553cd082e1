"""How do ranks look up and step rows that lie on devices? As on CPUs, by kernels.

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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.dist.device.batch import PublishedBatches, check_batch
from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.pad import Channel, SignalPad
from tierbed.dist.device.plan import DevicePlan, Group
from tierbed.dist.device.store import Arena, DeviceStore
from tierbed.dist.exchange import Serving
from tierbed.dist.joined import JoinedBags, RankBatch, join_batches
from tierbed.dist.lending import Lender
from tierbed.errors import ClosedError, InvalidError, UnsupportedError
from tierbed.optim import Optimizer

__all__ = ["DeviceExchange", "Limits"]

# Forwards that may wait for their backward, one for each buffer.
KEPT_MAX = 2
PTR_ALIGN = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What memory is taken for.

    Args:
        samples_max: Most samples of a rank's batch.
        indices_max: Most ids of a rank's batch.
        timeout_s: How long another rank may be silent.
        is_weighted: Whether batches have weights.
        copies_outputs: Whether outputs are copied out of the shared memory.
    """

    samples_max: int
    indices_max: int
    timeout_s: float
    is_weighted: bool
    copies_outputs: bool


class DeviceExchange:
    """One rank's part; all ranks make the same calls in the same order.

    Args:
        store: Where this rank's rows go; their tables are added.
        plan: The groups of all ranks.
        heap: Memory that the devices of all ranks write; closed with this.
        optimizer: What steps the rows.
        limits: What memory is taken for, at once.
    """

    def __init__(
        self,
        store: DeviceStore,
        plan: DevicePlan,
        heap: DeviceHeap,
        optimizer: Optimizer,
        limits: Limits,
    ) -> None:
        self._store = store
        self._plan = plan
        self._heap = heap
        self._limits = limits
        self._rank = heap.rank
        with self._on_device():
            own = plan.groups[heap.rank]
            self._launches = [
                _Launch(group, store.add_tables(group.tables, optimizer), plan.output_dim)
                for group in own
            ]
            sizes = (limits.samples_max, limits.indices_max)
            self._batches = PublishedBatches(heap, len(plan.row_counts), sizes, limits.is_weighted)
            shape = (limits.samples_max, plan.output_dim)
            self._outputs = heap.alloc(shape, torch.float32)
            # Matrices of all ranks are one size, that of the widest.
            words = heap.count * limits.samples_max * max(plan.widths)
            self._grads = heap.alloc((words,), torch.float32)
            self._pad = SignalPad(heap, limits.timeout_s)
            self._runs, self._run_holders = _runs_of(plan, heap.device)
        self._lender = Lender(plan.output_dim, torch.float32, self._outputs)
        self._kept: dict[int, _Step] = {}
        self._step = 0
        self._grads_step = 0
        self._failure: str | None = None

    @property
    def is_trainable(self) -> bool:
        """As :attr:`tierbed.dist.exchange.Exchange.is_trainable`."""
        return True

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """As :meth:`tierbed.dist.exchange.Exchange.forward`."""
        if wants[1]:
            raise UnsupportedError(
                "rows on devices bring no gradients of weights; detach the weights, or keep rows "
                "in a tierbed.Store"
            )
        self._check()
        with self._on_device():
            limits = (self._limits.samples_max, self._limits.indices_max)
            bags = (indices, offsets, weights)
            own = check_batch(bags, self._plan.row_counts, self._plan.names, limits)
            self._lender.begin()
            with self._breaking():
                return self._forward(own, wants[0])

    def forward_parts(self, *_: object) -> tuple[int, list[Tensor], Serving]:
        """Refuses: rows on a device do not arrive one after the other."""
        raise UnsupportedError("rows on devices arrive together; call the collection itself")

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """As :meth:`tierbed.dist.exchange.Exchange.backward`."""
        del weights_grad
        self._check()
        if step not in self._kept:
            raise InvalidError(
                f"forward {step} is not waiting for its backward; run backward once, before the "
                "next forward but one",
                {"step": str(step)},
            )
        with self._on_device(), self._breaking():
            self._backward(self._kept.pop(step), grad.to(self._heap.device))

    def close(self) -> None:
        """As :meth:`tierbed.dist.exchange.Exchange.close`."""
        with self._on_device():
            self._heap.close()

    def _forward(self, own: RankBatch, is_training: bool) -> tuple[int, Tensor]:
        self._step += 1
        step = self._step
        self._batches.write(step, own)
        self._pad.signal(Channel.IDS, step)
        self._pad.wait(Channel.IDS, step)
        batches = self._batches.read(step)
        samples = [batch.samples for batch in batches]
        firsts = torch.tensor([0, *torch.tensor(samples).cumsum(0).tolist()])
        first_samples = firsts.to(self._heap.device)
        kept = _Step(firsts.tolist(), [])
        for launch in self._launches:
            joined = join_batches(batches, launch.group.features)
            kept.bags.append(joined)
            if launch.group.is_mirrored:
                launch.pool_own(batches[self._rank], self._outputs.peer_ptrs(step), self._rank)
            else:
                launch.pool(joined, self._outputs.peer_ptrs(step), first_samples)
        if is_training:
            self._kept = {step: kept, **dict(list(self._kept.items())[: KEPT_MAX - 1])}
        self._pad.signal(Channel.OUTPUTS, step)
        self._pad.wait(Channel.OUTPUTS, step)
        local = self._outputs.local(step)
        (out,) = self._lender.lend(local.data_ptr(), [(0, own.samples)], local.device)
        return step, out.clone() if self._limits.copies_outputs else out

    def _backward(self, step: _Step, grad: Tensor) -> None:
        from tierbed.kernels.put_grads import put_grads

        self._grads_step += 1
        turn = self._grads_step
        matrices = self._grads.peer_ptrs(turn)[self._run_holders]
        first = step.first_samples[self._rank]
        put_grads(grad, self._runs, matrices, first, max(g.dim for g in self._all_groups()))
        self._pad.signal(Channel.GRADS, turn)
        self._pad.wait(Channel.GRADS, turn)
        width = self._plan.widths[self._rank]
        grads = self._grads.local(turn)[: step.first_samples[-1] * width]
        for launch, bags in zip(self._launches, step.bags, strict=True):
            launch.step(bags, grads, width)
            self._store.note_step(launch.arena)

    def _all_groups(self) -> list[Group]:
        return [group for groups in self._plan.groups for group in groups]

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


class _Step:
    """What a forward leaves for its backward: where ranks' samples begin, and each group's bags."""

    def __init__(self, first_samples: list[int], bags: list[JoinedBags]) -> None:
        self.first_samples = first_samples
        self.bags = bags


class _Launch:
    """A group of this rank, with its rows, as the kernels take it."""

    def __init__(self, group: Group, arena: Arena, output_dim: int) -> None:
        device = arena.weights.device
        self.group = group
        self.arena = arena
        firsts = [arena.first_rows[table] for table in group.table_of]
        self._first_rows = torch.tensor(firsts, device=device)
        self._output_columns = torch.tensor(group.output_columns, device=device)
        self._grad_columns = torch.tensor(group.grad_columns, device=device)
        self._stride = output_dim
        columns = (group.dim, output_dim, *group.output_columns)
        self._is_aligned = all(column % PTR_ALIGN == 0 for column in columns)

    def pool(self, bags: JoinedBags, outputs: Tensor, first_samples: Tensor) -> None:
        """Pools ``bags`` into ``outputs``, addresses of one for each rank."""
        from tierbed.kernels.pool_to_ranks import pool_to_ranks

        pool_to_ranks(
            self.arena.weights,
            self._first_rows,
            (bags.indices, bags.offsets, bags.weights),
            outputs,
            first_samples,
            self._output_columns,
            self._stride,
            is_mean=self.group.is_mean,
            is_aligned=self._is_aligned,
        )

    def pool_own(self, batch: RankBatch, outputs: Tensor, rank: int) -> None:
        """Pools this rank's samples into its own output."""
        bags = join_batches([batch], self.group.features)
        bounds = torch.tensor([0, batch.samples], device=outputs.device)
        self.pool(bags, outputs[rank : rank + 1], bounds)

    def step(self, bags: JoinedBags, grads: Tensor, width: int) -> None:
        """Steps the rows of ``bags``; ``grads`` is this rank's matrix, ``width`` columns."""
        from tierbed.kernels.step_rows import StepNumbers, sort_uses, step_rows

        arena, count = self.arena, bags.indices.numel()
        if count == 0:
            return
        lengths = torch.diff(bags.offsets)
        samples = lengths.numel() // len(self.group.features)
        bag = torch.repeat_interleave(lengths, output_size=count)
        feature, sample = bag // samples, bag % samples
        optimizer = arena.optimizer
        uses = sort_uses(
            self._first_rows[feature] + bags.indices,
            sample * width + self._grad_columns[feature],
            bags.weights,
            lengths[bag].to(torch.float32) if self.group.is_mean else None,
        )
        numbers = StepNumbers(
            kind=optimizer.kind,
            lr=float(optimizer.lr),
            eps=float(getattr(optimizer, "eps", 0.0)),
            weight_decay=float(optimizer.weight_decay),
        )
        step_rows(arena.weights, arena.state, arena.use_counts, uses, grads, numbers)


def _runs_of(plan: DevicePlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ``[runs, 4]`` as ``put_grads`` takes them, and who holds each."""
    runs, holders = [], []
    for rank, groups in enumerate(plan.groups):
        for group in groups:
            for source, target in zip(group.output_columns, group.grad_columns, strict=True):
                runs.append((source, target, group.dim, plan.widths[rank]))
                holders.append(rank)
    return torch.tensor(runs, device=device), torch.tensor(holders, device=device)
