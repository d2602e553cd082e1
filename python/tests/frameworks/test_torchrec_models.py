"""TorchRec's own models, trained with its tables and with ours, and its training pipelines."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
import tierbed.torchrec as tbr

from .torchrec_kit import memory, torchrec

from torch.distributed.optim import _apply_optimizer_in_backward  # isort: skip
from torchrec.datasets.utils import Batch  # isort: skip
from torchrec.distributed.train_pipeline.train_pipelines import (  # isort: skip
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.models.deepfm import SimpleDeepFMNN  # isort: skip
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain  # isort: skip
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # isort: skip

FEATURES = ["f0", "f1", "f2", "f3"]
DENSE = 5


def tables(rows: int, dim: int) -> list[Any]:
    return [
        torchrec.EmbeddingBagConfig(
            name=f"t{at}", num_embeddings=rows, embedding_dim=dim, feature_names=[feature]
        )
        for at, feature in enumerate(FEATURES)
    ]


def loader(count: int, rows: int, samples: int = 32) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        lengths = torch.randint(0, 5, (len(FEATURES) * samples,), generator=generator)
        drawn = torch.rand(int(lengths.sum()), generator=generator)
        yield Batch(
            torch.randn(samples, DENSE, generator=generator),
            torchrec.KeyedJaggedTensor(FEATURES, (drawn**3 * rows).long(), lengths=lengths),
            (torch.rand(samples, generator=generator) < 0.3).long(),
        )


def dlrm(bags: Any) -> Any:
    torch.manual_seed(2)
    dim = bags.embedding_bag_configs()[0].embedding_dim
    return DLRM(bags, DENSE, [16, dim], [16, 1])


def dlrm_dcn(bags: Any) -> Any:
    torch.manual_seed(2)
    dim = bags.embedding_bag_configs()[0].embedding_dim
    return DLRM_DCN(bags, DENSE, [16, dim], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4)


def dlrm_projection(bags: Any) -> Any:
    torch.manual_seed(2)
    dim = bags.embedding_bag_configs()[0].embedding_dim
    branch = [8, 2 * dim]
    return DLRM_Projection(bags, DENSE, [16, dim], [16, 1], branch, branch)


def losses(model: Any, batches: Any) -> list[float]:
    """Trains a model; its rows are stepped in backward, its dense part by SGD."""
    train = DLRMTrain(model)
    dense = [p for name, p in train.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.05)
    found = []
    for batch in batches:
        loss, _ = train(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


ROWS, DIM, STEPS = 40_000, 32, 200
NUMBERS = {"lr": 0.05, "eps": 1e-6}


def learnt_by_theirs(state: dict[str, torch.Tensor]) -> tuple[list[float], Any]:
    """The losses of 200 steps of TorchRec alone, from ``state``, and its tables then."""
    theirs = FusedEmbeddingBagCollection(
        tables(ROWS, DIM),
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs=NUMBERS,
    )
    theirs.load_state_dict(state)
    return losses(dlrm(theirs), loader(STEPS, ROWS)), theirs


def learnt_by_ours(model: Any, store: tb.Store) -> list[float]:
    bags = model.sparse_arch.embedding_bag_collection
    batches: Any = torch.utils.data.DataLoader(list(loader(STEPS, ROWS)), batch_size=None)
    key = lambda batch: batch.sparse_features  # noqa: E731
    return losses(model, tb.lookahead(batches, bags, window=8, key=key))


def check_learnt(store: tb.Store, found: list[float], expected: list[float], theirs: Any) -> None:
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-5
    assert sum(expected[-20:]) < sum(expected[:20])
    for name, bag in theirs.embedding_bags.items():
        rows = store.read_rows(name, 0, ROWS)
        assert float((rows - bag.weight.detach()).abs().max()) < 1e-5


def test_dlrm_learns_the_same_with_a_twentieth_of_its_tables_in_memory(tmp_path: Path) -> None:
    plain = torchrec.EmbeddingBagCollection(tables(ROWS, DIM))
    expected, theirs = learnt_by_theirs(plain.state_dict())
    budget = sum(weight.nbytes for weight in plain.parameters()) // 20
    with tb.Store.open(tmp_path / "store", dram_budget=budget) as store:
        model = tbr.replace(dlrm(plain), store, optimizer=tb.RowWiseAdagrad(**NUMBERS))
        assert not [name for name, _ in model.named_parameters() if "embedding" in name]
        check_learnt(store, learnt_by_ours(model, store), expected, theirs)
        assert store.order()["kind"] == "window"


def test_dlrm_learns_the_same_in_forward_order(tmp_path: Path) -> None:
    meta = torch.device("meta")
    with memory() as store:
        # Initial rows come from the seed of a store, whichever keeps them.
        state = tbr.from_configs(tables(ROWS, DIM), store).full_state_dict()
    expected, theirs = learnt_by_theirs(state)
    budget = sum(weight.nbytes for weight in state.values()) // 20
    with tb.Store.open(tmp_path / "store", dram_budget=budget, order="forward") as store:
        plain = torchrec.EmbeddingBagCollection(tables(ROWS, DIM), device=meta)
        model = tbr.replace(dlrm(plain), store, optimizer=tb.RowWiseAdagrad(**NUMBERS))
        found = learnt_by_ours(model, store)
        assert store.order()["kind"] == "forward"
        check_learnt(store, found, expected, theirs)


@pytest.mark.parametrize("build", [dlrm, dlrm_dcn, dlrm_projection])
def test_their_models_run_unmodified(build: Any) -> None:
    theirs = torchrec.EmbeddingBagCollection(tables(500, 8))
    theirs_model = build(theirs)
    with memory() as store:
        ours_model = tbr.replace(copy.deepcopy(theirs_model), store, optimizer=tb.SGD(lr=0.1))
        with memory() as other:
            # A model is also built on a collection from the configs.
            built = build(tbr.from_configs(tables(500, 8), other))
            assert len(losses(built, loader(2, 500))) == 2
        _apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": 0.1})
        expected = losses(theirs_model, loader(20, 500))
        found = losses(ours_model, loader(20, 500))
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-5


def test_their_deepfm_runs_unmodified() -> None:
    theirs = torchrec.EmbeddingBagCollection(tables(500, 8))
    model = SimpleDeepFMNN(DENSE, theirs, 16, 4)
    batch = next(loader(1, 500))
    with memory() as store:
        ours = tbr.replace(copy.deepcopy(model), store)
        expected = model(batch.dense_features, batch.sparse_features)
        found = ours(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_gradient_of_the_dense_part_is_theirs() -> None:
    model = DLRMTrain(dlrm(torchrec.EmbeddingBagCollection(tables(500, 8))))
    with memory() as store:
        ours = tbr.replace(copy.deepcopy(model), store)
        for batch in loader(1, 500):
            model(batch)[0].backward()
            ours(batch)[0].backward()
        for name, weight in ours.named_parameters():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- pipelines


def progressed(pipeline: Any, iterator: Any) -> Iterator[Any]:
    while True:
        try:
            yield pipeline.progress(iterator)
        except StopIteration:
            return


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist], ids=str)
@pytest.mark.parametrize("order", ["window", "auto"])
def test_their_pipelines_train_the_same(kind: Any, order: Any, tmp_path: Path) -> None:
    cpu = torch.device("cpu")

    def model(store: tb.Store) -> Any:
        bags = tbr.from_configs(tables(500, 8), store, optimizer=tb.SGD(lr=0.1))
        return dlrm(bags)

    with memory() as store:
        expected = losses(model(store), loader(20, 500))
        rows = store.read_rows("t0", 0, 500)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB", order=order) as store:
        train = DLRMTrain(model(store))
        bags = train.model.sparse_arch.embedding_bag_collection
        batches: Any = torch.utils.data.DataLoader(list(loader(20, 500)), batch_size=None)
        ahead = tb.lookahead(batches, bags, window=4, key=lambda batch: batch.sparse_features)
        pipeline = kind(train, torch.optim.SGD(train.parameters(), lr=0.05), cpu)
        found = [float(out[0]) for out in progressed(pipeline, iter(ahead))]
        assert found == expected
        # A pipeline takes batches earlier than a plan allows.
        assert store.order()["kind"] == "window"
        assert torch.equal(store.read_rows("t0", 0, 500), rows)


def test_their_pipeline_evaluates() -> None:
    with memory() as store:
        model = DLRMTrain(dlrm(tbr.from_configs(tables(500, 8), store))).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pipeline = EvalPipelineSparseDist(model, optimizer, torch.device("cpu"))
        iterator = iter(loader(3, 500))
        found = [pipeline.progress(iterator)[0] for _ in range(3)]
        expected = [model(batch)[1][0] for batch in loader(3, 500)]
        assert [float(loss) for loss in found] == [float(loss) for loss in expected]
        assert store.steps_done("t0") == 0


def test_a_collection_is_one_call_of_a_traced_graph() -> None:
    with memory() as store:
        model = dlrm(tbr.from_configs(tables(500, 8), store))
        graph = torch.fx.symbolic_trace(model)
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
        assert "sparse_arch.embedding_bag_collection" in calls
        (batch,) = loader(1, 500)
        with pytest.raises(tb.UnsupportedError, match="trace the model that holds it"):
            torch.fx.symbolic_trace(model.sparse_arch.embedding_bag_collection)
        arguments = (batch.dense_features, batch.sparse_features)
        assert torch.equal(graph(*arguments), model(*arguments))
