"""Ranks on several hosts, which `scripts/hosts` makes of namespaces of this machine.

A function runs as `H` times `L` ranks and what it returns comes back, by rank. Hosts share no
memory and count what they send, so what needs a cluster can be tried and counted here.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tierbed.errors import TierbedError

__all__ = ["Hosts", "Launcher", "RankResult", "Ranks", "hosts", "sent_bytes", "why_no_hosts"]

PROGRAM = Path(__file__).parents[3] / "scripts" / "hosts"
RANK = Path(__file__).with_name("hosts_rank.py")
PORT = 29_500
_NUMBERS = itertools.count()

Launcher = Literal["env", "torchrun"]


def why_no_hosts() -> str | None:
    """Why this machine makes no hosts; None: it does."""
    if not PROGRAM.is_file():
        return "scripts/hosts is not here: it is in the repository, not in the package"
    found = subprocess.run([PROGRAM, "check"], check=False, capture_output=True, text=True)
    return None if found.returncode == 0 else found.stderr.strip()


def sent_bytes() -> int:
    """Bytes that this host has sent, with the headers of frames."""
    [line] = [one for one in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in one]
    return int(line.split(":")[1].split()[8])


@contextlib.contextmanager
def hosts(
    count: int, *, rate: str | None = None, is_single_frames: bool = False
) -> Iterator[Hosts]:
    """Makes hosts, and ends them with all that runs on them; also when this process dies.

    Args:
        count: Hosts.
        rate: Of each link, each way, as ``1gbit``; by default no limit.
        is_single_frames: Count each frame of 1,500 bytes with its header.

    Raises:
        TierbedError: They cannot be made; the error says what is missing.
    """
    made = Hosts(count, f"t{os.getpid()}-{next(_NUMBERS)}")
    options = [*(["--rate", rate] if rate else []), *(["--single-frames"] * is_single_frames)]
    try:
        made.ask("up", str(count), *options, "--until", str(os.getpid()))
        yield made
    finally:
        made.ask("down")


class Hosts:
    """Hosts that are up; see :func:`hosts`.

    Args:
        count: Hosts.
        name: Of this set of hosts.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.name = name

    def ask(self, *words: str) -> str:
        """Asks ``scripts/hosts`` and returns what it prints.

        Raises:
            TierbedError: It failed; the error is its own.
        """
        command = [str(PROGRAM), "--name", self.name, *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise TierbedError(done.stderr.strip())
        return done.stdout

    def command(self, host: int, *words: str) -> list[str]:
        """Returns the command that runs ``words`` on a host."""
        return [str(PROGRAM), "--name", self.name, "run", str(host), *words]

    def address(self, host: int) -> str:
        """Returns the address of a host."""
        return f"10.77.0.{host + 1}"

    def counters(self) -> list[dict[str, int]]:
        """Each host's number and process, and bytes and frames that its interface sent and got."""
        found: list[dict[str, int]] = json.loads(self.ask("bytes", "--json"))
        return found

    def kill(self, host: int) -> None:
        """Ends all processes of a host at once."""
        self.ask("kill", str(host))

    def cut(self, host: int) -> None:
        """Takes a host's cable: others hear nothing of it, not even that it is gone."""
        self.ask("cut", str(host))

    def mend(self, host: int) -> None:
        """Plugs a host in again."""
        self.ask("mend", str(host))

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        folder: Path,
        local_ranks: int = 1,
        launcher: Launcher = "env",
        timeout_s: float = 60.0,
        environment: dict[str, str] | None = None,
        max_restarts: int = 0,
    ) -> Ranks:
        """Starts a function as ranks: those of host 0 first, each in a process of its own.

        Each is a fork of one process that has imported torch, or what torchrun starts. It has a
        process group of gloo over the hosts' network, one thread of torch and seed 0.

        Args:
            function: Of a module's top level; the module is imported by each rank.
            arguments: What it is called with; they can be pickled.
            folder: An empty one, for what the ranks print and return.
            local_ranks: Ranks of each host.
            launcher: ``env`` says rank and address in variables; ``torchrun`` runs one torchrun
                for each host.
            timeout_s: Of the process group.
            environment: Further variables.
            max_restarts: As of torchrun.
        """
        source = inspect.getsourcefile(function)
        assert source is not None, "a function of a file"
        folder.mkdir(parents=True, exist_ok=True)
        call = {
            "file": source,
            "name": function.__name__,
            "arguments": arguments,
            "timeout_s": timeout_s,
            "paths": sys.path,
            "hosts": [] if launcher == "torchrun" else [one["pid"] for one in self.counters()],
            "local_ranks": local_ranks,
            "address": self.address(0),
        }
        (folder / "call.pickle").write_bytes(pickle.dumps(call))
        program = [sys.executable, str(RANK), str(folder)]
        commands = [program]
        if launcher == "torchrun":
            commands = self._by_torchrun(program[1:], local_ranks, max_restarts)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        ranks = Ranks(folder, self.count, local_ranks)
        for at, command in enumerate(commands):
            with (folder / f"started-{at}.txt").open("w") as printed:
                ranks.started.append(
                    subprocess.Popen(command, env=variables, stdout=printed, stderr=printed)
                )
        return ranks

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Runs a function as ranks, as :meth:`start` does; returns what it returned, by rank.

        Raises:
            TierbedError: A rank failed; the error has the end of what it printed.
        """
        limit_s = options.pop("limit_s", 120.0)
        return self.start(function, *arguments, **options).values(limit_s)

    def _by_torchrun(
        self, program: list[str], local_ranks: int, max_restarts: int
    ) -> list[list[str]]:
        commands = []
        for host in range(self.count):
            options = {
                "nnodes": self.count,
                "nproc-per-node": local_ranks,
                "node-rank": host,
                "rdzv-backend": "c10d",
                "rdzv-id": self.name,
                "rdzv-endpoint": f"{self.address(0)}:{PORT}",
                "local-addr": self.address(host),
                "max-restarts": max_restarts,
            }
            told = [f"--{name}={value}" for name, value in options.items()]
            launched = [sys.executable, "-m", "torch.distributed.run", *told, *program]
            commands.append(self.command(host, *launched))
        return commands


@dataclass(frozen=True)
class RankResult:
    """What came of a rank.

    Args:
        value: What the function returned; None where it did not.
        error: Why it did not, as the rank said; None where it did.
        is_back: Whether the rank said anything at all.
    """

    value: Any
    error: str | None
    is_back: bool


class Ranks:
    """Ranks that were started.

    Args:
        folder: Where they write.
        host_count: Hosts.
        local_ranks: Ranks of each.
    """

    def __init__(self, folder: Path, host_count: int, local_ranks: int) -> None:
        self.folder = folder
        self.host_count = host_count
        self.local_ranks = local_ranks
        self.started: list[subprocess.Popen[bytes]] = []

    def await_file(self, name: str, limit_s: float = 60.0) -> None:
        """Waits until a rank has written a file into the folder.

        Raises:
            TierbedError: It did not in time, or ended before.
        """
        until = time.monotonic() + limit_s
        while not (self.folder / name).exists():
            if time.monotonic() > until or all(one.poll() is not None for one in self.started):
                self.end()
                raise TierbedError(f"no rank wrote {name}: {self.printed()}")
            time.sleep(0.02)

    def results(self, limit_s: float = 120.0) -> list[RankResult]:
        """Waits until all have ended, at most ``limit_s``; returns what came of each, by rank."""
        until = time.monotonic() + limit_s
        try:
            for one in self.started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(max(0.0, until - time.monotonic()))
        finally:
            self.end()
        return [self._result(at) for at in range(self.host_count * self.local_ranks)]

    def values(self, limit_s: float = 120.0) -> list[Any]:
        """As :meth:`results`, but what the function returned.

        Raises:
            TierbedError: A rank failed; the error has the end of what it printed.
        """
        found = self.results(limit_s)
        for rank, result in enumerate(found):
            if result.error is not None or not result.is_back:
                what = result.error or "it did not end, or was killed"
                raise TierbedError(f"rank {rank} failed: {what}\n{self.printed()}")
        return [result.value for result in found]

    def end(self) -> None:
        """Ends what still runs."""
        for one in self.started:
            one.kill()
            one.wait()

    def printed(self, bytes_max: int = 3_000) -> str:
        """Returns the ends of what was printed."""
        files = sorted(self.folder.glob("started-*.txt"))
        return "\n".join(f"{one.name}: {one.read_text()[-bytes_max:]}" for one in files)

    def _result(self, rank: int) -> RankResult:
        file = self.folder / f"rank-{rank}.pickle"
        if not file.is_file():
            return RankResult(None, None, False)
        # Our own ranks wrote it.
        value, error = pickle.loads(file.read_bytes())  # noqa: S301
        return RankResult(value, error, True)
