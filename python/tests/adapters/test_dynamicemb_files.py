"""Files of dynamicemb: written and read by the storage, and by what reads its dumps elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import tierbed as tb
from tierbed.adapters.dynamicemb import TierbedStorage

from . import published
from .dynamicemb_kit import LFU, LRU, bits, storage_of

KEYS = torch.tensor([3, -1, 1 << 60, 7])
TABLES = torch.zeros_like(KEYS)
SCORES = torch.tensor([10, 20, 30, 40])
ITEMS = ("keys", "values", "scores", "opt_values")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[tb.Store]]:
    opened = [tb.Store.open(tmp_path / name, dram_budget="16MiB") for name in ("one", "two")]
    yield opened
    for store in opened:
        store.close()


def files_in(folder: Path) -> list[str]:
    """Returns the files of table ``t0`` as dynamicemb calls those of one rank."""
    names = [f"t0_emb_{item}.rank_0.world_size_1" for item in ITEMS]
    return [str(folder / name) for name in ("t0_opt_args.json", *names)]


def dumped(storage: TierbedStorage, folder: Path, **options: Any) -> Tensor:
    """Fills a storage, dumps it as dynamicemb's tables do, and returns what it was filled with."""
    values = torch.randn(len(KEYS), storage.max_value_dim())
    storage.insert(KEYS, TABLES, values, SCORES)
    storage.dump(0, *files_in(folder), **options)
    return values


def found(storage: TierbedStorage) -> tuple[Tensor, Tensor]:
    count, *_, scores, values = storage.find(KEYS, TABLES, published.CopyMode.VALUE)
    assert count == 0
    return scores, values


@pytest.mark.parametrize("kind", ["adam", "exact_adagrad", "exact_row_wise_adagrad", "sgd"])
def test_what_is_dumped_is_loaded(stores: list[tb.Store], tmp_path: Path, kind: str) -> None:
    one, two = (storage_of(store, 4, kind=kind) for store in stores)
    values = dumped(one, tmp_path, current_score=17)
    two._optimizer.numbers["iters"] = 0
    assert two.load(0, *files_in(tmp_path), include_optim=True) == 17
    # As dynamicemb does, numbers come along with state.
    assert two._optimizer.numbers["iters"] == (0 if kind == "sgd" else 3)
    scores, back = found(two)
    assert torch.equal(scores, SCORES)
    kept = 4 + one._optimizer.get_ckpt_state_dim(4)
    assert torch.equal(bits(back[:, :kept]), bits(values[:, :kept]))
    assert torch.equal(back[:, kept:], torch.zeros(len(KEYS), back.shape[1] - kept))


def test_files_are_those_of_a_dump(stores: list[tb.Store], tmp_path: Path) -> None:
    """Read by numbers alone, and by what imports dumps that dynamicemb itself wrote."""
    folder = tmp_path / "dump"
    folder.mkdir()
    values = dumped(storage_of(stores[0], 4), folder)
    keys = torch.frombuffer(bytearray(Path(files_in(folder)[1]).read_bytes()), dtype=torch.int64)
    order = [KEYS.tolist().index(key) for key in keys.tolist()]
    weights = torch.frombuffer(bytearray(Path(files_in(folder)[2]).read_bytes()), dtype=torch.float)
    assert torch.equal(weights.view(-1, 4), values[order, :4])
    tb.tables.import_tables(stores[1], folder, {"item": "t0"}, optimizer=tb.Adam(lr=0.1))
    rows = stores[1].translate("item", KEYS)
    read = [stores[1].read_rows_and_state("item", int(row), 1) for row in rows]
    assert torch.equal(torch.cat([row for row, _ in read]), values[:, :4])
    assert torch.equal(torch.cat([state for _, state in read]), values[:, 4:])
    assert stores[1].steps_done("item") == 3


def test_a_dump_of_another_tool_is_loaded(stores: list[tb.Store], tmp_path: Path) -> None:
    config = tb.EmbeddingConfig(num_embeddings=None, embedding_dim=4, name="t0")
    stores[0].add_table(config, tb.Adagrad(lr=0.1))
    rows = stores[0].assign_ids("t0", KEYS)
    weights, state = torch.randn(4, 4), torch.rand(4, 4)
    stores[0].scatter_rows("t0", rows, weights, state)
    (tmp_path / "dump").mkdir()
    tb.tables.export_tables(stores[0], tmp_path / "dump", file_format="dynamicemb", state=True)
    paths = files_in(tmp_path / "dump")
    told = json.loads(Path(paths[0]).read_text())
    Path(paths[0]).write_text(json.dumps({"lr": 0.1, **told}))
    storage = storage_of(stores[1], 4, kind="exact_adagrad")
    storage.load(0, *paths, include_optim=True)
    assert torch.equal(found(storage)[1], torch.cat([weights, state], 1))


def test_scores_of_the_least_recently_used_are_ages(stores: list[tb.Store], tmp_path: Path) -> None:
    one, two = (storage_of(store, 4, evict_strategy=LRU) for store in stores)
    dumped(one, tmp_path, timestamp=100)
    ages = torch.frombuffer(bytearray(Path(files_in(tmp_path)[3]).read_bytes()), dtype=torch.int64)
    assert sorted(ages.tolist()) == [60, 70, 80, 90]
    two.load(0, *files_in(tmp_path), True, 75)
    assert found(two)[0].tolist() == [0, 0, 5, 15]


def test_state_is_left_out_when_it_is_not_asked_for_or_another_ones(
    stores: list[tb.Store], tmp_path: Path
) -> None:
    values = dumped(storage_of(stores[0], 4), tmp_path)
    storage = storage_of(stores[1], 4)
    storage._optimizer.start = 0.5
    storage.load(0, *files_in(tmp_path), include_optim=False)
    assert torch.equal(found(storage)[1][:, :4], values[:, :4])
    assert (found(storage)[1][:, 4:] == 0.5).all()
    storage._optimizer.numbers["opt_type"] = "exact_adagrad"
    with pytest.warns(RuntimeWarning, match="the state of adam"):
        storage.load(0, *files_in(tmp_path), include_optim=True)
    meta, keys, weights, *_ = files_in(tmp_path)
    with pytest.warns(RuntimeWarning, match="there is no file of state"):
        storage_of(stores[1], 4).load(0, meta, keys, weights, None, None, include_optim=True)
    assert torch.equal(found(storage)[0], SCORES)  # without scores keys keep theirs


def test_nothing_but_rows_is_dumped_where_nothing_else_is_asked_for(
    stores: list[tb.Store], tmp_path: Path
) -> None:
    dumped(storage_of(stores[0], 4), tmp_path, include_optim=False, include_meta=False)
    assert [Path(path).exists() for path in files_in(tmp_path)] == [False, True, True, True, False]


def test_a_rank_loads_its_own_keys(
    stores: list[tb.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = dumped(storage_of(stores[0], 4), tmp_path)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    storage = storage_of(stores[1], 4)
    storage.load(0, *files_in(tmp_path))
    *_, founds, _, back = storage.find(KEYS, TABLES, published.CopyMode.VALUE)
    assert founds.tolist() == [False, False, True, False]
    assert torch.equal(back[2], values[2])


@pytest.mark.parametrize("damaged", [0, 1, 2, 3, 4])
def test_damaged_files_are_refused_and_good_ones_load(
    stores: list[tb.Store], tmp_path: Path, damaged: int
) -> None:
    values = dumped(storage_of(stores[0], 4), tmp_path)
    path = Path(files_in(tmp_path)[damaged])
    whole, storage = path.read_bytes(), storage_of(stores[1], 4)
    path.write_bytes(whole[:-3])
    with pytest.raises(tb.CorruptionError, match="bring all its files again"):
        storage.load(0, *files_in(tmp_path), include_optim=True)
    if damaged < 3:
        path.unlink()
        with pytest.raises(tb.CorruptionError, match="bring all its files again"):
            storage.load(0, *files_in(tmp_path), include_optim=True)
    path.write_bytes(whole)
    storage.load(0, *files_in(tmp_path), include_optim=True)
    assert torch.equal(found(storage)[1], values)


@pytest.mark.parametrize(
    ("name", "ours"), [("evict_strategy", LRU), ("dist_type", "hash_roundrobin")]
)
def test_rows_of_another_eviction_or_distribution_are_refused(
    stores: list[tb.Store], tmp_path: Path, name: str, ours: Any
) -> None:
    dumped(storage_of(stores[0], 4), tmp_path)
    with pytest.raises(tb.InvalidError, match=f"give the table that {name}"):
        storage_of(stores[1], 4, **{name: ours}).load(0, *files_in(tmp_path))
    theirs = {"evict_strategy": LFU, "dist_type": "roundrobin"}[name]
    storage_of(stores[1], 4, **{name: theirs}).load(0, *files_in(tmp_path))
