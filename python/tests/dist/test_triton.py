"""The GPU kernel without a GPU: interpreted against the CPU kernels, and compiled for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
CASES = Path(__file__).with_name("triton_cases.py")


def run(case: str, **variables: str) -> str:
    found = subprocess.run(
        [sys.executable, str(CASES), case],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        timeout=240,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


def test_the_interpreted_kernel_has_the_bits_of_the_cpu_kernels() -> None:
    run("interpret", TRITON_INTERPRET="1")


def test_sm_90_stores_to_peers_in_128_bits() -> None:
    assert "st.global.v4.b32" in run("compile")
