"""Tables of open vocabulary: any 64-bit id, rows by first appearance, the bits of dense tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.results import EvictedIds
from tierbed.tables import export_tables

BIG = 2**62 + 12345
EXTREMES = [0, -1, 2**63 - 1, -(2**63)]


def raw_batches(count: int, size: int = 16) -> list[tb.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(5)
    batches = []
    for step in range(count):
        lengths = torch.randint(0, 4, (2 * size,), generator=generator)
        total = int(lengths.sum())
        ids = torch.randint(0, 60, (total,), generator=generator) * BIG + step // 4
        at = torch.randint(0, 30, (total,), generator=generator)
        for place, extreme in enumerate(EXTREMES):
            ids[at == place] = extreme
        batches.append(tb.KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
    return batches


def config(name: str = "item", rows: int | None = None, **more: Any) -> tb.EmbeddingBagConfig:
    return tb.EmbeddingBagConfig(
        num_embeddings=rows,
        embedding_dim=8,
        name=name,
        feature_names=["a", "b"],
        init=tb.Uniform(-0.5, 0.5),
        **more,
    )


def train(
    emb: torch.nn.Module, batches: list[tb.KeyedJaggedTensor], window: int = 0
) -> list[torch.Tensor]:
    outputs = []
    for batch in tb.lookahead(batches, emb, window=window, key=lambda batch: batch):
        output = emb(batch).values()
        (output * torch.linspace(0.1, 1.0, output.shape[1])).square().sum().backward()
        outputs.append(output.detach().clone())
    return outputs


def translated(batches: list[tb.KeyedJaggedTensor]) -> list[tb.KeyedJaggedTensor]:
    rows: dict[int, int] = {}
    dense = []
    for batch in batches:
        values = [rows.setdefault(int(id_), len(rows) + 1) for id_ in batch.values()]
        values_tensor = torch.tensor(values, dtype=torch.int64)
        dense.append(tb.KeyedJaggedTensor(batch.keys(), values_tensor, lengths=batch.lengths()))
    return dense


@pytest.mark.parametrize("window", [0, 4])
def test_equals_a_dense_table_of_translated_ids(tmp_path: Path, window: int) -> None:
    batches = raw_batches(24)
    optimizer = tb.Adam(lr=0.05)
    with (
        tb.Store.open(tmp_path / "open", dram_budget="512KiB") as store,
        tb.Store.open(backend="memory", dram_budget="64MiB") as oracle,
    ):
        emb = tb.EmbeddingBagCollection([config()], store=store, optimizer=optimizer)
        dense = tb.EmbeddingBagCollection([config(rows=2000)], store=oracle, optimizer=optimizer)
        first = train(emb, batches[:12], window)
        store.checkpoint("half")
        store.close()
        with tb.Store.open(tmp_path / "open", dram_budget="512KiB") as again:
            emb = tb.EmbeddingBagCollection([config()], store=again, optimizer=optimizer)
            found = first + train(emb, batches[12:], window)
            expected = train(dense, translated(batches))
            for step, pair in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(*pair), f"step {step}"
            count = again.vocabularies()["item"]["next_row"]
            assert torch.equal(
                again.read_rows("item", 0, count), oracle.read_rows("item", 0, count)
            )
            names = [name for name, _, _ in emb.iter_full_state()]
            prefix = "embedding_bags.item"
            assert names == [f"{prefix}.weight", f"{prefix}.ids", f"{prefix}.shared"]
            assert [table["name"] for table in again.tables()] == ["item"]


def test_looking_without_training_gives_no_rows() -> None:
    with tb.Store.open(backend="memory", dram_budget="64MiB") as store:
        emb = tb.EmbeddingBagCollection([config()], store=store)
        batch = raw_batches(1)[0]
        emb.eval()
        emb(batch)
        emb.train()
        with torch.no_grad():
            emb(batch)
        assert store.vocabularies()["item"]["id_count"] == 0
        assert store.translate("item", batch.values()).abs().max() == 0
        train(emb, [batch])
        different = len(set(batch.values().tolist()))
        assert store.vocabularies()["item"]["id_count"] == different
        rows = store.translate("item", torch.tensor([[EXTREMES[2], EXTREMES[3]]]))
        assert rows.shape == (1, 2)


def test_compiles_whole_and_gives_the_same_bits() -> None:
    batches = raw_batches(4)
    results = []
    for is_compiled in (False, True):
        with tb.Store.open(backend="memory", dram_budget="64MiB") as store:
            emb: Any = tb.EmbeddingBagCollection([config()], store=store)
            run = torch.compile(emb, fullgraph=True, backend="aot_eager") if is_compiled else emb
            outputs = []
            for batch in batches:
                output = run(batch).values()
                output.square().sum().backward()
                outputs.append(output.detach().clone())
            results.append(torch.cat(outputs))
    assert torch.equal(*results)


def test_admission_and_eviction_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000
    monkeypatch.setattr("tierbed.ops.binding.minutes_now", lambda: now)
    table = config(
        admission_strategy=tb.FrequencyAdmissionStrategy(threshold=2),
        virtual_table_eviction_policy=tb.TimestampBasedEvictionPolicy(eviction_ttl_mins=10),
    )

    def kjt(ids: list[int]) -> tb.KeyedJaggedTensor:
        lengths = torch.tensor([len(ids), 0])
        return tb.KeyedJaggedTensor(["a", "b"], torch.tensor(ids), lengths=lengths)

    with tb.Store.open(tmp_path / "s", dram_budget="1MiB") as store:
        emb = tb.EmbeddingBagCollection([table], store=store)
        train(emb, [kjt([7, 7, -5])])
        assert store.translate("item", torch.tensor([7, -5])).tolist() == [0, 0]
        train(emb, [kjt([-5, 7])])
        assert store.translate("item", torch.tensor([7, -5])).tolist() == [2, 1]
        now = 1011
        train(emb, [kjt([7])])
        assert store.evict(now_mins=1012) == {"item": EvictedIds(id_count=1, waiting_count=0)}
        assert store.translate("item", torch.tensor([7, -5])).tolist() == [2, 0]
        assert int(store.use_counts("item", 1, 1)) == 0
        store.checkpoint("after")
        dense = tb.EmbeddingBagConfig(num_embeddings=4, embedding_dim=2, name="dense")
        store.add_table(dense, tb.SGD(lr=0.1))
        with pytest.raises(tb.InvalidError, match="open vocabulary"):
            store.evict("dense")


def test_a_snapshot_answers_raw_ids(tmp_path: Path) -> None:
    batches = raw_batches(8)
    with tb.Store.open(tmp_path / "s", dram_budget="2MiB") as store:
        emb = tb.EmbeddingBagCollection([config()], store=store)
        train(emb, batches)
        store.publish(tmp_path / "snapshot")
        emb.eval()
        expected = emb(batches[3]).values()
        unknown = torch.tensor([424242, EXTREMES[1]])
        rows = store.translate("item", unknown)
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="4MiB") as snapshot:
        assert [table["name"] for table in snapshot.tables()] == ["item"]
        served = tb.EmbeddingBagCollection([config()], store=snapshot)
        assert torch.equal(served(batches[3]).values(), expected)
        looked_up = snapshot.lookup(batches[3], tables=["item", "item"]).values()
        assert torch.equal(looked_up, expected)
        assert torch.equal(snapshot.translate("item", unknown), rows)
        assert int(rows[0]) == 0
        with pytest.raises(tb.InvalidError):
            tb.EmbeddingBagCollection([config(rows=2000)], store=snapshot)


def test_wrong_policies_are_refused() -> None:
    with pytest.raises(tb.InvalidError, match="num_embeddings=None"):
        config(rows=5, admission_strategy=tb.FrequencyAdmissionStrategy(threshold=2))
    for threshold in (0, -1, True, 1.5):
        with pytest.raises(tb.InvalidError, match="threshold"):
            config(admission_strategy=tb.FrequencyAdmissionStrategy(threshold=threshold))  # type: ignore[arg-type]
    with tb.Store.open(backend="memory", dram_budget="64MiB") as store:
        wrong = config(
            virtual_table_eviction_policy=tb.CountBasedEvictionPolicy(2.0, decay_rate=1.5)
        )
        with pytest.raises(tb.InvalidError, match="decay"):
            tb.EmbeddingBagCollection([wrong], store=store)


def test_embedding_bag_takes_any_ids() -> None:
    with tb.Store.open(backend="memory", dram_budget="64MiB") as store:
        bag = tb.EmbeddingBag(None, 4, store=store, mode="sum", padding_idx=-1)
        ids = torch.tensor([[BIG, -1], [-7, BIG]])
        output = bag(ids)
        output.sum().backward()
        assert store.vocabularies()["embedding_bag"]["id_count"] == 2


# ---------------------------------------------------------------- out, with ids


def trained(store: tb.Store) -> tb.EmbeddingBagCollection:
    emb = tb.EmbeddingBagCollection([config()], store=store, optimizer=tb.Adagrad(lr=0.5))
    train(emb, raw_batches(6))
    store.evict("item")
    return emb


def assert_rows_of_ids(
    store: tb.Store, ids: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor
) -> None:
    known = torch.cat([batch.values() for batch in raw_batches(6)]).unique()
    assert ids.sort().values.tolist() == known.tolist()
    assert torch.equal(rows, store.gather_rows("item", store.translate("item", ids)))
    assert torch.equal(shared, store.read_rows("item", 0, 1))


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_ids_of_a_table_are_told_with_their_rows(open_store: Any, backend: str) -> None:
    store = open_store(backend)
    emb = trained(store)
    ids, rows = store.ids("item")
    assert torch.equal(rows, store.translate("item", ids))
    assert torch.equal(rows, rows.sort().values)
    assert len(ids) == store.vocabularies()["item"]["id_count"]
    full = emb.full_state_dict()
    names = ("ids", "weight", "shared")
    assert_rows_of_ids(store, *(full[f"embedding_bags.item.{name}"] for name in names))
    dense = tb.EmbeddingBagConfig(name="dense", num_embeddings=3, embedding_dim=2)
    tb.EmbeddingBagCollection([dense], store=store)
    with pytest.raises(tb.InvalidError, match="ids of table 'dense' are its rows"):
        store.ids("dense")


def test_a_table_nobody_trained_has_no_ids(open_store: Any) -> None:
    store = open_store()
    emb = tb.EmbeddingBagCollection([config()], store=store)
    assert [part.tolist() for part in store.ids("item")] == [[], []]
    assert emb.full_state_dict()["embedding_bags.item.weight"].shape == (0, 8)


@pytest.mark.parametrize("chunk_rows", [7, 65536])
def test_an_export_has_the_ids_of_its_rows(
    open_store: Any, tmp_path: Path, chunk_rows: int
) -> None:
    import pyarrow.parquet as parquet
    from safetensors.torch import load_file

    store = open_store("file")
    trained(store)
    count = len(store.ids("item")[0])
    for suffix in (".safetensors", ".pt", ".parquet"):
        file = tmp_path / f"item{suffix}"
        assert export_tables(store, file, "item", chunk_rows=chunk_rows)[0].rows == count
    for loaded in (
        load_file(tmp_path / "item.safetensors"),
        torch.load(tmp_path / "item.pt", weights_only=True),
    ):
        assert_rows_of_ids(store, *(loaded[f"item.{name}"] for name in ("ids", "weight", "shared")))
    read = parquet.read_table(tmp_path / "item.parquet").to_pydict()
    assert read["id"][-1] is None
    rows = torch.tensor(read["weight"])
    assert_rows_of_ids(store, torch.tensor(read["id"][:-1]), rows[:-1], rows[-1:])


def test_a_scan_has_the_rows_of_each_table_and_no_index() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = tb.EmbeddingBagCollection(
            [
                tb.EmbeddingBagConfig(None, 8, "first", ["a"]),
                tb.EmbeddingBagConfig(None, 4, "second", ["b"]),
            ],
            store=store,
        )
        for batch in raw_batches(2):
            emb(batch).values().sum().backward()
        found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        store.scan(lambda table, rows, weights, *_: found.append((table, rows, weights)))
        assert [table for table, _, _ in found] == ["first", "second"]
        for table, rows, weights in found:
            assert rows.sort().values.tolist() == store.ids(table)[1].tolist()
            assert torch.equal(weights, store.gather_rows(table, rows))
