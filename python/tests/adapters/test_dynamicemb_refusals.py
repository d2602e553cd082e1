"""What a storage refuses, and that its remedy works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.adapters.dynamicemb import external_storage

from . import published
from .dynamicemb_kit import Optimizer, Options, storage_of


@pytest.fixture
def store(tmp_path: Path):
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as opened:
        yield opened


def test_a_group_has_a_name_for_each_table(store: tb.Store) -> None:
    options = [Options(4), Options(8)]
    with pytest.raises(tb.InvalidError, match="a name for each table"):
        external_storage(store, ["a"])(options, Optimizer())
    assert external_storage(store, ["a", "b"])(options, Optimizer()).num_tables == 2


def test_rows_are_floats_of_at_most_32_bits(store: tb.Store) -> None:
    with pytest.raises(tb.UnsupportedError, match="choose float32, float16 or bfloat16"):
        storage_of(store, 4, embedding_dtype=torch.float64)
    for at, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        external_storage(store, [f"of_{at}"])([Options(4, dtype)], Optimizer())


def test_an_id_has_one_score(store: tb.Store) -> None:
    with pytest.raises(tb.UnsupportedError, match="choose one score_strategy"):
        storage_of(store, 4, score_strategy=(1, 2))
    storage_of(store, 4, score_strategy=1)


def test_rows_with_state_fit_a_table(store: tb.Store) -> None:
    with pytest.raises(tb.UnsupportedError, match="an optimizer with less state, or a smaller dim"):
        storage_of(store, 2000)
    storage_of(store, 2000, kind="exact_adagrad")
    external_storage(store, ["smaller"])([Options(1364)], Optimizer())


@pytest.mark.parametrize("rows", [None, 100])
def test_a_table_of_another_shape_is_refused(store: tb.Store, rows: int | None) -> None:
    store.add_table(tb.EmbeddingConfig(num_embeddings=rows, embedding_dim=15, name="t0"))
    with pytest.raises(tb.InvalidError, match="t0"):
        storage_of(store, 4)
    external_storage(store, ["t1"])([Options(4)], Optimizer())


def test_values_have_the_width_of_the_storage(store: tb.Store) -> None:
    storage = storage_of(store, 4, 8)
    with pytest.raises(tb.InvalidError, match=r"values must be \[N, 24\]"):
        storage.insert(torch.tensor([1]), torch.tensor([0]), torch.zeros(1, 12))
    storage.insert(torch.tensor([1]), torch.tensor([0]), torch.zeros(1, 24))


@pytest.mark.parametrize("table", [-1, 2])
def test_keys_are_of_tables_that_are_there(store: tb.Store, table: int) -> None:
    storage, key = storage_of(store, 4, 8), torch.tensor([1])
    with pytest.raises(tb.InvalidError, match="table_ids must be from 0 to 1"):
        storage.insert(key, torch.tensor([table]), torch.zeros(1, 24))
    with pytest.raises(tb.InvalidError, match="table_ids must be from 0 to 1"):
        storage.find(key, torch.tensor([table]), published.CopyMode.VALUE)


def test_a_store_that_only_reads_finds_and_keeps_nothing(tmp_path: Path) -> None:
    key, table = torch.tensor([1]), torch.tensor([0])
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        storage_of(store, 4).insert(key, table, torch.ones(1, 12))
        store.checkpoint("kept")
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB", read_only=True) as store:
        storage = storage_of(store, 4)
        assert storage.size() == 1
        with pytest.raises(tb.UnsupportedError):
            storage.insert(key, table, torch.zeros(1, 12))
