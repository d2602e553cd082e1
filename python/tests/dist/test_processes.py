"""Ranks as processes: the example trains under torchrun, and one that is killed is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "sharded_dlrm.py"
SHARDINGS = ["balanced", "table", "row", "column", "mirrored"]
TIMEOUT_S = 2.0


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_example_trains_with_the_bits_of_one_process(count: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={count}", str(EXAMPLE), "--check", "--steps=3"]
    exchanges = ["auto", "collective"] if count == 2 else ["one_sided"]
    found = subprocess.run(
        [*command, "--samples=24", "--exchange", *exchanges, "--sharding", *SHARDINGS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    for exchange in exchanges:
        for sharding in SHARDINGS:
            told = f"{exchange}, {sharding}: {count} ranks have the bits of one process"
            assert told in found.stdout


RANK = """
import sys
import torch
import torch.distributed as dist
import tierbed as tb
from tierbed import dist as tbd

rank, count, folder = int(sys.argv[1]), 3, sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=count)
tables = [tb.EmbeddingBagConfig(50, 8, name) for name in "abc"]
plan = tbd.ShardingPlan(count, {name: tbd.TableWise(at) for at, name in enumerate("abc")})
store = tb.Store.open(backend="memory", dram_budget="16MiB")
how = tbd.ExchangeOptions(kind="one_sided", timeout_s=float(sys.argv[3]))
rows = tbd.ShardedEmbeddingBagCollection(tables, store=store, plan=plan, exchange=how)
bags = tb.KeyedJaggedTensor(list("abc"), torch.arange(12), lengths=torch.ones(12).long())
step = 0
try:
    while True:
        rows(bags).values().sum().backward()
        step += 1
        if step == 3:
            print("ready", flush=True)
except tb.TierbedError as error:
    print(error, flush=True)
    sys.exit(3)
"""


def shared_memory() -> set[str]:
    """Names what a crash could leave behind: files that are memory, and who holds unnamed ones."""
    return {path.name for path in Path("/dev/shm").iterdir() if "tierbed" in path.name}


def test_a_killed_rank_is_named_in_time_and_leaves_no_memory(tmp_path: Path) -> None:
    before = shared_memory()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), str(TIMEOUT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate()[1][-2000:]
        heap = f"/proc/{ranks[0].pid}/fd"
        links = [os.readlink(f"{heap}/{name}") for name in os.listdir(heap)]
        assert any("memfd:tierbed-exchange" in link for link in links)
        ranks[2].send_signal(signal.SIGKILL)
        start = time.monotonic()
        told = [rank.communicate(timeout=60)[0] for rank in ranks[:2]]
        spent = time.monotonic() - start
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks[:2]] == [3, 3]
    # The first to notice names the one that is gone; the other may hear of it from the first.
    assert any("rank 2 did not answer in time" in text for text in told), told
    assert all("rank 2" in text or "failed" in text for text in told), told
    assert spent < TIMEOUT_S + 20
    # Unnamed memory goes with the last process that holds it, and nothing has a name.
    assert shared_memory() == before
