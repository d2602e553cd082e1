"""The backward of rows on devices: what ``triton_cases.py`` runs of it in its processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compile_kit import DIMS, check_rounding, check_wide, compiled, width_of
from torch._subclasses.fake_tensor import FakeTensorMode

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist.joined import JoinedBags


def interpret_all() -> None:
    check_sorted()
    check_that_the_host_never_waits()


def compile_all() -> None:
    for dim in DIMS:
        compile_step(dim, "row_wise_adagrad")
        compile_weight_grads(dim)
    for kind in ("sgd", "adagrad"):
        compile_step(64, kind)
    compile_list_uses()


def check_sorted() -> None:
    """Uses are sorted as numpy sorts them, in 32 bits where that is enough."""
    from tierbed.dist.kernels import uses as kernels

    kernels.USES = 16
    for use_total, row_total in [(1, 9), (50, 9), (64, 1), (48, 1 << 40)]:
        generator = torch.Generator().manual_seed(use_total)
        rows = torch.randint(0, row_total, (use_total,), generator=generator)
        grads_at, numbers = torch.randperm(use_total), torch.rand(use_total)
        found = kernels.sort_uses(
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
    from tierbed.dist.device import group_rows
    from tierbed.dist.device.plan import DevicePlan
    from tierbed.dist.device.store import Arena
    from tierbed.dist.kernels import step_rows, uses, weight_grads

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
                is_written=torch.zeros(20, dtype=torch.bool),
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
    assert launched == ["weight_grads_kernel", "list_uses_kernel", "step_rows_kernel"]


def compile_step(dim: int, kind: str) -> None:
    from tierbed.dist.kernels import step_rows as step
    from tierbed.dist.kernels.launch import OPTIONS

    rows, warps = step.step_tile(dim)
    floats = ["weights", "state", "scales", "counts", "grads"]
    ptx = compiled(
        step.step_rows_kernel,
        dict.fromkeys(floats, "*fp32")
        | dict.fromkeys(["use_counts", *NARROW], "*i32")
        | {"use_total": "i32"}
        | dict.fromkeys(["lr", "eps", "weight_decay"], "fp32"),
        {
            "dim": dim,
            "width": max(16, width_of(dim)),
            "kind": step.KINDS[kind],
            "is_aligned": dim % 4 == 0,
            "is_weighted": True,
            "is_mean": True,
            "has_decay": True,
            "rows_per_program": rows,
        },
        {**OPTIONS, "num_warps": warps},
    )
    check_rounding(ptx)
    check_wide(ptx, dim, "ld")


def compile_weight_grads(dim: int) -> None:
    from tierbed.dist.kernels import weight_grads as dots
    from tierbed.dist.kernels.launch import OPTIONS

    uses, warps = dots.uses_tile(dim)
    ptx = compiled(
        dots.weight_grads_kernel,
        dict.fromkeys(["weights", "counts", "grads"], "*fp32") | {"use_total": "i32"},
        {"dim": dim, "width": max(16, width_of(dim)), "is_mean": True, "uses_per_program": uses},
        {**OPTIONS, "num_warps": warps},
    )
    check_rounding(ptx)


# What fits into 32 bits.
NARROW = ["rows", "bounds", "row_of_use", "grads_at"]


def compile_list_uses() -> None:
    from tierbed.dist.kernels import uses

    floats = ["scales", "counts", "sorted_scales", "sorted_counts"]
    compiled(
        uses.list_uses_kernel,
        dict.fromkeys(floats, "*fp32")
        | dict.fromkeys(["keys", "rows", "bounds", "row_of_use", "sorted_at"], "*i32")
        | {"use_total": "i32"},
        {"is_weighted": True, "is_mean": True, "uses_per_program": uses.USES},
        {"num_warps": 4},
    )
