"""Parts of a batch complete on their own, while rows of later parts are still read."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from test_ranks import SAMPLES, SHARDINGS, TABLES, draw, run_ranks, small

import tierbed as tb
from tierbed import dist as tbd

STEPS = 2
PARTS = 3


def train(sharded: tbd.ShardedEmbeddingBagCollection, rank: int, parts: int | None) -> Any:
    outputs = []
    for step in range(STEPS):
        batch = draw(10 * step + rank, SAMPLES[rank], False)
        if parts is None:
            found = [sharded(batch).values()]
        else:
            found = [part.values() for part in sharded.forward_parts(batch, parts)]
        out = torch.cat(found)
        outputs.append(out.detach().clone())
        (out * (out.detach() * 0.3 + 0.1 * step)).sum().backward()
        del found, out
    return outputs


@pytest.mark.parametrize("name", SHARDINGS)
def test_parts_have_the_bits_of_the_whole_and_step_rows_once(name: str) -> None:
    plan = tbd.ShardingPlan(2, SHARDINGS[name](2))

    def work(rank: tbd.LocalRank, parts: int | None) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        with tbd.ShardedEmbeddingBagCollection(
            TABLES, store=store, plan=plan, ranks=rank, optimizer=tb.Adagrad(lr=0.05)
        ) as sharded:
            return train(sharded, rank.rank, parts), store

    whole = run_ranks(2, lambda rank: work(rank, None))
    divided = run_ranks(2, lambda rank: work(rank, PARTS))
    for rank in range(2):
        for found, expected in zip(divided[rank][0], whole[rank][0], strict=True):
            assert torch.equal(found, expected), (name, rank)
        for table in divided[rank][1].tables():
            both = [
                store.read_rows_and_state(table["name"], 0, table["row_count"])
                for store in (divided[rank][1], whole[rank][1])
            ]
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), (name, rank)


class SlowRows:
    """A store on a device that reads only when it is told to; its rows were never written."""

    def __init__(self) -> None:
        self.may_read = threading.Semaphore(0)
        self.reads = 0

    def add_table(self, table: int, name: str, row_count: int, record_bytes: int) -> None:
        self.record_bytes = record_bytes

    def read(self, table: int, rows: Any) -> tuple[Any, Any]:
        assert self.may_read.acquire(timeout=20)
        self.reads += 1
        return np.zeros((len(rows), self.record_bytes), np.uint8), np.zeros(len(rows), np.bool_)

    def write(self, table: int, rows: Any, records: Any) -> None:
        raise AssertionError("nothing was trained")

    def scan(self, table: int, after: int, row_count_max: int) -> tuple[Any, Any]:
        return np.zeros(0, np.int64), np.zeros((0, self.record_bytes), np.uint8)

    def commit(self, blobs: Any) -> None:
        pass

    def blob(self, name: str) -> bytes | None:
        return None

    def close(self) -> None:
        pass


def test_a_part_is_there_before_the_next_one_was_read() -> None:
    samples = 6
    tables = [tb.EmbeddingBagConfig(100, 8, "a", init=tb.Normal(0.0, 0.5))]
    ids = torch.arange(2 * samples).view(2, samples)
    devices = [SlowRows(), SlowRows()]
    plan = tbd.ShardingPlan(2, {"a": tbd.TableWise(1)})
    with tb.Store.open(backend="memory", dram_budget="16MiB") as whole:
        one = tb.EmbeddingBagCollection(tables, store=whole)
        rows = one.store.read_rows("a", 0, 2 * samples)

    by_memory = tbd.ExchangeOptions(kind="one_sided", timeout_s=30.0)

    def work(rank: tbd.LocalRank) -> None:
        device = devices[rank.rank]
        store = tb.Store.over(device, dram_budget="16MiB")
        bags = tb.KeyedJaggedTensor(
            ["a"], ids[rank.rank], lengths=torch.ones(samples, dtype=torch.int64)
        )
        with (
            tbd.ShardedEmbeddingBagCollection(
                tables, store=store, plan=plan, ranks=rank, exchange=by_memory
            ) as sharded,
            torch.no_grad(),
        ):
            found = sharded.forward_parts(bags, PARTS)
            for part in range(PARTS):
                if rank.rank == 0:
                    # Rank 1 holds the table: it may read what this part needs, and no more.
                    devices[1].may_read.release()
                first = 2 * part
                expected = rows[ids[rank.rank][first : first + 2]]
                assert torch.equal(next(found).values(), expected)
                if rank.rank == 0:
                    assert devices[1].reads == part + 1
            assert next(found, None) is None

    run_ranks(2, work)


def test_parts_are_refused_where_they_cannot_be() -> None:
    (rank,) = tbd.local_ranks(1)
    batch = draw(1, 3, is_weighted=False)
    copying = small(rank, exchange=tbd.ExchangeOptions(copies_outputs=True))
    with copying, pytest.raises(tb.UnsupportedError, match="copies whole outputs"):
        copying.forward_parts(batch, 2)
    with small(rank) as lending:
        for parts in (0, 1025):
            with pytest.raises(tb.InvalidError, match="1 to 1024 parts"):
                lending.forward_parts(batch, parts)
        # A consumer that stops early does not disturb the next lookup.
        next(lending.forward_parts(batch, 2))
        assert lending(batch).values().shape == (3, 28)


def test_a_rank_that_cannot_read_tells_its_own_error() -> None:
    class Broken(SlowRows):
        def read(self, table: int, rows: Any) -> tuple[Any, Any]:
            raise OSError("the disk is gone")

    (rank,) = tbd.local_ranks(1)
    tables = [tb.EmbeddingBagConfig(100, 8, "a")]
    store = tb.Store.over(Broken(), dram_budget="16MiB")
    sharded = tbd.ShardedEmbeddingBagCollection(tables, store=store, ranks=rank)
    bags = tb.KeyedJaggedTensor(["a"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    with pytest.raises(Exception, match="the disk is gone"):
        list(sharded.forward_parts(bags, 2))
