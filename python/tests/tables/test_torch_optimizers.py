"""Tables and optimizers of torch, saved in the middle of a training, go on in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.tables import export_tables, find_tables, import_tables

ROWS, DIM = 60, 8
#: Optimizers of torch, ours, and how far their rows may be apart after further steps. Bags have one
#: id each: sums of several are rounded in another order.
KINDS = [
    (torch.optim.SparseAdam, {"lr": 0.05}, tb.Adam(lr=0.05), 3e-8),
    (torch.optim.Adagrad, {"lr": 0.1}, tb.Adagrad(lr=0.1), 2.4e-7),
    (torch.optim.SGD, {"lr": 0.1}, tb.SGD(lr=0.1), 0.0),
]


def bags(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(at)
    return torch.randperm(ROWS, generator=generator)[:40], torch.arange(40)


def train(bag: Any, first: int, count: int, optimizer: Any = None) -> None:
    for at in range(first, first + count):
        ids, offsets = bags(at)
        if optimizer is not None:
            optimizer.zero_grad()
        bag(ids, offsets).square().sum().backward()
        if optimizer is not None:
            optimizer.step()


def trained(kind: Any, numbers: Any) -> tuple[torch.nn.EmbeddingBag, Any]:
    bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    torch.nn.init.normal_(bag.weight, std=0.1)
    optimizer = kind(bag.parameters(), **numbers)
    train(bag, 0, 6, optimizer)
    return bag, optimizer


@pytest.mark.parametrize(("kind", "numbers", "ours", "apart"), KINDS)
def test_training_goes_on_in_a_store_as_in_torch(
    open_store: Any, tmp_path: Path, kind: Any, numbers: Any, ours: Any, apart: float
) -> None:
    bag, optimizer = trained(kind, numbers)
    file = tmp_path / "last.ckpt"
    saved = {
        "state_dict": {"item.weight": bag.weight},
        "optimizer_states": [optimizer.state_dict()],
    }
    torch.save(saved, file)
    store = open_store("file")
    has_state = kind is not torch.optim.SGD
    keys = {"item": "optimizer_states.0.state.0"} if has_state else None
    done = import_tables(store, file, "item", state_keys=keys, optimizer=ours, chunk_rows=17)
    assert done[0].has_state == has_state
    mine = tb.EmbeddingBag(ROWS, DIM, mode="sum", name="item", store=store, optimizer=ours)
    train(bag, 6, 6, optimizer)
    train(mine, 6, 6)
    torch.testing.assert_close(store.read_rows("item", 0, ROWS), bag.weight, rtol=0, atol=apart)


@pytest.mark.parametrize(("kind", "numbers", "ours", "apart"), KINDS[:2])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_and_goes_back(
    open_store: Any, tmp_path: Path, suffix: str, kind: Any, numbers: Any, ours: Any, apart: float
) -> None:
    bag, optimizer = trained(kind, numbers)
    store = open_store()
    mine = tb.EmbeddingBag(ROWS, DIM, mode="sum", name="item", store=store, optimizer=ours)
    torch.save({"item.weight": bag.weight, "state": optimizer.state_dict()}, tmp_path / "in.pt")
    import_tables(store, tmp_path / "in.pt", state_keys={"item": "state.state.0"})
    train(mine, 6, 6)
    file = tmp_path / f"back{suffix}"
    export_tables(store, file, state=True)
    held = {name: rows.whole() for name, rows in find_tables(file).tensors.items()}

    again = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    again.load_state_dict({"weight": held["item.weight"]})
    resumed = kind(again.parameters(), **numbers)
    state = {
        name.removeprefix("item."): rows for name, rows in held.items() if "weight" not in name
    }
    state.setdefault("step", torch.tensor(12.0))  # Adagrad's rows do not depend on it.
    state["step"] = int(state["step"]) if kind is torch.optim.SparseAdam else state["step"]
    resumed.load_state_dict({**resumed.state_dict(), "state": {0: state}})
    train(again, 12, 4, resumed)
    train(bag, 6, 10, optimizer)
    torch.testing.assert_close(again.weight, bag.weight, rtol=0, atol=4 * apart)


def test_state_of_another_optimizer_is_refused_and_nothing_changes(
    open_store: Any, tmp_path: Path
) -> None:
    bag, optimizer = trained(*KINDS[0][:2])
    torch.save({"item.weight": bag.weight, "optim": optimizer.state_dict()}, tmp_path / "in.pt")
    keys = {"item": "optim.state.0"}
    for wrong, told in (
        (tb.Adagrad(), "adagrad"),
        (tb.RowWiseAdagrad(), "row_wise"),
        (tb.SGD(), "sgd"),
    ):
        store = open_store()
        with pytest.raises(
            tb.UnsupportedError, match=f"not that of table 'item'.*{told}.*state=False"
        ):
            import_tables(store, tmp_path / "in.pt", state_keys=keys, optimizer=wrong)
        assert store.tables() == []
    store = open_store()
    done = import_tables(
        store, tmp_path / "in.pt", state_keys=keys, optimizer=tb.Adagrad(), state=False
    )
    assert not done[0].has_state
    with pytest.raises(
        tb.InvalidError, match=r"no optimizer state 'optim.0', but \['optim.state.0'\]"
    ):
        import_tables(store, tmp_path / "in.pt", state_keys={"item": "optim.0"})


def test_names_of_torchrec_and_fbgemm_are_known(open_store: Any, tmp_path: Path) -> None:
    rows, first = torch.randn(ROWS, DIM), torch.rand(ROWS)
    model = {"ebc.embedding_bags.item.weight": rows, "over.weight": torch.ones(2, 2)}
    state = {"ebc.embedding_bags.item.weight": {"item.momentum1": first}}
    torch.save({"model": model, "optim": {"state": state}}, tmp_path / "rec.pt")
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(ROWS, DIM, "item"), tb.RowWiseAdagrad())
    assert import_tables(store, tmp_path / "rec.pt")[0].has_state
    assert torch.equal(store.read_rows_and_state("item", 0, ROWS)[1][:, 0], first)


def test_distributed_checkpoints_come_in_shard_by_shard(open_store: Any, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    rows, second = torch.randn(ROWS, DIM), torch.rand(ROWS, DIM)
    name = "ebc.embedding_bags.item.weight"
    state = {"item.momentum1": -second, "item.exp_avg_sq": second}
    saved = {"model": {name: rows}, "optim": {"state": {name: state}}}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    store = open_store()
    with pytest.raises(tb.InvalidError, match=r"how many steps were done.*--steps"):
        import_tables(store, tmp_path / "dcp", optimizer=tb.Adam())
    import_tables(store, tmp_path / "dcp", optimizer=tb.Adam(), steps=9, chunk_rows=7)
    found, held = store.read_rows_and_state("item", 0, ROWS)
    assert torch.equal(found, rows)
    assert torch.equal(held, torch.cat([-second, second], dim=1))
    assert store.steps_done("item") == 9


def test_shards_of_rows_and_of_columns_are_joined() -> None:
    from tierbed.tables.sources import StoredRows
    from tierbed.torchrec.pieces import Parts, Piece

    whole = torch.randn(11, 6)
    asked: list[tuple[int, int]] = []

    def piece(first: int, end: int, left: int, right: int) -> Piece:
        def read() -> torch.Tensor:
            asked.append((first, left))
            return whole[first:end, left:right].clone()

        return Piece((first, left), (end - first, right - left), read)

    pieces = [piece(0, 5, 0, 4), piece(0, 5, 4, 6), piece(5, 11, 0, 6)]
    for chunk_rows in (1, 3, 20):
        asked.clear()
        rows = StoredRows(Parts((11, 6), torch.float32, pieces)).rows()
        assert torch.equal(torch.cat(list(rows.chunks(chunk_rows))), whole)
        assert sorted(asked) == [(0, 0), (0, 4), (5, 0)], "each shard is read once"


def test_state_without_a_name_is_told(tmp_path: Path) -> None:
    bag, optimizer = trained(*KINDS[0][:2])
    torch.save({"item.weight": bag.weight, "optim": optimizer.state_dict()}, tmp_path / "in.pt")
    file = find_tables(tmp_path / "in.pt")
    assert file.numbered_state() == {
        "optim.state.0": ["step []", f"exp_avg [{ROWS}, {DIM}]", f"exp_avg_sq [{ROWS}, {DIM}]"]
    }
