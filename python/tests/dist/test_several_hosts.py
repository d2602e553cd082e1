"""Ranks on hosts made of namespaces: the bits of one process, and errors that name a lost host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import test_open_vocabularies as open_tables
import torch
import torch.distributed as dist
from hosts_kit import MakeHosts
from test_rank_plans import Batches
from test_ranks import (
    ROWS,
    SAMPLES,
    SHARDINGS,
    STEPS,
    TABLES,
    check_rows,
    draw,
    join,
    optimizers,
    train,
)

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist import sharding

TIMEOUT_S = 3.0
# Hosts, and ranks of each.
LAYOUTS = [(1, 2), (2, 1), (2, 2)]
WINDOWS = (0, 2)


def cases() -> list[tuple[str, int, int]]:
    """Every sharding with every optimizer, with and without look-ahead."""
    return [
        (name, number, window)
        for name in SHARDINGS
        for number in range(len(optimizers(name)))
        for window in WINDOWS
    ]


def batches_of(rank: int, is_weighted: bool) -> list[tb.KeyedJaggedTensor]:
    samples = [SAMPLES[(rank + step) % 4] for step in range(STEPS)]
    return [draw(100 * step + rank, samples[step], is_weighted) for step in range(STEPS)]


def options_of(name: str, number: int) -> dict[str, Any]:
    return {
        "optimizer": optimizers(name)[number],
        "is_weighted": number % 2 == 1 and name != "column-wise",
    }


def train_all() -> Any:
    """Trains all cases as one rank; returns how vectors travelled, and what it saw and holds."""
    rank, count = dist.get_rank(), dist.get_world_size()
    found = []
    exchange = None
    for name, number, window in cases():
        options = options_of(name, number)
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
        with tbd.ShardedEmbeddingBagCollection(TABLES, store=store, plan=plan, **options) as rows:
            exchange = rows.exchange
            batches = batches_of(rank, options["is_weighted"])
            seen = train(rows, tb.lookahead(batches, rows, window=window))
        held = {
            table["name"]: store.read_rows_and_state(table["name"], 0, table["row_count"])
            for table in store.tables()
        }
        found.append((seen, held))
    return exchange, found


class Held:
    """What a rank's store had, for :func:`check_rows`."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self._tables = tables

    def read_rows_and_state(self, name: str, _first: int, _count: int) -> Any:
        return self._tables[name]


@pytest.mark.parametrize(("host_count", "local_ranks"), LAYOUTS)
def test_two_hosts_have_the_bits_of_one_process(
    make_hosts: MakeHosts, tmp_path: Path, host_count: int, local_ranks: int
) -> None:
    count = host_count * local_ranks
    made = make_hosts(host_count)
    ranks = made.run(train_all, folder=tmp_path, local_ranks=local_ranks, limit_s=240)
    kinds = {(1, 2): "one_sided", (2, 1): "collective", (2, 2): "hierarchical"}
    assert {exchange for exchange, _ in ranks} == {kinds[host_count, local_ranks]}
    for at, (name, number, window) in enumerate(cases()):
        options = options_of(name, number)
        own = [batches_of(rank, options["is_weighted"]) for rank in range(count)]
        joined = [join([batches[step] for batches in own]) for step in range(STEPS)]
        whole = tb.Store.open(backend="memory", dram_budget="16MiB")
        one = tb.EmbeddingBagCollection(TABLES, store=whole, **options)
        expected, expected_grads = train(one, joined)
        plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
        what = (name, options["optimizer"], window)
        for step in range(STEPS):
            outputs = torch.cat([found[at][0][0][step] for _, found in ranks])
            assert torch.equal(outputs, expected[step]), (what, step)
            for feature in ROWS if options["is_weighted"] else []:
                grads = torch.cat([found[at][0][1][step][feature] for _, found in ranks])
                assert torch.equal(grads, expected_grads[step][feature]), (what, feature, step)
        for rank, (_, found) in enumerate(ranks):
            check_rows(Held(found[at][1]), whole, plan, rank)  # type: ignore[arg-type]


RESTARTED = {"a": tbd.RowWise(), "b": tbd.Mirrored(), "c": tbd.TableWise(1)}


def collection_of(folder: Path, name: str) -> Any:
    """A collection over all ranks, whose rows are on disk."""
    store = tb.Store.open(folder / f"{name}-{dist.get_rank()}", dram_budget="16MiB")
    plan = tbd.ShardingPlan(dist.get_world_size(), dict(RESTARTED))
    rows = tbd.ShardedEmbeddingBagCollection(
        TABLES, store=store, plan=plan, optimizer=tb.Adam(lr=0.05)
    )
    return store, rows


def train_planned(folder: Path) -> Any:
    """Trains two epochs along plans, and saves; returns outputs and the orders of stores."""
    store, rows = collection_of(folder, "first")
    batches = Batches(batches_of(dist.get_rank(), False))
    with store, rows:
        seen = [train(rows, tb.lookahead(batches, rows, window=2))[0] for _ in range(2)]
        rows.save(folder / "saved")
        return seen, store.order()["kind"]


def train_on(folder: Path) -> Any:
    """Goes on with half of the ranks, each with the samples of two."""
    store, rows = collection_of(folder, "second")
    own = [batches_of(2 * dist.get_rank() + at, False) for at in range(2)]
    joined = [join([batches[step] for batches in own]) for step in range(STEPS)]
    with store, rows:
        rows.load(folder / "saved")
        return train(rows, tb.lookahead(joined, rows, window=2))[0]


def test_fewer_hosts_go_on_with_the_bits_of_one_process(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    own = [batches_of(rank, False) for rank in range(4)]
    joined = [join([batches[step] for batches in own]) for step in range(STEPS)]
    whole = tb.Store.open(backend="memory", dram_budget="16MiB")
    one = tb.EmbeddingBagCollection(TABLES, store=whole, optimizer=tb.Adam(lr=0.05))
    expected = [train(one, joined)[0] for _ in range(3)]

    many = make_hosts(2)
    ranks = many.run(train_planned, tmp_path, folder=tmp_path / "a", local_ranks=2, limit_s=120)
    assert [kind for _, kind in ranks] == ["forward"] * 4
    for epoch in range(2):
        for step in range(STEPS):
            outputs = torch.cat([seen[epoch][step] for seen, _ in ranks])
            assert torch.equal(outputs, expected[epoch][step]), (epoch, step)
    few = make_hosts(1)
    ranks = few.run(train_on, tmp_path, folder=tmp_path / "b", local_ranks=2, limit_s=120)
    for step in range(STEPS):
        outputs = torch.cat([seen[step] for seen in ranks])
        assert torch.equal(outputs, expected[2][step]), step


def train_open(folder: Path, first: int, end: int) -> Any:
    """Trains some steps of tables with open vocabularies; later ones go on at a checkpoint."""
    sharding.OPEN_BLOCK_ROWS = 4
    own = open_tables.batches_of(dist.get_world_size())[dist.get_rank()][first:end]
    store = open_tables.memory()
    with store, open_tables.make(tbd.ProcessRank(), store, "row-wise") as rows:
        if first > 0:
            rows.load(folder / "saved")
        seen = [open_tables.step(rows, batch)[0] for batch in tb.lookahead(own, rows, window=2)]
        if first == 0:
            rows.save(folder / "saved")
        return seen


def test_hosts_share_open_vocabularies(make_hosts: MakeHosts, tmp_path: Path) -> None:
    one = tb.EmbeddingBagCollection(open_tables.TABLES, store=open_tables.memory())
    (joined,) = open_tables.batches_of(1)
    expected = [open_tables.step(one, batch)[0] for batch in joined]
    for hosts, first, end in [(2, 0, 3), (1, 3, len(joined))]:
        folder = tmp_path / str(hosts)
        found = make_hosts(hosts).run(
            train_open, tmp_path, first, end, folder=folder, local_ranks=2, limit_s=120
        )
        for at in range(end - first):
            outputs = torch.cat([seen[at] for seen in found])
            assert torch.equal(outputs, expected[first + at]), (hosts, at)


def train_until_lost(folder: Path) -> Any:
    """Trains until another rank is lost; returns the error, and after how many seconds."""
    rank, count = dist.get_rank(), dist.get_world_size()
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    plan = tbd.ShardingPlan(count, SHARDINGS["row-wise"](count))
    how = tbd.ExchangeOptions(timeout_s=TIMEOUT_S)
    rows = tbd.ShardedEmbeddingBagCollection(
        TABLES, store=store, plan=plan, exchange=how, optimizer=tb.SGD()
    )
    batch = draw(rank, 5, is_weighted=False)
    last = time.monotonic()
    try:
        for step in range(1_000_000):
            rows(batch).values().sum().backward()
            last = time.monotonic()
            if step == 3:
                (folder / f"there-{rank}").touch()
    except tb.TierbedError as error:
        return str(error), time.monotonic() - last
    return "", 0.0


# A killed process leaves its connections closed, a cut cable leaves the time-out.
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_killed_host_is_named_within_the_timeout(
    make_hosts: MakeHosts, tmp_path: Path, how: str
) -> None:
    two = make_hosts(2)
    ranks = two.start(
        train_until_lost, tmp_path, folder=tmp_path, local_ranks=2, timeout_s=4 * TIMEOUT_S
    )
    for rank in range(4):
        ranks.await_file(f"there-{rank}")
    getattr(two, how)(1)
    found = ranks.results(TIMEOUT_S + 30)
    for rank, result in enumerate(found[:2]):
        assert result.error is None, result.error
        told, seconds = result.value
        # That of its own rail, or of the rank beside it.
        assert "rank 2" in told or "rank 3" in told, (rank, told)
        assert seconds < TIMEOUT_S + 2
    assert any(f"host '{two.name}-1'" in result.value[0] for result in found[:2])
    assert [result.is_back for result in found[2:]] == [how == "cut"] * 2
