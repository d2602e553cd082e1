"""What does the exchange's kernel give on one GPU? One command, less than eight minutes.

    python tools/python/gpu/gpu_exchange.py --json gpu_exchange.json
    python tools/python/gpu/gpu_exchange.py --dry-run  # without a GPU: no times

Needs torch, triton and this repository; all but the cases run without the engine. Virtual ranks
share the device, so that figures labelled ``measured-1gpu`` know no link. Those labelled
``measured-pcie`` have one: the second rank's output lies in pinned memory of the host. In order:

- correctness: sum, mean, weights, empty bags, uneven ranks, against torch, to the last bit;
- copy: bytes per second of a device copy, the yardstick;
- kernel: the paper's loads, as a share of the yardstick; into one matrix and into the outputs of
  two ranks; other tiles; rows in fewer bytes; ``embedding_bag`` and ``cat`` beside;
- unpack: the same lookup with blocks copied and unpacked behind the kernel;
- pcie: the same two ways, over the link to the host;
- put, step, hot-row: the backward, see ``gpu_backward.py``;
- case: the tests of ``tierbed.dist`` on the device, see ``gpu_cases.py``; these need the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from copy import copy as shallow_copy
from pathlib import Path
from typing import Any

import torch
from gpu_backward import check_backward, measure_hot_rows, measure_put, measure_step
from gpu_cases import run_cases
from gpu_measure import (
    DEVICE,
    FULL,
    IS_DRY,
    RANKS,
    TINY,
    Case,
    Load,
    load_kernels,
    ratio,
    timed,
    timed_on_host,
)
from gpu_told import Told
from torch import Tensor


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
    """Measures other tiles of the kernel."""
    outputs = [torch.empty(count, RANKS * case.width, device=DEVICE) for count in case.counts]
    found = []
    for bags, rows, warps in [(1, 4, 1), (2, 2, 1), (2, 4, 1), (2, 8, 1), (4, 4, 1), (4, 4, 2)]:
        if time.perf_counter() > deadline:
            break
        tile = {"bags": bags, "rows_at_once": rows, "warps": warps}
        tried = kernels.tiles.MeasuredTile(
            gpu="any", kernel="pool_to_ranks", width=case.load.dim, tile=tile
        )
        tiles = kernels.tiles.Tiles((tried,))
        ms = timed(lambda tiles=tiles: case.pool(kernels, outputs, tiles=tiles), repeats=7)  # type: ignore[misc]
        found.append({"part": "tile", "load": case.load.name, **tile, "ms": ms})
    return found


def of_types(case: Case, kernels: Any, copy: float | None) -> list[dict[str, Any]]:
    """Measures rows that are kept in fewer bytes."""
    found, width = [], RANKS * case.width
    outputs = [torch.empty(count, width, device=DEVICE) for count in case.counts]
    for kind in (torch.float16, torch.bfloat16, torch.uint8):
        kept = shallow_copy(case)
        kept.rows = case.rows.to(kind)
        if kind == torch.uint8:
            # Scales of 1 and biases of 0, as bf16.
            kept.heads = torch.full((len(case.rows),), 0x3F80, dtype=torch.int32, device=DEVICE)
        ms = timed(lambda kept=kept: kept.pool(kernels, outputs), repeats=7)  # type: ignore[misc]
        share = None if ms is None or copy is None else kept.bytes / (ms / 1e3) / copy
        told = {"part": "type", "load": case.load.name, "rows": str(kind), "bytes": kept.bytes}
        found.append({**told, "ms": ms, "share_of_copy": share})
    return found


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
    parser.add_argument("--lines", type=Path, help="write each result there at once, a line each")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: all paths, no times")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing after these")
    options = parser.parse_args()
    if not IS_DRY and not torch.cuda.is_available():
        print("no GPU here; --dry-run runs every path without one", file=sys.stderr)
        return 2
    deadline = time.perf_counter() + options.seconds
    kernels = load_kernels()
    told = Told(options.lines)
    told.add({"part": "machine", **machine()})
    told.add(*check(kernels))
    told.add(*check_backward(kernels))
    told.add(*measure_hot_rows(kernels))
    copy = copy_bandwidth()
    told.add({"part": "copy", "bytes_per_s": copy})
    skipped = []
    for load in TINY if IS_DRY else FULL:
        if time.perf_counter() > deadline:
            skipped.append(load.name)
            continue
        case = Case(load)
        told.add(measure(case, kernels, copy))
        told.add(over_pcie(case, kernels))
        if load.name == "weak":
            told.add(*sweep(case, kernels, deadline))
            told.add(*of_types(case, kernels, copy))
        told.add(measure_put(case, kernels))
        told.add(measure_step(case, kernels, copy))
        del case
    for row in run_cases(IS_DRY, deadline):
        told.add(row)
    rows = told.rows[1:]
    result = {"machine": machine(), "is_dry": IS_DRY, "skipped": skipped, "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if row.get("equal") is False]
    if wrong:
        print(f"{len(wrong)} results differ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
