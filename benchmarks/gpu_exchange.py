"""What does the exchange's kernel give on one GPU? One command, less than eight minutes.

    python benchmarks/gpu_exchange.py --json gpu_exchange.json
    python benchmarks/gpu_exchange.py --dry-run          # no GPU: every path, interpreted, no times

Needs torch, triton and this repository; nothing is built. Virtual ranks share the device, so that
figures labelled ``measured-1gpu`` know no link. Those labelled ``measured-pcie`` have one: the
second rank's output lies in pinned memory of the host. In order:

- correctness: sum, mean, weights, empty bags, uneven ranks, against torch, to the last bit;
- copy: bytes per second of a device copy, the yardstick;
- kernel: the paper's loads, as a share of the yardstick; into one matrix and into the outputs of
  two ranks; other tiles; ``embedding_bag`` and ``cat`` beside;
- unpack: the same lookup with blocks copied and unpacked behind the kernel;
- pcie: the same two ways, over the link to the host.
"""

from __future__ import annotations

import argparse
import json
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
DEVICE = "cpu" if IS_DRY else "cuda"


def load_kernels() -> Any:
    """Imports the kernels, of an installed package or of this checkout without its engine."""
    try:
        from tierbed.kernels import pool_to_ranks, signals
    except ImportError:
        package = types.ModuleType("tierbed")
        package.__path__ = [str(Path(__file__).parents[1] / "python" / "tierbed")]
        sys.modules["tierbed"] = package
        from tierbed.kernels import pool_to_ranks, signals
    return types.SimpleNamespace(pool=pool_to_ranks, signals=signals)


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
        self.first_rows = torch.arange(load.tables, device=DEVICE) * load.rows
        self.columns = torch.arange(load.tables, device=DEVICE) * load.dim
        self.width = load.tables * load.dim
        self.counts = counts or [load.batch // RANKS, load.batch - load.batch // RANKS]
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        self.first_samples = torch.tensor([0, *ends], device=DEVICE)

    @property
    def bytes(self) -> int:
        """Bytes that a lookup reads and writes: rows, ids, offsets, vectors."""
        of_rows = self.count * (self.load.dim * 4 + 8)
        return of_rows + self.offsets.numel() * 8 + self.load.batch * self.width * 4

    def pool(
        self,
        kernels: Any,
        outputs: list[Tensor],
        *,
        is_mean: bool = False,
        is_weighted: bool = False,
        first_column: int = 0,
    ) -> None:
        """Pools into ``outputs``, ``[samples, stride]`` of each rank, from a column on."""
        first_samples = self.first_samples
        if len(outputs) == 1:
            first_samples = torch.tensor([0, self.load.batch], device=DEVICE)
        kernels.pool.pool_to_ranks(
            self.rows,
            self.first_rows,
            (self.ids, self.offsets, self.weights if is_weighted else None),
            torch.tensor([output.data_ptr() for output in outputs], device=DEVICE),
            first_samples,
            self.columns + first_column,
            outputs[0].shape[1],
            is_mean=is_mean,
        )

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


def check(kernels: Any) -> list[dict[str, Any]]:
    """Compares with torch, to the last bit."""
    rows = []
    shapes = [(64, [3, 0, 9, 2]), (8, [11, 6]), (128, [5])]
    if not IS_DRY:
        shapes.append((64, [1000, 24, 0, 3000]))
    for dim, counts in shapes:
        load = Load("check", 3, 100, sum(counts), 0, 6, dim)
        case = Case(load, seed=dim, counts=counts)
        for is_mean, is_weighted in [(False, False), (True, False), (False, True), (True, True)]:
            outputs = [torch.full((n, case.width + 4), float("nan"), device=DEVICE) for n in counts]
            case.pool(kernels, outputs, is_mean=is_mean, is_weighted=is_weighted)
            found = torch.cat(outputs)
            expected = case.reference(is_mean, is_weighted)
            is_equal = torch.equal(found[:, : case.width], expected)
            is_inside = bool(found[:, case.width :].isnan().all())
            rows.append(
                {
                    "part": "correctness",
                    "dim": dim,
                    "ranks": len(counts),
                    "mean": is_mean,
                    "weighted": is_weighted,
                    "equal": is_equal and is_inside,
                }
            )
    pads = [torch.zeros(2, 32, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    words = torch.tensor([pad[1].data_ptr() for pad in pads], device=DEVICE)
    kernels.signals.signal_ranks(words, 7)
    late = [kernels.signals.wait_for_ranks(pads[0], epoch, spins=100).tolist() for epoch in (7, 8)]
    rows.append({"part": "signals", "equal": late == [[1, 0], [1, 1]]})
    return rows


def timed(run: Callable[[], object], repeats: int = 15) -> float | None:
    """Returns the median milliseconds on the device, or None in a dry run."""
    return median_ms(lambda: device_ms(run), run, repeats)


def timed_on_host(run: Callable[[], object], repeats: int = 9) -> float | None:
    """Returns the median milliseconds until the host has everything, or None in a dry run."""
    return median_ms(lambda: host_ms(run), run, repeats)


def median_ms(
    measure: Callable[[], float], run: Callable[[], object], repeats: int
) -> float | None:
    """Returns the median of ``measure`` after two that do not count; a dry run only runs."""
    if IS_DRY:
        run()
        return None
    return median([measure() for _ in range(repeats + 2)][2:])


def device_ms(run: Callable[[], object]) -> float:
    """Returns milliseconds between two events of the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def host_ms(run: Callable[[], object]) -> float:
    """Returns milliseconds of the host, with an idle device before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def copy_bandwidth() -> float | None:
    """Returns bytes per second, read and written, of a copy of 1 GiB on the device."""
    source = torch.ones((1 << 28) if not IS_DRY else 64, device=DEVICE)
    target = torch.empty_like(source)
    ms = timed(lambda: target.copy_(source))
    return None if ms is None else 2 * source.nbytes / (ms / 1e3)


def blocks_and_unpack(local: Tensor, received: Tensor, out: Tensor, own: int) -> None:
    """Copies the own block as a transport would, then puts columns side by side."""
    received.copy_(local)
    torch.cat([received[:own], received[own : 2 * own]], dim=1, out=out)


def measure(case: Case, kernels: Any, copy: float | None) -> dict[str, Any]:
    """Measures the kernel and what follows it, on the device alone."""
    load = case.load
    own = load.batch // RANKS
    local = torch.empty(load.batch, case.width, device=DEVICE)
    stride = RANKS * case.width
    outputs = [torch.empty(count, stride, device=DEVICE) for count in case.counts]
    received, out = torch.empty_like(local), torch.empty(own, stride, device=DEVICE)

    def unfused() -> None:
        case.pool(kernels, [local])
        blocks_and_unpack(local, received, out, own)

    def bags() -> None:
        parts = []
        for table in range(load.tables):
            offsets = case.offsets[table * load.batch : (table + 1) * load.batch + 1]
            ids = case.ids[int(bounds[table]) : int(bounds[table + 1])]
            rows = case.rows[table * load.rows : (table + 1) * load.rows]
            parts.append(
                torch.nn.functional.embedding_bag(
                    ids, rows, offsets - offsets[0], mode="sum", include_last_offset=True
                )
            )
        torch.cat(parts, dim=1)

    bounds = case.offsets[:: load.batch].tolist()
    compute = timed(lambda: case.pool(kernels, [local]))
    fused = timed(lambda: case.pool(kernels, outputs))
    case.pool(kernels, [local])
    case.pool(kernels, outputs)
    is_equal = torch.equal(torch.cat(outputs)[:, : case.width], local)
    whole = timed(unfused)
    torch_bags = timed(bags)
    share = None if fused is None or copy is None else case.bytes / (fused / 1e3) / copy
    return {
        "part": "kernel",
        "load": load.name,
        "measured": "dry-run" if IS_DRY else "measured-1gpu",
        "bytes": case.bytes,
        "compute_ms": compute,
        "fused_ms": fused,
        "copied_and_unpacked_ms": whole,
        "embedding_bag_ms": torch_bags,
        "share_of_copy": share,
        "fused_vs_compute": ratio(fused, compute),
        "unfused_vs_fused": ratio(whole, fused),
        "embedding_bag_vs_fused": ratio(torch_bags, fused),
        "equal": is_equal,
    }


def sweep(case: Case, kernels: Any, deadline: float) -> list[dict[str, Any]]:
    """Measures other tiles of the kernel, and puts back its own."""
    own = (kernels.pool.BAGS_PER_PROGRAM, kernels.pool.OPTIONS)
    outputs = [torch.empty(count, RANKS * case.width, device=DEVICE) for count in case.counts]
    rows = []
    for bags, warps in [(4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8)]:
        if time.perf_counter() > deadline:
            break
        kernels.pool.BAGS_PER_PROGRAM = bags
        kernels.pool.OPTIONS = {**own[1], "num_warps": warps}
        ms = timed(lambda: case.pool(kernels, outputs), repeats=7)
        rows.append(
            {"part": "tile", "load": case.load.name, "bags": bags, "warps": warps, "ms": ms}
        )
    kernels.pool.BAGS_PER_PROGRAM, kernels.pool.OPTIONS = own
    return rows


def over_pcie(case: Case, kernels: Any) -> dict[str, Any]:
    """Measures both ways to an output in the host's memory, for the second rank's samples."""
    load = case.load
    own = case.counts[1]
    stride = RANKS * case.width
    is_pinned = not IS_DRY
    here = torch.empty(case.counts[0], stride, device=DEVICE)
    there = torch.zeros(own, stride, pin_memory=is_pinned)
    local = torch.empty(load.batch, case.width, device=DEVICE)
    block = torch.empty(own, case.width, pin_memory=is_pinned)
    unpacked = torch.zeros(own, stride)

    def fused() -> None:
        case.pool(kernels, [here, there])

    def unfused() -> None:
        case.pool(kernels, [local])
        block.copy_(local[case.counts[0] :], non_blocking=True)
        if is_pinned:
            torch.cuda.synchronize()
        unpacked[:, : case.width] = block

    fused_ms, unfused_ms = timed_on_host(fused), timed_on_host(unfused)
    link = timed_on_host(lambda: block.copy_(local[case.counts[0] :], non_blocking=True))
    return {
        "part": "pcie",
        "load": load.name,
        "measured": "dry-run" if IS_DRY else "measured-pcie",
        "sent_bytes": block.nbytes,
        "fused_ms": fused_ms,
        "kernel_copy_unpack_ms": unfused_ms,
        "copy_ms": link,
        "copy_bytes_per_s": None if link is None else block.nbytes / (link / 1e3),
        "unfused_vs_fused": ratio(unfused_ms, fused_ms),
        "equal": torch.equal(there[:, : case.width], unpacked[:, : case.width]),
    }


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns above / below, where both were measured."""
    return None if above is None or not below else above / below


def show(rows: list[dict[str, Any]]) -> None:
    """Prints one line per row."""
    for row in rows:
        parts = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(parts), flush=True)


def machine() -> dict[str, Any]:
    """Returns what one must know of the machine."""
    told: dict[str, Any] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if not IS_DRY:
        told["gpu"] = torch.cuda.get_device_name()
        told["cuda"] = torch.version.cuda
    return told


def main() -> int:
    """Measures, prints and writes; returns 1 when something was not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: all paths, no times")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing after these")
    options = parser.parse_args()
    if not IS_DRY and not torch.cuda.is_available():
        print("no GPU here; --dry-run runs every path without one", file=sys.stderr)
        return 2
    deadline = time.perf_counter() + options.seconds
    kernels = load_kernels()
    rows = check(kernels)
    copy = copy_bandwidth()
    rows.append({"part": "copy", "bytes_per_s": copy})
    skipped = []
    for load in TINY if IS_DRY else FULL:
        if time.perf_counter() > deadline:
            skipped.append(load.name)
            continue
        case = Case(load)
        rows.append(measure(case, kernels, copy))
        rows.append(over_pcie(case, kernels))
        if load.name == "weak":
            rows += sweep(case, kernels, deadline)
        del case
    show(rows)
    result = {"machine": machine(), "is_dry": IS_DRY, "skipped": skipped, "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if row.get("equal") is False]
    if wrong:
        print(f"{len(wrong)} results differ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
