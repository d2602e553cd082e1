"""What are the ceilings of this machine? Copies, random rows, links; the first stage of a campaign.

    python tools/python/gpu/gpu_probe.py --lines probe.jsonl [--dry-run]

- machine: GPU, driver, link, processor, versions;
- copy: bytes per second of a copy on the device, read and written;
- gather: bytes per second of random rows of 64 to 512 bytes, by a kernel of a few lines of CUDA and
  by torch: what lookups of single rows can reach at most;
- link: pinned and pageable copies both ways, alone and both at once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_measure import DEVICE, IS_DRY, timed, timed_on_host
from gpu_told import Told
from torch import Tensor

MIB = 1 << 20
# One thread copies 16 bytes of a row; a warp has 512 bytes under way.
GATHER = r"""
#include <cstdint>
__global__ void gather(
    const float4* rows, const int64_t* ids, float4* out, int64_t parts, int per) {
    int64_t at = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (at < parts) out[at] = rows[ids[at / per] * per + at % per];
}
extern "C" int launch(
    const void* rows, const void* ids, void* out, int64_t count, int per, void* stream) {
    int64_t parts = count * per;
    gather<<<(parts + 255) / 256, 256, 0, (cudaStream_t)stream>>>(
        (const float4*)rows, (const int64_t*)ids, (float4*)out, parts, per);
    return (int)cudaGetLastError();
}
"""


def machine() -> dict[str, Any]:
    """Returns what one must know of the machine."""
    told: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            told["processor"] = line.split(":", 1)[1].strip()
            break
    if not IS_DRY:
        told |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        told |= _link_of_gpu()
    return told


def _link_of_gpu() -> dict[str, Any]:
    asked = "driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.memory"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia_smi": f"left out: {error}"}
    names = ("driver", "pcie_generation", "pcie_lanes", "memory_clock")
    return dict(zip(names, (word.strip() for word in found.stdout.split(",")), strict=True))


def copies(told: Told) -> float | None:
    """Measures a copy on the device; returns its bytes per second."""
    source = torch.ones(256 * MIB if not IS_DRY else 64, device=DEVICE)
    target = torch.empty_like(source)
    ms = timed(lambda: target.copy_(source))
    speed = None if ms is None else 2 * source.nbytes / (ms / 1e3)
    told.add({"part": "copy", "bytes_per_s": speed})
    return speed


def compiled() -> ctypes.CDLL | str:
    """Returns the kernel that gathers rows, or why there is none."""
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if IS_DRY or compiler is None:
        return "a dry run" if IS_DRY else "nvcc is not installed"
    major, minor = torch.cuda.get_device_capability()
    folder = Path(tempfile.mkdtemp())
    (folder / "gather.cu").write_text(GATHER)
    command = [compiler, "-O3", "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
    command += ["-o", str(folder / "gather.so"), str(folder / "gather.cu")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        return found.stderr.strip().splitlines()[-1]
    library = ctypes.CDLL(str(folder / "gather.so"))
    pointer = ctypes.c_void_p
    library.launch.argtypes = [*[pointer] * 3, ctypes.c_int64, ctypes.c_int, pointer]
    return library


def gathers(told: Told, copy: float | None) -> None:
    """Measures random rows, by a kernel of its own and by torch."""
    library = compiled()
    table_bytes, count = (4096 * MIB, 4_000_000) if not IS_DRY else (4096, 8)
    for row_bytes in (64, 128, 256, 512):
        dim = row_bytes // 4
        rows = torch.ones(table_bytes // row_bytes, dim, device=DEVICE)
        ids = torch.randint(len(rows), (count,), device=DEVICE)
        out = torch.empty(count, dim, device=DEVICE)
        # Read and written rows, and the ids.
        moved = count * (2 * row_bytes + 8)
        row: dict[str, Any] = {"part": "gather", "row_bytes": row_bytes}
        for name, run in (
            ("torch", lambda: torch.index_select(rows, 0, ids, out=out)),  # noqa: B023
            ("kernel", lambda: _gather(library, rows, ids, out)),  # noqa: B023
        ):
            if name == "kernel" and isinstance(library, str):
                row["kernel_left_out"] = library
                continue
            ms = timed(run)
            speed = None if ms is None else moved / (ms / 1e3)
            row |= {f"{name}_bytes_per_s": speed}
            row |= {f"{name}_share_of_copy": None if None in (speed, copy) else speed / copy}
        row["equal"] = bool((out == 1.0).all())
        told.add(row)


def _gather(library: ctypes.CDLL | str, rows: Tensor, ids: Tensor, out: Tensor) -> None:
    assert not isinstance(library, str)
    stream = torch.cuda.current_stream().cuda_stream
    pointers = rows.data_ptr(), ids.data_ptr(), out.data_ptr()
    failed = library.launch(*pointers, ids.numel(), rows.shape[1] // 4, stream)
    assert not failed, f"error {failed} of CUDA"


def links(told: Told) -> None:
    """Measures copies between host and device, each way and both at once."""
    for size in (MIB, 16 * MIB, 256 * MIB) if not IS_DRY else (1024,):
        here = torch.zeros(size // 4, device=DEVICE)
        other = torch.zeros_like(here)
        for kind in ("pinned", "pageable"):
            host = torch.zeros(size // 4, pin_memory=kind == "pinned" and not IS_DRY)
            back = torch.zeros(size // 4, pin_memory=kind == "pinned" and not IS_DRY)
            down, up = (_copy(back, here), _copy(other, host))
            both = _both(down, up)
            row: dict[str, Any] = {"part": "link", "memory": kind, "bytes": size}
            for name, run, times in (("up", up, 1), ("down", down, 1), ("both", both, 2)):
                ms = timed_on_host(run)
                row[f"{name}_bytes_per_s"] = None if ms is None else times * size / (ms / 1e3)
            told.add(row)


def _copy(target: Tensor, source: Tensor) -> Any:
    return lambda: target.copy_(source, non_blocking=True)


def _both(down: Any, up: Any) -> Any:
    stream = None if IS_DRY else torch.cuda.Stream()

    def run() -> None:
        down()
        if stream is None:
            up()
            return
        with torch.cuda.stream(stream):
            up()

    return run


def main() -> int:
    """Measures; returns 1 when something was not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, help="write each result there at once, a line each")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: all paths, no times")
    options = parser.parse_args()
    told = Told(options.lines)
    told.add({"part": "machine", **machine()})
    copy = copies(told)
    gathers(told, copy)
    links(told)
    return 1 if any(row.get("equal") is False for row in told.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
