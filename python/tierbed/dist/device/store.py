"""Rows in the memory of a device, tables one behind the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer
from tierbed.config.tables import DataType
from tierbed.dist.held import CHUNK_ROWS, Held, initial_rows
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.store_rows import RowVisitor

__all__ = ["Arena", "DeviceStore", "HeldArena"]

# Threads that make initial rows of a table, at most.
INITIAL_THREADS_MAX = 8


@dataclass(kw_only=True)
class Arena:
    """Tables of one dim on a device, one behind the other.

    Args:
        weights: ``[N, dim]`` f32.
        state: ``[N, S]`` f32, ``S`` of the optimizer.
        use_counts: ``[N]`` i32, how many steps touched each row.
        optimizer: What steps them.
        first_rows: Where each table begins.
    """

    weights: Tensor
    state: Tensor
    use_counts: Tensor
    optimizer: Optimizer
    first_rows: list[int]


@dataclass(kw_only=True)
class HeldArena(Arena):
    """An arena of whole tables.

    Args:
        is_written: ``[N]`` bool, rows that came from elsewhere.
    """

    is_written: Tensor


class DeviceStore:
    """Rows of one rank in the memory of its device.

    A :class:`tierbed.dist.ShardedEmbeddingBagCollection` adds its tables, each once.
    They train with SGD, Adagrad or row-wise Adagrad, with the bits of a :class:`tierbed.Store`.
    Nothing is on disk: keep rows by the collection's ``save``. Threads that are ranks and share a
    GPU must run backward themselves: ``with torch.autograd.set_multithreading_enabled(False)``.

    Args:
        device: A CUDA device; or ``"cpu"`` to run the kernels in Triton's interpreter, for tests.
        seed: From it come the initial rows of every table, as in :class:`tierbed.Store`.

    Raises:
        UnsupportedError: Triton is not installed.
        InvalidError: A device that is not there.
    """

    def __init__(self, device: str | torch.device = "cuda", *, seed: int = 0) -> None:
        try:
            # Triton is optional.
            from tierbed.dist.kernels.launch import check_device
            from tierbed.dist.kernels.step_rows import step_rows_kernel
        except ImportError as error:
            raise UnsupportedError(
                f"rows on a device need Triton, and it cannot be imported ({error}); install "
                "triton, or keep rows in a tierbed.Store"
            ) from error
        self._device = torch.device(device)
        check_device(self._device, step_rows_kernel)
        if str(self._device) == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._seed = seed
        self._tables: dict[str, tuple[Held, HeldArena, int]] = {}
        self._steps: dict[str, int] = {}

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._device

    @property
    def seed(self) -> int:
        """Seed of the initial rows."""
        return self._seed

    @property
    def is_trainable(self) -> bool:
        """True: a backward steps the rows."""
        return True

    def add_tables(self, tables: Sequence[Held], optimizer: Optimizer) -> HeldArena:
        """Makes room for tables of one dim, one behind the other, and writes their initial rows.

        Args:
            tables: Of one dim.
            optimizer: That of their rows.

        Raises:
            InvalidError: A table that is here already.
            UnsupportedError: An optimizer the kernel does not know, or rows not in float32.
        """
        from tierbed.dist.kernels.step_rows import KINDS

        if optimizer.kind not in KINDS:
            raise UnsupportedError(
                f"rows on a device step by one of {list(KINDS)}, not {optimizer.kind}; keep rows "
                "in a tierbed.Store for other optimizers",
                {"optimizer": optimizer.kind},
            )
        for held in tables:
            if held.name in self._tables:
                raise InvalidError(
                    f"table {held.name!r} is in this DeviceStore already; make one for each "
                    "collection",
                    {"table": held.name},
                )
            if held.config.data_type is not DataType.FP32:
                raise UnsupportedError(
                    f"table {held.name!r}: rows on a device are float32, not "
                    f"{held.config.data_type.value}",
                    {"table": held.name},
                )
        firsts = [0]
        for held in tables:
            firsts.append(firsts[-1] + len(held.rows))
        row_count, dim = firsts.pop(), len(tables[0].columns)
        shape = (row_count, optimizer.state_words(dim))
        arena = HeldArena(
            weights=torch.empty((row_count, dim), device=self._device),
            state=torch.full(shape, optimizer.state_init, device=self._device),
            use_counts=torch.zeros(row_count, dtype=torch.int32, device=self._device),
            is_written=torch.zeros(row_count, dtype=torch.bool, device=self._device),
            optimizer=optimizer,
            first_rows=firsts,
        )
        for held, first in zip(tables, firsts, strict=True):
            self._tables[held.name] = (held, arena, first)
            self._steps[held.name] = 0
            threads = min(INITIAL_THREADS_MAX, len(os.sched_getaffinity(0)))
            for at, rows in initial_rows(held, self._seed, threads=threads):
                begin = first + at - held.rows.start
                # The device copies pinned memory while the host makes the next rows.
                source = rows.pin_memory() if self._device.type == "cuda" else rows
                arena.weights[begin : begin + len(rows)].copy_(source, non_blocking=True)
        return arena

    def note_step(self, arena: Arena) -> None:
        """Counts one step of all tables of ``arena``.

        Args:
            arena: The tables.
        """
        for name, (_, of_table, _) in self._tables.items():
            if of_table is arena:
                self._steps[name] += 1

    def read_rows(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Copies rows ``first_row..`` of a table to the host, ``[row_count, D]`` f32.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """
        return self.read_rows_and_state(table, first_row, row_count)[0]

    def read_rows_and_state(
        self, table: str, first_row: int, row_count: int
    ) -> tuple[Tensor, Tensor]:
        """Copies rows and their optimizer state to the host, ``[N, D]`` and ``[N, S]`` f32.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.

        Raises:
            InvalidError: No such table or rows.
        """
        arena, span = self._span(table, first_row, row_count)
        return arena.weights[span].cpu().clone(), arena.state[span].cpu().clone()

    def write_rows(
        self,
        table: str,
        first_row: int,
        weights: Tensor,
        rows_state: Tensor | None = None,
        use_counts: Tensor | None = None,
    ) -> None:
        """Overwrites rows ``first_row..`` with ``weights`` ``[N, D]`` f32.

        Without ``rows_state`` ``[N, S]`` their state starts anew, as do use counts.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            weights: Rows ``[N, D]`` f32.
            rows_state: Optimizer state ``[N, S]`` f32.
            use_counts: Use counts ``[N]`` i64.

        Raises:
            InvalidError: No such table or rows, or another shape.
        """
        arena, span = self._span(table, first_row, weights.shape[0])
        if weights.shape != arena.weights[span].shape:
            raise InvalidError(
                f"rows of table {table!r} must be [N, {arena.weights.shape[1]}], found "
                f"{tuple(weights.shape)}",
                {"table": table},
            )
        arena.weights[span].copy_(weights)
        if rows_state is None:
            arena.state[span].fill_(arena.optimizer.state_init)
        else:
            arena.state[span].copy_(rows_state)
        if use_counts is None:
            arena.use_counts[span].zero_()
        else:
            arena.use_counts[span].copy_(use_counts)
        arena.is_written[span] = True

    def use_counts(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Returns how many steps touched each row, ``[row_count]`` i64.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """
        arena, span = self._span(table, first_row, row_count)
        return arena.use_counts[span].to("cpu", torch.int64)

    def scan(self, visit: RowVisitor, *, chunk_rows: int = CHUNK_ROWS) -> None:
        """Visits every row that was ever written or stepped, as :meth:`tierbed.Store.scan`.

        Args:
            visit: As of :meth:`tierbed.Store.scan`.
            chunk_rows: Most rows at a time.
        """
        for name, (held, arena, first) in self._tables.items():
            span = slice(first, first + len(held.rows))
            is_there = arena.is_written[span] | (arena.use_counts[span] > 0)
            for rows in torch.split(is_there.nonzero().view(-1), chunk_rows):
                at = rows + first
                visit(
                    name,
                    rows.cpu() + held.rows.start,
                    arena.weights[at].cpu(),
                    arena.state[at].cpu(),
                    arena.use_counts[at].to("cpu", torch.int64),
                )

    def steps_done(self, table: str) -> int:
        """Returns how many steps the table's optimizer did.

        Args:
            table: Name of the table.
        """
        return self._steps[table]

    def set_steps_done(self, table: str, steps: int) -> None:
        """Lets the table's optimizer have done ``steps`` steps.

        Args:
            table: Name of the table.
            steps: How many.
        """
        self._steps[table] = steps

    def set_learning_rate(self, lr: float) -> None:
        """Changes the learning rate of all tables from the next step on.

        Args:
            lr: Learning rate.
        """
        for _, arena, _ in self._tables.values():
            arena.optimizer = arena.optimizer.with_lr(lr)

    def _span(self, table: str, first_row: int, row_count: int) -> tuple[HeldArena, slice]:
        if table not in self._tables:
            known = list(self._tables)
            raise InvalidError(f"no table {table!r}; the store has {known}", {"table": table})
        held, arena, first = self._tables[table]
        if first_row < held.rows.start or first_row + row_count > held.rows.stop:
            raise InvalidError(
                f"rows {first_row}..{first_row + row_count} of table {table!r}, of which rows "
                f"{held.rows.start}..{held.rows.stop} are here",
                {"table": table},
            )
        begin = first + first_row - held.rows.start
        return arena, slice(begin, begin + row_count)
