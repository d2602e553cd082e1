"""State dictionaries and distributed checkpoints between TorchRec's models and ours."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import tierbed as tb
import tierbed.torchrec as tbr
from tierbed.tables import export_tables, import_tables

from .torchrec_kit import ROWS, bag_configs, batches, configs, memory, rows_differ, torchrec

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # isort: skip
from torch.distributed.optim import _apply_optimizer_in_backward  # isort: skip
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # isort: skip
from torchrec.distributed.model_parallel import DistributedModelParallel  # isort: skip
from torchrec.distributed.planner import (  # isort: skip
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # isort: skip

ADAGRAD = {"lr": 0.05, "eps": 1e-6}
DIM = 64
KINDS = [
    (torch.optim.SGD, {"lr": 0.1}, tb.SGD(lr=0.1)),
    (torch.optim.Adagrad, ADAGRAD, tb.Adagrad(**ADAGRAD)),
    (torchrec.optim.RowWiseAdagrad, ADAGRAD, tb.RowWiseAdagrad(**ADAGRAD)),
]


class Model(torch.nn.Module):
    """Tables below a dense layer."""

    def __init__(self, bags: Any, dim: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.bags = bags
        self.head = torch.nn.Linear(3 * dim, 1)

    def forward(self, kjt: Any) -> Any:
        return self.head(self.bags(kjt).values())


def step(model: Any, count: int = 5) -> None:
    """Steps the rows only: the dense part keeps its numbers."""
    for kjt in batches(count):
        model(kjt).square().sum().backward()


def ours(store: tb.Store, optimizer: Any = None) -> Model:
    return Model(tbr.from_configs(bag_configs(dim=DIM), store, optimizer=optimizer))


def theirs() -> Model:
    return Model(torchrec.EmbeddingBagCollection(bag_configs(dim=DIM)))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    logging.disable(logging.WARNING)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
    logging.disable(logging.NOTSET)


def sharded(kind: type[Any], numbers: dict[str, Any], how: str, ranks: int = 1) -> Any:
    """TorchRec's model in parallel, with fused optimizers."""
    model = Model(
        torchrec.EmbeddingBagCollection(bag_configs(dim=DIM), device=torch.device("meta"))
    )
    _apply_optimizer_in_backward(kind, model.bags.parameters(), dict(numbers))
    constraint = ParameterConstraints(
        sharding_types=[how], compute_kernels=["fused"], min_partition=DIM // 2
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device="cpu"),
        constraints={"t1": constraint, "t2": constraint},
    ).collective_plan(model, sharders, torch.distributed.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def same(store: tb.Store, state: Any) -> bool:
    """Whether the rows are those of a state dictionary, whole or sharded."""
    for table in ("t1", "t2"):
        value = state[f"bags.embedding_bags.{table}.weight"]
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        whole = value if shards is None else torch.cat([one.tensor for one in shards], dim=1)
        if not torch.allclose(store.read_rows(table, 0, ROWS), whole, rtol=0, atol=2e-6):
            return False
    return True


# ---------------------------------------------------------------- dictionaries


def test_a_dictionary_goes_in_and_comes_out() -> None:
    model = theirs()
    with memory() as store:
        mine = ours(store)
        mine.head.reset_parameters()
        tbr.load_state_dict(mine, model.state_dict(), chunk_rows=33)
        full = tbr.full_state_dict(mine)
        assert list(full) != []
        for name, value in model.state_dict().items():
            assert torch.equal(full[name], value), name
        other = theirs()
        assert str(other.load_state_dict(full)) == "<All keys matched successfully>"


def test_sequences_go_in_and_come_out() -> None:
    model = torchrec.EmbeddingCollection(configs())
    with memory() as store:
        mine = tbr.from_configs(configs(), store)
        tbr.load_state_dict(mine, model.state_dict())
        assert rows_differ(model, store) == 0.0
        model.load_state_dict(tbr.full_state_dict(mine))


def test_rows_of_fewer_bytes_are_made_floats() -> None:
    model = theirs().half()
    with memory() as store:
        mine = ours(store)
        tbr.load_state_dict(mine, model.state_dict())
        expected = model.bags.embedding_bags["t2"].weight.float()
        assert torch.equal(store.read_rows("t2", 0, ROWS), expected)


@pytest.mark.parametrize(("kind", "numbers", "optimizer"), KINDS, ids=str)
def test_fused_state_goes_along(kind: type[Any], numbers: Any, optimizer: Any) -> None:
    model = Model(FusedEmbeddingBagCollection(bag_configs(dim=DIM), kind, dict(numbers)))
    step(model)
    with memory() as store:
        mine = ours(store, optimizer)
        tbr.load_state_dict(
            mine,
            model.state_dict(),
            optimizer_state=model.bags.fused_optimizer().state_dict(),
            chunk_rows=33,
        )
        step(model)
        step(mine)
        assert same(store, model.state_dict())


@pytest.mark.parametrize("how", ["table_wise", "column_wise"])
@pytest.mark.parametrize(("kind", "numbers", "optimizer"), KINDS, ids=str)
def test_sharded_state_goes_along(
    kind: type[Any], numbers: Any, optimizer: Any, how: str, one_rank: None
) -> None:
    model = sharded(kind, numbers, how)
    step(model)
    state, fused = model.state_dict(), model.fused_optimizer.state_dict()
    with memory() as store:
        mine = ours(store, optimizer)
        if how == "column_wise" and optimizer.kind == "row_wise_adagrad":
            # Each shard of columns has a number of its own per row.
            with pytest.raises(tb.InvalidError, match=r"\[400, 1\], not \[200, 1\]"):
                tbr.load_state_dict(mine, state, optimizer_state=fused)
            return
        tbr.load_state_dict(mine, state, optimizer_state=fused, chunk_rows=33)
        assert same(store, state)
        step(model)
        step(mine)
        assert same(store, model.state_dict())


def test_sharded_tables_are_not_replaced(one_rank: None) -> None:
    model = sharded(*KINDS[0][:2], "table_wise")
    with memory() as store:
        with pytest.raises(tb.UnsupportedError, match="before they are sharded, fused or"):
            tbr.replace(model, store)
        assert store.tables() == []


def test_a_distributed_tensor_goes_in(one_rank: None) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = theirs()
    placed = [torch.distributed.tensor.Shard(0)]
    state = {
        name: torch.distributed.tensor.distribute_tensor(value, mesh, placed)
        if "bags" in name
        else value
        for name, value in model.state_dict().items()
    }
    with memory() as store:
        tbr.load_state_dict(ours(store), state)
        assert same(store, model.state_dict())


def test_adam_goes_on_where_it_was() -> None:
    model = theirs()
    for bag in model.bags.embedding_bags.values():
        bag.sparse = True
    weights = list(model.bags.parameters())
    adam = torch.optim.SparseAdam(weights, lr=0.01, eps=1e-6)

    def their_step() -> None:
        for kjt in batches(5):
            adam.zero_grad()
            model(kjt).square().sum().backward()
            adam.step()

    their_step()
    state = {
        f"bags.embedding_bags.{table}.weight": {
            f"{table}.momentum1": adam.state[weight]["exp_avg"],
            f"{table}.exp_avg_sq": adam.state[weight]["exp_avg_sq"],
        }
        for table, weight in zip(("t1", "t2"), weights, strict=True)
    }
    with memory() as store:
        mine = ours(store, tb.Adam(lr=0.01, eps=1e-6))
        with pytest.raises(tb.InvalidError, match="give steps="):
            tbr.load_state_dict(mine, model.state_dict(), optimizer_state={"state": state})
        tbr.load_state_dict(mine, model.state_dict(), optimizer_state={"state": state}, steps=5)
        assert store.steps_done("t1") == 5
        their_step()
        step(mine)
        assert same(store, model.state_dict())


# ---------------------------------------------------------------- checkpoints


class Counted:
    """The most rows that a store was asked for, or given, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        for name in ("read_rows", "read_rows_and_state"):
            self._count(monkeypatch, name, lambda _, first, count: count)
        self._count(monkeypatch, "write_rows", lambda _, first, rows, *rest: len(rows))

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str, rows_of: Any) -> None:
        call = getattr(tb.Store, name)

        def counted(store: tb.Store, *args: Any) -> Any:
            self.most = max(self.most, rows_of(*args))
            return call(store, *args)

        monkeypatch.setattr(tb.Store, name, counted)


def test_a_checkpoint_goes_in_and_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = theirs()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs")
    with memory() as store:
        mine = ours(store)
        mine.head.reset_parameters()
        counted = Counted(monkeypatch)
        tbr.load_checkpoint(mine, tmp_path / "theirs", prefix="model", chunk_rows=33)
        tbr.save_checkpoint(mine, tmp_path / "ours", prefix="model", chunk_rows=33)
        assert counted.most == 33
    state = {"model": {name: torch.zeros_like(x) for name, x in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name], value), name
    # Whole files are made of it as of any other.
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "ours.pt")
    loaded = torch.load(tmp_path / "ours.pt")["model"]
    assert str(theirs().load_state_dict(loaded)) == "<All keys matched successfully>"


@pytest.mark.parametrize("how", ["table_wise", "column_wise"])
@pytest.mark.parametrize(("kind", "numbers", "optimizer"), KINDS[1:], ids=str)
def test_sharded_checkpoints_go_in_and_come_out(
    kind: type[Any], numbers: Any, optimizer: Any, how: str, one_rank: None, tmp_path: Path
) -> None:
    if how == "column_wise" and optimizer.kind == "row_wise_adagrad":
        pytest.skip("each shard of columns has a number of its own per row: no such state here")
    model = sharded(kind, numbers, how)
    step(model)

    def state() -> Any:
        return {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}

    dcp.save(state(), checkpoint_id=tmp_path / "theirs")
    options: Any = {"prefix": "model", "optimizer_prefix": "optim", "chunk_rows": 33}
    with memory() as store:
        mine = ours(store, optimizer)
        tbr.load_checkpoint(mine, tmp_path / "theirs", **options)
        assert same(store, model.state_dict())
        assert_imports_as(store, tmp_path / "theirs", optimizer)
        step(mine)
        tbr.save_checkpoint(mine, tmp_path / "ours", **options)
        # Their model goes on where ours is.
        loaded = state()
        dcp.load(loaded, checkpoint_id=tmp_path / "ours")
        model.load_state_dict(loaded["model"])
        model.fused_optimizer.load_state_dict(loaded["optim"])
        assert same(store, model.state_dict())
        step(model)
        step(mine)
        assert same(store, model.state_dict())


def assert_imports_as(store: tb.Store, path: Path, optimizer: Any) -> None:
    """The tables alone come in, with their state, without the model."""
    names = [str(table["name"]) for table in store.tables()]
    with memory() as other:
        done = import_tables(other, path, names, optimizer=optimizer, chunk_rows=33)
        assert all(one.has_state for one in done)
        for name in names:
            rows = int(store.table(name)["row_count"])
            pairs = zip(
                store.read_rows_and_state(name, 0, rows),
                other.read_rows_and_state(name, 0, rows),
                strict=True,
            )
            assert all(torch.equal(*pair) for pair in pairs), name


# Makes TorchRec's model on two ranks, each with half the columns of a table, and saves both.
TWO_RANKS = """
import sys, logging
logging.disable(logging.WARNING)
import torch
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
)
from frameworks import test_torchrec_states as tests
from torch.distributed import checkpoint as dcp
model = tests.sharded(torch.optim.Adagrad, dict(tests.ADAGRAD), "column_wise", 2)
state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
torch.manual_seed(rank)
for of_table in state["optim"]["state"].values():
    for sums in of_table.values():
        for shard in sums.local_shards():
            shard.tensor.uniform_()
dcp.save(state, checkpoint_id=f"{folder}/theirs")
print([tuple(one.tensor.shape) for one in state["model"][tests.T1].local_shards()])
torch.distributed.destroy_process_group()
"""
T1 = "bags.embedding_bags.t1.weight"


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_in(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", TWO_RANKS, str(rank), str(tmp_path)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [out for out, _ in said] == [f"[({ROWS}, {DIM // 2})]\n"] * 2
    whole: Any = {"model": {T1: torch.zeros(ROWS, DIM)}}
    whole["optim"] = {"state": {T1: {"t1.momentum1": torch.zeros(ROWS, DIM)}}}
    dcp.load(whole, checkpoint_id=tmp_path / "theirs")
    with memory() as store:
        mine = ours(store, tb.Adagrad(**ADAGRAD))
        options: Any = {"prefix": "model", "optimizer_prefix": "optim", "chunk_rows": 33}
        tbr.load_checkpoint(mine, tmp_path / "theirs", **options)
        rows, state = store.read_rows_and_state("t1", 0, ROWS)
        assert torch.equal(rows, whole["model"][T1])
        assert torch.equal(state, whole["optim"]["state"][T1]["t1.momentum1"])
        assert bool(state.all())
        assert_imports_as(store, tmp_path / "theirs", tb.Adagrad(**ADAGRAD))


# ---------------------------------------------------------------- remedies


def test_what_is_missing_or_of_another_shape_changes_nothing(tmp_path: Path) -> None:
    model = theirs()
    state = model.state_dict()
    name = "bags.embedding_bags.t1.weight"
    with memory() as store:
        mine = ours(store)
        before = tbr.full_state_dict(mine)

        def unchanged() -> bool:
            now = tbr.full_state_dict(mine)
            return all(torch.equal(now[name], before[name]) for name in before)

        rest = {key: value for key, value in state.items() if key != name}
        with pytest.raises(tb.InvalidError, match="strict=False leaves those of the store"):
            tbr.load_state_dict(mine, rest)
        with pytest.raises(tb.InvalidError, match=r"\[199, 64\], not \[200, 64\]"):
            tbr.load_state_dict(mine, {**state, name: state[name][1:]})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            tbr.load_state_dict(mine, {**state, "more": torch.zeros(1)})
        assert unchanged()
        tbr.load_state_dict(mine, rest, strict=False)
        assert torch.equal(store.read_rows("t1", 0, ROWS), before[name])
        assert not unchanged()


def test_state_is_that_of_the_optimizer_or_left_out() -> None:
    model = theirs()
    state = model.state_dict()
    name = "bags.embedding_bags.{}.weight"
    with memory() as store:
        mine = ours(store, tb.SGD(lr=0.1))
        sums = {name.format(t): {f"{t}.momentum1": torch.ones(ROWS)} for t in ("t1", "t2")}
        with pytest.raises(tb.UnsupportedError, match="leave out optimizer_state, or make"):
            tbr.load_state_dict(mine, state, optimizer_state={"state": sums})
        tbr.load_state_dict(mine, state)
    with memory() as store:
        mine = ours(store, tb.RowWiseAdagrad(lr=0.1))
        with pytest.raises(tb.InvalidError, match=r"lacks \['momentum1'\]; leave out"):
            tbr.load_state_dict(mine, state, optimizer_state={"state": {}})
        tbr.load_state_dict(mine, state, optimizer_state={"state": sums})
        assert bool((store.read_rows_and_state("t1", 0, ROWS)[1] == 1).all())


def test_a_checkpoint_is_named_with_its_prefix(tmp_path: Path) -> None:
    model = theirs()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs")
    with memory() as store:
        mine = ours(store)
        with pytest.raises(tb.InvalidError, match="give prefix= where"):
            tbr.load_checkpoint(mine, tmp_path / "theirs")
        with pytest.raises(tb.InvalidError, match="give the folder that torch"):
            tbr.load_checkpoint(mine, tmp_path)
        tbr.load_checkpoint(mine, tmp_path / "theirs", prefix="model")
        with pytest.raises(tb.InvalidError, match="give a new folder for the checkpoint"):
            tbr.save_checkpoint(mine, tmp_path / "theirs")
        tbr.save_checkpoint(mine, tmp_path / "new")


def test_damage_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    model = theirs()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "theirs")
    (data,) = (tmp_path / "theirs").glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with memory() as store:
        with pytest.raises(tb.CorruptionError, match="cannot be read"):
            tbr.load_checkpoint(ours(store), tmp_path / "theirs")
        (tmp_path / "theirs" / ".metadata").write_bytes(b"damaged")
        with pytest.raises(tb.CorruptionError, match="metadata cannot be read"):
            tbr.load_checkpoint(ours(store), tmp_path / "theirs")


def test_rows_that_are_not_here_whole_come_by_a_checkpoint(tmp_path: Path) -> None:
    class Part:
        """A sharded tensor of which another rank has the other half."""

        def __init__(self, whole: torch.Tensor) -> None:
            self.whole = whole

        def metadata(self) -> None: ...

        def size(self) -> torch.Size:
            return self.whole.shape

        def local_shards(self) -> list[Any]:
            meta = type("Meta", (), {"shard_offsets": [0, 0]})
            return [type("Shard", (), {"tensor": self.whole[:100], "metadata": meta})]

    model = theirs()
    state = {
        name: Part(value) if "bags" in name else value for name, value in model.state_dict().items()
    }
    with memory() as store:
        with pytest.raises(tb.InvalidError, match="load that with load_checkpoint"):
            tbr.load_state_dict(ours(store), state)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "theirs")
        tbr.load_checkpoint(ours(store), tmp_path / "theirs")
        assert same(store, model.state_dict())


def test_tables_of_ids_and_of_snapshots_are_not_moved_so(tmp_path: Path) -> None:
    with memory() as store:
        tables = [tb.EmbeddingBagConfig(None, 4, "open")]
        model = Model(tb.EmbeddingBagCollection(tables, store=store), dim=4)
        with pytest.raises(tb.UnsupportedError, match="move it by 'tierbed export'"):
            tbr.full_state_dict(model)
        model.bags(tb.KeyedJaggedTensor(["open"], torch.tensor([7]), lengths=torch.tensor([1])))
        assert export_tables(store, tmp_path / "open.pt")[0].rows == 1
    with memory() as store:
        mine = ours(store)
        coded = tb.CodedStore.of(store, [tb.EmbeddingBagConfig(ROWS, DIM, "t1")])
        looked_up = tbr.from_configs(bag_configs(dim=DIM)[:1], coded)
        with pytest.raises(tb.UnsupportedError, match="take the model on its training store"):
            tbr.full_state_dict(looked_up)
        assert len(tbr.full_state_dict(copy.copy(mine))) == 4
