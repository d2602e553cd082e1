"""What copies and pickles of collections share, and what they do to rows."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import tierbed as tb

SHARED = "a deep copy shares the store of its original"


def bags(*ids: int) -> tb.KeyedJaggedTensor:
    ones = torch.ones(len(ids), dtype=torch.int64)
    return tb.KeyedJaggedTensor(["i"], torch.tensor(ids), lengths=ones)


def collection(store: Any, **options: Any) -> tb.EmbeddingBagCollection:
    options.setdefault("optimizer", tb.SGD(lr=1.0))
    table = tb.EmbeddingBagConfig(10, 4, "i", init=tb.Constant(0.0))
    return tb.EmbeddingBagCollection([table], store=store, **options)


class Model(nn.Module):
    def __init__(self, store: Any) -> None:
        super().__init__()
        # As modules of Lightning have it, for checkpoints.
        self.store = store
        self.emb = collection(store)
        self.top = nn.Linear(4, 1)

    def forward(self, features: tb.KeyedJaggedTensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(self.emb(features).values())
        return scores


def step(emb: tb.EmbeddingBagCollection, *ids: int) -> None:
    emb(bags(*ids)).values().sum().backward()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tb.Store]:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB", order="window") as store:
        yield store


# ---------------------------------------------------------------- deep copies


def test_a_deep_copy_reads_the_rows_and_steps_none(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    with pytest.warns(UserWarning, match=SHARED):
        copied = copy.deepcopy(emb)
    step(emb, 1)
    assert copied(bags(1)).values().tolist() == [[-1.0] * 4], "rows are shared"
    assert not copied(bags(1)).values().requires_grad
    assert copied.store is store
    assert store.collections() == [emb], "a plan is still made for one collection"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(emb)
    del emb
    assert copied(bags(1)).values().tolist() == [[-1.0] * 4], "and stay usable"


def test_a_copy_trains_when_it_is_told_to(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    with pytest.warns(UserWarning, match=SHARED):
        copied = copy.deepcopy(emb).requires_grad_(True)
    step(copied, 1)
    assert store.read_rows("i", 1, 1).tolist() == [[-1.0] * 4]
    assert len(store.collections()) == 2


def test_an_average_of_weights_goes_beside_training(open_store: Any) -> None:
    store = open_store()
    model = Model(store)
    with pytest.warns(UserWarning, match=SHARED):
        averaged = AveragedModel(model)
    for _ in range(3):
        model(bags(1, 2)).sum().backward()
        nn.init.normal_(model.top.weight)
        averaged.update_parameters(model)
    steps = store.steps_done("i")
    assert averaged.module.store is store
    averaged(bags(1, 2)).sum().backward()
    assert store.steps_done("i") == steps == 3, "the average steps no rows"
    pooled = model.emb(bags(1)).values()
    assert torch.equal(averaged.module.emb(bags(1)).values(), pooled)
    assert not torch.equal(averaged.module.top.weight, model.top.weight)


def test_a_copy_does_not_end_the_forward_order(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB", order="forward") as store:
        emb = collection(store)
        with pytest.warns(UserWarning, match=SHARED):
            copied = copy.deepcopy(emb)
        loader: Any = DataLoader(range(4), 1, collate_fn=lambda ids: bags(*ids))
        for batch in tb.lookahead(loader, emb, key=lambda batch: batch):
            step(emb, *batch.values().tolist())
        assert store.order()["kind"] == "forward"
        assert copied(bags(2)).values().tolist() == [[-1.0] * 4]


@pytest.mark.parametrize("kind", [tb.EmbeddingBag, tb.Embedding])
def test_modules_of_one_table_are_copied_and_pickled(kind: Any, folder: tb.Store) -> None:
    module = kind(10, 4, store=folder, name="i", optimizer=tb.SGD(lr=1.0))
    with pytest.warns(UserWarning, match=SHARED):
        copied = copy.deepcopy(nn.Sequential(module))
    again = pickle.loads(pickle.dumps(module))
    ids = torch.tensor([[1, 2]])
    module(ids).sum().backward()
    assert torch.equal(copied(ids), module(ids))
    assert torch.equal(again(ids), module(ids))


def test_a_store_itself_is_not_copied(folder: tb.Store) -> None:
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(tb.UnsupportedError, match="cannot be copied or pickled"):
            copied(folder)
        with pytest.raises(tb.UnsupportedError, match=r"cannot be copied or pickled.*Snapshot"):
            copied(tb.CodedStore())
    coded = tb.EmbeddingBagCollection(
        [tb.EmbeddingBagConfig(10, 4, "i", init=tb.Constant(0.5))], store=tb.CodedStore()
    )
    assert copy.deepcopy(coded).store is coded.store, "shared"


def test_a_shallow_copy_shares_everything(open_store: Any) -> None:
    store = open_store()
    step(copy.copy(collection(store)), 1)
    assert store.read_rows("i", 1, 1).tolist() == [[-1.0] * 4]


# ---------------------------------------------------------------- pickles


def test_a_saved_model_is_loaded_over_its_open_store(tmp_path: Path) -> None:
    path, saved = tmp_path / "store", io.BytesIO()
    with tb.Store.open(path, dram_budget="16MiB") as store:
        model = Model(store)
        del model.store  # a module that is saved has no store but that of its collections
        step(model.emb, 1)
        model.emb.requires_grad_(False)
        store.set_learning_rate(0.5)
        torch.save(model, saved)
        store.checkpoint("a")
        expected = model(bags(1))
        del model
    for loads in range(2):
        saved.seek(0)
        with tb.Store.open(path, dram_budget="16MiB") as store:
            loaded = torch.load(saved, weights_only=False)
            assert torch.equal(loaded(bags(1)), expected)
            assert not loaded.emb(bags(1)).values().requires_grad, "frozen as it was"
            loaded.emb.requires_grad_(True)
            step(loaded.emb, 2)
            assert store.read_rows("i", 2, 1).tolist() == [[-0.5] * 4], loads


def test_a_pickle_needs_its_store_open(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with tb.Store.open(path, dram_budget="16MiB") as store:
        packed = pickle.dumps(collection(store))
        store.checkpoint("a")
    with pytest.raises(tb.ClosedError, match=r"not open in this process.*Store\.open\('.*store'\)"):
        pickle.loads(packed)
    with tb.Store.open(path, dram_budget="16MiB", read_only=True):
        rows = pickle.loads(packed).eval()(bags(1)).values()
    assert rows.tolist() == [[0.0] * 4]


def test_rows_of_other_steps_are_told(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with tb.Store.open(path, dram_budget="16MiB") as store:
        emb = collection(store)
        store.checkpoint("a")
        step(emb, 1)
        packed = pickle.dumps(emb)
        del emb
    with (
        tb.Store.open(path, dram_budget="16MiB"),
        pytest.warns(UserWarning, match=r"steps \{'i': 0\}, and .* at the steps \{'i': 1\}"),
    ):
        pickle.loads(packed)


def test_rows_in_memory_are_not_pickled(open_store: Any, folder: tb.Store) -> None:
    emb = collection(open_store("memory"))
    step(emb, 1)
    with pytest.raises(tb.UnsupportedError, match=r"without a folder.*full_state_dict"):
        pickle.dumps(emb)
    on_disk = collection(folder)
    on_disk.load_state_dict(pickle.loads(pickle.dumps(emb.full_state_dict())))
    assert pickle.loads(pickle.dumps(on_disk))(bags(1)).values().tolist() == [[-1.0] * 4]


def test_a_model_over_a_snapshot_goes_to_another_process(folder: tb.Store, tmp_path: Path) -> None:
    emb = collection(folder)
    step(emb, 1)
    folder.publish(tmp_path / "snapshot")
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="16MiB") as snapshot:
        served = collection(snapshot)
        assert copy.deepcopy(served)(bags(1)).values().tolist() == [[-1.0] * 4]
        (tmp_path / "served.pickle").write_bytes(pickle.dumps((served, bags(1))))
    code = (
        "import pickle, sys; served, bags = pickle.load(open(sys.argv[1], 'rb'));"
        "print(served(bags).values().tolist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "served.pickle")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[[-1.0, -1.0, -1.0, -1.0]]"


# ---------------------------------------------------------------- state dictionaries


def test_full_states_are_loaded_into_the_store(folder: tb.Store) -> None:
    model = Model(folder)
    step(model.emb, 1)
    full = {**model.state_dict(), "emb.embedding_bags.i.weight": torch.randn(10, 4)}
    assert model.load_state_dict(full).missing_keys == []
    assert torch.equal(folder.read_rows("i", 0, 10), full["emb.embedding_bags.i.weight"])
    assert folder.steps_done("i") == 1, "as torch leaves the state of optimizers"
    model.load_state_dict(model.state_dict())
    half = {"embedding_bags.i.weight": full["emb.embedding_bags.i.weight"].bfloat16()}
    model.emb.load_state_dict(half)
    assert torch.equal(folder.read_rows("i", 0, 10), half["embedding_bags.i.weight"].float())


def test_loaded_rows_keep_their_optimizer_state(open_store: Any) -> None:
    store = open_store()
    emb = collection(store, optimizer=tb.Adagrad(lr=1.0))
    step(emb, 1, 2)
    _, before = store.read_rows_and_state("i", 0, 10)
    emb.load_state_dict({"embedding_bags.i.weight": torch.ones(10, 4)})
    rows, after = store.read_rows_and_state("i", 0, 10)
    assert bool((rows == 1).all())
    assert torch.equal(before, after)
    assert store.use_counts("i", 0, 3).tolist() == [0, 1, 1]


def test_rows_that_do_not_fit_are_errors_of_torch(open_store: Any) -> None:
    emb = collection(open_store())
    for rows, match in (
        (torch.ones(9, 4), r"size mismatch.*\(9, 4\).*\(10, 4\)"),
        (torch.ones(10, 4, dtype=torch.uint8), "tierbed.torchrec.load_state_dict"),
    ):
        with pytest.raises(RuntimeError, match=match):
            emb.load_state_dict({"embedding_bags.i.weight": rows})
    with (
        pytest.warns(UserWarning, match=r"\['embedding_bags.j.weight'\] are not loaded"),
        pytest.raises(RuntimeError, match="Unexpected"),
    ):
        emb.load_state_dict({"embedding_bags.j.weight": torch.ones(10, 4)})
    opened = tb.EmbeddingBag(None, 4, store=open_store(), name="open")
    with pytest.raises(RuntimeError, match="open vocabulary belong to ids"):
        opened.load_state_dict(opened.full_state_dict(), strict=False)


def test_tables_of_torch_are_loaded_and_come_back(open_store: Any) -> None:
    store, theirs = open_store(), nn.EmbeddingBag(10, 4)
    bag = nn.ModuleDict({"embeddings": tb.EmbeddingBag(10, 4, store=store, name="b")})
    bag.load_state_dict({"embeddings.weight": theirs.weight})
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.allclose(bag["embeddings"](ids), theirs(ids))
    theirs.load_state_dict(bag["embeddings"].full_state_dict())
