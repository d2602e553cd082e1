"""Ranks on the hosts of :mod:`tierbed_bench.hosts`: call a function, and write what it returned.

One process imports torch and has a fork of itself on the hosts for each rank; or torchrun has
started this program as a rank, and then it is one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SCRIPTS = Path(__file__).parents[3] / "scripts"
PORT = 29_500


def fork_ranks(call: dict[str, Any], folder: Path) -> int:
    """Runs the ranks of all hosts as forks, and returns 1 where one failed."""
    sys.path.append(str(SCRIPTS))
    run_there = importlib.import_module("host_namespaces").run_there
    local_ranks, world = call["local_ranks"], call["local_ranks"] * len(call["hosts"])
    children = []
    for rank in range(world):
        host, local = divmod(rank, local_ranks)
        given = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": local_ranks,
            "GROUP_RANK": host,
            "MASTER_ADDR": call["address"],
            "MASTER_PORT": PORT,
            "TIERBED_HOST": host,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        child = os.fork()
        if child == 0:
            os.environ.update({name: str(value) for name, value in given.items()})
            os._exit(run_there({"pid": call["hosts"][host]}, lambda: be_rank(call, folder)))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return int(any(codes))


def be_rank(call: dict[str, Any], folder: Path) -> int:
    """Calls the function as one rank; returns the exit code."""
    sys.path[:] = [str(Path(call["file"]).parent), *call["paths"]]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    value: Any = None
    error: str | None = None
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=call["timeout_s"]))
        function = runpy.run_path(call["file"], run_name="rank")[call["name"]]
        value = function(*call["arguments"])
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    written = folder / f"rank-{rank}.partial"
    written.write_bytes(pickle.dumps((value, error)))
    os.replace(written, folder / f"rank-{rank}.pickle")
    if error is None and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    # Others may be gone: nothing waits for them.
    os._exit(0 if error is None else 1)


def main() -> int:
    """Does as the folder says that is the argument; returns the exit code."""
    folder = Path(sys.argv[1])
    # The process that started this one wrote it.
    call = pickle.loads((folder / "call.pickle").read_bytes())  # noqa: S301
    return fork_ranks(call, folder) if call["hosts"] else be_rank(call, folder)


if __name__ == "__main__":
    sys.exit(main())
