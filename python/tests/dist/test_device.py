"""Rows on devices without a device: kernels interpreted, heaps of the host, a stand-in for torch's
symmetric memory; and the same on a GPU where there is one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_cases import ALONE

pytest.importorskip("triton", reason="triton is not installed")
CASES = Path(__file__).with_name("device_cases.py")
COLLECTIVE_CASES = Path(__file__).with_name("collective_cases.py")
WINDOW_CASES = Path(__file__).with_name("window_cases.py")
# Of windows, those that need no simulated streams.
WINDOWS = ["bits", "sequences", "restarts", "moved_plans", "evaluation", "other_steps", "nonfinite"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def start(*arguments: str, cases: Path = CASES, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, str(cases), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **environment,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **variables,
        },
    )


def check(*cases: subprocess.Popen[str]) -> None:
    try:
        for case in cases:
            told = case.communicate(timeout=240)
            assert case.returncode == 0, told[1][-4000:]
    finally:
        for case in cases:
            # Its forks too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(case.pid, signal.SIGKILL)
            case.wait()


def test_ranks_that_share_memory() -> None:
    trainings = "training_of_whole_tables/training_of_divided_tables"
    alone = "heaps,pinned_gradients,stand_in,single_ids,default_plan,refusals"
    cases = f"{trainings}/{alone},checkpoints"
    check(start(cases, "cpu", TRITON_INTERPRET="1"))


def test_ranks_that_share_no_memory() -> None:
    cases = "collective/silent_process/collective_refusals,queued_calls,processes,calls_of_gpus"
    check(start(cases, "cpu", cases=COLLECTIVE_CASES, TRITON_INTERPRET="1"))


def test_windows() -> None:
    cases = "bits,default_dtype,sequences/restarts,moved_plans/evaluation,other_steps,nonfinite"
    cases += "/late_copies/host_only,refusals,failed_launch"
    check(start(cases, "cpu", cases=WINDOW_CASES, TRITON_INTERPRET="1"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_remedy_is_told() -> None:
    check(start("without_gpu", "cpu"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", ALONE)
def test_on_a_gpu(case: str) -> None:
    check(start(case, "cuda"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_on_a_gpu(case: str) -> None:
    check(start(case, "cuda", cases=WINDOW_CASES))


@pytest.mark.gpu
@needs_gpu
def test_collective_calls_on_a_gpu() -> None:
    # Ranks are threads: their tensors go through memory of the host.
    check(start("collective", "cuda", cases=COLLECTIVE_CASES))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("device_heap", ["auto", "pinned"])
def test_processes_on_a_gpu(device_heap: str, tmp_path: Path) -> None:
    # Both on one GPU, which torch allows for tests.
    allow = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    ranks = [str(rank) for rank in range(2)]
    check(
        *(start("processes", "cuda", rank, str(tmp_path), device_heap, **allow) for rank in ranks)
    )
