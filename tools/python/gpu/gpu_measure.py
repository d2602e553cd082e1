"""What do the GPU benchmarks share? Loads, clocks, and the kernels, with or without a GPU."""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

IS_DRY = "--dry-run" in sys.argv
if IS_DRY:
    # Triton looks at this when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

RANKS = 2
# How long runs between two events are to take together, and how many they are at most.
SPAN_MS = 20.0
LAUNCHES_MAX = 50
DEVICE = "cpu" if IS_DRY else "cuda"


def load_kernels() -> Any:
    """Imports the kernels, of an installed package or of this checkout without its engine."""
    try:
        from tierbed.dist.kernels import pool_to_ranks, put_grads, signals, step_rows, tiles, uses
    except ImportError:
        package = types.ModuleType("tierbed")
        package.__path__ = [str(Path(__file__).parents[3] / "python" / "tierbed")]
        sys.modules["tierbed"] = package
        from tierbed.dist.kernels import pool_to_ranks, put_grads, signals, step_rows, tiles, uses
    return types.SimpleNamespace(
        pool=pool_to_ranks,
        signals=signals,
        put=put_grads,
        step=step_rows,
        tiles=tiles,
        uses=uses,
    )


@dataclass(frozen=True)
class Load:
    """A batch for the tables of one rank.

    Args:
        name: For the table.
        tables: Tables of the rank.
        rows: Rows of a table.
        batch: Samples of all ranks.
        shortest: Fewest ids of a bag.
        longest: Most ids of a bag.
        dim: Elements of a row.
    """

    name: str
    tables: int
    rows: int
    batch: int
    shortest: int
    longest: int
    dim: int = 64


FULL = [
    Load("weak", 64, 1_000_000, 16384, 0, 128),
    Load("strong", 48, 1_000_000, 16384, 0, 32),
    Load("one-hot", 48, 1_000_000, 16384, 1, 1),
]
TINY = [Load("weak", 2, 50, 9, 0, 5, 8), Load("one-hot", 3, 40, 6, 1, 1, 16)]


class Case:
    """A load with its rows, ids and outputs on the device."""

    def __init__(self, load: Load, seed: int = 1, counts: list[int] | None = None) -> None:
        self.load = load
        generator = torch.Generator(DEVICE).manual_seed(seed)
        lengths = torch.randint(
            load.shortest,
            load.longest + 1,
            (load.tables * load.batch,),
            generator=generator,
            device=DEVICE,
        )
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self.count = int(self.offsets[-1])
        self.ids = torch.randint(
            load.rows, (self.count,), generator=generator, device=DEVICE, dtype=torch.int64
        )
        self.weights = torch.rand(self.count, generator=generator, device=DEVICE)
        self.rows = torch.randn(
            load.tables * load.rows, load.dim, generator=generator, device=DEVICE
        )
        # Scales and biases of rows that are codes.
        self.heads: Tensor | None = None
        self.first_rows = torch.arange(load.tables, device=DEVICE) * load.rows
        self.columns = torch.arange(load.tables, device=DEVICE) * load.dim
        self.width = load.tables * load.dim
        self.counts = counts or [load.batch // RANKS, load.batch - load.batch // RANKS]
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        self.first_samples = torch.tensor([0, *ends], device=DEVICE)
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def bytes(self) -> int:
        """Bytes that a lookup reads and writes: rows, ids, offsets, vectors."""
        of_row = self.load.dim * self.rows.element_size() + (0 if self.heads is None else 4)
        of_rows = self.count * (of_row + 8)
        return of_rows + self.offsets.numel() * 8 + self.load.batch * self.width * 4

    def pool(
        self,
        kernels: Any,
        outputs: list[Tensor],
        *,
        is_mean: bool = False,
        is_weighted: bool = False,
        first_column: int = 0,
        tiles: Any = None,
    ) -> None:
        """Pools into ``outputs``, ``[samples, stride]`` of each rank, from a column on."""
        addresses, first_samples, columns = self._placed(outputs, first_column)
        kernels.pool.pool_to_ranks(
            self.rows,
            self.first_rows,
            (self.ids, self.offsets, self.weights if is_weighted else None),
            addresses,
            first_samples,
            columns,
            outputs[0].shape[1],
            is_mean=is_mean,
            is_single=self.load.longest <= 1,
            heads=self.heads,
            tiles=tiles,
        )

    def _placed(self, outputs: list[Tensor], first_column: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns addresses, bounds and columns on the device; what is timed makes none of them."""
        key = (first_column, *(output.data_ptr() for output in outputs))
        if key not in self._places:
            bounds = self.first_samples
            if len(outputs) == 1:
                bounds = torch.tensor([0, self.load.batch], device=DEVICE)
            addresses = torch.tensor(key[1:], device=DEVICE)
            self._places[key] = (addresses, bounds, self.columns + first_column)
        return self._places[key]

    def reference(self, is_mean: bool, is_weighted: bool) -> Tensor:
        """Pools with torch, row by row in index order: ``[B, tables * dim]``."""
        starts, ends = self.offsets[:-1], self.offsets[1:]
        table = torch.arange(self.load.tables, device=DEVICE).repeat_interleave(self.load.batch)
        total = torch.zeros(starts.numel(), self.load.dim, device=DEVICE)
        for at in range(int((ends - starts).max())):
            is_there = starts + at < ends
            position = torch.where(is_there, starts + at, 0)
            row = self.rows[self.ids[position] + table * self.load.rows]
            row = self.weights[position, None] * row if is_weighted else row
            total = torch.where(is_there[:, None], total + row, total)
        if is_mean:
            total = total / (ends - starts).clamp(min=1)[:, None].float()
        of_table = total.view(self.load.tables, self.load.batch, self.load.dim)
        return of_table.transpose(0, 1).reshape(self.load.batch, self.width)


def timed(run: Callable[[], object], repeats: int = 15) -> float | None:
    """Returns the median milliseconds on the device, or None in a dry run.

    Short runs are repeated between two events, so that the host's own time for a launch, which
    is longer than a short kernel, falls beside the run before it.
    """
    if IS_DRY:
        run()
        return None
    device_ms(run, 1)
    launches = max(1, min(LAUNCHES_MAX, int(SPAN_MS / device_ms(run, 1))))
    return median([device_ms(run, launches) for _ in range(repeats)])


def timed_on_host(run: Callable[[], object], repeats: int = 9) -> float | None:
    """Returns the median milliseconds until the host has everything, or None in a dry run."""
    if IS_DRY:
        run()
        return None
    return median([host_ms(run) for _ in range(repeats + 2)][2:])


def device_ms(run: Callable[[], object], launches: int) -> float:
    """Returns milliseconds of one of ``launches`` runs between two events of the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / launches


def host_ms(run: Callable[[], object]) -> float:
    """Returns milliseconds of the host, with an idle device before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns above / below, where both were measured."""
    return None if above is None or not below else above / below
