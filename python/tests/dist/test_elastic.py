"""The example of several hosts: restarted on fewer ranks, it ends with the bits of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from s3_kit import free_ports

import tierbed as tb
from tierbed import dist as tbd

EXAMPLE = Path(__file__).parents[3] / "examples" / "sharded_hosts.py"
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}
HAS_RAY = importlib.util.find_spec("ray") is not None


def example() -> Any:
    spec = importlib.util.spec_from_file_location("sharded_hosts", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sharded_hosts"] = module
    spec.loader.exec_module(module)
    return module


def rows_of(path: str) -> dict[str, torch.Tensor]:
    """All rows and state of a checkpoint of the example."""
    tables = example().tables()
    (rank,) = tbd.local_ranks(1)
    store = tb.Store.open(backend="memory", dram_budget="64MiB")
    with tbd.ShardedEmbeddingBagCollection(
        tables, store=store, ranks=rank, optimizer=tb.RowWiseAdagrad(lr=0.05)
    ) as rows:
        rows.load(path)
        found = {}
        for config in tables:
            parts = store.read_rows_and_state(config.name, 0, config.num_embeddings or 0)
            found[config.name] = torch.cat(parts, dim=1)
    store.close()
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained_alone(out: Path, steps: int) -> dict[str, torch.Tensor]:
    """Trains in this process, from the last checkpoint below ``out``."""
    module = example()

    def restore(rows: Any) -> int:
        last = tbd.find_checkpoints(out)[-1:]
        return int((rows.load(last[0]) or {})["step"]) if last else 0

    def keep(rows: Any, step: int) -> None:
        rows.save(out / f"step-{step}", {"step": step})

    module.train(module.Options(steps=steps, samples=48, every=4), restore, keep)
    return rows_of(tbd.find_checkpoints(out)[-1])


def test_the_example_goes_on_with_fewer_ranks_and_the_same_bits(tmp_path: Path) -> None:
    given = [str(EXAMPLE), "--out", str(tmp_path / "two"), "--steps=8", "--samples=48", "--every=4"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, *given], capture_output=True, text=True, env=QUIET, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 8 on 2 ranks" in done.stdout
    names = [Path(path).name for path in tbd.find_checkpoints(tmp_path / "two")]
    assert names == ["step-4", "step-8"]
    with one_process(tmp_path):
        after = trained_alone(tmp_path / "two", 12)
        expected = trained_alone(tmp_path / "one", 12)
    assert equal(after, expected)
    assert Path(tbd.find_checkpoints(tmp_path / "two")[-1]).name == "step-12"


def agent(port: int, out: Path) -> subprocess.Popen[str]:
    """Starts what ``torchrun`` is on one of two hosts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
    launcher += ["--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=run"]
    launcher += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=5"]
    given = [str(EXAMPLE), "--out", str(out), "--steps=400", "--samples=48", "--every=20"]
    return subprocess.Popen(
        [*launcher, *given, "--timeout=5"],
        env=QUIET,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill_host(of: subprocess.Popen[str]) -> None:
    """Kills an agent and its workers, which have sessions of their own."""
    children = Path(f"/proc/{of.pid}/task/{of.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    for pid in (of.pid, *map(int, workers)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_goes_on_without_a_lost_host(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    out = tmp_path / "run"
    first = agent(port, out)
    time.sleep(3.0)
    second = agent(port, out)
    try:
        ends = time.monotonic() + 200
        while not tbd.find_checkpoints(out):
            assert time.monotonic() < ends
            assert first.poll() is None, first.communicate()[0][-3000:]
            time.sleep(0.1)
        kill_host(second)
        told, _ = first.communicate(timeout=200)
    finally:
        for one in (first, second):
            kill_host(one)
            one.communicate()
    assert first.returncode == 0, told[-3000:]
    assert "on 2 ranks" in told
    assert "step 400 on 1 ranks" in told
    with one_process(tmp_path):
        expected = trained_alone(tmp_path / "one", 400)
    assert equal(rows_of(tbd.find_checkpoints(out)[-1]), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed (extra `ray`)")
def test_ray_train_survives_a_lost_node(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ray_train_cases.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**QUIET, "PYTHONPATH": f"{EXAMPLE.parent}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Ray's own processes write there, too.
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    # One start, one after the killed worker, one after the lost node.
    assert found["disturbed"]["starts"] >= 3
    assert found["disturbed"]["nodes_left"] == 2
    assert found["calm"]["starts"] == 1
    paths = [found[name]["last"] for name in ("calm", "disturbed", "fewer")]
    assert [Path(path).name for path in paths] == ["step-24", "step-24", "step-28"]
    calm, disturbed, fewer = map(rows_of, paths)
    assert equal(calm, disturbed)
    # The same run goes on with one worker, and has the bits of one process.
    with one_process(tmp_path):
        expected = trained_alone(tmp_path / "one", 28)
    assert equal(fewer, expected)
