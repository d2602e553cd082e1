"""What ranks whose devices share no memory do: threads, and processes over gloo.

TRITON_INTERPRET=1 python collective_cases.py CASE,CASE/CASE cpu
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_cases import (
    DEVICE,
    WAYS,
    check_held,
    compiling_before,
    fork,
    on_device,
    ranks_and_one,
    run_cases,
    train,
    train_over_heap,
)
from heap_kit import run_device_ranks
from test_ranks import ROWS, SAMPLES, STEPS, TABLES, draw, join

import tierbed as tb
import tierbed.dist.ranks
from tierbed import dist as tbd
from tierbed.dist.device.messages import GroupMessages, WireMessages, wait_for
from tierbed.dist.nodes import Nodes
from tierbed.dist.wire import Connected, TorchWire

# Optimizers, and on how many ranks; weights have gradients in every other one.
OPTIMIZERS: dict[str, list[tuple[Any, list[int]]]] = {
    "table-wise": [
        (tb.SGD(lr=0.05, weight_decay=0.1), [3]),
        (tb.RowWiseAdagrad(lr=0.05), [2, 4]),
    ],
    "column-wise": [(tb.Adagrad(lr=0.05), [3])],
    "mirrored": [(tb.SGD(lr=0.05), [2]), (tb.RowWiseAdagrad(lr=0.05), [3])],
    "row-wise": [(tb.SGD(lr=0.05), [2]), (tb.RowWiseAdagrad(lr=0.05), [4])],
    "uneven rows": [(tb.SGD(lr=0.05), [3])],
    "mixed": [(tb.Adagrad(lr=0.05), [1]), (tb.Adagrad(lr=0.05), [2])],
    "together": [(tb.SGD(lr=0.05), [4])],
}
# Processes.
RANKS = 4


def collective() -> None:
    """Threads: the bits of one process, and of ranks that write each other's memory."""
    with compiling_before():
        for name, optimizers in OPTIMIZERS.items():
            for number, (optimizer, counts) in enumerate(optimizers):
                for count in counts:
                    plan = tbd.ShardingPlan(count, WAYS[name](count))
                    how = {"kind": "collective"}
                    ranks_and_one(plan, optimizer, is_weighted=number % 2 == 1, how=how)
        # What falls back by itself, as GPUs of several hosts do.
        plan = tbd.ShardingPlan(2, WAYS["together"](2))
        ranks_and_one(plan, tb.Adagrad(lr=0.05), is_weighted=False, nodes=2)


def collective_refusals() -> None:
    """What is an error, what may be mended, and who is named."""
    plan = tbd.ShardingPlan(2, WAYS["table-wise"](2))

    def insist(rank: Any) -> str:
        with pytest.raises(tb.UnsupportedError) as caught:
            on_device(rank, plan, how={"kind": "one_sided"})
        return str(caught.value)

    told = run_device_ranks(2, insist, nodes=2)
    assert told[0] == told[1]
    assert "rank 0 on host 'node 0' and rank 1 on host 'node 1' do not reach" in told[0]

    def mend(rank: Any) -> None:
        with on_device(rank, plan, how={"kind": "collective"}) as rows:
            assert rows.exchange == "collective"
            bad = draw(1, 3, is_weighted=False)
            bad.values()[-1] = 200
            if rank.rank == 0:
                with pytest.raises(tb.InvalidError, match="id 200 of feature 'w'"):
                    rows(bad)
            outputs = [rows(draw(1, 3, is_weighted=False)).values() for _ in range(4)]
            # Outputs are nobody's but whose they are.
            assert all(torch.equal(outputs[0], output) for output in outputs)
            outputs[-1].sum().backward()
            assert rows.sent_bytes()["vectors"] > 0
            assert rows.sent_bytes()["gradients"] > 0

    run_device_ranks(2, mend)

    def stay_away(rank: Any) -> str:
        collection = on_device(rank, plan, how={"timeout_s": 0.3, "kind": "collective"})
        if rank.rank == 1:
            return ""
        with pytest.raises(tb.IoError, match=r"rank 1 .* does not answer rank 0"):
            collection(draw(1, 3, is_weighted=False))
        with pytest.raises(tb.ClosedError, match="start all ranks again"):
            collection(draw(1, 3, is_weighted=False))
        return "named"

    assert run_device_ranks(2, stay_away)[0] == "named"


def queued_calls() -> None:
    """Calls that only queue work, as NCCL's, are waited for by the host, and not for ever."""

    class Work:
        """A call that is done after some looks."""

        def __init__(self, looks: int) -> None:
            self.looks = looks
            self.waits = 0

        def wait(self) -> None:
            self.waits += 1

        def is_completed(self) -> bool:
            self.looks -= 1
            return self.looks < 0

    work = Work(3)
    wait_for(work, 60.0, is_queued=True)
    assert (work.looks, work.waits) == (-1, 1)
    with pytest.raises(RuntimeError, match=r"nothing came in 0\.05 s"):
        wait_for(Work(1_000_000), 0.05, is_queued=True)


def calls_of_gpus() -> None:
    """NCCL is taken where a group has it and each rank a GPU, else memory of the host."""
    nodes = Nodes(rank=0, count=1, ranks_each=1)
    gpu = torch.device("cuda", 0)
    made: list[tuple[str, float | None]] = []

    def beside(_: Any, backend: str = "gloo", timeout_s: float | None = None) -> Any:
        made.append((backend, timeout_s))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        dist.init_process_group("gloo", init_method=f"file://{folder}/a", rank=0, world_size=1)
        patch.setattr(tierbed.dist.ranks, "gpu_uuid", lambda device: "some GPU")
        patch.setattr(Connected, "beside", beside)
        patch.setattr(TorchWire, "__init__", lambda *_: None)
        rank = tbd.ProcessRank()
        assert isinstance(rank.device_messages(nodes, gpu, 5.0), WireMessages)
        assert isinstance(rank.device_messages(nodes, torch.device("cpu"), 5.0), GroupMessages)
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        assert isinstance(rank.device_messages(nodes, gpu, 5.0), GroupMessages)
        # NCCL's own time-out would end the process.
        assert made == [("gloo", 5.0), ("nccl", None)]
        # Two ranks on one GPU, as in tests.
        patch.setattr(tbd.ProcessRank, "count", 2)
        patch.setattr(tbd.ProcessRank, "gather", lambda self, value: [value] * 2)
        assert isinstance(rank.device_messages(nodes, gpu, 5.0), WireMessages)
        dist.destroy_process_group()


def fork_ranks(work: Callable[[int], None]) -> list[int]:
    """Runs ``work`` as each of some ranks, processes of their own; returns how they ended."""
    with tempfile.TemporaryDirectory() as folder:

        def be_rank(rank: int) -> None:
            file = f"file://{folder}/ranks"
            dist.init_process_group("gloo", init_method=file, rank=rank, world_size=RANKS)
            work(rank)

        ranks = [fork(lambda rank=rank: be_rank(rank)) for rank in range(RANKS)]
        return [os.waitpid(rank, 0)[1] for rank in ranks]


def processes() -> None:
    """Processes: the bits of one over gloo, on all of them and on fewer; then one is killed."""
    *ended, lost = fork_ranks(train_and_be_killed)
    assert ended == [0] * (RANKS - 1), ended
    assert os.WTERMSIG(lost) == signal.SIGKILL


def silent_process() -> None:
    """A process that lets its time run out, and the time to say that it is there, is named."""

    def be_silent(rank: int) -> None:
        seconds = lose_a_rank(4.0, lambda: time.sleep(12.0))
        assert seconds < 12.0 or rank == RANKS - 1, seconds

    assert fork_ranks(be_silent) == [0] * RANKS


def train_and_be_killed(rank: int) -> None:
    """One of the processes."""
    # Torch numbers groups by those that a rank is in: the largest come first.
    for count in range(RANKS, 0, -1):
        group = dist.new_group(list(range(count)))
        if rank < count:
            train_in_group(group, count)
        dist.barrier()
    two = dist.new_group([0, 1])
    if rank < 2:
        train_over_heap(tbd.ProcessRank(two))
    dist.barrier()
    # A connection that closes is noticed at once, by its neighbours, and then by all.
    killed = lose_a_rank(60.0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert killed < 20.0, killed


def train_in_group(group: dist.ProcessGroup, count: int) -> None:
    """Trains as one of the ranks of a group, and compares every bit with one process."""
    rank = dist.get_rank()
    way = ("together", "row-wise", "mixed", "table-wise")[count % 4]
    plan = tbd.ShardingPlan(count, WAYS[way](count))
    is_weighted = way != "together"
    optimizer: Any = tb.RowWiseAdagrad(lr=0.05) if is_weighted else tb.Adagrad(lr=0.05)
    own = [
        [draw(100 * step + at, SAMPLES[(at + step) % 4], is_weighted) for step in range(STEPS)]
        for at in range(count)
    ]
    joined = [join([batches[step] for batches in own]) for step in range(STEPS)]
    options = {"optimizer": optimizer, "is_weighted": is_weighted}
    grads: Any = [] if is_weighted else None
    expected_grads: Any = [] if is_weighted else None
    with tb.Store.open(backend="memory", dram_budget="16MiB") as whole:
        one = tb.EmbeddingBagCollection(TABLES, store=whole, **options)
        expected = train(one, joined, expected_grads)
        store = tbd.DeviceStore(DEVICE)
        how = {"kind": "collective", "timeout_s": 60.0}
        with on_device(tbd.ProcessRank(group), plan, store=store, how=how, **options) as rows:
            found = train(rows, own[rank], grads)
        for step in range(STEPS):
            samples = [batches[step].stride() for batches in own]
            first = sum(samples[:rank])
            of_rank = expected[step][first : first + samples[rank]]
            assert torch.equal(found[step], of_rank), (way, count, step)
            for feature in range(len(ROWS)) if is_weighted else []:
                counts = [batches[step][list(ROWS)[feature]].values().numel() for batches in own]
                begin = sum(counts[:rank])
                of_ids = expected_grads[step][feature][begin : begin + counts[rank]]
                assert torch.equal(grads[step][feature], of_ids), (count, feature, step)
        check_held(store, whole, plan, rank)


def lose_a_rank(timeout_s: float, lose: Callable[[], None]) -> float:
    """The last rank is lost in training, and the others name it; returns after how long."""
    rank, count = dist.get_rank(), dist.get_world_size()
    plan = tbd.ShardingPlan(count, WAYS["table-wise"](count))
    how = {"kind": "collective", "timeout_s": timeout_s}
    rows = on_device(tbd.ProcessRank(), plan, how=how, optimizer=tb.SGD())
    batch = draw(rank, 2, is_weighted=False)
    rows(batch).values().sum().backward()
    last = time.monotonic()
    if rank == count - 1:
        lose()
    with pytest.raises(tb.IoError) as caught:
        rows(batch)
    assert rank == count - 1 or f"rank {count - 1} on host" in str(caught.value), caught.value
    return time.monotonic() - last


if __name__ == "__main__":
    run_cases(sys.argv[1], globals())
