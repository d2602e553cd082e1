"""A folder as a place for tables: file system, direct I/O, room, speed, and the engine on it.

Files of some MiB are written there, read, and removed. The I/O engine is what a snapshot says of
itself: its probe of io_uring runs when it is opened, and its reads are those that are timed.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierbed._util.bytes import format_bytes
from tierbed.cli.doctor.findings import Finding
from tierbed.cli.doctor.system import Mount, System
from tierbed.jagged import KeyedJaggedTensor
from tierbed.placement import import_tables
from tierbed.serve.snapshot import Snapshot

__all__ = ["Engine", "Raw", "file_system", "findings", "io_uring"]

_MIB = 1 << 20
#: Most that is written by each of two measurements.
_BYTES_MAX = 32 * _MIB
_SECONDS = 1.0
_ROOM_BYTES_MIN = 10 << 30
#: A row of them fills a page.
_PAGE_BYTES, _DIM = 4096, 960
_IDS = 1024
#: Slower than any SSD of this machine would be.
_READS_PER_S_MIN = 20_000
_LOCAL = {"ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "ext3", "ext2"}
_MEMORY = {"tmpfs", "ramfs"}
_LAYERS = {"overlay", "aufs"}
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "gpfs", "virtiofs"}


@dataclass(frozen=True)
class Engine:
    """What the engine said and did.

    Args:
        name: ``io_uring``, or what it fell back to.
        reason: Why; empty for io_uring.
        reads: Pages that were read.
        seconds: What that took.
    """

    name: str
    reason: str
    reads: int
    seconds: float


@dataclass(frozen=True)
class Raw:
    """What plain reads and writes of a file took.

    Args:
        refusal: Why the file system takes no direct I/O; None where it does.
        write_bytes_per_s: Of blocks of 1 MiB, one after the other, with the sync behind them.
        read_bytes_per_s: Of the same blocks.
        read_us: The median read of 4 KiB, one at a time.
        size_bytes: Of the file.
    """

    refusal: str | None
    write_bytes_per_s: float
    read_bytes_per_s: float
    read_us: float
    size_bytes: int


def findings(system: System, folder: Path, scratch: Path, *, is_timed: bool) -> list[Finding]:
    """Returns what there is to say of a folder.

    Args:
        system: Where facts come from.
        folder: The place for tables.
        scratch: A folder in it, which is removed afterwards.
        is_timed: Measure how fast it is.
    """
    found = [file_system(system.mounts(), folder), _room(folder)]
    size = _BYTES_MAX if is_timed else _MIB
    raw = _measure(scratch / "blocks", size, _SECONDS if is_timed else 0.0)
    found.append(_direct(raw))
    # As much as is written in two seconds.
    size = min(size, max(4 * _MIB, int(2 * raw.write_bytes_per_s)))
    engine = _ask_engine(scratch / "snapshot", size, _SECONDS if is_timed else 0.0)
    found.append(io_uring(system, engine))
    return [*found, _speed(raw, engine)] if is_timed else found


def mount_of(mounts: list[Mount], folder: Path) -> Mount | None:
    """Returns the file system that a folder is on."""
    path, found = os.path.realpath(folder), None
    for mount in mounts:
        inner = os.path.relpath(path, mount.point)
        is_longer = found is None or len(mount.point) >= len(found.point)
        if not inner.startswith("..") and is_longer:
            found = mount
    return found


def file_system(mounts: list[Mount], folder: Path) -> Finding:
    """Returns what kind of file system a folder is on."""
    mount = mount_of(mounts, folder)
    if mount is None:
        return Finding("file system", "warning", "unknown", "/proc/self/mountinfo says which")
    found = f"{mount.kind} at {mount.point}"
    values = {"kind": mount.kind, "mount": mount.point}
    advice = ""
    if mount.kind in _MEMORY:
        advice = (
            "it is memory outside the budget, and empty after a restart; use a folder on a disk"
        )
    elif mount.kind in _LAYERS:
        advice = "files go with the container, and changed ones are copied; mount a volume here"
    elif mount.kind in _REMOTE or mount.kind.startswith("fuse"):
        advice = (
            "each read waits for a network or another process; use a folder on a local NVMe SSD"
        )
    elif mount.kind not in _LOCAL:
        advice = "Tierbed was not tried on it; use a folder on ext4 or xfs"
    return Finding("file system", "warning" if advice else "ok", found, advice, values)


def _room(folder: Path) -> Finding:
    about = os.statvfs(folder)
    free, total = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    found = f"{format_bytes(free)} of {format_bytes(total)} are free"
    values = {"free_bytes": free, "total_bytes": total}
    if free < _ROOM_BYTES_MIN:
        advice = "a checkpoint is written beside the one before; make room, or use --disk-quota"
        return Finding("free space", "warning", found, advice, values)
    return Finding("free space", "ok", found, "", values)


def _direct(raw: Raw) -> Finding:
    values: dict[str, Any] = {"is_direct": raw.refusal is None, "refusal": raw.refusal}
    if raw.refusal is None:
        return Finding("O_DIRECT", "ok", "pages pass by the page cache", "", values)
    found = f"refused: {raw.refusal}; pages go through the page cache and are dropped from it"
    advice = "use a folder on ext4 or xfs"
    return Finding("O_DIRECT", "warning", found, advice, values)


def io_uring(system: System, engine: Engine) -> Finding:
    """Returns whether the engine has io_uring, and what refuses it."""
    values: dict[str, Any] = {"engine": engine.name, "refusal": engine.reason or None}
    if engine.name == "io_uring":
        return Finding("io_uring", "ok", "in use", "", values)
    disabled = system.text("proc/sys/kernel/io_uring_disabled")
    filtered = "\nSeccomp:\t2" in f"\n{system.text('proc/self/status')}"
    values |= {"io_uring_disabled": disabled, "has_seccomp_filter": filtered}
    allow = "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"
    if disabled == "2":
        advice = "sysctl kernel.io_uring_disabled=0"
    elif disabled == "1":
        advice = "sysctl kernel.io_uring_disabled=0, or run in the group of kernel.io_uring_group"
    elif "ENOMEM" in engine.reason:
        advice = "raise the limit of locked memory: ulimit -l 65536, LimitMEMLOCK=64M"
    elif "ENOSYS" in engine.reason and not filtered:
        advice = "use a kernel from 5.1 on with CONFIG_IO_URING"
    elif filtered:
        advice = f"{allow} (docker run --security-opt seccomp=PROFILE)"
    else:
        advice = "a policy of SELinux or AppArmor, or the kernel forbids it; ask who runs the host"
    found = f"refused: {engine.reason}; {engine.name} reads and writes in its place"
    return Finding("io_uring", "warning", found, advice, values)


def _speed(raw: Raw, engine: Engine) -> Finding:
    per_s = engine.reads / engine.seconds
    found = (
        f"{per_s:,.0f} random reads of 4 KiB/s by the engine, {raw.read_us:,.0f} us for one alone; "
        f"1 MiB blocks: reads {format_bytes(raw.read_bytes_per_s)}/s, writes "
        f"{format_bytes(raw.write_bytes_per_s)}/s"
    )
    if raw.refusal is not None:
        found += "; through the page cache, which may answer in the disk's place"
    values = {
        "random_reads_per_s": per_s,
        "read_us": raw.read_us,
        "sequential_read_bytes_per_s": raw.read_bytes_per_s,
        "sequential_write_bytes_per_s": raw.write_bytes_per_s,
        "file_bytes": raw.size_bytes,
    }
    if per_s < _READS_PER_S_MIN:
        advice = "use a local NVMe SSD; look if others use this disk, or a limit of the group holds"
        return Finding("device speed", "warning", found, advice, values)
    return Finding("device speed", "ok", found, "", values)


def _measure(path: Path, size_bytes: int, seconds: float) -> Raw:
    """Writes a file in blocks, and reads it in blocks and in pages, each for some time."""
    fd, refusal = _open(path)
    block = mmap.mmap(-1, _MIB)
    block.write(os.urandom(_MIB))
    try:
        began_s = time.perf_counter()
        at = 0
        while at < size_bytes and (at == 0 or time.perf_counter() - began_s < seconds):
            at += os.pwritev(fd, [block], at)
        os.fsync(fd)
        write_s = time.perf_counter() - began_s
        # Where pages went through the cache, they leave it; a hint, which may be refused.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        read = 0
        while read < at and (read == 0 or time.perf_counter() - began_s < seconds):
            read += os.preadv(fd, [block], read)
        read_s = time.perf_counter() - began_s
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return Raw(refusal, at / write_s, read / read_s, _read_us(fd, at, seconds), at)
    finally:
        os.close(fd)


def _open(path: Path) -> tuple[int, str | None]:
    """Makes a file for direct I/O; where that is refused, for the page cache, and says why."""
    flags = os.O_RDWR | os.O_CREAT
    page = mmap.mmap(-1, _PAGE_BYTES)
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags, 0o600), error.strerror
    try:
        os.pwritev(fd, [page], 0)
    except OSError as error:
        # The file can be opened so, but not written.
        os.close(fd)
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags, 0o600), error.strerror
    return fd, None


def _read_us(fd: int, size_bytes: int, seconds: float) -> float:
    page = mmap.mmap(-1, _PAGE_BYTES)
    offsets = torch.randint(size_bytes // _PAGE_BYTES, (200,)).tolist()
    times = []
    began_s = time.perf_counter()
    for offset in offsets:
        start_s = time.perf_counter()
        os.preadv(fd, [page], offset * _PAGE_BYTES)
        times.append(time.perf_counter() - start_s)
        if time.perf_counter() - began_s > seconds:
            break
    return statistics.median(times) * 1e6


def _ask_engine(folder: Path, size_bytes: int, seconds: float) -> Engine:
    """Publishes a table of one row a page, and looks up rows of it at random for some time."""
    rows = size_bytes // _PAGE_BYTES
    import_tables({"rows": torch.rand(rows, _DIM)}, folder, dram_budget="64MiB")
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    lengths = torch.ones(_IDS, dtype=torch.int64)
    spent_s = 0.0
    with Snapshot.open(folder, dram_budget="8MiB") as snapshot:
        while True:
            ids = KeyedJaggedTensor(["rows"], torch.randint(rows, (_IDS,)), lengths=lengths)
            began_s = time.perf_counter()
            snapshot.lookup(ids)
            spent_s += time.perf_counter() - began_s
            if spent_s >= seconds:
                break
        io = snapshot.stats()["snapshot"]["io"]
    return Engine(io["engine"], io["fallback_reason"], io["read_count"], spent_s)
