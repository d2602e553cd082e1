"""Servers that a Ray cluster keeps: one on each of some nodes, started again where it ends.

An actor on each node runs `tierbed-server` or `tierbed serve` as a process of its own, and says
where it listens and whether it is ready. Requests go to that process and never through Ray. An
actor that is lost takes its server with it; Ray starts the actor again, there or on another node,
and it starts the server again.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierbed.errors import InvalidError, TierbedError, UnsupportedError

__all__ = ["RayServer", "ServerOptions", "ray_servers", "start_ray_servers", "stop_ray_servers"]

NAMESPACE = "tierbed"
#: Between two starts of a server that ended, first and at most.
PAUSE_S, PAUSE_MAX_S = 0.1, 10.0
#: A server that ran so long is no one that cannot start.
STEADY_S = 30.0
STOP_S = 20.0
ASK_S = 2.0
_LISTENS = re.compile(r"https?://[^\s:]+:(\d+)")
_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers of a cluster.

    Args:
        servers: How many, each on a node of its own.
        name: Of these servers; others by another name stand beside them.
        port: Where each listens; 0 picks a free one, another one after each start.
        cpus: Processors of its node that Ray counts as taken by a server.
        program: Program and first arguments; by default `tierbed-server` where the path has it,
            else `tierbed serve`.
    """

    servers: int = 1
    name: str = "tierbed"
    port: int = 8080
    cpus: float = 1.0
    program: str | None = None

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise InvalidError(f"--servers is at least 1, not {self.servers}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise InvalidError(f"--name is small letters and digits, not {self.name!r}; write ads")

    def command(self, words: Sequence[str]) -> list[str]:
        """The command of a server; ``words`` are its snapshot and further options."""
        if self.program is not None:
            head = self.program.split()
        elif (found := shutil.which("tierbed-server")) is not None:
            head = [found]
        else:
            head = [sys.executable, "-m", "tierbed", "serve"]
        return [*head, *words, "--address", f"0.0.0.0:{self.port}"]


@dataclass(frozen=True, kw_only=True)
class RayServer:
    """A server of a cluster.

    Args:
        name: Of its actor.
        node: Ray's name of its node; None without an answer.
        address: ``host:port`` of its node; None until it listens, or without an answer.
        is_ready: Whether it says so at ``/readyz``.
        start_count: How often it was started, by this actor.
        last_exit: Exit code of the last one that ended; None: none ended.
        pid: Of its process, on its node.
    """

    name: str
    node: str | None
    address: str | None
    is_ready: bool
    start_count: int
    last_exit: int | None
    pid: int | None


class ServerKeeper:
    """The actor of a node: runs a server, and starts it again.

    Args:
        name: Of the actor.
        command: What it runs.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self._name = name
        self._command = command
        self._ends = threading.Event()
        self._port: str | None = None
        self._server: subprocess.Popen[str] | None = None
        self._start_count = 0
        self._last_exit: int | None = None
        self._libc = ctypes.CDLL(None)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def command(self) -> list[str]:
        """What it runs."""
        return self._command

    def _keep(self) -> None:
        pause_s = PAUSE_S
        while not self._ends.is_set():
            started_s = time.monotonic()
            # Who loses its actor ends with it: this thread lives as long as the actor.
            self._server = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=self._end_with_parent,  # noqa: PLW1509
            )
            self._start_count += 1
            with self._server as server:
                for line in server.stdout or ():
                    print(line, end="", flush=True)
                    found = _LISTENS.search(line) if self._port is None else None
                    self._port = found[1] if found else self._port
            self._port, self._last_exit = None, self._server.returncode
            if time.monotonic() - started_s > STEADY_S:
                pause_s = PAUSE_S
            self._ends.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _end_with_parent(self) -> None:
        self._libc.prctl(_PDEATHSIG, signal.SIGKILL)

    def status(self) -> RayServer:
        """Where the server listens, and whether it is ready."""
        import ray

        server, port = self._server, self._port
        address = None if port is None else f"{_node_ip(ray)}:{port}"
        lives = server is not None and server.poll() is None
        return RayServer(
            name=self._name,
            node=ray.get_runtime_context().get_node_id(),
            address=address,
            is_ready=port is not None and lives and _is_ready(port),
            start_count=self._start_count,
            last_exit=self._last_exit,
            pid=server.pid if server is not None and lives else None,
        )

    def stop(self) -> None:
        """Ends the server as SIGTERM does, and waits; it is not started again."""
        self._ends.set()
        if self._server is not None:
            self._server.terminate()
            # A second signal ends the time that balancers have.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            self._server.terminate()
            self._thread.join(STOP_S)
            self._server.kill()


def _node_ip(ray: Any) -> str:
    return str(ray.util.get_node_ip_address())


def _is_ready(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=ASK_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError("ray is not installed: pip install 'tierbed[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        except ConnectionError as error:
            raise InvalidError(
                f"no Ray cluster at {address} ({error}); start one by `ray start --head`, and name "
                "it with --ray"
            ) from error
    return ray


def _actors(ray: Any, name: str) -> dict[str, Any]:
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [
        one["name"]
        for one in found
        if one["namespace"] == NAMESPACE and re.fullmatch(rf"{name}-\d+", one["name"])
    ]
    names.sort(key=lambda one: int(one.rpartition("-")[2]))
    return {one: ray.get_actor(one, namespace=NAMESPACE) for one in names}


def start_ray_servers(
    words: Sequence[str],
    options: ServerOptions | None = None,
    *,
    address: str = "auto",
    wait_s: float = 120.0,
) -> list[RayServer]:
    """Starts servers, each on a node of its own, and waits until all are ready.

    Those that run already stay.

    Args:
        words: The snapshot, which each node can read, and further options of a server.
        options: How many, and what they are.
        address: Of the Ray cluster.
        wait_s: How long they may take until they are ready.

    Raises:
        InvalidError: Fewer nodes than servers, or others run by this name.
        TierbedError: They were not ready in time; they run on.
        UnsupportedError: Ray is not installed.
    """
    given = options or ServerOptions()
    ray = _connected(address)
    command = given.command(words)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    node_count = sum(node.get("CPU", 0.0) >= given.cpus for node in alive)
    if given.servers > node_count:
        raise _no_room(given, f"{node_count} are there")
    there = _actors(ray, given.name)
    for name, actor in there.items():
        if ray.get(actor.command.remote()) != command or len(there) > given.servers:
            raise InvalidError(
                f"{name} runs another server, or there are more; end them first: tierbed ray down "
                f"--name {given.name}"
            )
    group = _group(ray, given)
    kind = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=given.cpus)(ServerKeeper)
    for at in range(given.servers):
        name = f"{given.name}-{at}"
        if name not in there:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=at
            )
            kind.options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                scheduling_strategy=strategy,
            ).remote(name, command)
    until = time.monotonic() + wait_s
    while True:
        found = ray_servers(given.name, address=address)
        if len(found) == given.servers and all(one.is_ready for one in found):
            return found
        if time.monotonic() > until:
            waiting = ", ".join(one.name for one in found if not one.is_ready)
            raise TierbedError(
                f"not ready after {wait_s:.0f} s: {waiting}; read what they say: ray logs actor"
            )
        time.sleep(0.1)


def _group(ray: Any, options: ServerOptions) -> Any:
    """The places of servers, one on a node; a place whose node is lost moves to another."""
    name = f"{NAMESPACE}-{options.name}"
    with contextlib.suppress(ValueError):
        return ray.util.get_placement_group(name)
    group = ray.util.placement_group(
        [{"CPU": options.cpus}] * options.servers,
        strategy="STRICT_SPREAD",
        name=name,
        lifetime="detached",
    )
    if not group.wait(60):
        ray.util.remove_placement_group(group)
        raise _no_room(options, "other work takes them")
    return group


def _no_room(options: ServerOptions, found: str) -> InvalidError:
    return InvalidError(
        f"{options.servers} servers need as many nodes with {options.cpus:g} processors, and "
        f"{found}; give fewer --servers or --cpus, or add nodes"
    )


def ray_servers(
    name: str = "tierbed", *, address: str = "auto", answer_s: float = 10.0
) -> list[RayServer]:
    """Returns the servers by a name, in their order.

    Args:
        name: Of the servers.
        address: Of the Ray cluster.
        answer_s: How long an actor may take to answer; one that does not is not ready.
    """
    ray = _connected(address)
    found = []
    for one, actor in _actors(ray, name).items():
        try:
            found.append(ray.get(actor.status.remote(), timeout=answer_s))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            found.append(
                RayServer(
                    name=one,
                    node=None,
                    address=None,
                    is_ready=False,
                    start_count=0,
                    last_exit=None,
                    pid=None,
                )
            )
    return found


def stop_ray_servers(name: str = "tierbed", *, address: str = "auto") -> int:
    """Ends the servers by a name, and their actors; returns how many there were.

    Args:
        name: Of the servers.
        address: Of the Ray cluster.
    """
    ray = _connected(address)
    actors = _actors(ray, name)
    stops = [actor.stop.remote() for actor in actors.values()]
    ray.wait(stops, num_returns=len(stops), timeout=STOP_S + 5.0) if stops else None
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(f"{NAMESPACE}-{name}"))
    return len(actors)
