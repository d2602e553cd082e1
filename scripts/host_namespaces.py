"""Namespaces that make a host, and the processes that live in them.

A host lives as long as its first process: where that ends, the kernel ends all others of its
process namespace, and its network goes with the last.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NAMESPACES = {
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
PR_SET_PDEATHSIG = 1
SHARED_MEMORY = "/dev/shm"  # noqa: S108
MS_REC, MS_PRIVATE, MS_BIND, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x4000, 0x40000, 0x1000, 2, 4, 8
#: How often the first process of a host looks for processes that ended.
REAP_S = 0.2
LIBC = ctypes.CDLL(None, use_errno=True)


class HostsError(Exception):
    """What went wrong, and what to do."""


def checked(result: int, what: str) -> None:
    """Raises the error of a system call that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """Mounts a file system, or binds a file."""
    kind_bytes = None if kind is None else kind.encode()
    done = LIBC.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), None)
    checked(done, f"mount {target}")


def check_machine(needs_rate: bool) -> None:
    """Raises what is missing of root, programs and namespaces."""
    missing = []
    if os.geteuid() != 0:
        missing.append("root (run it as root)")
    packages = {"ip": "iproute2", "nsenter": "util-linux"}
    if needs_rate:
        packages["tc"] = "iproute2"
    missing += [f"{name} (install {of})" for name, of in packages.items() if not shutil.which(name)]
    if missing:
        raise HostsError("hosts of namespaces need " + ", ".join(missing))
    tried = ["unshare", "--net", "--pid", "--fork", "true"]
    made = subprocess.run(tried, check=False, capture_output=True, text=True)
    if made.returncode != 0:
        raise HostsError(
            f"this machine makes no namespaces ({made.stderr.strip()}); run where root may, not in "
            "a container without CAP_SYS_ADMIN"
        )


def start(name: str, names: Path, until: int | None) -> dict[str, Any]:
    """Starts the first process of a host in namespaces of its own; the host lives as long.

    ``names`` tells what hosts are called; the host ends with the process ``until``.
    """
    read, write = os.pipe()
    watched = None if until is None else os.pidfd_open(until)
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            os.setsid()
            checked(LIBC.unshare(sum(NAMESPACES.values())), "unshare")
            first = os.fork()
            if first:
                os.write(write, f"{first}\n".encode())
                os._exit(0)
            be_first(name, names, write, watched)
        except BaseException as error:
            os.write(write, f"{error}\n".encode())
        os._exit(1)
    os.close(write)
    if watched is not None:
        os.close(watched)
    os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        lines = told.read().split("\n")
    if "ready" not in lines:
        raise HostsError(f"{name} did not start: {' '.join(lines).strip()}")
    first_pid = int(next(line for line in lines if line.isdigit()))
    return {"pid": first_pid, "started": started(first_pid)}


def be_first(name: str, names: Path, told: int, watched: int | None) -> NoReturn:
    """Is the first process of a host: makes it a place, and waits for what others leave."""
    checked(LIBC.sethostname(name.encode(), len(name)), "sethostname")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", SHARED_MEMORY, "tmpfs", MS_NOSUID | MS_NODEV)
    mount(str(names), "/etc/hosts", None, MS_BIND)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for at in range(3):
        os.dup2(nothing, at)
    os.write(told, b"ready\n")
    for opened in range(3, 1024):
        if opened != watched:
            with contextlib.suppress(OSError):
                os.close(opened)
    while True:
        # What lost its parent is a child of this process; it keeps its number until it is asked.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if select.select([] if watched is None else [watched], [], [], REAP_S)[0]:
            os._exit(0)


def started(pid: int) -> str | None:
    """When a process started, so that a later one of its number is no mistake; None: it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def lives(host: dict[str, Any]) -> bool:
    """Whether the first process of a host is there."""
    return started(host["pid"]) == host["started"]


def end(host: dict[str, Any]) -> None:
    """Ends a host with all that runs on it, and waits until it is gone."""
    if lives(host):
        os.kill(host["pid"], signal.SIGKILL)
    until = time.monotonic() + 10.0
    while lives(host):
        if time.monotonic() > until:
            raise HostsError(f"process {host['pid']} does not end; look what holds it: ps -o wchan")
        time.sleep(0.005)


def within(host: dict[str, Any], *command: str, told: str | None = None) -> None:
    """Runs a command of the network in a host's namespace; ``told`` is its input."""
    full = ["nsenter", "-t", str(host["pid"]), "-n", *command]
    done = subprocess.run(full, check=False, capture_output=True, text=True, input=told)
    if done.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")


def run_there(host: dict[str, Any], act: Callable[[], int]) -> int:
    """Runs ``act`` in a process on a host, in this folder; returns its exit code, or 128 + signal.

    This process enters the host's namespaces, too.
    """
    folder = os.getcwd()
    kinds = {kind: os.open(f"/proc/{host['pid']}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES}
    for kind, opened in kinds.items():
        checked(LIBC.setns(opened, NAMESPACES[kind]), f"enter {kind}")
        os.close(opened)
    child = os.fork()
    if child == 0:
        # Who ends this program ends the process, too.
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(folder)
        code = 1
        try:
            code = act()
        finally:
            os._exit(code)
    for sent in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(sent, lambda number, _: os.kill(child, number))
    # A terminal sends it to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def become(command: list[str]) -> int:
    """Makes this process another program; returns only where there is none."""
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        print(f"hosts: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    return 127
