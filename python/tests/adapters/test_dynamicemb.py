"""A store as dynamicemb's storage: the interface, rows by key, and their bits."""

from __future__ import annotations

import copy
import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from campaign.processes import call

import tierbed as tb
from tierbed.adapters.dynamicemb import TierbedStorage, external_storage

from . import published
from .dynamicemb_kit import Naive, Optimizer, Options, bits, storage_of

EMBEDDING, VALUE = published.CopyMode.EMBEDDING, published.CopyMode.VALUE


@pytest.fixture
def store(tmp_path: Path):
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as opened:
        yield opened


def test_it_has_all_that_the_published_class_asks_for(store: tb.Store) -> None:
    published.check_implements(TierbedStorage, published.Storage)

    class Both(TierbedStorage, published.Storage):
        pass

    storage = Both([Options(4)], Optimizer(), store=store, tables=["t"])
    assert isinstance(storage, published.Storage)


@pytest.mark.skipif(
    importlib.util.find_spec("dynamicemb") is None, reason="dynamicemb needs a GPU to install"
)
def test_it_is_a_storage_of_the_real_package() -> None:
    types = pytest.importorskip("dynamicemb.types")
    published.check_implements(TierbedStorage, types.Storage)
    assert issubclass(TierbedStorage, types.Storage)
    assert not TierbedStorage.__abstractmethods__


def test_a_missing_method_fails() -> None:
    class Less:
        find = TierbedStorage.find

    with pytest.raises(AssertionError, match="Less has no"):
        published.check_implements(Less, published.Storage)


@pytest.mark.parametrize("kind", ["adam", "exact_adagrad", "exact_row_wise_adagrad", "sgd"])
def test_rows_come_back_as_a_dictionary_keeps_them(store: tb.Store, kind: str) -> None:
    storage, naive = storage_of(store, 2, 8, kind=kind), Naive()
    width, dims, generator = storage.max_value_dim(), (2, 8), torch.Generator().manual_seed(1)
    for step in range(8):
        keys = torch.randperm(300, generator=generator)[:50] * (1 << 55) - (1 << 62)
        tables = torch.randint(0, 2, (50,), generator=generator)
        values = torch.randn(50, width, generator=generator)
        scores = torch.randint(-(1 << 62), 1 << 62, (50,), generator=generator)
        given, keeps = (scores if step % 3 else None), step % 4 == 3
        storage.insert(keys, tables, values, given, keeps)
        naive.insert(keys, tables, values, given, keeps)
    keys = torch.arange(300) * (1 << 55) - (1 << 62)
    for table in (0, 1):
        tables = torch.full((300,), table)
        count, missing, places, owners, uses, founds, found_scores, values = storage.find(
            keys, tables, VALUE
        )
        expected = [naive.rows.get((table, int(key))) for key in keys]
        assert founds.tolist() == [one is not None for one in expected]
        assert count == len(missing) == (~founds).sum()
        assert uses is None
        assert torch.equal(missing, keys[~founds])
        assert torch.equal(keys[places], missing)
        assert owners.tolist() == [table] * count
        assert found_scores.tolist() == [0 if one is None else one[1] for one in expected]
        state = slice(8, 8 + storage.value_dim(table) - dims[table])
        for at, one in enumerate(expected):
            row = torch.zeros(width) if one is None else one[0]
            for columns in (slice(0, dims[table]), state):
                assert torch.equal(bits(values[at, columns]), bits(row[columns]))
        weights = storage.find(keys, tables, EMBEDDING)[-1]
        assert torch.equal(bits(weights), bits(values[:, :8]))
    assert storage.size() == len(naive.rows)


def test_every_bit_pattern_comes_back(store: tb.Store) -> None:
    storage = storage_of(store, 4)
    words = torch.tensor([0, -(1 << 31), 1, 0x7F800000, 0x7F800001, 0x7FC12345, -1, 0x00400000])
    values = words.to(torch.int32).view(torch.float32).repeat(2)[:12].view(1, 12)
    scores = torch.tensor([-(1 << 63)])
    storage.insert(torch.tensor([-1]), torch.tensor([0]), values, scores)
    *_, found, back = storage.find(torch.tensor([-1]), torch.tensor([0]), VALUE)
    assert torch.equal(bits(back), bits(values))
    assert torch.equal(found, scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_come_back_exactly(store: tb.Store, dtype: torch.dtype) -> None:
    storage = storage_of(store, 4, embedding_dtype=dtype)
    values = torch.arange(0, 30000, dtype=torch.int16).view(dtype)[:29988].view(-1, 12)
    keys = torch.arange(len(values))
    storage.insert(keys, torch.zeros_like(keys), values)
    back = storage.find(keys, torch.zeros_like(keys), VALUE)[-1]
    assert back.dtype == dtype == storage.embedding_dtype()
    assert torch.equal(back, values)


def test_rows_outlive_the_process_with_a_checkpoint(tmp_path: Path) -> None:
    keys, tables, values = torch.tensor([5, -5]), torch.tensor([0, 0]), torch.randn(2, 12)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        storage_of(store, 4).insert(keys, tables, values, torch.tensor([7, 8]))
        store.checkpoint("kept")
        storage_of(store, 4).insert(keys, tables, values + 1)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        *_, scores, back = storage_of(store, 4).find(keys, tables, VALUE)
        assert torch.equal(back, values)
        assert scores.tolist() == [7, 8]


def test_uses_are_added_to_scores_and_handed_back_where_keys_are_missing(store: tb.Store) -> None:
    storage = storage_of(store, 4)
    storage.insert(torch.tensor([5]), torch.tensor([0]), torch.zeros(1, 12), torch.tensor([10]))
    keys, uses = torch.tensor([4, 5]), torch.tensor([3, 2])
    _, _, _, _, missing, _, scores, _ = storage.find(keys, torch.zeros_like(keys), EMBEDDING, uses)
    assert missing.tolist() == [3]
    assert scores.tolist() == [0, 12]
    unsigned = torch.tensor([3], dtype=torch.uint64)
    storage.insert(torch.tensor([5]), torch.tensor([0]), torch.zeros(1, 12), unsigned)
    assert storage.find(keys, torch.zeros_like(keys), VALUE)[-2].tolist() == [0, 3]


def test_a_row_that_was_assigned_but_never_written_is_missing(store: tb.Store) -> None:
    storage = storage_of(store, 4)
    store.assign_ids("t0", torch.tensor([9]))  # as of a process that was stopped in between
    assert storage.find(torch.tensor([9]), torch.tensor([0]), VALUE)[0] == 1
    assert not list(storage.export_keys_values(torch.device("cpu")))


def test_the_store_evicts_by_its_own_policy(store: tb.Store) -> None:
    policy = tb.TimestampBasedEvictionPolicy(eviction_ttl_mins=5)
    storage = external_storage(store, ["t"], eviction_policy=policy)([Options(4)], Optimizer())
    keys = torch.arange(20)
    storage.insert(keys, torch.zeros_like(keys), torch.ones(20, 12))
    assert store.evict(now_mins=(1 << 32) - 1)["t"].id_count == 20
    assert storage.find(keys, torch.zeros_like(keys), VALUE)[0] == 20
    storage.insert(keys[:5], torch.zeros(5, dtype=torch.int64), torch.ones(5, 12))
    assert storage.find(keys, torch.zeros_like(keys), VALUE)[0] == 15


def test_shapes_and_nothing_at_all(store: tb.Store) -> None:
    storage = storage_of(store, 2, 8)
    assert (storage.max_embedding_dim(), storage.max_value_dim()) == (8, 24)
    assert (storage.embedding_dim(0), storage.value_dim(0), storage.num_tables) == (2, 6, 2)
    assert storage.embedding_dims().tolist() == [2, 8]
    assert not storage.all_dims_vec4()
    assert storage.init_optimizer_state() == 0.0
    assert storage._state is None
    none = torch.empty(0, dtype=torch.int64)
    storage.insert(none, none, torch.empty(0, 24))
    assert storage.find(none, none, VALUE)[-1].shape == (0, 24)
    assert storage.size() == 0


def test_the_default_dtype_changes_nothing(store: tb.Store) -> None:
    storage, key, values = storage_of(store, 4), torch.tensor([1]), torch.rand(1, 12)
    torch.set_default_dtype(torch.float64)
    try:
        storage.insert(key, key - 1, values)
        back = storage.find(key, key - 1, VALUE)[-1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(back, values)


def test_what_dynamicemb_is_given_survives_its_copies(store: tb.Store) -> None:
    make = external_storage(store, ["t"])
    assert copy.deepcopy(make) is make
    assert hash(make) == hash(copy.deepcopy(make))


def test_threads_see_whole_rows(store: tb.Store) -> None:
    storage, keys, failed = storage_of(store, 4), torch.arange(64), []
    tables = torch.zeros_like(keys)

    def look() -> None:
        while not done.is_set():
            _, _, _, _, _, founds, _, values = storage.find(keys, tables, VALUE)
            if not (values[founds] == values[founds][:, :1]).all() or (values[founds] == 0).any():
                failed.append(values)

    done = threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    for step in range(1, 60):
        storage.insert(keys, tables, torch.full((64, 12), float(step)))
    done.set()
    thread.join()
    assert not failed


def test_a_forked_child_is_refused_even_while_the_lock_is_held(store: tb.Store) -> None:
    storage, keys = storage_of(store, 4), torch.tensor([1])
    with storage._lock:
        for ask in (
            lambda: storage.find(keys, keys - 1, VALUE),
            lambda: storage.insert(keys, keys - 1, torch.zeros(1, 12)),
            lambda: next(storage.export_keys_values(torch.device("cpu"))),
            storage.size,
        ):
            ended = call(ask)
            assert ended.kind == "ClosedError", ended
