"""Measures tiles of kernels on the GPU at hand, and keeps the best.

    python -m tierbed.dist.kernels.tune 64 128

Nothing else does: a training takes what is in the file, or a formula. Bits are those of any tile.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import triton
from triton.runtime.errors import OutOfResources

from tierbed.dist.kernels.pool_to_ranks import pool_to_ranks
from tierbed.dist.kernels.step_rows import StepNumbers, step_rows
from tierbed.dist.kernels.tiles import FIELDS, MeasuredTile, Tiles, gpu_name, keep_tiles
from tierbed.dist.kernels.uses import sort_uses
from tierbed.errors import InvalidError, TierbedError

__all__ = ["Load", "candidates", "measure_ms", "tune", "tune_kernel"]

# Runs of a kernel between two looks at the clock.
LAUNCHES = 10
# Numbers that a thread holds of its items, at least and at most.
VALUES = {
    "pool_to_ranks": (2, 8),
    "pool_to_ranks_single": (4, 32),
    "step_rows": (2, 8),
    "step_rows_many": (1, 4),
}
# How many items a program may take, and how many loads may be on their way at once.
CHOICES = {
    "pool_to_ranks": ((1, 2, 4, 8), (2, 4, 8)),
    "pool_to_ranks_single": ((2, 4, 8, 16, 32), (1,)),
    "step_rows": ((1, 2, 4, 8), (1, 2, 4)),
    "step_rows_many": ((1,), (8, 16, 32)),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What kernels are measured with.

    Args:
        features: Tables, and features that read them.
        rows: Rows of a table.
        batch: Samples.
        longest: Most ids of a bag; half as many are usual.
    """

    features: int = 8
    rows: int = 1 << 18
    batch: int = 8192
    longest: int = 32


def candidates(kernel: str, dim: int) -> Iterator[Mapping[str, int]]:
    """Gives the tiles of a kernel that fit rows of ``dim`` numbers."""
    width = (
        max(16, triton.next_power_of_2(dim)) if "step" in kernel else triton.next_power_of_2(dim)
    )
    least, most = VALUES[kernel]
    for items, at_once, warps in itertools.product(*CHOICES[kernel], (1, 2, 4, 8, 16)):
        values = items * width / (32 * warps)
        # Narrow rows do not fill a warp; then one warp it is.
        if values <= most and (values >= least or warps == 1):
            yield dict(zip(FIELDS[kernel], (items, at_once, warps), strict=True))


def measure_ms(run: Callable[[], None]) -> float:
    """Returns the median milliseconds of ``run`` on the device.

    Some runs follow each other, so that the host's own time for a launch does not count.
    """
    found = []
    for _ in range(10):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(LAUNCHES):
            run()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) / LAUNCHES)
    return median(found[3:])


def tune(dims: Sequence[int], device: str | torch.device = "cuda") -> list[MeasuredTile]:
    """Measures all kernels for rows of ``dims`` numbers, and keeps the best tiles.

    Args:
        dims: Numbers of a row; those up to the next power of two share a tile.
        device: A CUDA device.

    Returns:
        What was kept, by :func:`~tierbed.dist.kernels.tiles.keep_tiles`.

    Raises:
        InvalidError: The device is no GPU.
        CorruptionError: The file of tiles is damaged; nothing is measured.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise InvalidError(f"tiles are measured on CUDA devices, and {str(device)!r} is none here")
    # A damaged file is told before the work.
    keep_tiles([])
    measured = []
    with torch.cuda.device(device):
        for dim, kernel in itertools.product(dims, FIELDS):
            measured.append(tune_kernel(kernel, dim, device, Load(), measure_ms))
            keep_tiles(measured[-1:])
    return measured


def tune_kernel(
    kernel: str,
    dim: int,
    device: torch.device,
    load: Load,
    measure: Callable[[Callable[[], None]], float],
) -> MeasuredTile:
    """Returns the tile of ``kernel`` of which ``measure`` tells the least."""
    make = _pooling if "pool" in kernel else _stepping
    run = make(kernel, dim, device, load)
    gpu, width = gpu_name(device), triton.next_power_of_2(dim)
    best, least = None, float("inf")
    for tile in candidates(kernel, dim):
        tried = MeasuredTile(gpu=gpu, kernel=kernel, width=width, tile=tile)
        tiles = Tiles((tried,))
        try:
            ms = measure(lambda tiles=tiles: run(tiles))  # type: ignore[misc]
        except OutOfResources:
            continue
        if ms < least:
            best, least = tried, ms
    assert best is not None, f"no tile of {kernel} fits {dim} numbers"
    return best


def _pooling(kernel: str, dim: int, device: torch.device, load: Load) -> Callable[[Tiles], None]:
    """Returns a lookup of a batch, whose bags have one id for the kernel of such."""
    is_single = kernel == "pool_to_ranks_single"
    bags = load.features * load.batch
    longest = 1 if is_single else load.longest
    lengths = torch.randint(0, longest + 1, (bags,), device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = torch.randint(0, load.rows, (int(offsets[-1]),), device=device)
    rows = torch.randn(load.features * load.rows, dim, device=device)
    first_rows = torch.arange(load.features, device=device) * load.rows
    stride = load.features * (dim + -dim % 4)
    out = torch.empty(load.batch, stride, device=device)
    outputs = torch.tensor([out.data_ptr()], device=device)
    first_samples = torch.tensor([0, load.batch], device=device)
    columns = torch.arange(load.features, device=device) * (stride // load.features)

    def run(tiles: Tiles) -> None:
        pool_to_ranks(
            rows,
            first_rows,
            (ids, offsets, None),
            outputs,
            first_samples,
            columns,
            stride,
            is_aligned=dim % 4 == 0,
            is_single=is_single,
            tiles=tiles,
        )
        # The output lives as long as its address is used.
        assert out.numel() > 0

    return run


def _stepping(kernel: str, dim: int, device: torch.device, load: Load) -> Callable[[Tiles], None]:
    """Returns a step of row-wise Adagrad; all uses are of few rows for the kernel of such."""
    use_total = load.batch * max(1, load.longest // 2)
    row_total = load.features if kernel == "step_rows_many" else load.features * load.rows
    rows = torch.randint(0, row_total, (use_total,), device=device)
    grads = torch.randn(load.batch, dim, device=device)
    grads_at = torch.randint(0, load.batch, (use_total,), device=device) * dim
    uses = sort_uses(rows, grads_at, None, None, row_total=row_total, grad_total=grads.numel())
    weights = torch.randn(row_total, dim, device=device)
    state = torch.ones(row_total, 1, device=device)
    counts = torch.zeros(row_total, dtype=torch.int32, device=device)
    numbers = StepNumbers(kind="row_wise_adagrad", lr=0.01, eps=1e-8, weight_decay=0.0)

    def run(tiles: Tiles) -> None:
        step_rows(
            weights, state, counts, uses, grads, numbers, is_aligned=dim % 4 == 0, tiles=tiles
        )

    return run


def main() -> None:
    """Tunes the dims of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dims", type=int, nargs="+", help="numbers of a row")
    dims = parser.parse_args().dims
    try:
        measured = tune(dims)
    except TierbedError as error:
        raise SystemExit(str(error)) from error
    for tile in measured:
        numbers = "  ".join(f"{name} {number}" for name, number in tile.tile.items())
        print(f"{tile.gpu}  {tile.kernel}  {tile.width}  {numbers}")


if __name__ == "__main__":
    main()
