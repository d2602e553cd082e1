"""Tables as features of GraphBolt: the interface, rows, stages, and GraphBolt's own loader."""

from __future__ import annotations

import importlib.util
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierbed as tb
from tierbed.adapters.graphbolt import TierbedFeature, TierbedFeatureStore

from . import published

ROWS, DIM = 500, 8
NODES = {("node", None, "feat"): "paper"}
HAS_DGL = importlib.util.find_spec("dgl") is not None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tb.Store]:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as opened:
        yield opened


@pytest.fixture
def rows(store: tb.Store) -> Tensor:
    table = tb.EmbeddingConfig(name="paper", num_embeddings=ROWS, embedding_dim=DIM)
    store.add_table(table, tb.Adagrad(lr=0.1))
    every = torch.randn(ROWS, DIM)
    every[3, 0] = -0.0
    store.write_rows("paper", 0, every)
    return every


@pytest.fixture
def snapshot(store: tb.Store, rows: Tensor, tmp_path: Path) -> Iterator[tb.Snapshot]:
    store.checkpoint("now")
    store.publish(tmp_path / "snapshot")
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="16MiB") as opened:
        yield opened


def fetched(feature: TierbedFeature, ids: Tensor) -> Tensor:
    """Reads as GraphBolt's fetcher does: as many steps as there are stages, then one wait."""
    futures = list(feature.read_async(ids))
    assert len(futures) == feature.read_async_num_stages(ids.device)
    return futures[-1].wait()


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


def test_they_have_all_that_the_published_classes_ask_for() -> None:
    published.check_implements(TierbedFeature, published.Feature)
    published.check_implements(TierbedFeatureStore, published.FeatureStore)

    class BothFeatures(TierbedFeature, published.Feature):
        pass

    class BothStores(TierbedFeatureStore, published.FeatureStore):
        pass

    assert not BothFeatures.__abstractmethods__
    assert not BothStores.__abstractmethods__


@pytest.mark.parametrize("kind", ["store", "snapshot"])
def test_rows_are_those_of_the_table(
    store: tb.Store, snapshot: tb.Snapshot, rows: Tensor, kind: str
) -> None:
    feature = TierbedFeature(store if kind == "store" else snapshot, "paper", {"about": "papers"})
    assert (feature.size(), feature.count()) == (torch.Size([DIM]), ROWS)
    assert feature.metadata() == {"about": "papers"}
    assert not feature.is_pinned()
    assert feature.pin_memory_() is feature
    assert feature.to("cpu") is feature
    assert equal(feature.read(), rows)
    for ids in (
        torch.tensor([499, 3, 3, 0]),
        torch.randint(0, ROWS, (300,)),
        torch.empty(0).long(),
    ):
        assert equal(feature.read(ids), rows[ids])
        assert equal(fetched(feature, ids), rows[ids])
        assert equal(feature.read(ids.int()), rows[ids])
    with pytest.raises(tb.InvalidError):
        feature.read(torch.tensor([ROWS]))
    future = next(feature.read_async(torch.tensor([-1])))
    with pytest.raises(tb.InvalidError):
        future.wait()


@pytest.mark.parametrize("kind", ["store", "snapshot"])
def test_an_open_vocabulary_is_read_by_ids(store: tb.Store, tmp_path: Path, kind: str) -> None:
    table = tb.EmbeddingConfig(name="author", num_embeddings=None, embedding_dim=DIM)
    store.add_table(table, tb.SGD(lr=0.1))
    ids, values = torch.tensor([1 << 60, -7, 12]), torch.randn(3, DIM)
    feature = TierbedFeature(store, "author")
    feature.update(values, ids)
    if kind == "snapshot":
        store.checkpoint("now")
        store.publish(tmp_path / "snapshot")
        feature = TierbedFeature(tb.Snapshot.open(tmp_path / "snapshot"), "author")
    assert equal(feature.read(ids.flip(0)), values.flip(0))
    assert equal(fetched(feature, ids[1:]), values[1:])


def test_updates_are_read_and_the_last_value_of_an_id_counts(store: tb.Store, rows: Tensor) -> None:
    feature = TierbedFeature(store, "paper")
    ids = torch.tensor([7, 2, 7, 499, 2])
    values = torch.randn(5, DIM)
    feature.update(values, ids)
    expected = rows.clone()
    expected[7], expected[2], expected[499] = values[2], values[4], values[3]
    assert equal(feature.read(), expected)
    feature.update(rows)
    assert equal(feature.read(), rows)


def test_futures_give_their_own_rows_in_any_order(store: tb.Store, rows: Tensor) -> None:
    feature = TierbedFeature(store, "paper")
    asked = [torch.randint(0, ROWS, (50,)) for _ in range(8)]
    readings = [feature.read_async(ids) for ids in asked]
    futures = [next(reading) for reading in readings]
    for at in torch.randperm(8).tolist():
        assert equal(futures[at].wait(), rows[asked[at]])
    with pytest.raises(tb.InvalidError, match="call read_async again"):
        futures[0].wait()
    assert equal(fetched(feature, asked[0]), rows[asked[0]])


def test_the_pipeline_goes_on_while_rows_are_read(
    store: tb.Store, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature, ids, may_read = TierbedFeature(store, "paper"), torch.tensor([1, 2]), threading.Event()
    gather = store.gather_rows

    def later(table: str, numbers: Tensor) -> Tensor:
        assert may_read.wait(30)
        return gather(table, numbers)

    monkeypatch.setattr(store, "gather_rows", later)
    future = next(feature.read_async(ids))  # returns while nothing can be read
    may_read.set()
    assert equal(future.wait(), rows[ids])


def test_a_feature_store_has_features_by_key(store: tb.Store, rows: Tensor) -> None:
    features = TierbedFeatureStore(store, NODES)
    key, ids = ("node", None, "feat"), torch.tensor([4, 1])
    assert key in features
    assert ("edge", None, "feat") not in features
    assert len(features) == 1
    assert features.keys() == [key]
    assert features.metadata(*key) == {}
    assert (features.size(*key), features.count(*key)) == (torch.Size([DIM]), ROWS)
    features.update(*key, torch.ones(2, DIM), ids)
    assert equal(features.read(*key, ids), torch.ones(2, DIM))
    assert equal(features.read(*key)[5:], rows[5:])
    with pytest.raises(KeyError):
        features.read("edge", None, "feat", ids)
    features["edge", "cites", "feat"] = features[key]
    assert equal(features.read("edge", "cites", "feat", ids), torch.ones(2, DIM))


def test_what_cannot_be_is_refused_with_a_way_out(
    store: tb.Store, snapshot: tb.Snapshot, rows: Tensor, tmp_path: Path
) -> None:
    ids, value = torch.tensor([1]), torch.ones(1, DIM)
    with pytest.raises(tb.UnsupportedError, match="publish it again"):
        TierbedFeature(snapshot, "paper").update(value, ids)
    TierbedFeature(store, "paper").update(value, ids)
    store.publish(tmp_path / "again")
    with tb.Snapshot.open(tmp_path / "again") as again:
        assert equal(TierbedFeature(again, "paper").read(ids), value)
    store.add_table(tb.EmbeddingConfig(name="author", num_embeddings=None, embedding_dim=DIM))
    author = TierbedFeature(store, "author")
    with pytest.raises(tb.UnsupportedError, match="give the ids to update"):
        author.update(value)
    author.update(value, ids)
    for wrong in (torch.ones(1, DIM + 1), torch.ones(2, DIM), torch.ones(DIM)):
        with pytest.raises(tb.InvalidError, match=r"must be \[1, 8\]"):
            author.update(wrong, ids)
    with pytest.raises(tb.InvalidError, match="no table"):
        TierbedFeature(store, "venue")


def test_a_feature_of_a_snapshot_goes_to_other_processes_and_one_of_a_store_does_not(
    store: tb.Store, snapshot: tb.Snapshot, rows: Tensor
) -> None:
    feature, ids = TierbedFeature(snapshot, "paper"), torch.tensor([5])
    fetched(feature, ids)  # has its thread
    assert equal(fetched(pickle.loads(pickle.dumps(feature)), ids), rows[ids])
    with pytest.raises(tb.UnsupportedError):
        pickle.dumps(TierbedFeature(store, "paper"))


@pytest.mark.skipif(not HAS_DGL, reason="DGL is not installed, or has no GraphBolt for this torch")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["store", "snapshot"])
def test_graphbolts_loader_fetches_rows(
    store: tb.Store, snapshot: tb.Snapshot, rows: Tensor, kind: str, workers: int
) -> None:
    gb = pytest.importorskip("dgl.graphbolt")
    published.check_implements(TierbedFeature, gb.Feature)
    features = TierbedFeatureStore(store if kind == "store" else snapshot, NODES)
    assert isinstance(features, gb.FeatureStore)
    assert isinstance(features["node", None, "feat"], gb.Feature)
    pipe = gb.ItemSampler(gb.ItemSet(torch.arange(ROWS), names="seeds"), 64, shuffle=True)
    pipe = pipe.transform(_take_seeds).fetch_feature(features, node_feature_keys=["feat"])
    seen = []
    for batch in gb.DataLoader(pipe, num_workers=workers):
        assert equal(batch.node_features["feat"], rows[batch.seeds])
        seen.append(batch.seeds)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(ROWS))


def _take_seeds(batch: Any) -> Any:
    """Samples no neighbours: the nodes of a minibatch are its seeds."""
    batch.input_nodes = batch.seeds
    return batch
