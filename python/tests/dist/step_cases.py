"""The backward of rows on devices: what ``triton_cases.py`` runs of it in its processes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from compile_kit import DIMS, check_rounding, compiled, width_of
from torch._subclasses.fake_tensor import FakeTensorMode

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist.device import group_rows
from tierbed.dist.device.plan import DevicePlan
from tierbed.dist.device.store import Arena
from tierbed.dist.joined import JoinedBags
from tierbed.dist.kernels import step_rows, uses, weight_grads
from tierbed.dist.kernels.launch import OPTIONS


def interpret_all() -> None:
    check_sorted()
    check_that_the_host_never_waits()
    check_rows_of_many_uses()


def compile_all() -> None:
    for dim in DIMS:
        compile_step(dim, "row_wise_adagrad")
        compile_weight_grads(dim)
    for kind in ("sgd", "adagrad"):
        compile_step(64, kind)
    compile_list_uses()


def check_sorted() -> None:
    """Uses are sorted as numpy sorts them, in 32 bits where that is enough."""
    uses.USES = 16
    for use_total, row_total in [(1, 9), (50, 9), (64, 1), (48, 1 << 40)]:
        generator = torch.Generator().manual_seed(use_total)
        rows = torch.randint(0, row_total, (use_total,), generator=generator)
        grads_at, numbers = torch.randperm(use_total), torch.rand(use_total)
        found = uses.sort_uses(
            rows, grads_at, numbers, 2 * numbers, row_total=row_total, grad_total=use_total
        )
        order = np.argsort(rows.numpy(), kind="stable")
        unique, starts = np.unique(rows.numpy()[order], return_index=True)
        count = int(found.row_of_use[-1]) + 1
        assert found.rows[:count].tolist() == unique.tolist()
        assert found.bounds[: count + 1].tolist() == [*starts, use_total]
        assert torch.equal(found.grads_at.long(), grads_at[order])
        assert found.scales is not None
        assert found.counts is not None
        assert torch.equal(found.scales, numbers[order])
        assert torch.equal(found.counts, 2 * numbers[order])
        assert found.rows.dtype == (torch.int64 if row_total > 1 << 31 else torch.int32)
        assert found.bounds.dtype == found.grads_at.dtype == torch.int32


def check_that_the_host_never_waits() -> None:
    """A step needs no number that is known on the device only: fake tensors have none."""
    launched: list[str] = []

    def note(kernel: Any, programs: int, *_: Any, **__: Any) -> None:
        assert isinstance(programs, int)
        launched.append(kernel.__name__)

    modules = (step_rows, uses, weight_grads)
    kept = [module.launch for module in modules]
    for module in modules:
        module.launch = note
    tables = [tb.EmbeddingBagConfig(10, 8, name, pooling="mean") for name in "ab"]
    plan = tbd.ShardingPlan(1, {name: tbd.TableWise(0) for name in "ab"})
    ((group,),) = DevicePlan(tables, plan).groups
    try:
        with FakeTensorMode():
            with pytest.raises(Exception, match="unique_consecutive"):
                torch.unique_consecutive(torch.zeros(3))
            arena = Arena(
                weights=torch.zeros(20, 8),
                state=torch.zeros(20, 1),
                use_counts=torch.zeros(20, dtype=torch.int32),
                optimizer=tb.RowWiseAdagrad(lr=0.1),
                first_rows=[0, 10],
            )
            indices, weights = torch.zeros(40, dtype=torch.int64), torch.zeros(40)
            bags = JoinedBags([3, 4], indices, torch.zeros(15, dtype=torch.int64), weights)
            rows = group_rows.GroupRows(group, arena, 16)
            rows.step(bags, torch.zeros(7 * 16), 16, torch.zeros(40, dtype=torch.int64))
    finally:
        for module, own in zip(modules, kept, strict=True):
            module.launch = own
    steps = ["step_rows_kernel"] * 2
    assert launched == ["weight_grads_kernel", "list_uses_kernel", *steps]


def check_rows_of_many_uses() -> None:
    """Rows with a program of their own have the bits of additions in order."""
    step_rows.MANY = 8
    # Below, at and above what makes a row one of many uses; at multiples and between them.
    for lengths in ([8], [7], [3, 8, 7, 21, 1, 8, 16], [40, 1, 9, 15, 2]):
        for dim, kind, has_factors in [
            (12, "sgd", True),
            (33, "row_wise_adagrad", False),
            (128, "row_wise_adagrad", False),
        ]:
            generator = torch.Generator().manual_seed(len(lengths))
            rows = torch.cat([torch.full((n,), 2 * at) for at, n in enumerate(lengths)])
            rows = rows[torch.randperm(len(rows), generator=generator)]
            grads = torch.randn(len(rows), dim, generator=generator)
            grads_at = dim * torch.randperm(len(rows), generator=generator)
            scales = torch.rand(len(rows), generator=generator) if has_factors else None
            counts = torch.full((len(rows),), 3.0) if has_factors else None
            weights = torch.randn(2 * len(lengths), dim, generator=generator)
            expected = weights.numpy().copy()
            for row in range(0, 2 * len(lengths), 2):
                total = np.zeros(dim, np.float32)
                for use in (rows == row).nonzero().view(-1).tolist():
                    of_bag = grads.view(-1)[grads_at[use] : grads_at[use] + dim].numpy()
                    total += of_bag if scales is None else scales[use].numpy() * of_bag / 3
                expected[row] -= rate_of(total, kind) * total
            state = torch.full((2 * len(lengths), int(kind != "sgd")), 0.5)
            use_counts = torch.zeros(2 * len(lengths), dtype=torch.int32)
            totals = {"row_total": len(weights), "grad_total": grads.numel()}
            sorted_uses = uses.sort_uses(rows, grads_at, scales, counts, **totals)
            numbers = step_rows.StepNumbers(kind=kind, lr=0.1, eps=1e-8, weight_decay=0.0)
            step_rows.step_rows(weights, state, use_counts, sorted_uses, grads, numbers)
            assert np.array_equal(weights.numpy(), expected), (lengths, dim)
            # Each row is one program's, and each is somebody's.
            assert use_counts.tolist() == [1, 0] * len(lengths), lengths


def rate_of(total: Any, kind: str) -> Any:
    """Returns what a gradient is multiplied by, in the order of the CPU kernels."""
    if kind == "sgd":
        return np.float32(0.1)
    squares = np.zeros(-(-len(total) // 16) * 16, np.float32)
    squares[: len(total)] = total * total
    lanes = np.zeros(16, np.float32)
    for part in squares.reshape(-1, 16):
        lanes += part
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    sum_of_row = np.float32(0.5) + lanes[0] / np.float32(len(total))
    return np.float32(0.1) / (np.sqrt(sum_of_row) + np.float32(1e-8))


def compile_step(dim: int, kind: str) -> None:
    # Tiles of rows with many uses differ less, and take long to compile.
    is_chosen = kind == "row_wise_adagrad" and dim in (64, 1024)
    for is_many in (False, True) if is_chosen else (False,):
        ptx = step_ptx(dim, kind, is_many)
        check_rounding(ptx)
        first_add, first_load = ptx.index("add.rn.f32"), next(re.finditer(GRAD_LOAD, ptx)).start()
        at_once = step_rows.MANY_AT_ONCE if is_many else step_rows.FEW_AT_ONCE
        places = re.findall(r"ld\.global\.L1::evict_first[.\w:]*\.b32", ptx[:first_load])
        assert len(places) >= at_once, "a place waits for a gradient"
        loads = re.findall(GRAD_LOAD, ptx[:first_add])
        assert len(loads) >= at_once, "gradients wait for one another"
        # Two numbers for each thread, where many uses are on their way.
        if dim % 4 == 0 and dim >= 64:
            vector = ".v2.b32" if is_many else ".v4.b32"
            assert all(vector in load for load in loads), loads


# Gradients skip the first cache.
GRAD_LOAD = r"ld\.global\.cg[.\w]*"


def step_ptx(dim: int, kind: str, is_many: bool) -> str:
    tile = step_rows.step_tile(dim, is_many=is_many)
    floats = ["weights", "state", "scales", "counts", "grads"]
    return compiled(
        step_rows.step_rows_kernel,
        dict.fromkeys(floats, "*fp32")
        | dict.fromkeys(["use_counts", *NARROW], "*i32")
        | {"use_total": "i32"}
        | dict.fromkeys(["lr", "eps", "weight_decay"], "fp32"),
        {
            "dim": dim,
            "width": max(16, width_of(dim)),
            "kind": step_rows.KINDS[kind],
            "is_aligned": dim % 4 == 0,
            "is_weighted": True,
            "is_mean": True,
            "has_decay": True,
            "rows_per_program": tile.rows,
            "uses_at_once": tile.uses_at_once,
            "many": step_rows.MANY,
            "is_many": is_many,
        },
        {**OPTIONS, "num_warps": tile.warps},
    )


def compile_weight_grads(dim: int) -> None:
    uses, warps = weight_grads.uses_tile(dim)
    ptx = compiled(
        weight_grads.weight_grads_kernel,
        dict.fromkeys(["weights", "counts", "grads"], "*fp32") | {"use_total": "i32"},
        {"dim": dim, "width": max(16, width_of(dim)), "is_mean": True, "uses_per_program": uses},
        {**OPTIONS, "num_warps": warps},
    )
    check_rounding(ptx)
    # A product is added once, by the thread that has its lane; the others are the tree.
    lanes = max(1, uses * 16 // (32 * warps))
    assert ptx.count("add.rn.f32") <= lanes * max(16, width_of(dim)) // 16 + 9, dim
    assert len(ptx.splitlines()) < 800 + 2 * dim, dim


# What fits into 32 bits.
NARROW = ["rows", "bounds", "row_of_use", "grads_at"]


def compile_list_uses() -> None:
    floats = ["scales", "counts", "sorted_scales", "sorted_counts"]
    compiled(
        uses.list_uses_kernel,
        dict.fromkeys(floats, "*fp32")
        | dict.fromkeys(["keys", "rows", "bounds", "row_of_use", "sorted_at"], "*i32")
        | {"use_total": "i32"},
        {"is_weighted": True, "is_mean": True, "uses_per_program": uses.USES},
        {"num_warps": 4},
    )
