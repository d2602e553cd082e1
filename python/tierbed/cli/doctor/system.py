"""Kernel, processor, memory and limits of this process, as they are in its container."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierbed import _native
from tierbed._util.bytes import format_bytes
from tierbed.cli.doctor.findings import Finding

__all__ = ["Mount", "System", "findings"]

#: Below it, the default budget of a run and torch do not fit beside each other.
_FREE_BYTES_MIN = 2 << 30
#: What a server with its default limits may open: connections, and files of its readers.
_SERVER_FILES = 2048 + 256
#: Rings of a server with its default depth; counted on kernels before 5.12 only.
_RING_BYTES = 1 << 20
#: What layers of an image are mounted as.
_IMAGES = {"overlay", "aufs", "fuse.fuse-overlayfs"}


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Args:
        point: The folder where it is.
        kind: Such as ``ext4``.
        options: Of the mount and of the file system.
        root: Which folder of the file system is mounted.
    """

    point: str
    kind: str
    options: frozenset[str]
    root: str = "/"


@dataclass(frozen=True)
class System:
    """Where facts come from.

    Args:
        root: Has ``proc`` and ``sys``.
        kind: The operating system.
        release: Of the kernel.
        machine: Kind of processor.
        limits: Gives the soft and the hard limit of a resource.
        isa: Instructions that the engine's kernels use.
        cpus: Processors that this process may use.
    """

    root: Path = Path("/")
    kind: str = field(default_factory=lambda: os.uname().sysname)
    release: str = field(default_factory=lambda: os.uname().release)
    machine: str = field(default_factory=lambda: os.uname().machine)
    limits: Callable[[int], tuple[int, int]] = resource.getrlimit
    isa: str = field(default_factory=_native.cpu_features)
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def text(self, path: str) -> str | None:
        """Returns a file of the kernel; None where it is missing or hidden."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def version(self) -> tuple[int, int]:
        """Returns the kernel's version."""
        found = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def mounts(self) -> list[Mount]:
        """Returns all mounts, the earliest first."""
        found = []
        for line in (self.text("proc/self/mountinfo") or "").splitlines():
            before, _, behind = line.partition(" - ")
            _, _, _, root, point, options, *_ = before.split(" ")
            kind, _, more = behind.split(" ", 2)
            words = frozenset([*options.split(","), *more.split(",")])
            found.append(Mount(_plain(point), kind, words, _plain(root)))
        return found

    def container(self) -> str | None:
        """Returns what kind of container this is; None where none is seen."""
        at_root = [mount.kind for mount in self.mounts() if mount.point == "/"]
        if not at_root or at_root[-1] not in _IMAGES:
            return None  # virtual machines are made of images, too, whose files they keep
        if (self.root / "run/.containerenv").exists():
            return "podman"
        if (self.root / "var/run/secrets/kubernetes.io").exists():
            return "kubernetes"
        return "docker" if (self.root / ".dockerenv").exists() else "image"

    def cgroup_files(self, controller: str, name: str) -> Iterator[str]:
        """Yields a file of this process's group and of all groups above it that are visible.

        Args:
            controller: Of version 1 of cgroups.
            name: The file of version 2, and with ``/`` before it that of version 1.
        """
        of_2, _, of_1 = name.partition("/")
        for line in (self.text("proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            is_1 = controller in controllers.split(",")
            if not is_1 and controllers:
                continue
            kind = "cgroup" if is_1 else "cgroup2"
            for mount in self.mounts():
                if mount.kind == kind and (not is_1 or controller in mount.options):
                    yield from self._upwards(mount, path, of_1 if is_1 else of_2)

    def cpu_quota(self) -> float | None:
        """Returns how many processors the groups may use; None: no limit."""
        shares = []
        for text in self.cgroup_files("cpu", "cpu.max/cpu.cfs_quota_us"):
            quota, _, period = text.partition(" ")
            if quota.isdigit():
                # Version 1 has the period in a file of its own, which is hardly ever changed.
                shares.append(int(quota) / int(period or 100_000))
        return min(shares, default=None)

    def _upwards(self, mount: Mount, path: str, name: str) -> Iterator[str]:
        # Of a group outside this namespace only the mounted one is visible.
        inner = os.path.relpath(path, mount.root)
        inner = "." if inner.startswith("..") else inner
        while True:
            text = self.text(os.path.join(mount.point.lstrip("/"), inner, name))
            if text is not None:
                yield text
            if inner in (".", ""):
                return
            inner = os.path.dirname(inner) or "."


def _plain(path: str) -> str:
    """Returns a path of mountinfo without its escapes."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), path)


def findings(system: System) -> list[Finding]:
    """Returns what there is to say of the machine, whatever the folder."""
    return [
        _kernel(system),
        _processor(system),
        _memory(system),
        _open_files(system),
        _locked_memory(system),
    ]


def _kernel(system: System) -> Finding:
    container = system.container()
    found = f"{system.kind} {system.release}, {system.machine}"
    values = {"release": system.release, "machine": system.machine, "container": container}
    found += f", in a container ({container})" if container else ""
    if system.kind != "Linux":
        return Finding("kernel", "problem", found, "Tierbed runs on Linux", values)
    if system.version() < (5, 1):
        advice = "io_uring is in Linux 5.1 and newer"
        return Finding("kernel", "warning", found, advice, values)
    return Finding("kernel", "ok", found, "", values)


def _processor(system: System) -> Finding:
    flags = set((system.text("proc/cpuinfo") or "").split())
    quota = system.cpu_quota()
    found = f"{system.cpus} processors, kernels use {system.isa}"
    found += f", the cgroup may use {quota:g}" if quota is not None else ""
    values = {"cpus": system.cpus, "cpu_quota": quota, "isa": system.isa}
    values |= {f"has_{flag}": flag in flags for flag in ("avx2", "avx512f")}
    if system.isa == "scalar" and system.machine == "x86_64":
        advice = "a processor with AVX2; in a virtual machine pass the host's on (-cpu host)"
        return Finding("processor", "warning", found, advice, values)
    return Finding("processor", "ok", found, "", values)


def _memory(system: System) -> Finding:
    of_machine = _numbers(system.text("proc/meminfo"), ":", "kB")
    total, free = of_machine.get("MemTotal", 0), of_machine.get("MemAvailable", 0)
    limits = system.cgroup_files("memory", "memory.max/memory.limit_in_bytes")
    used = system.cgroup_files("memory", "memory.current/memory.usage_in_bytes")
    limit = None
    # A limit that is none is a word, or in version 1 more than there can be.
    for of_group, now, about in zip(
        limits, used, system.cgroup_files("memory", "memory.stat/memory.stat"), strict=False
    ):
        if of_group.isdigit() and int(of_group) < total:
            limit = min(limit or total, int(of_group))
            stat = _numbers(about, " ", "")
            # Pages of files are given back.
            cached = sum(
                stat.get(f"total_{kind}", stat.get(kind, 0))
                for kind in ("inactive_file", "active_file")
            )
            free = min(free, max(0, int(of_group) - int(now) + cached))
    found = format_bytes(total)
    found += f", the cgroup may use {format_bytes(limit)}" if limit is not None else ""
    found += f", {format_bytes(free)} are free"
    values = {"ram_bytes": total, "cgroup_limit_bytes": limit, "free_bytes": free}
    if total and free < _FREE_BYTES_MIN:
        advice = "give the container more memory, or a smaller --dram-budget than 1GiB"
        return Finding("memory", "warning", found, advice, values)
    return Finding("memory", "ok", found, "", values)


def _numbers(text: str | None, divider: str, unit: str) -> dict[str, int]:
    """Returns the numbers of a text with a name and a number in each line."""
    found = re.findall(rf"^(\w+){divider}\s*(\d+) ?{unit}$", text or "", re.MULTILINE)
    return {name: int(number) << (10 if unit else 0) for name, number in found}


def _open_files(system: System) -> Finding:
    soft, hard = system.limits(resource.RLIMIT_NOFILE)
    values = {"soft": _limit(soft), "hard": _limit(hard)}
    found = f"{_shown(soft)} files at once, at most {_shown(hard)}"
    if soft != resource.RLIM_INFINITY and soft < _SERVER_FILES:
        advice = (
            "before serving 2,048 connections: ulimit -n 65536, LimitNOFILE=65536, or a smaller "
            "--connections-max"
        )
        return Finding("open files", "warning", found, advice, values)
    return Finding("open files", "ok", found, "", values)


def _locked_memory(system: System) -> Finding:
    soft, hard = system.limits(resource.RLIMIT_MEMLOCK)
    size = "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    values = {"soft_bytes": _limit(soft), "hard_bytes": _limit(hard)}
    if system.version() >= (5, 12):
        # From there on rings count as memory of the group, and Tierbed locks nothing itself.
        found = f"{size}; this kernel counts no rings of io_uring"
        return Finding("locked memory", "ok", found, "", values)
    if soft != resource.RLIM_INFINITY and soft < _RING_BYTES:
        advice = "rings of io_uring count here before Linux 5.12: ulimit -l 65536, LimitMEMLOCK=64M"
        return Finding("locked memory", "warning", size, advice, values)
    return Finding("locked memory", "ok", size, "", values)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _shown(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else f"{value:,}"
