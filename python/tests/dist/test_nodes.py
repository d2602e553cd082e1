"""Ranks of several nodes against one process: outputs, rows, state, to the last bit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
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
    run_ranks,
    train,
)

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist.nodes import nodes_of

# Ranks, and the nodes that they are on.
HOSTS = [(2, 2), (4, 2), (4, 4)]


def train_window(collection: Any, batches: Any, window: int) -> Any:
    """Trains with a look-ahead over batches."""
    return train(collection, tb.lookahead(batches, collection, window=window))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize(("count", "nodes"), [*HOSTS, (2, 1)])
def test_nodes_have_the_bits_of_one_process(name: str, count: int, nodes: int, window: int) -> None:
    if (nodes, window) == (1, 0):
        pytest.skip("one node without look-ahead is in test_ranks.py")
    plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
    for number, optimizer in enumerate(optimizers(name)):
        is_weighted = number % 2 == 1 and name != "column-wise"
        batches = [
            [draw(100 * step + rank, SAMPLES[(rank + step) % 4], is_weighted) for step in range(3)]
            for rank in range(count)
        ]
        joined = [join([own[step] for own in batches]) for step in range(STEPS)]
        options = {"optimizer": optimizer, "is_weighted": is_weighted}
        whole = tb.Store.open(backend="memory", dram_budget="16MiB")
        one = tb.EmbeddingBagCollection(TABLES, store=whole, **options)
        expected, expected_grads = train(one, joined)

        def work(rank: tbd.LocalRank, own: Any = batches, options: Any = options) -> Any:
            store = tb.Store.open(backend="memory", dram_budget="16MiB")
            sharded = tbd.ShardedEmbeddingBagCollection(
                TABLES, store=store, plan=plan, ranks=rank, **options
            )
            with sharded:
                return train_window(sharded, own[rank.rank], window), store

        found = run_ranks(count, work, nodes=nodes)
        for step in range(STEPS):
            outputs = torch.cat([result[0][0][step] for result in found])
            assert torch.equal(outputs, expected[step]), (optimizer, step)
            for feature in ROWS if is_weighted else []:
                grads = torch.cat([result[0][1][step][feature] for result in found])
                assert torch.equal(grads, expected_grads[step][feature]), (feature, step)
        for rank in range(count):
            check_rows(found[rank][1], whole, plan, rank)


@pytest.mark.parametrize("name", SHARDINGS)
def test_parts_over_nodes_have_the_bits_of_the_whole(name: str) -> None:
    plan = tbd.ShardingPlan(4, SHARDINGS[name](4))
    is_weighted = name != "column-wise"
    batches = [draw(rank, samples, is_weighted) for rank, samples in enumerate(SAMPLES)]

    def looked_up(parts: int) -> Any:
        def work(rank: tbd.LocalRank) -> Any:
            store = tb.Store.open(backend="memory", dram_budget="16MiB")
            sharded = tbd.ShardedEmbeddingBagCollection(
                TABLES,
                store=store,
                plan=plan,
                ranks=rank,
                is_weighted=is_weighted,
                optimizer=tb.Adagrad(lr=0.05),
            )
            batch = batches[rank.rank]
            weights = batch.weights_or_none()
            if weights is not None:
                weights.requires_grad_().grad = None
            with sharded:
                for _ in range(2):
                    if parts:
                        found = [part.values() for part in sharded.forward_parts(batch, parts)]
                    else:
                        found = [sharded(batch).values()]
                    out = torch.cat(found)
                    (out * out.detach()).sum().backward()
                grads = None if weights is None else weights.grad
                return out.detach().clone(), grads

        return run_ranks(4, work, nodes=2)

    whole = looked_up(0)
    for parts in (1, 3):
        for (out, grads), (expected, expected_grads) in zip(looked_up(parts), whole, strict=True):
            assert torch.equal(out, expected), (name, parts)
            assert grads is None or torch.equal(grads, expected_grads), (name, parts)


def test_rows_cross_once_per_node_and_ids_go_to_their_holder() -> None:
    """What goes between nodes is counted, next to what must go."""
    rows, dim, samples, ranks = 1000, 32, 300, 4
    tables = [tb.EmbeddingBagConfig(rows, dim, "a", ["x"])]
    generator = torch.Generator().manual_seed(3)
    # Few of the rows, so that both ranks of a node ask for the same.
    ids = [torch.randint(0, 1000, (samples,), generator=generator) % 97 * 10 for _ in range(ranks)]
    bounds = [0, 250, 500, 750, 1000]
    needed = 0
    for node, other in ((0, 1), (1, 0)):
        asked = torch.cat([ids[2 * node], ids[2 * node + 1]])
        for holder in (2 * other, 2 * other + 1):
            there = asked[(asked >= bounds[holder]) & (asked < bounds[holder + 1])]
            # Ids, each row once, and a gradient for each bag.
            needed += 4 * there.numel() + 4 * dim * (there.unique().numel() + there.numel())

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        sharded = tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=tbd.ShardingPlan(ranks, {"a": tbd.RowWise()}), ranks=rank
        )
        own = ids[rank.rank]
        batch = tb.KeyedJaggedTensor(["x"], own, lengths=torch.ones(samples, dtype=torch.int64))
        network = rank._process.networks[0]
        with sharded:
            before = network.bytes_sent
            rank.gather(None)
            sharded(batch).values().sum().backward()
            rank.gather(None)
            sent = network.bytes_sent - before
            # Nobody closes before all have read.
            rank.gather(None)
            return sent

    sent = run_ranks(ranks, work, nodes=2)
    assert len(set(sent)) == 1
    assert needed < sent[0] <= 1.02 * needed


def test_look_ahead_saves_reads_over_ranks(tmp_path: Any) -> None:
    """Rows of several batches come in one sorted sweep: fewer pages are read, no bit is other."""
    rows, steps, samples = 20_000, 6, 300
    tables = [tb.EmbeddingBagConfig(rows, 16, "a", ["x"])]
    plan = tbd.ShardingPlan(2, {"a": tbd.RowWise()})

    def bags(ids: torch.Tensor) -> tb.KeyedJaggedTensor:
        return tb.KeyedJaggedTensor(["x"], ids, lengths=torch.ones(ids.numel(), dtype=torch.int64))

    def run(window: int, nodes: int) -> Any:
        def train_on(rank: tbd.LocalRank, batches: Any) -> Any:
            folder = tmp_path / f"{window}-{nodes}-{rank.rank}"
            store = tb.Store.open(folder, backend="file", dram_budget="4MiB")
            sharded = tbd.ShardedEmbeddingBagCollection(
                tables, store=store, plan=plan, ranks=rank, optimizer=tb.SGD()
            )
            with sharded, store:
                for batch in tb.lookahead(batches, sharded, window=window):
                    sharded(batch).values().sum().backward()
                store.checkpoint("done")
                reads = store.stats()["store"]["io"]["read_count"]
                return store.read_rows("a", 0, rows), reads

        def work(rank: tbd.LocalRank) -> Any:
            # All rows are written, and then none is in memory.
            every = torch.arange(rows).view(10, 2, -1)[:, rank.rank]
            train_on(rank, [bags(ids) for ids in every])
            generator = torch.Generator().manual_seed(rank.rank)
            drawn = torch.randint(0, rows, (steps, samples), generator=generator)
            return train_on(rank, [bags(ids) for ids in drawn])

        return run_ranks(2, work, nodes=nodes)

    without = run(0, 1)
    for nodes in (1, 2):
        ahead = run(steps, nodes)
        for (found, reads), (expected, more) in zip(ahead, without, strict=True):
            assert torch.equal(found, expected)
            assert reads < 0.6 * more, (nodes, reads, more)


def test_ranks_may_leave_a_look_ahead_and_look_up_other_batches() -> None:
    tables = [tb.EmbeddingBagConfig(50, 8, "a", ["x"])]

    def bags(number: int) -> tb.KeyedJaggedTensor:
        return tb.KeyedJaggedTensor(["x"], torch.tensor([number]), lengths=torch.tensor([1]))

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        sharded = tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=tbd.ShardingPlan(2, {"a": tbd.RowWise()}), ranks=rank
        )
        own = [bags(10 * rank.rank + at) for at in range(6)]
        found = []
        with sharded:
            expected = [sharded(batch).values().detach().clone() for batch in own]
            for at, batch in enumerate(tb.lookahead(own, sharded, window=4)):
                if at == 1:
                    continue  # announced, and never looked up
                with torch.no_grad():
                    # Another batch, as of an evaluation.
                    assert torch.equal(sharded(own[5]).values(), expected[5])
                    found.append((at, sharded(batch).values().clone()))
                if at == 4:
                    break
            found.append((0, sharded(own[0]).values().detach().clone()))
        return all(torch.equal(out, expected[at]) for at, out in found)

    for nodes in (1, 2):
        assert run_ranks(2, work, nodes=nodes) == [True, True]


def test_loaders_of_unequal_length_are_told() -> None:
    tables = [tb.EmbeddingBagConfig(50, 8, "a", ["x"])]

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        sharded = tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=tbd.ShardingPlan(2, {"a": tbd.RowWise()}), ranks=rank
        )
        batches = [
            tb.KeyedJaggedTensor(["x"], torch.tensor([at]), lengths=torch.tensor([1]))
            for at in range(3 - rank.rank)
        ]
        with sharded, pytest.raises(tb.InvalidError, match="2 to 3") as caught:
            next(iter(tb.lookahead(batches, sharded, window=8)))
        return "DistributedSampler" in str(caught.value)

    for nodes in (1, 2):
        assert run_ranks(2, work, nodes=nodes) == [True, True]


def test_a_bad_call_over_nodes_is_mended_and_breaks_nothing() -> None:
    tables = [tb.EmbeddingBagConfig(50, 8, "a", ["x"])]

    def bags(number: int) -> tb.KeyedJaggedTensor:
        return tb.KeyedJaggedTensor(["x"], torch.tensor([number]), lengths=torch.tensor([1]))

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        sharded = tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=tbd.ShardingPlan(4, {"a": tbd.RowWise()}), ranks=rank
        )
        with sharded:
            for step in (1, 2):
                with pytest.raises(tb.InvalidError, match="out of range"):
                    sharded(bags(50))
                out = sharded(bags(3)).values()
                with pytest.raises(tb.InvalidError, match="not waiting"):
                    sharded._exchange.backward(999, torch.ones(1, 8), None)
                with pytest.raises(tb.InvalidError, match="finite"):
                    sharded._exchange.backward(step, torch.full((1, 8), float("nan")), None)
                out.sum().backward()
        return True

    assert run_ranks(4, work, nodes=2) == [True] * 4


def test_a_rank_that_fails_is_named_on_other_nodes_at_once() -> None:
    tables = [tb.EmbeddingBagConfig(50, 8, "a", ["x"])]

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        sharded = tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=tbd.ShardingPlan(4, {"a": tbd.RowWise()}), ranks=rank
        )
        batch = tb.KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
        sharded(batch)
        if rank.rank == 3:
            store.close()
        started = time.monotonic()
        with pytest.raises(tb.TierbedError) as caught:
            sharded(batch)
        # Nobody waits for the time-out of a minute.
        assert time.monotonic() - started < 20
        return str(caught.value)

    told = run_ranks(4, work, nodes=2)
    assert "closed" in told[3]
    assert "rank 3" in told[1]
    assert "rank 3" in told[2]
    # It heard of it by the rank of its own node that waited for rank 3.
    assert "rank 3" in told[0] or "rank 2" in told[0], told[0]


def test_nodes_are_found_by_shared_memory_not_by_name() -> None:
    pairs = [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    nodes = nodes_of(2, pairs, ["same"] * 4)
    assert (nodes.own, nodes.count, nodes.ranks_each) == (1, 2, 2)
    assert nodes.rail == [0, 2]
    assert list(nodes.ranks()) == [2, 3]
    assert nodes_of(1, [[True] * 3] * 3, ["a", "b", "c"]).count == 1
    mixed = [[True, False, True], [False, True, False], [True, False, True]]
    with pytest.raises(tb.InvalidError, match=r"torchrun --nnodes and an equal --nproc-per-node"):
        nodes_of(0, mixed, ["a"] * 3)
    one_way = [[True, True], [False, True]]
    with pytest.raises(tb.InvalidError, match="equally many"):
        nodes_of(0, one_way, ["a"] * 2)


def test_what_nodes_cannot_do_is_refused() -> None:
    with pytest.raises(tb.InvalidError, match="cannot be divided into 2 nodes"):
        tbd.local_ranks(3, nodes=2)
    rank = tbd.local_ranks(2, nodes=2)[0]
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    with pytest.raises(tb.UnsupportedError, match="use exchange='auto'"):
        tbd.ShardedEmbeddingBagCollection(TABLES, store=store, ranks=rank, exchange="one_sided")
