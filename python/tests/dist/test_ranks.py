"""Ranks as threads against one process: outputs, rows, state, to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed import dist as tbd

STEPS = 3
TABLES = [
    tb.EmbeddingBagConfig(60, 8, "a", ["x", "y"]),
    tb.EmbeddingBagConfig(9, 4, "b", ["z"], pooling="mean"),
    tb.EmbeddingBagConfig(200, 8, "c", ["w"], init=tb.Normal(0.0, 0.5)),
]
ROWS = {"x": 60, "y": 60, "z": 9, "w": 200}
# Uneven, and one rank without samples.
SAMPLES = [5, 0, 7, 2]

SHARDINGS: dict[str, Callable[[int], Any]] = {
    "table-wise": lambda ranks: {
        "a": tbd.TableWise(ranks - 1),
        "b": tbd.TableWise(0),
        "c": tbd.TableWise(ranks // 2),
    },
    "row-wise": lambda ranks: {name: tbd.RowWise() for name in "abc"},
    "column-wise": lambda ranks: {name: tbd.ColumnWise() for name in "abc"},
    "mirrored": lambda ranks: {name: tbd.Mirrored() for name in "abc"},
    "mixed": lambda ranks: {"a": tbd.RowWise(), "b": tbd.Mirrored(), "c": tbd.TableWise(0)},
}


def run_ranks(count: int, work: Callable[[tbd.LocalRank], Any], **options: Any) -> list[Any]:
    """Runs ``work`` once per rank, each in a thread of its own."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(rank: tbd.LocalRank) -> None:
        try:
            results[rank.rank] = work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in tbd.local_ranks(count, **options)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def draw(seed: int, samples: int, is_weighted: bool) -> tb.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(ROWS) * samples,), generator=generator)
    values = [
        torch.randint(0, rows, (int(of_feature.sum()),), generator=generator)
        for rows, of_feature in zip(ROWS.values(), lengths.view(len(ROWS), -1), strict=True)
    ]
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if is_weighted else None
    return tb.KeyedJaggedTensor(list(ROWS), ids, weights, lengths=lengths, stride=samples)


def join(batches: list[tb.KeyedJaggedTensor]) -> tb.KeyedJaggedTensor:
    """Joins batches of several ranks: samples of rank 0 first."""
    parts: dict[str, tb.JaggedTensor] = {}
    for name in batches[0].keys():
        found = [batch[name] for batch in batches]
        weights = [one.weights_or_none() for one in found]
        parts[name] = tb.JaggedTensor(
            torch.cat([one.values() for one in found]),
            lengths=torch.cat([one.lengths() for one in found]),
            weights=None if weights[0] is None else torch.cat(weights),
        )
    return tb.KeyedJaggedTensor.from_jt_dict(parts)


def train(collection: Any, batches: list[tb.KeyedJaggedTensor]) -> tuple[Any, Any]:
    outputs, weight_grads = [], []
    for step, batch in enumerate(batches):
        weights = batch.weights_or_none()
        if weights is not None:
            weights.requires_grad_()
        out = collection(batch).values()
        outputs.append(out.detach().clone())
        # A gradient that depends on the output: any difference spreads.
        (out * (out.detach() * 0.3 + 0.1 * step)).sum().backward()
        if weights is not None:
            weight_grads.append(dict(zip(ROWS, _by_feature(batch, weights.grad), strict=True)))
    return outputs, weight_grads


def _by_feature(batch: tb.KeyedJaggedTensor, values: Any) -> Any:
    counts = batch.lengths().view(len(ROWS), -1).sum(dim=1).tolist()
    return values.split(counts)


def all_rows(store: tb.Store, config: tb.EmbeddingBagConfig) -> tuple[Any, Any]:
    return store.read_rows_and_state(config.name, 0, config.num_embeddings)


def check_rows(store: tb.Store, whole: tb.Store, plan: tbd.ShardingPlan, rank: int) -> None:
    """Compares what ``rank`` holds with the rows of one process."""
    for config in TABLES:
        rows, state = all_rows(whole, config)
        way = plan.sharding(config)
        if way["kind"] == "columns":
            first, end = way["bounds"][rank], way["bounds"][rank + 1]
            name = f"{config.name}.columns.{first}"
            found, found_state = store.read_rows_and_state(name, 0, config.num_embeddings)
            assert torch.equal(found, rows[:, first:end])
            parts = state.view(config.num_embeddings, -1, config.embedding_dim)[:, :, first:end]
            assert torch.equal(found_state, parts.reshape(config.num_embeddings, -1))
        elif way["kind"] != "whole" or way["rank"] == rank:
            held = slice(*(way["bounds"][rank : rank + 2] if way["kind"] == "rows" else (None,)))
            found, found_state = all_rows(store, config)
            assert torch.equal(found[held], rows[held]), (config.name, rank)
            assert torch.equal(found_state[held], state[held]), (config.name, rank)


def optimizers(name: str) -> list[Any]:
    by_element = [tb.SGD(lr=0.05), tb.Adagrad(lr=0.05), tb.Adam(lr=0.05)]
    return by_element if name == "column-wise" else [*by_element, tb.RowWiseAdagrad(lr=0.05)]


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_sharding_trains_as_one_process_does(name: str, count: int) -> None:
    plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
    for number, optimizer in enumerate(optimizers(name)):
        is_weighted = number % 2 == 1 and name != "column-wise"
        batches = [
            [draw(100 * step + rank, SAMPLES[(rank + step) % 4], is_weighted) for step in range(3)]
            for rank in range(count)
        ]
        joined = [join([own[step] for own in batches]) for step in range(STEPS)]

        whole = tb.Store.open(backend="memory", dram_budget="16MiB")
        one = tb.EmbeddingBagCollection(
            TABLES, store=whole, optimizer=optimizer, is_weighted=is_weighted
        )
        expected, expected_grads = train(one, joined)

        def work(
            rank: tbd.LocalRank,
            batches: Any = batches,
            optimizer: Any = optimizer,
            is_weighted: bool = is_weighted,
        ) -> Any:
            store = tb.Store.open(backend="memory", dram_budget="16MiB")
            sharded = tbd.ShardedEmbeddingBagCollection(
                TABLES,
                store=store,
                plan=plan,
                ranks=rank,
                optimizer=optimizer,
                is_weighted=is_weighted,
            )
            with sharded:
                return train(sharded, batches[rank.rank]), store

        found = run_ranks(count, work)
        for step in range(STEPS):
            outputs = torch.cat([result[0][0][step] for result in found])
            assert torch.equal(outputs, expected[step]), (optimizer, step)
            for feature in ROWS if is_weighted else []:
                grads = torch.cat([result[0][1][step][feature] for result in found])
                assert torch.equal(grads, expected_grads[step][feature]), (feature, step)
        for rank in range(count):
            check_rows(found[rank][1], whole, plan, rank)


def test_a_balanced_plan_mirrors_small_tables_and_divides_the_largest() -> None:
    sizes = {"tiny": 10, "large": 10_000_000} | {f"m{at}": 90_000 for at in range(1, 5)}
    tables = [tb.EmbeddingBagConfig(rows, 16, name) for name, rows in sizes.items()]
    plan = tbd.ShardingPlan.balanced(tables, 2)
    assert plan.tables["tiny"] == tbd.Mirrored()
    assert plan.tables["large"] == tbd.RowWise()
    undivided = tbd.ShardingPlan.balanced(tables, 2, divides_rows=False)
    assert undivided.tables["large"] == tbd.TableWise(0)
    holders = [plan.tables[name] for name in ("m1", "m2", "m3", "m4")]
    assert sorted(holder.rank for holder in holders if isinstance(holder, tbd.TableWise)) == [
        0,
        0,
        1,
        1,
    ]
    busy = tbd.ShardingPlan.balanced(tables, 2, ids_per_sample={"m1": 50.0})
    alone = busy.tables["m1"]
    assert all(busy.tables[name] != alone for name in ("m2", "m3", "m4"))


def small(rank: tbd.LocalRank, **options: Any) -> tbd.ShardedEmbeddingBagCollection:
    plan = tbd.ShardingPlan(rank.count, SHARDINGS["table-wise"](rank.count))
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    return tbd.ShardedEmbeddingBagCollection(
        TABLES, store=store, plan=plan, ranks=rank, optimizer=tb.SGD(), **options
    )


def test_an_output_kept_too_long_is_an_error_and_copies_are_not() -> None:
    (rank,) = tbd.local_ranks(1)
    batch = draw(1, 3, is_weighted=False)
    with small(rank) as lending:
        first = lending(batch).values()
        kept = first.clone()
        lending(batch)
        with pytest.raises(tb.InvalidError, match="still in use"):
            lending(batch)
        del first
    with small(rank, exchange=tbd.ExchangeOptions(copies_outputs=True)) as copying:
        outputs = [copying(batch).values() for _ in range(4)]
        assert all(torch.equal(output, kept) for output in outputs)


def test_a_rank_that_stays_away_is_named() -> None:
    def work(rank: tbd.LocalRank) -> str:
        collection = small(rank, exchange=tbd.ExchangeOptions(timeout_s=0.2))
        if rank.rank == 1:
            return ""
        with pytest.raises(tb.TierbedError, match="rank 1") as caught:
            collection(draw(1, 3, is_weighted=False))
        return str(caught.value)

    assert "rank 1" in run_ranks(2, work)[0]


def test_what_cannot_be_divided_is_refused() -> None:
    (rank,) = tbd.local_ranks(1)
    store = tb.Store.open(backend="memory", dram_budget="16MiB")

    def make(**options: Any) -> Any:
        given = {"store": store, "ranks": rank, **options}
        return tbd.ShardedEmbeddingBagCollection(options.pop("tables", TABLES), **given)

    columns = tbd.ShardingPlan(1, SHARDINGS["column-wise"](1))
    with pytest.raises(tb.UnsupportedError, match="state of whole rows"):
        make(plan=columns)
    with pytest.raises(tb.InvalidError, match="does not name table"):
        make(plan=tbd.ShardingPlan(1, {"a": tbd.TableWise(0)}))
    with pytest.raises(tb.InvalidError, match="plan is for 2 ranks"):
        make(plan=tbd.ShardingPlan(2, {}))
    with pytest.raises(tb.InvalidError, match="exchange must be one of"):
        make(exchange="nccl")


def test_outputs_go_to_the_device_of_the_model() -> None:
    config = tb.EmbeddingConfig(60, 8, "s")

    def work(rank: tbd.LocalRank) -> None:
        with (
            tb.Store.open(backend="memory", dram_budget="16MiB") as store,
            tbd.ShardedEmbeddingBagCollection(TABLES, store=store, ranks=rank) as rows,
            tbd.ShardedEmbeddingCollection([config], store=store, ranks=rank, device="meta") as seq,
        ):
            # A move to the device without memory is for parameters, which are loaded later.
            rows.to("meta").to(torch.float16)
            assert rows(draw(1, 3, False)).values().is_cpu
            rows._device = torch.device("meta")
            assert rows(draw(1, 3, False)).values().is_meta
            assert all(part.values().is_meta for part in rows.forward_parts(draw(1, 3, False), 2))
            found = seq(tb.KeyedJaggedTensor(["s"], torch.tensor([3]), lengths=torch.tensor([1])))
            assert found["s"].values().is_meta
            assert found["s"].lengths().is_meta

    run_ranks(2, work)
