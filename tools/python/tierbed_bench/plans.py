"""Is what `tierbed plan --full-samples` computes what a run over these samples needs?

Tables of several sizes, each with samples and memory in proportion. A quarter of the samples, or
another share, is rehearsed and continued; all are rehearsed beside it. Each is a process of its
own, so that memory is that of one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierbed._util.progress import Progress
from tierbed._util.report import Row, print_table, write_json
from tierbed.config.words import Positive
from tierbed.errors import InvalidError
from tierbed_bench.generator import scale_for_rows
from tierbed_bench.suite import write_suite

__all__ = ["COMPUTED", "PlanOptions", "run_plans"]

#: What is computed, and what is compared with it.
COMPUTED = (
    "disk_bytes",
    "dram_peak_bytes",
    "process_peak_bytes",
    "first_epoch_read_bytes_per_batch",
    "first_epoch_write_bytes_per_batch",
    "later_epoch_read_bytes_per_batch",
    "later_epoch_write_bytes_per_batch",
)
#: Of a table of a gigabyte: samples of a full run, and bytes of memory.
SAMPLES_PER_GB, MEMORY_PER_GB = 500_000, 20 << 20
ORDERS = ("forward", "window")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is compared.

    Args:
        sizes: Bytes of all tables with optimizer state, in GB.
        orders: Orders to train in.
        share: Of the samples, so many are rehearsed.
        dim: Elements of a row.
        batch_size: Samples per step.
        seed: Of the samples.
    """

    sizes: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    orders: tuple[str, ...] = ORDERS
    share: float = 0.25
    dim: Positive = 16
    batch_size: Positive = 256
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise InvalidError(f"--share is above 0 and at most 1, not {self.share:g}")
        if not self.sizes or min(self.sizes) <= 0.0:
            raise InvalidError("--sizes are gigabytes above 0, by comma")
        if wrong := set(self.orders) - set(ORDERS):
            raise InvalidError(f"--orders are of {ORDERS}, not {sorted(wrong)}")


def run_plans(out: Path, options: PlanOptions, json_path: Path | None = None) -> Path:
    """Computes and rehearses, prints both, and writes ``OUT/plans.json``.

    Args:
        out: Folder for the file.
        options: What is compared.
        json_path: Where the rows go, too.
    """
    rows: list[Row] = []
    jobs = [(size, order) for size in options.sizes for order in options.orders]
    with Progress("plans", len(jobs), "runs") as bar:
        for size, order in jobs:
            rows += _compared(size, order, options)
            bar.advance(1)
    print_table("computed and measured", rows)
    worst = {
        name: max(abs(float(row["ratio"]) - 1.0) for row in rows if row["value"] == name)
        for name in COMPUTED
    }
    out.mkdir(parents=True, exist_ok=True)
    told = {"share": options.share, "dim": options.dim, "batch_size": options.batch_size}
    path = write_suite(out, "plans", rows, worst, told=told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _compared(size_gb: float, order: str, options: PlanOptions) -> list[Row]:
    """Returns a row for each value of a table of this size."""
    # Adagrad: as much state as weights, and a use count.
    table_rows = round(size_gb * 1e9 / (4 * (2 * options.dim + 1)))
    samples = max(64, round(size_gb * SAMPLES_PER_GB))
    few = max(16, round(samples * options.share))
    given = {
        "--format": "synthetic",
        "--scale": f"{scale_for_rows(table_rows):.9f}",
        "--seed": options.seed,
        "--eval-last": 0,
        "--dim": options.dim,
        "--batch-size": options.batch_size,
        "--dram-budget": max(2 << 20, round(size_gb * MEMORY_PER_GB)),
        "--order": order,
    }
    computed = _planned({**given, "--samples": few, "--full-samples": samples})
    measured = _planned({**given, "--samples": samples})
    return [
        {
            "table_gb": size_gb,
            "order": order,
            "samples": samples,
            "value": name,
            "computed": computed[f"full_{name}"],
            "measured": measured[name],
            "ratio": (computed[f"full_{name}"] or 0.0) / max(1.0, measured[name]),
        }
        for name in COMPUTED
    ]


def _planned(options: dict[str, Any]) -> dict[str, Any]:
    """Runs `tierbed plan` in a process; returns its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        arguments = [str(part) for option in options.items() for part in option]
        done = subprocess.run(
            [sys.executable, "-m", "tierbed", "plan", *arguments, "--json", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode != 0:
            raise InvalidError(f"tierbed plan failed: {done.stderr.strip()[-500:]}")
        return dict(json.loads(path.read_text()))
