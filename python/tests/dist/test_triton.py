"""The GPU kernel without a GPU: interpreted against the CPU kernels, and compiled for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
CASES = Path(__file__).with_name("triton_cases.py")


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Starts all cases at once; each test waits for its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables.pop("TRITON_INTERPRET", None)
    started = {}
    for case in ("interpret", "compile"):
        started[case] = subprocess.Popen(
            [sys.executable, str(CASES), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**variables, **({"TRITON_INTERPRET": "1"} if case == "interpret" else {})},
        )
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def told(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-4000:]
    return out


def test_the_interpreted_kernels_have_the_bits_of_the_cpu_kernels(
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    told(processes["interpret"])


def test_sm_90_stores_to_peers_in_128_bits(processes: dict[str, subprocess.Popen[str]]) -> None:
    assert "st.global.cs.v4.b32" in told(processes["compile"])
