"""What does the backward give on one GPU? Part of ``gpu_exchange.py``.

- put: gradients written into the matrices of two holders, next to packing them and copying blocks;
- step: uses sorted, gradients added per row in order, rows stepped; next to atomic additions
  (``index_add_``), which have no order and so no equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_measure import DEVICE, IS_DRY, RANKS, Case, Load, ratio, timed
from torch import Tensor

LR = 0.05


def uses_of(case: Case, kernels: Any) -> Any:
    """Sorts the uses of a batch, whose gradients are one matrix ``[B, width]``."""
    lengths = torch.diff(case.offsets)
    bag = torch.repeat_interleave(lengths, output_size=case.count)
    table, sample = bag // case.load.batch, bag % case.load.batch
    rows = case.first_rows[table] + case.ids
    grads_at = sample * case.width + case.columns[table]
    totals = {"row_total": case.rows.shape[0], "grad_total": case.load.batch * case.width}
    return kernels.uses.sort_uses(rows, grads_at, None, None, **totals)


def rows_in(uses: Any) -> int:
    """Returns how many rows a batch uses."""
    return int(uses.row_of_use[-1]) + 1 if uses.row_of_use.numel() else 0


def numbers_of(kernels: Any, kind: str) -> Any:
    """Returns the numbers of an optimizer."""
    return kernels.step.StepNumbers(kind=kind, lr=LR, eps=1e-8, weight_decay=0.0)


def check_backward(kernels: Any) -> list[dict[str, Any]]:
    """Compares steps with numpy, row by row in order, to the last bit."""
    told = []
    for kind in ("sgd", "row_wise_adagrad"):
        case = Case(Load("check", 3, 50, 20, 0, 6, 48), seed=5)
        grads = torch.randn(20, case.width, device=DEVICE)
        state = torch.full((150, 0 if kind == "sgd" else 1), 0.5, device=DEVICE)
        counts = torch.zeros(150, dtype=torch.int32, device=DEVICE)
        uses = uses_of(case, kernels)
        expected = case.rows.cpu().numpy().copy()
        flat, bounds = grads.cpu().numpy().reshape(-1), uses.bounds.tolist()
        for at, row in enumerate(uses.rows[: rows_in(uses)].tolist()):
            total = np.zeros(48, np.float32)
            for begin in uses.grads_at[bounds[at] : bounds[at + 1]].tolist():
                total += flat[begin : begin + 48]
            rate = np.float32(LR)
            if kind != "sgd":
                lanes = np.zeros(16, np.float32)
                for part in (total * total).reshape(-1, 16):
                    lanes += part
                for half in (8, 4, 2, 1):
                    lanes = lanes[:half] + lanes[half:]
                sum_of_row = np.float32(0.5) + lanes[0] / np.float32(48)
                rate = rate / (np.sqrt(sum_of_row) + np.float32(1e-8))
            expected[row] -= rate * total
        numbers = numbers_of(kernels, kind)
        kernels.step.step_rows(case.rows, state, counts, uses, grads, numbers)
        is_equal = np.array_equal(case.rows.cpu().numpy(), expected)
        told.append({"part": "step-correctness", "optimizer": kind, "equal": is_equal})
    return told


def measure_put(case: Case, kernels: Any) -> dict[str, Any]:
    """Measures how gradients reach two holders on one device."""
    load, own = case.load, case.counts[0]
    stride = RANKS * case.width
    grad = torch.randn(own, stride, device=DEVICE)
    matrices = [torch.empty(load.batch, case.width, device=DEVICE) for _ in range(RANKS)]
    runs, holders = [], []
    for rank in range(RANKS):
        for table in range(load.tables):
            column = table * load.dim
            runs.append((rank * case.width + column, column, load.dim, case.width))
            holders.append(matrices[rank].data_ptr())
    described, addresses = torch.tensor(runs, device=DEVICE), torch.tensor(holders, device=DEVICE)
    blocks = [torch.empty(load.batch, case.width, device=DEVICE) for _ in range(RANKS)]

    def put() -> None:
        kernels.put.put_grads(grad, described, addresses, 0, load.dim)

    def pack_and_copy() -> None:
        packed = torch.cat([part.reshape(-1) for part in torch.split(grad, case.width, dim=1)])
        for block, part in zip(blocks, packed.view(RANKS, own, case.width), strict=True):
            block[:own].copy_(part)

    put_ms, packed_ms = timed(put), timed(pack_and_copy)
    return {
        "part": "put",
        "load": load.name,
        "measured": "dry-run" if IS_DRY else "measured-1gpu",
        "bytes": 2 * grad.nbytes,
        "put_ms": put_ms,
        "pack_and_copy_ms": packed_ms,
        "unfused_vs_fused": ratio(packed_ms, put_ms),
        "equal": all(
            torch.equal(matrix[:own], block[:own])
            for matrix, block in zip(matrices, blocks, strict=True)
        ),
    }


def measure_step(case: Case, kernels: Any, copy: float | None) -> dict[str, Any]:
    """Measures sorting and stepping; changes the case's rows."""
    load = case.load
    grads = torch.randn(load.batch, case.width, device=DEVICE)
    counts = torch.zeros(case.rows.shape[0], dtype=torch.int32, device=DEVICE)
    state = {
        "sgd": torch.empty(case.rows.shape[0], 0, device=DEVICE),
        "row_wise_adagrad": torch.zeros(case.rows.shape[0], 1, device=DEVICE),
    }
    uses = uses_of(case, kernels)
    touched = rows_in(uses)
    longest = int(torch.diff(uses.bounds[: touched + 1]).max()) if touched else 0
    sort_ms = timed(lambda: uses_of(case, kernels), repeats=5)

    def step(kind: str) -> None:
        numbers = numbers_of(kernels, kind)
        kernels.step.step_rows(case.rows, state[kind], counts, uses, grads, numbers)

    ms = {kind: timed(lambda kind=kind: step(kind), repeats=7) for kind in state}  # type: ignore[misc]
    atomic_ms = timed(lambda: add_atomically(case, grads), repeats=5)
    moved = case.count * (load.dim * 4 + 16) + touched * (load.dim * 8 + 24)
    sgd_ms = ms["sgd"]
    share = None if sgd_ms is None or copy is None else moved / (sgd_ms / 1e3) / copy
    return {
        "part": "step",
        "load": load.name,
        "measured": "dry-run" if IS_DRY else "measured-1gpu",
        "bytes": moved,
        "rows_touched": touched,
        "uses_of_a_row_max": longest,
        "sort_ms": sort_ms,
        "sgd_ms": sgd_ms,
        "row_wise_adagrad_ms": ms["row_wise_adagrad"],
        "atomic_sgd_ms": atomic_ms,
        "share_of_copy": share,
        "atomic_vs_sgd": ratio(atomic_ms, sgd_ms),
    }


def measure_hot_rows(kernels: Any) -> list[dict[str, Any]]:
    """Measures the step of one row that a batch uses again and again."""
    told, dim, samples = [], 64, 4096
    for use_total in (100,) if IS_DRY else (100, 1_000, 10_000, 60_000):
        rows = torch.zeros(use_total, dtype=torch.int64, device=DEVICE)
        grads = torch.randn(samples, dim, device=DEVICE)
        grads_at = torch.arange(use_total, device=DEVICE) % samples * dim
        totals = {"row_total": 1, "grad_total": grads.numel()}
        uses = kernels.uses.sort_uses(rows, grads_at, None, None, **totals)
        weights, state = torch.randn(1, dim, device=DEVICE), torch.ones(1, 1, device=DEVICE)
        counts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        numbers = numbers_of(kernels, "row_wise_adagrad")
        arguments = (weights, state, counts, uses, grads, numbers)
        ms = timed(lambda given=arguments: kernels.step.step_rows(*given, is_aligned=True))  # type: ignore[misc]
        ns = None if ms is None else 1e6 * ms / use_total
        told.append({"part": "hot-row", "uses": use_total, "ms": ms, "ns_per_use": ns})
    return told


def add_atomically(case: Case, grads: Tensor) -> None:
    """Steps SGD by additions in any order, table by table."""
    by_bag = grads.view(case.load.batch, case.load.tables, case.load.dim)
    bounds = case.offsets[:: case.load.batch].tolist()
    lengths = torch.diff(case.offsets).view(case.load.tables, case.load.batch)
    for table in range(case.load.tables):
        ids = case.ids[bounds[table] : bounds[table + 1]]
        sample = torch.repeat_interleave(lengths[table], output_size=ids.numel())
        rows = case.rows[table * case.load.rows : (table + 1) * case.load.rows]
        rows.index_add_(0, ids, by_bag[sample, table], alpha=-LR)
