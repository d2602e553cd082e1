"""`tierbed doctor`: what it finds, what it advises, and what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

import tierbed as tb
from tierbed._util.report import print_table
from tierbed.cli import main
from tierbed.cli.doctor import disk, examine, packages, system
from tierbed.cli.doctor.findings import Finding
from tierbed.cli.doctor.system import Mount, System

GIB = 1 << 30
MEMORY = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"


def machine(root: Path, files: dict[str, str] | None = None, **more: Any) -> System:
    """Returns a machine whose kernel has these files only."""
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    more.setdefault("limits", lambda _: (1 << 20, 1 << 20))
    fixed = {"root": root, "release": "6.1.0-13", "machine": "x86_64", "isa": "avx2", "cpus": 8}
    return System(**(fixed | more))


def found(name: str, findings: list[Finding]) -> Finding:
    [one] = [finding for finding in findings if finding.name == name]
    return one


def of_machine(name: str, root: Path, files: dict[str, str] | None = None, **more: Any) -> Finding:
    return found(name, system.findings(machine(root, files, **more)))


REFUSED = "io_uring_setup: Operation not permitted (EPERM)"


@pytest.mark.parametrize(
    ("reason", "files", "advice"),
    [
        (REFUSED, {"proc/sys/kernel/io_uring_disabled": "2\n"}, "io_uring_disabled=0"),
        (REFUSED, {"proc/sys/kernel/io_uring_disabled": "1\n"}, "kernel.io_uring_group"),
        (REFUSED, {"proc/self/status": "Name:\tx\nSeccomp:\t2\n"}, "in the seccomp profile"),
        (REFUSED, {"proc/self/status": "Name:\tx\nSeccomp:\t0\n"}, "SELinux or AppArmor"),
        ("io_uring_setup: not there (ENOSYS)", {}, "a kernel from 5.1 on"),
        ("io_uring_setup: not there (ENOSYS)", {"proc/self/status": "Seccomp:\t2"}, "seccomp pro"),
        ("io_uring_setup: Cannot allocate memory (ENOMEM)", {}, "ulimit -l 65536"),
    ],
)
def test_what_refuses_io_uring_is_named(
    tmp_path: Path, reason: str, files: dict[str, str], advice: str
) -> None:
    said = disk.io_uring(machine(tmp_path, files), disk.Engine("pread_pool", reason, 1, 1.0))
    assert said.state == "warning", "it works without"
    assert reason in said.found
    assert "pread_pool" in said.found
    assert advice in said.advice


def test_io_uring_that_works_needs_no_advice(tmp_path: Path) -> None:
    said = disk.io_uring(machine(tmp_path), disk.Engine("io_uring", "", 1, 1.0))
    assert (said.state, said.advice) == ("ok", "")


MOUNTS = """\
22 1 254:0 / / rw,relatime - overlay overlay rw,lowerdir=/l
23 22 0:5 / /dev/shm rw - tmpfs tmpfs rw
24 22 0:6 / /data rw,noatime shared:1 master:2 - ext4 /dev/nvme0n1 rw
25 24 0:7 / /data/far\\040away rw - nfs4 host:/x rw,vers=4.2
26 24 0:8 / /data/home rw - fuse.sshfs host: rw
27 24 0:9 / /data/odd rw - squashfs /x ro
28 22 0:6 / /tables rw - tmpfs tmpfs rw
29 22 0:6 / /tables rw - xfs /dev/nvme1n1 rw
"""


@pytest.mark.parametrize(
    ("folder", "kind", "advice"),
    [
        ("/data", "ext4", ""),
        ("/data/x/y", "ext4", ""),
        ("/database", "overlay", "mount a volume here"),
        ("/dev/shm/x", "tmpfs", "empty after a restart"),
        ("/data/far away/x", "nfs4", "local NVMe SSD"),
        ("/data/home", "fuse.sshfs", "local NVMe SSD"),
        ("/data/odd", "squashfs", "not tried on it"),
        ("/tables", "xfs", ""),
    ],
)
def test_the_file_system_of_a_folder_is_found(
    tmp_path: Path, folder: str, kind: str, advice: str
) -> None:
    mounts = machine(tmp_path, {"proc/self/mountinfo": MOUNTS}).mounts()
    said = disk.file_system(mounts, Path(folder))
    assert said.found.startswith(f"{kind} at /")
    assert said.state == ("warning" if advice else "ok")
    assert advice in said.advice


def test_an_unknown_file_system_is_a_warning() -> None:
    assert disk.file_system([], Path("/data")).state == "warning"
    assert disk.file_system([Mount("/else", "ext4", frozenset())], Path("/data")).found == "unknown"


@pytest.mark.parametrize("refuses_at", ["open", "write"])
def test_a_file_system_without_direct_io_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses_at: str
) -> None:
    opened, written, direct = os.open, os.pwritev, set[int]()

    def refuse_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refuses_at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = opened(path, flags, mode)
        direct.add(fd) if flags & os.O_DIRECT else direct.discard(fd)
        return fd

    def refuse_write(fd: int, buffers: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(fd, buffers, offset)

    monkeypatch.setattr(disk.os, "open", refuse_open)
    monkeypatch.setattr(disk.os, "pwritev", refuse_write)
    said = disk.findings(machine(tmp_path), tmp_path, tmp_path, is_timed=False)
    one = found("O_DIRECT", said)
    assert (one.state, one.values["is_direct"]) == ("warning", False)
    assert one.found.startswith("refused: Invalid argument; pages go through the page cache")


def test_the_memory_is_that_of_the_container(tmp_path: Path) -> None:
    bare = of_machine("memory", tmp_path / "bare", {"proc/meminfo": MEMORY})
    assert bare.found == "64.0 GiB, 32.0 GiB are free"
    files = {
        "proc/meminfo": MEMORY,
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n",
    }
    said = of_machine("memory", tmp_path / "two", files)
    assert said.values == {
        "ram_bytes": 64 * GIB,
        "cgroup_limit_bytes": 4 * GIB,
        "free_bytes": 3 * GIB,
    }
    assert said.state == "ok", "pages of files are given back"
    files["sys/fs/cgroup/memory.stat"] = "anon 5\n"
    said = of_machine("memory", tmp_path / "full", files)
    assert (said.state, said.values["free_bytes"]) == ("warning", GIB)
    assert "more memory" in said.advice
    files["sys/fs/cgroup/memory.max"] = "max\n"
    assert of_machine("memory", tmp_path / "none", files).values["cgroup_limit_bytes"] is None


def test_the_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMORY,
        "proc/self/cgroup": "0::/user/job\n",
        "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
    }
    for group, limit in (("user/", f"{8 * GIB}"), ("user/job/", "max")):
        files[f"sys/fs/cgroup/{group}memory.max"] = limit
        files[f"sys/fs/cgroup/{group}memory.current"] = f"{GIB}"
        files[f"sys/fs/cgroup/{group}memory.stat"] = "anon 5"
    said = of_machine("memory", tmp_path, files)
    assert (said.values["cgroup_limit_bytes"], said.values["free_bytes"]) == (8 * GIB, 7 * GIB)


def test_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMORY,
        "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
        # In a container the mounted part is the container's own.
        "proc/self/mountinfo": "1 0 0:1 /docker/abc /sys/fs/cgroup/memory rw - cgroup c rw,memory\n"
        "2 0 0:2 / /sys/fs/cgroup/cpu rw - cgroup c rw,cpu,cpuacct\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{16 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "250000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    }
    said = of_machine("memory", tmp_path, files)
    assert (said.values["cgroup_limit_bytes"], said.values["free_bytes"]) == (16 * GIB, 15 * GIB)
    assert of_machine("processor", tmp_path).values["cpu_quota"] == 2.5


def test_more_threads_than_the_container_has_are_a_warning(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        "sys/fs/cgroup/cpu.max": "200000 100000\n",
    }
    here = machine(tmp_path, files)
    assert found("processor", system.findings(here)).values["cpu_quota"] == 2.0
    for threads, state in ((2, "ok"), (8, "warning")):
        said = found("torch", packages.findings(here, packages.Torch("2.11", threads, None)))
        assert said.state == state
    assert "OMP_NUM_THREADS=2" in said.advice


@pytest.mark.parametrize(
    ("more", "name", "state", "advice"),
    [
        ({"kind": "Darwin"}, "kernel", "problem", "runs on Linux"),
        ({"release": "4.19.0"}, "kernel", "warning", "Linux 5.1"),
        ({}, "kernel", "ok", ""),
        ({"isa": "scalar"}, "processor", "warning", "AVX2"),
        ({"isa": "scalar", "machine": "aarch64"}, "processor", "ok", ""),
        ({"limits": lambda _: (1024, 4096)}, "open files", "warning", "ulimit -n 65536"),
        ({"limits": lambda _: (resource.RLIM_INFINITY,) * 2}, "open files", "ok", ""),
        ({"limits": lambda _: (65536, 65536)}, "locked memory", "ok", ""),
        (
            {"limits": lambda _: (65536, 65536), "release": "5.4.0"},
            "locked memory",
            "warning",
            "ulimit -l 65536",
        ),
    ],
)
def test_the_machine_is_judged(
    tmp_path: Path, more: dict[str, Any], name: str, state: str, advice: str
) -> None:
    said = of_machine(name, tmp_path, None, **more)
    assert said.state == state
    assert advice in said.advice
    assert bool(said.advice) == (state != "ok")


def test_a_container_is_seen_by_its_layers(tmp_path: Path) -> None:
    layers = "22 1 254:0 / / rw,relatime - overlay overlay rw\n"
    plain = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    for kind, files in {
        "docker": {"proc/self/mountinfo": layers, ".dockerenv": ""},
        "podman": {"proc/self/mountinfo": layers, "run/.containerenv": ""},
        "image": {"proc/self/mountinfo": layers},
        None: {"proc/self/mountinfo": plain, ".dockerenv": ""},
    }.items():
        assert machine(tmp_path / str(kind), files).container() == kind


def test_packages_that_are_missing_or_too_old_are_problems(tmp_path: Path) -> None:
    needs = ("torch>=2.9", "typer>=0.27", "ray>=2.40,<3 ; extra == 'ray'", "numpy>=1.26")
    there = {"tierbed": tb.__version__, "torch": "2.8.1+cpu", "numpy": "1.26.0"}
    said = packages.findings(
        machine(tmp_path), packages.Torch("2.8", 1, None), packages.Packages(there.get, needs)
    )
    one = found("packages", said)
    assert (one.state, one.advice) == ("problem", "pip install 'torch>=2.9' 'typer>=0.27'")
    assert one.found == "torch 2.8.1+cpu, typer missing, numpy 1.26.0"
    assert found("tierbed", said).state == "ok"
    there["tierbed"] = "0.0.9"
    said = packages.findings(
        machine(tmp_path), packages.Torch("2.8", 1, None), packages.Packages(there.get, ())
    )
    assert found("tierbed", said).state == "problem"
    assert "0.0.9" in found("tierbed", said).found


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1  Release Build\n"


@pytest.mark.parametrize(
    ("driver", "torch", "state", "told"),
    [
        (None, packages.Torch("2", 1, None), "ok", "no GPU, and none is needed"),
        (None, packages.Torch("2", 1, "13.0"), "ok", "torch is built for CUDA 13.0"),
        (DRIVER, packages.Torch("2", 1, "12.4", ("H100",)), "ok", "H100; CUDA 12.4, driver 550"),
        (DRIVER, packages.Torch("2", 1, None), "warning", "torch uses no GPU"),
        (OPEN_DRIVER, packages.Torch("2", 1, "13.0", (), "too old"), "warning", "570.1 is there"),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_a_warning(
    tmp_path: Path, driver: str | None, torch: packages.Torch, state: str, told: str
) -> None:
    files = {} if driver is None else {"proc/driver/nvidia/version": driver}
    said = found("CUDA", packages.findings(machine(tmp_path, files), torch))
    assert said.state == state
    assert told in said.found


def test_a_real_run_measures_and_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", str(tmp_path), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in told["checks"]}
    assert list(tmp_path.iterdir()) == []
    assert told["problem_count"] == 0
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB") as store:
        io = store.stats()["store"]["io"]
    assert checks["io_uring"]["engine"] == io["engine"]
    speed = checks["device speed"]
    assert speed["random_reads_per_s"] > 0
    assert speed["read_us"] > 0
    assert 0 < speed["file_bytes"] <= 32 << 20
    kinds = {line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    assert checks["file system"]["kind"] in kinds
    assert checks["processor"]["isa"] == tb._native.cpu_features()


def test_a_folder_that_cannot_be_written_ends_with_1(capsys: Any) -> None:
    assert main(["doctor", "/proc", "--no-speed"]) == 1
    said = capsys.readouterr().out
    assert "files cannot be written and read in /proc" in said
    assert "a folder that this user may write" in said


def test_a_disk_without_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "pwritev", full)
    one = found("folder", examine(tmp_path, is_timed=True))
    assert one.state == "problem"
    assert "No space left on device" in one.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_made_first(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "tables"
    assert main(["doctor", str(folder), "--no-speed"]) == 2
    assert capsys.readouterr().err.endswith("; make it first\n")
    folder.mkdir()
    assert main(["doctor", str(folder), "--no-speed"]) == 0
    assert "device speed" not in capsys.readouterr().out


def test_brackets_in_a_table_are_text(capsys: Any) -> None:
    print_table("[bold] of [red]", [{"what": "[data] :smile:"}])
    out = capsys.readouterr().out
    assert "[bold] of [red]" in out
    assert "[data] :smile:" in out
