"""The result file of a suite: rows, ratios, machine, date and command, and its picture."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierbed._util.report import Row, write_json
from tierbed_bench.figures import Figure, save_figure

__all__ = ["machine", "write_suite"]


def machine() -> dict[str, Any]:
    """Returns what one must know about this machine to read a measurement."""
    import torch

    from tierbed import _native

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "cpu_features": _native.cpu_features(),
        "memory_bytes": memory_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "tierbed": _native.version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_suite(
    out: str | os.PathLike[str],
    suite: str,
    rows: Sequence[Row],
    ratios: Mapping[str, float | None],
    figure: Figure | None = None,
    told: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``<out>/<suite>.json``, and ``<out>/<suite>.png`` when a figure is given.

    Args:
        out: Folder.
        suite: Name of the benchmark.
        rows: One flat object per measurement: its parameters and metrics in snake_case.
        ratios: ``<system>_vs_<baseline>``: ratio; None where a side is missing.
        figure: Draws onto a matplotlib figure.
        told: What else one must know, such as sizes; beside ``machine`` and ``date``.

    Returns:
        The path of the JSON file.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite}.json"
    write_json(
        path,
        {
            "suite": suite,
            "machine": machine(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": _commit(),
            "command": _command(),
            **(told or {}),
            "rows": [dict(row) for row in rows],
            "ratios": dict(ratios),
        },
    )
    if figure is not None:
        save_figure(folder / f"{suite}.png", figure)
    return path


def _commit() -> str | None:
    """Returns the commit of the checkout that is measured; None outside of one."""
    call = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
