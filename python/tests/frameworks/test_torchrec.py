"""TorchRec itself: its batches, modules and models on a store, beside its own."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
import tierbed.torchrec as tbr

from .torchrec_kit import (
    DIM,
    ROWS,
    bag_configs,
    batch,
    batches,
    configs,
    memory,
    rows_differ,
    torchrec,
)

from torch.distributed.optim import _apply_optimizer_in_backward  # isort: skip
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection  # isort: skip
from torchrec.modules.fp_embedding_modules import (  # isort: skip
    FeatureProcessedEmbeddingBagCollection,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # isort: skip

KJT = torchrec.KeyedJaggedTensor


def pair(store: tb.Store, *, weighted: bool = False, **options: Any) -> tuple[Any, Any]:
    """TorchRec's collection, and ours of the same rows."""
    theirs = torchrec.EmbeddingBagCollection(bag_configs(), is_weighted=weighted)
    options.setdefault("optimizer", tb.SGD(lr=0.1))
    return theirs, tbr.replace(copy.deepcopy(theirs), store, **options)


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keys": ("f3", "f1", "f2")},
        {"keys": ("x", "f2", "y", "f1", "f3", "z")},
        {"ids": torch.int32},
        {"weighted": True},
        {"samples": 1},
    ],
    ids=str,
)
def test_pooled_rows_are_theirs(options: Any) -> None:
    with memory() as store:
        theirs, ours = pair(store, weighted=options.get("weighted", False))
        for kjt in batches(4, **options):
            expected, found = theirs(kjt), ours(kjt)
            assert type(found) is torchrec.KeyedTensor
            assert found.keys() == expected.keys()
            assert found.length_per_key() == expected.length_per_key()
            torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=1e-6)
            # Tierbed's own collections take the same batches.
            plain = tb.EmbeddingBagCollection.forward(ours, kjt)
            assert torch.equal(plain.values(), found.values())


def test_means_and_features_of_several_tables_are_theirs() -> None:
    tables = bag_configs(pooling=torchrec.PoolingType.MEAN)
    tables[0].feature_names = ["f1", "f2"]
    theirs = torchrec.EmbeddingBagCollection(tables)
    with memory() as store:
        ours = tbr.replace(copy.deepcopy(theirs), store)
        expected, found = theirs(batch()), ours(batch())
        assert found.keys() == expected.keys() == ["f1", "f2@t1", "f2@t2", "f3"]
        torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("needed", [False, True])
def test_sequences_are_theirs(needed: bool) -> None:
    theirs = torchrec.EmbeddingCollection(configs(), need_indices=needed)
    with memory() as store:
        ours = tbr.replace(copy.deepcopy(theirs), store)
        for training in (True, False):
            ours.train(training)
            expected, found = theirs(batch()), ours(batch())
            assert list(found) == list(expected)
            for name, rows in expected.items():
                assert type(found[name]) is torchrec.JaggedTensor
                assert torch.equal(found[name].values(), rows.values())
                assert torch.equal(found[name].lengths(), rows.lengths())
                padded = (found[name].to_padded_dense(3), rows.to_padded_dense(3))
                assert torch.equal(*padded)
                weights = (found[name].weights_or_none(), rows.weights_or_none())
                assert torch.equal(*weights) if needed else weights == (None, None)


def shared_batch(*, weighted: bool = False) -> Any:
    """Samples share bags: features of 2, 1 and 3 bags in a batch of 4 samples."""
    lengths = torch.tensor([1, 2, 2, 2, 0, 1])
    return KJT(
        keys=["f1", "f2", "f3"],
        values=torch.tensor([1, 2, 3, 4, 4, 5, 6, 7]),
        weights=torch.linspace(0.5, 2.0, 8) if weighted else None,
        lengths=lengths,
        stride_per_key_per_rank=[[2], [1], [3]],
        inverse_indices=(
            ["f3", "f1", "f2"],
            torch.tensor([[2, 1, 0, 2], [0, 1, 0, 0], [0, 0, 0, 0]]),
        ),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_share_bags_as_theirs(weighted: bool) -> None:
    with memory() as store:
        theirs, ours = pair(store, weighted=weighted)
        _apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": 0.1})
        kjt = shared_batch(weighted=weighted)
        for _ in range(3):
            expected, found = theirs(kjt).values(), ours(kjt).values()
            assert expected.shape == (4, 3 * DIM)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            expected.square().sum().backward()
            found.square().sum().backward()
        assert rows_differ(theirs, store) < 1e-6


def test_equal_counts_of_shared_bags_are_theirs() -> None:
    kjt = KJT(
        keys=["f1", "f2", "f3"],
        values=torch.arange(6),
        lengths=torch.ones(6, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [2], [2]],
        inverse_indices=(["f1", "f2", "f3"], torch.tensor([[1, 0], [0, 0], [1, 1]])),
    )
    with memory() as store:
        theirs, ours = pair(store)
        assert torch.equal(ours(kjt).values(), theirs(kjt).values())


def test_sequences_of_shared_bags_are_theirs() -> None:
    theirs = torchrec.EmbeddingCollection(configs())
    with memory() as store:
        ours = tbr.replace(copy.deepcopy(theirs), store)
        expected, found = theirs(shared_batch()), ours.eval()(shared_batch())
        for name, rows in expected.items():
            assert torch.equal(found[name].values(), rows.values())
            assert torch.equal(found[name].lengths(), rows.lengths())


def test_shared_bags_are_looked_ahead(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB", order="window") as store:
        _, ours = pair(store)
        loader = [shared_batch() for _ in range(6)]
        ahead = tb.lookahead(loader, ours, window=3, key=lambda kjt: kjt)
        assert sum(ours(kjt).values().shape[0] for kjt in ahead) == 24


# ---------------------------------------------------------------- contract


def test_ours_fulfil_their_interfaces() -> None:
    from torchrec.modules import embedding_modules as theirs

    with memory() as store:
        bags = tbr.from_configs(bag_configs(), store, is_weighted=True)
        assert isinstance(bags, theirs.EmbeddingBagCollectionInterface)
        assert isinstance(bags, tb.EmbeddingBagCollection)
        assert bags.is_weighted()
        assert bags.device == torch.device("cpu")
        assert bags.embedding_bag_configs()[0].pooling is torchrec.PoolingType.SUM
    with memory() as store:
        rows = tbr.from_configs(configs(), store, need_indices=True)
        assert isinstance(rows, theirs.EmbeddingCollectionInterface)
        assert rows.need_indices()
        assert rows.embedding_dim() == DIM
        assert rows.embedding_names_by_table() == [["f1"], ["f2", "f3"]]
        assert [config.name for config in rows.embedding_configs()] == ["t1", "t2"]


def test_everything_of_a_module_is_kept() -> None:
    theirs = torchrec.EmbeddingBagCollection(bag_configs(), is_weighted=True).eval()
    theirs.requires_grad_(False)
    with memory() as store:
        ours = tbr.replace(theirs, store, chunk_rows=7)
        assert not ours.training
        assert ours.is_weighted()
        assert ours.embedding_bag_configs() is not None
        assert list(ours.full_state_dict()) == list(theirs.state_dict())
        assert rows_differ(theirs, store) == 0.0
        ours.train()(batch(weighted=True)).values()
        assert not ours(batch(weighted=True)).values().requires_grad


def test_rows_go_back_into_theirs() -> None:
    for theirs in (
        torchrec.EmbeddingBagCollection(bag_configs()),
        torchrec.EmbeddingCollection(configs()),
    ):
        with memory() as store:
            ours = tbr.replace(copy.deepcopy(theirs), store)
            for weight in theirs.parameters():
                torch.nn.init.zeros_(weight)
            theirs.load_state_dict(ours.full_state_dict())
            assert rows_differ(theirs, store) == 0.0
            assert any(bool(weight.any()) for weight in theirs.parameters())


def test_a_model_starts_on_meta_and_goes_on_with_its_rows(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        bags = torchrec.EmbeddingBagCollection(bag_configs(), device=torch.device("meta"))
        return torch.nn.ModuleDict({"bags": bags})

    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        ours = tbr.replace(model(), store, rows="keep", optimizer=tb.SGD(lr=0.1))
        bound = ROWS**-0.5
        first = store.read_rows("t1", 0, ROWS)
        assert -bound <= float(first.min()) < 0 < float(first.max()) < bound
        ours["bags"](batch()).values().sum().backward()
        store.checkpoint("one")
        trained = store.read_rows("t1", 0, ROWS)
        assert not torch.equal(first, trained)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        tbr.replace(model(), store, rows="keep", optimizer=tb.SGD(lr=0.1))
        assert torch.equal(store.read_rows("t1", 0, ROWS), trained)


def test_position_weights_get_their_gradient() -> None:
    def model() -> Any:
        torch.manual_seed(1)
        processors = PositionWeightedModuleCollection(
            dict.fromkeys(("f1", "f2", "f3"), 4), torch.device("cpu")
        )
        bags = torchrec.EmbeddingBagCollection(bag_configs(), is_weighted=True)
        return FeatureProcessedEmbeddingBagCollection(bags, processors)

    theirs = model()
    _apply_optimizer_in_backward(
        torch.optim.SGD, theirs._embedding_bag_collection.parameters(), {"lr": 0.1}
    )
    with memory() as store:
        ours = tbr.replace(copy.deepcopy(model()), store, optimizer=tb.SGD(lr=0.1))
        for kjt in batches(3):
            theirs(kjt).values().square().sum().backward()
            ours(kjt).values().square().sum().backward()
        for name, weight in ours._feature_processors.named_parameters():
            expected = theirs._feature_processors.get_parameter(name).grad
            torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-6)
        assert rows_differ(theirs._embedding_bag_collection, store) < 1e-6


# ---------------------------------------------------------------- optimizers


APPLIED = [
    (torch.optim.SGD, {"lr": 0.1}, 1e-6),
    (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6}, 2e-6),
    (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6, "initial_accumulator_value": 0.1}, 2e-6),
    (torchrec.optim.RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6}, 2e-6),
    (torch.optim.SparseAdam, {"lr": 0.01, "eps": 1e-6}, 2e-6),
]


@pytest.mark.parametrize(("kind", "numbers", "tolerance"), APPLIED, ids=str)
def test_steps_are_those_applied_in_backward(
    kind: type[Any], numbers: dict[str, Any], tolerance: float
) -> None:
    theirs = torchrec.EmbeddingBagCollection(bag_configs())
    for bag in theirs.embedding_bags.values():
        bag.sparse = kind is torch.optim.SparseAdam
    target = torch.linspace(-1, 1, 3 * DIM)
    _apply_optimizer_in_backward(kind, theirs.parameters(), numbers)

    def step(module: Any, kjt: Any) -> None:
        (module(kjt).values() - target).square().sum().backward()

    for kjt in batches(10):
        step(theirs, kjt)
    with memory() as store:
        # Rows and the state of the optimizer go along, so both go on alike.
        ours = tbr.replace(torch.nn.ModuleList([theirs]), store)[0]
        assert rows_differ(theirs, store) == 0.0
        for kjt in batches(20, samples=6):
            step(theirs, kjt)
            step(ours, kjt)
        assert rows_differ(theirs, store) < tolerance


FUSED = [
    (torch.optim.SGD, tb.SGD(lr=0.1), {"lr": 0.1}, 1e-6),
    (torch.optim.Adagrad, tb.Adagrad(lr=0.05, eps=1e-6), {"lr": 0.05, "eps": 1e-6}, 2e-6),
    (
        torchrec.optim.RowWiseAdagrad,
        tb.RowWiseAdagrad(lr=0.05, eps=1e-6),
        {"lr": 0.05, "eps": 1e-6},
        2e-6,
    ),
]


@pytest.mark.parametrize(("kind", "optimizer", "numbers", "tolerance"), FUSED, ids=str)
def test_steps_are_those_of_fbgemm(
    kind: type[Any], optimizer: Any, numbers: dict[str, Any], tolerance: float
) -> None:
    fused = FusedEmbeddingBagCollection(
        bag_configs(), optimizer_type=kind, optimizer_kwargs=dict(numbers)
    )
    plain = torchrec.EmbeddingBagCollection(bag_configs())
    plain.load_state_dict(fused.state_dict())
    with memory() as store:
        ours = tbr.replace(plain, store, optimizer=optimizer)
        target = torch.linspace(-1, 1, 3 * DIM)
        for kjt in batches(20):
            for module in (fused, ours):
                (module(kjt).values() - target).square().sum().backward()
        assert rows_differ(fused, store) < tolerance


# ---------------------------------------------------------------- without TorchRec


def test_the_package_is_imported_without_torchrec() -> None:
    code = (
        "import sys; sys.modules['torchrec'] = None\n"
        "import tierbed as tb, tierbed.torchrec as tbr\n"
        "try:\n    tbr.from_configs([], tb.Store.open(backend='memory', dram_budget='8MiB'))\n"
        "except tb.UnsupportedError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install torchrec fbgemm-gpu-cpu" in done.stdout
