"""Ranks as processes: the example trains under torchrun, with the bits of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "sharded_dlrm.py"


def test_the_example_trains_with_the_bits_of_one_process() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["--check", "--steps=4", "--samples=32", "--exchange", "one_sided", "collective"]
    found = subprocess.run(
        [*command, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    for exchange in ("one_sided", "collective"):
        assert f"{exchange}: 2 ranks have the bits of one process" in found.stdout
