"""Tests of ``tierbed.dist`` on devices, run from the benchmark of the GPU exchange.

Each case of ``python/tests/dist/device_cases.py`` runs in a process of its own: heaps, training
with the bits of one process, checkpoints, refusals, ranks that share no memory, and two processes
on one GPU over torch's symmetric memory and over pinned memory. They need the engine, so ``make
setup`` first; without, they are named as left out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[3] / "python" / "tests" / "dist" / "device_cases.py"
COLLECTIVE_CASES = CASES.with_name("collective_cases.py")
# Those that a GPU has alone.
ALONE = [
    "heaps",
    "training",
    "pinned_gradients",
    "checkpoints",
    "single_ids",
    "default_plan",
    "refusals",
]
# A GPU compiles about a hundred kernels for the training.
SECONDS_MAX = 240.0


def run_cases(is_dry: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Runs the cases that there is time for; a dry run, interpreted, one of them."""
    device = "cpu" if is_dry else "cuda"
    for case in ["heaps"] if is_dry else ALONE:
        yield _run(case, [[str(CASES), case, device]], deadline)
    if not is_dry:
        yield _run("collective", [[str(COLLECTIVE_CASES), "collective", device]], deadline)
    for device_heap in [] if is_dry else ["auto", "pinned"]:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                [str(CASES), "processes", device, str(at), folder, device_heap] for at in range(2)
            ]
            yield _run(f"processes, {device_heap}", ranks, deadline)


def _run(case: str, commands: list[list[str]], deadline: float) -> dict[str, Any]:
    told: dict[str, Any] = {"part": "case", "case": case}
    left = min(SECONDS_MAX, deadline - time.perf_counter())
    if importlib.util.find_spec("pytest") is None or not _has_engine():
        return told | {"left_out": "the engine or pytest is not installed"}
    if left <= 0:
        return told | {"left_out": "no time"}
    variables = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    path = [str(CASES.parents[2]), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
        )
        for command in commands
    ]
    try:
        errors = [process.communicate(timeout=left)[1] for process in started]
    except subprocess.TimeoutExpired:
        errors = [f"took more than {left:.0f} seconds"] * len(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    is_equal = all(process.returncode == 0 for process in started)
    last = [line for text in errors for line in text.splitlines()[-1:]]
    return told | {"equal": is_equal} | ({} if is_equal else {"told": " | ".join(last)})


def _has_engine() -> bool:
    """Whether the engine is beside the sources, or installed."""
    package = CASES.parents[2] / "tierbed"
    if any(package.glob("_native*.so")):
        return True
    installed = importlib.util.find_spec("tierbed")
    return installed is not None and importlib.util.find_spec("tierbed._native") is not None
