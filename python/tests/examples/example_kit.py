"""Runs an example as its reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *options: str) -> str:
    """Returns what the example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def last(said: str, run_name: str, quality: str) -> float:
    """Returns the quality that the report tells of a run."""
    begin = f"{run_name}: {quality} "
    found = [line for line in said.splitlines() if line.startswith(begin)]
    assert len(found) == 1, said
    return float(found[0][len(begin) :].split(",")[0])


def rows_mib(said: str, run_name: str) -> float:
    """Returns the memory that rows of a run took, in MiB."""
    found = [line for line in said.splitlines() if line.startswith(f"{run_name}: ")]
    told = [line for line in found if "rows took " in line]
    assert len(told) == 1, said
    return float(told[0].split("rows took ")[1].split(" MiB")[0])
