"""Remedies of what is refused of TorchRec: the wrong call, what it advises, the right call."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
import tierbed.torchrec as tbr

from .torchrec_kit import DIM, ROWS, bag_configs, batch, configs, memory, torchrec

from torch.distributed.optim import _apply_optimizer_in_backward  # isort: skip
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # isort: skip

KJT = torchrec.KeyedJaggedTensor
FP16 = torchrec.modules.embedding_configs.DataType.FP16


def refused(remedy: str, kind: type[Exception] = tb.UnsupportedError) -> Any:
    return pytest.raises(kind, match=remedy)


def ebc(**options: Any) -> Any:
    return torchrec.EmbeddingBagCollection(bag_configs(**options))


def test_configs_of_each_package_go_to_its_own_collections() -> None:
    with memory() as store:
        mine = [tb.EmbeddingBagConfig(ROWS, DIM, "t1")]
        with refused("for those of Tierbed make a tierbed.EmbeddingBagColl", tb.InvalidError):
            tbr.from_configs(mine, store)
        tb.EmbeddingBagCollection(mine, store=store)
        with refused("tierbed.torchrec.from_configs takes those of TorchRec", tb.InvalidError):
            tb.EmbeddingBagCollection(bag_configs(), store=store)
    with memory() as store:
        tbr.from_configs(bag_configs(), store)


def test_bags_and_sequences_are_collections_of_their_own() -> None:
    with memory() as store:
        sequences = configs()
        sequences[0].name, sequences[1].name = "s1", "s2"
        with refused("make a collection of each", tb.InvalidError):
            tbr.from_configs(bag_configs() + sequences, store)
        tbr.from_configs(bag_configs(), store)
        tbr.from_configs(sequences, store)


def test_fields_without_a_counterpart_stay_unset() -> None:
    with memory() as store:
        tables = bag_configs()
        tables[0].use_virtual_table = True
        with refused("use_virtual_table=True has no counterpart.*leave it unset"):
            tbr.from_configs(tables, store)
        tables[0].use_virtual_table = False
        tbr.from_configs(tables, store)


def test_rows_train_in_float32() -> None:
    with memory() as store:
        with refused("float32, not FP16; give data_type=DataType.FP32"):
            tbr.replace(ebc(data_type=FP16), store)
        with refused("not torch.bfloat16; give model.float"):
            tbr.replace(ebc().bfloat16(), store)
        assert store.tables() == []
        tbr.replace(ebc().bfloat16().float(), store)


def test_initial_rows_are_known_or_drawn() -> None:
    draw = functools.partial(torch.nn.init.trunc_normal_, std=0.1)
    known = functools.partial(torch.nn.init.normal_, std=0.5)
    with memory() as store:
        with refused("give init={name: tierbed.Normal"):
            tbr.from_configs(bag_configs(init_fn=draw), store)
        init = {"t1": tb.Normal(std=0.1), "t2": tb.Constant(3.0)}
        tbr.from_configs(bag_configs(init_fn=draw), store, init=init)
        assert bool((store.read_rows("t2", 0, ROWS) == 3).all())
    with memory() as store:
        drawn = ebc(init_fn=draw)
        tbr.replace(drawn, store)
        assert torch.equal(store.read_rows("t1", 0, ROWS), drawn.embedding_bags["t1"].weight)
    with memory() as store:
        tbr.from_configs(bag_configs(init_fn=known), store)
        assert 0.4 < float(store.read_rows("t1", 0, ROWS).std()) < 0.6


def applied(*optimizers: tuple[type[Any], dict[str, Any]]) -> Any:
    module = ebc()
    for kind, numbers in optimizers:
        _apply_optimizer_in_backward(kind, module.parameters(), numbers)
    return module


def test_one_optimizer_is_applied() -> None:
    sgd = (torch.optim.SGD, {"lr": 0.1})
    with memory() as store:
        with refused(r"\['SGD', 'SGD'\] in backward; apply one"):
            tbr.replace(applied(sgd, sgd), store)
        tbr.replace(applied(sgd), store)
        assert store.learning_rate("t1") == 0.1


@pytest.mark.parametrize(
    ("kind", "numbers", "remedy", "optimizer"),
    [
        (torch.optim.Adam, {"lr": 0.1}, "give optimizer=tierbed.Adam", tb.Adam(lr=0.1)),
        (
            torch.optim.SGD,
            {"lr": 0.1, "weight_decay": 0.5},
            "give optimizer= with that weight_decay",
            tb.SGD(lr=0.1, weight_decay=0.5),
        ),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "no momentum", tb.SGD(lr=0.1)),
        (torch.optim.RMSprop, {}, "no fused counterpart", tb.Adagrad()),
    ],
    ids=str,
)
def test_an_optimizer_that_steps_otherwise_is_chosen(
    kind: type[Any], numbers: Any, remedy: str, optimizer: Any
) -> None:
    with memory() as store:
        with refused(remedy):
            tbr.replace(applied((kind, numbers)), store)
        assert store.tables() == []
        tbr.replace(applied((kind, numbers)), store, optimizer=optimizer)


def test_one_optimizer_is_given_for_all_tables() -> None:
    module = ebc()
    for name, rate in (("t1", 0.1), ("t2", 0.2)):
        weights = module.embedding_bags[name].parameters()
        _apply_optimizer_in_backward(torch.optim.SGD, weights, {"lr": rate})
    with memory() as store:
        with refused("give one for all of them with optimizer="):
            tbr.replace(module, store)
        tbr.replace(module, store, optimizer=tb.SGD(lr=0.1))


def test_tables_that_are_there_already_are_kept(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        module = ebc()
        tbr.replace(module, store)
        store.checkpoint("one")
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        with refused("rows='keep' trains on with its rows", tb.InvalidError):
            tbr.replace(ebc(), store)
        tbr.replace(ebc(), store, rows="keep")
        assert torch.equal(store.read_rows("t1", 0, ROWS), module.embedding_bags["t1"].weight)


def test_a_training_store_is_replaced_into_and_others_are_read() -> None:
    with memory() as store:
        ours = tbr.replace(ebc(), store)
        coded = tb.CodedStore.of(store, [tb.EmbeddingBagConfig(ROWS, DIM, "t1")])
        with refused("make a collection with tierbed.torchrec.from_configs", tb.InvalidError):
            tbr.replace(ebc(), coded)
        kept = tbr.from_configs(bag_configs()[:1], coded).eval()
        torch.testing.assert_close(kept(batch()).values(), ours(batch())["f1"])


def test_other_modules_are_replaced_before_they_become_such() -> None:
    fused = FusedEmbeddingBagCollection(bag_configs(), torch.optim.SGD, {"lr": 0.1})
    with memory() as store:
        with refused("before they are sharded, fused or quantized"):
            tbr.replace(torch.nn.ModuleDict({"bags": fused}), store)
        with refused("give the module that holds them", tb.InvalidError):
            tbr.replace(torch.nn.Linear(2, 2), store)
        tbr.replace(torch.nn.ModuleDict({"bags": ebc()}), store)


def test_tables_have_different_names() -> None:
    with memory() as store:
        with refused("give the tables of the model different names", tb.InvalidError):
            tbr.replace(torch.nn.ModuleList([ebc(), ebc()]), store)
        tables = bag_configs()
        tables[0].name, tables[1].name = "u1", "u2"
        other = torchrec.EmbeddingBagCollection(tables)
        tbr.replace(torch.nn.ModuleList([ebc(), other]), store)


def test_hooks_come_after() -> None:
    module = ebc()
    handle = module.register_forward_hook(lambda *_: None)
    with memory() as store:
        with refused("register them after it is replaced"):
            tbr.replace(module, store)
        handle.remove()
        ours = tbr.replace(module, store)
        seen: list[Any] = []
        ours.register_forward_hook(lambda *_: seen.append(1))
        ours(batch())
        assert seen == [1]


def test_a_collection_is_frozen_as_a_whole() -> None:
    module = ebc()
    module.embedding_bags["t1"].requires_grad_(False)
    with memory() as store:
        with refused("a store freezes a collection, so make two of them"):
            tbr.replace(module, store)
        first, second = (torchrec.EmbeddingBagCollection([one]) for one in bag_configs())
        first.requires_grad_(False)
        frozen, trained = tbr.replace(torch.nn.ModuleList([first, second]), store)
        assert not frozen(batch()).values().requires_grad
        assert trained(batch()).values().requires_grad


def test_tables_are_as_torchrec_makes_them() -> None:
    for change in (
        lambda bag: setattr(bag, "max_norm", 1.0),
        lambda bag: setattr(bag, "padding_idx", 0),
        lambda bag: setattr(bag, "weight", torch.nn.Parameter(torch.zeros(3, DIM))),
        lambda bag: bag.weight.register_hook(lambda grad: grad),
    ):
        module = ebc()
        change(module.embedding_bags["t1"])
        with memory() as store:
            with refused("replace tables as TorchRec makes them"):
                tbr.replace(module, store)
            tbr.replace(ebc(), store)


def test_a_table_is_used_in_one_module() -> None:
    module = ebc()
    with memory() as store:
        with refused("use the table in one module, with several features"):
            tbr.replace(torch.nn.ModuleDict({"a": module, "b": module}), store)
        tied = torch.nn.ModuleDict({"a": module, "b": torch.nn.Linear(DIM, ROWS, bias=False)})
        tied["b"].weight = module.embedding_bags["t1"].weight
        with refused(r"shared by \['a.embedding_bags.t1.weight', 'b.weight'\]"):
            tbr.replace(tied, store)
        tables = bag_configs()
        tables[0].feature_names = ["f1", "f4"]
        tbr.replace(torchrec.EmbeddingBagCollection(tables), store)


def test_samples_are_told_their_bags() -> None:
    ids = torch.arange(6)
    lengths = torch.ones(6, dtype=torch.int64)
    bare = KJT(["f1", "f2", "f3"], ids, lengths=lengths, stride_per_key_per_rank=[[2], [1], [3]])
    with memory() as store:
        ours = tbr.replace(ebc(), store)
        with refused("give inverse_indices, or a bag for each sample", tb.InvalidError):
            ours(bare)
        inverse = (["f1", "f2", "f3"], torch.tensor([[0, 1], [0, 0], [2, 2]]))
        told = KJT(
            ["f1", "f2", "f3"],
            ids,
            lengths=lengths,
            stride_per_key_per_rank=[[2], [1], [3]],
            inverse_indices=inverse,
        )
        assert ours(told).values().shape == (2, 3 * DIM)
        each = KJT(["f1", "f2", "f3"], ids, lengths=lengths)
        assert ours(each).values().shape == (2, 3 * DIM)
        inverse[1][1, 0] = 1
        with refused("feature 'f2' must be from 0 to 0", tb.InvalidError):
            ours(told)
