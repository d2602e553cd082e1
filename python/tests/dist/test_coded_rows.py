"""Rows kept in fewer bytes on ranks: equal bits on any number of them, near to float32."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import SAMPLES, SHARDINGS, TABLES, draw, join, run_ranks

import tierbed as tb
from tierbed import dist as tbd

# Bytes of a row of ``dim`` numbers.
ROW_BYTES = {
    tb.DataType.FP16: lambda dim: 2 * dim,
    tb.DataType.BF16: lambda dim: 2 * dim,
    tb.DataType.INT8: lambda dim: dim + 4,
}
# Of the largest number of a row.
TOLERANCE = {
    tb.DataType.FP16: 2.0**-11,
    tb.DataType.BF16: 2.0**-8,
    tb.DataType.INT8: 2 / 500 + 1 / 128,
}
Batches = Sequence[tb.KeyedJaggedTensor]


def kept_as(kind: tb.DataType) -> list[tb.EmbeddingBagConfig]:
    return [dataclasses.replace(config, data_type=kind) for config in TABLES]


def trained() -> tb.Store:
    """A store whose rows are not their initial ones."""
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    one = tb.EmbeddingBagCollection(TABLES, store=store, optimizer=tb.SGD(lr=0.1))
    for step in range(3):
        one(draw(step, 20, False)).values().sum().backward()
    return store


def batches(is_weighted: bool) -> list[tb.KeyedJaggedTensor]:
    return [draw(part, SAMPLES[part], is_weighted) for part in range(4)]


def of_ranks(drawn: Batches, count: int) -> list[tb.KeyedJaggedTensor]:
    parts = 4 // count
    return [join(list(drawn[parts * rank : parts * (rank + 1)])) for rank in range(count)]


def lookup_loaded(
    count: int, name: str, tables: list[Any], folder: Path, drawn: Batches, is_weighted: bool
) -> tuple[torch.Tensor, list[tb.CodedStore]]:
    plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
    own = of_ranks(drawn, count)

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.CodedStore()
        with tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=plan, ranks=rank, is_weighted=is_weighted
        ) as sharded:
            sharded.load(folder)
            return sharded(own[rank.rank]).values().detach().clone(), store

    found = run_ranks(count, work)
    return torch.cat([values for values, _ in found]), [store for _, store in found]


def save_trained(store: tb.Store, folder: Path) -> None:
    (rank,) = tbd.local_ranks(1)
    plan = tbd.ShardingPlan(1, SHARDINGS["table-wise"](1))
    with tbd.ShardedEmbeddingBagCollection(
        TABLES, store=store, plan=plan, ranks=rank, optimizer=tb.SGD(lr=0.1)
    ) as sharded:
        sharded.save(folder)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", ROW_BYTES)
def test_ranks_have_the_bits_of_one_process_and_are_near_to_float32(
    kind: tb.DataType, is_weighted: bool, tmp_path: Path
) -> None:
    exact, folder, tables = trained(), tmp_path / "kept", kept_as(kind)
    save_trained(exact, folder)
    drawn = batches(is_weighted)
    whole = join(drawn)
    coded = tb.CodedStore.of(exact, tables)
    one = tb.EmbeddingBagCollection(tables, store=coded, is_weighted=is_weighted)
    expected = one(whole).values().detach()
    near = tb.EmbeddingBagCollection(
        TABLES, store=exact, optimizer=tb.SGD(lr=0.1), is_weighted=is_weighted
    )(whole)
    largest = max(exact.read_rows(c.name, 0, c.num_embeddings).abs().max() for c in TABLES)
    # At most 3 rows a bag, with weights of at most 1.
    worst = (near.values() - expected).abs().max()
    assert 0 < worst <= 3 * TOLERANCE[kind] * largest
    for name in SHARDINGS:
        if name == "column-wise" and kind is tb.DataType.INT8:
            continue
        for count in (1, 2, 4):
            found, stores = lookup_loaded(count, name, tables, folder, drawn, is_weighted)
            assert torch.equal(found, expected), (name, count)
            check_bytes(stores, name, count, kind)


def check_bytes(stores: list[tb.CodedStore], name: str, count: int, kind: tb.DataType) -> None:
    """All ranks together hold each row once, or once each, in as few bytes as it has."""
    for config in TABLES:
        rows, dim = config.num_embeddings or 0, config.embedding_dim
        held = [
            table["held_bytes"]
            for store in stores
            for table in store.tables()
            if table["name"].split(".")[0] == config.name
        ]
        way = SHARDINGS[name](count)[config.name]
        copies = count if isinstance(way, tbd.Mirrored) else 1
        # Memory is whole words: at most 3 bytes more per table and rank.
        least = copies * rows * ROW_BYTES[kind](dim)
        assert least <= sum(held) <= least + 3 * count
        assert sum(held) < 0.8 * copies * rows * 4 * dim


@pytest.mark.parametrize("kind", ROW_BYTES)
def test_codes_are_saved_on_some_ranks_and_loaded_on_others(
    kind: tb.DataType, tmp_path: Path
) -> None:
    tables, drawn = kept_as(kind), batches(False)
    save_trained(trained(), tmp_path / "rows")
    names = [name for name in SHARDINGS if (name, kind) != ("column-wise", tb.DataType.INT8)]
    expected = None
    for name in names:
        folder = tmp_path / name
        plan = tbd.ShardingPlan(2, SHARDINGS[name](2))

        def save(rank: tbd.LocalRank, plan: Any = plan, folder: Path = folder) -> None:
            with tbd.ShardedEmbeddingBagCollection(
                tables, store=tb.CodedStore(), plan=plan, ranks=rank
            ) as sharded:
                sharded.load(tmp_path / "rows")
                sharded.save(folder, extra={"step": 7})

        run_ranks(2, save)
        for count, other in [(1, "table-wise"), (2, name), (4, "mixed"), (4, "row-wise")]:
            found, _ = lookup_loaded(count, other, tables, folder, drawn, False)
            expected = found if expected is None else expected
            assert torch.equal(found, expected), (name, count, other)
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert {file["codec"] for file in files} == {tables[0].codec_name()}
        (rank,) = tbd.local_ranks(1)
        with (
            tbd.ShardedEmbeddingBagCollection(
                TABLES,
                store=tb.Store.open(backend="memory", dram_budget="16MiB"),
                plan=tbd.ShardingPlan(1, SHARDINGS["table-wise"](1)),
                ranks=rank,
                optimizer=tb.SGD(),
            ) as training,
            pytest.raises(tb.InvalidError, match="do not train"),
        ):
            training.load(folder)


def test_columns_of_float32_become_int8_rows_with_the_scale_of_the_row(tmp_path: Path) -> None:
    """A rank's columns alone have another scale than the row."""
    exact, drawn = trained(), batches(False)
    plan = tbd.ShardingPlan(2, SHARDINGS["column-wise"](2))
    save_trained(exact, tmp_path / "rows")

    def save(rank: tbd.LocalRank) -> None:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        with tbd.ShardedEmbeddingBagCollection(
            TABLES, store=store, plan=plan, ranks=rank, optimizer=tb.SGD(lr=0.1)
        ) as sharded:
            sharded.load(tmp_path / "rows")
            sharded.save(tmp_path / "columns")

    run_ranks(2, save)
    tables = kept_as(tb.DataType.INT8)
    expected, _ = lookup_loaded(2, "row-wise", tables, tmp_path / "rows", drawn, False)
    found, _ = lookup_loaded(2, "row-wise", tables, tmp_path / "columns", drawn, False)
    assert torch.equal(found, expected)


def test_every_table_has_its_own_type() -> None:
    exact = trained()
    kinds = [tb.DataType.FP32, tb.DataType.INT8, tb.DataType.BF16]
    tables = [dataclasses.replace(c, data_type=kind) for c, kind in zip(TABLES, kinds, strict=True)]
    store = tb.CodedStore.of(exact, tables)
    assert [table["codec"] for table in store.tables()] == ["f32", "int8", "bf16"]
    assert torch.equal(store.read_rows("a", 0, 60), exact.read_rows("a", 0, 60))
    bf16 = exact.read_rows("c", 0, 200).to(torch.bfloat16).float()
    assert torch.equal(store.read_rows("c", 0, 200), bf16)


def frozen(**options: Any) -> tbd.ShardedEmbeddingBagCollection:
    (rank,) = tbd.local_ranks(1)
    tables = options.pop("tables", kept_as(tb.DataType.BF16))
    plan = tbd.ShardingPlan(1, SHARDINGS[options.pop("sharding", "table-wise")](1))
    return tbd.ShardedEmbeddingBagCollection(
        tables, store=tb.CodedStore(), plan=plan, ranks=rank, **options
    )


def test_training_is_refused_before_anything_is_sent_and_what_is_above_may_train() -> None:
    batch = draw(1, 6, True)
    head = torch.nn.Linear(28, 1)
    with frozen() as sharded:
        store = sharded.store
        one = tb.EmbeddingBagCollection(kept_as(tb.DataType.BF16), store=store)
        for rows in (sharded, one):
            out = head(rows(batch).values()).sum()
            with pytest.raises(tb.UnsupportedError, match=r"do not train.*eval\(\)"):
                out.backward()
            head.zero_grad()
            rows.eval()
            head(rows(batch).values()).sum().backward()
            assert head.weight.grad is not None
            assert head.weight.grad.abs().sum() > 0
        # The exchange was not broken by what was refused.
        assert torch.equal(sharded(batch).values(), one(batch).values())
        parts = torch.cat([part.values() for part in sharded.forward_parts(batch, 3)])
        assert torch.equal(parts, one(batch).values())


def test_what_cannot_be_kept_is_refused() -> None:
    kinds = kept_as(tb.DataType.FP16)
    training = tb.Store.open(backend="memory", dram_budget="16MiB")
    with pytest.raises(tb.UnsupportedError, match="train in float32, not fp16"):
        tb.EmbeddingBagCollection(kinds, store=training)
    with pytest.raises(tb.UnsupportedError, match="scale of whole rows"):
        frozen(tables=kept_as(tb.DataType.INT8), sharding="column-wise")
    with pytest.raises(tb.InvalidError, match="data_type of table 'a' must be one of"):
        dataclasses.replace(TABLES[0], data_type="fp8")
    with pytest.raises(tb.InvalidError, match="open vocabulary"):
        tb.CodedStore().add_table(tb.EmbeddingBagConfig(None, 8, "open"))
    store = tb.CodedStore()
    store.add_table(kinds[0], range(20, 40))
    with pytest.raises(tb.InvalidError, match="not held here"):
        store.read_rows("a", 19, 2)
    with pytest.raises(tb.InvalidError, match="cannot keep"):
        store.write_rows("a", 20, torch.full((1, 8), 1e6))
    with pytest.raises(tb.InvalidError, match="another codec or other rows"):
        store.add_table(kinds[0])
