"""Tables of HugeCTR and dynamicemb, in the layouts that their sources write and read.

HugeCTR 25.03: ``localized_slot_sparse_embedding_hash.cu`` (``dump_parameters``: ``key`` i64,
``slot_id`` u64, ``emb_vector`` f32), ``opt_states_functor.cu`` (``dump_opt_states``) and
``weight_io/parameter_IO.cpp``.
dynamicemb of recsys-examples v26.06.01: ``batched_dynamicemb_tables.py``
(``encode_checkpoint_file_path``) and ``key_value_table.py`` (``_dump_table``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierbed as tb
from tierbed.tables import export_tables, find_tables, import_tables

DIM = 4
KEYS = torch.tensor([-7, 2**62, 5, 0, 1, 99, -(2**63), 12], dtype=torch.int64)


def sparse_model(folder: Path, keys: Tensor, rows: Tensor, slots: Tensor | None = None) -> None:
    """Writes what HugeCTR's ``save_params_to_files`` does."""
    folder.mkdir()
    keys.numpy().tofile(folder / "key")
    rows.numpy().tofile(folder / "emb_vector")
    if slots is not None:
        slots.numpy().astype("<u8").tofile(folder / "slot_id")


def assert_rows_of(store: tb.Store, table: str, keys: Tensor, rows: Tensor) -> None:
    assert torch.equal(store.gather_rows(table, store.translate(table, keys)), rows)


@pytest.mark.parametrize("with_slots", [False, True])
def test_sparse_models_of_hugectr_become_open_vocabularies(
    open_store: Any, tmp_path: Path, with_slots: bool
) -> None:
    rows = {name: torch.randn(len(KEYS), DIM) for name in ("0", "1")}
    for name, weights in rows.items():
        slots = torch.arange(len(KEYS)) % 3 if with_slots else None
        sparse_model(tmp_path / f"dcn{name}_sparse_900.model", KEYS, weights, slots)
    found = find_tables(tmp_path).tables
    assert [(one.name, one.rows, one.dim) for one in found] == [
        ("dcn0_sparse_900", len(KEYS), DIM),
        ("dcn1_sparse_900", len(KEYS), DIM),
    ]
    store = open_store("file")
    names = {"user": "dcn0_sparse_900", "item": "dcn1_sparse_900"}
    done = import_tables(store, tmp_path, names, optimizer=tb.SGD(), chunk_rows=3)
    assert all(one.has_ids and one.is_new for one in done)
    assert_rows_of(store, "user", KEYS, rows["0"])
    assert_rows_of(store, "item", KEYS, rows["1"])
    store.checkpoint_rows("in")
    store.publish(tmp_path / "snapshot")
    assert store.vocabularies()["user"]["id_count"] == len(KEYS)


@pytest.mark.parametrize(("optimizer", "parts"), [(tb.Adagrad(), 1), (tb.Adam(), 2)])
def test_state_of_hugectr_lies_behind_each_other_as_large_as_its_table(
    open_store: Any, tmp_path: Path, optimizer: Any, parts: int
) -> None:
    rows, room = torch.randn(len(KEYS), DIM), 20  # max_vocabulary_size_per_gpu
    sparse_model(tmp_path / "wdl0_sparse_3.model", KEYS, rows)
    state = torch.rand(parts, room, DIM)
    state.numpy().tofile(tmp_path / "wdl0_opt_sparse_3.model")
    store = open_store()
    model = tmp_path / "wdl0_sparse_3.model"
    done = import_tables(store, model, "item", optimizer=optimizer, steps=3, chunk_rows=5)
    assert done[0].has_state
    at = store.translate("item", KEYS)
    expected = torch.cat(list(state[:, : len(KEYS)]), dim=1)
    for row, wanted in zip(at.tolist(), expected, strict=True):
        assert torch.equal(store.read_rows_and_state("item", row, 1)[1][0], wanted)
    for wrong in (tb.RowWiseAdagrad(), tb.SGD()):
        with pytest.raises(tb.InvalidError, match="not the state of 8 rows of 4 numbers in"):
            import_tables(open_store(), model, "item", optimizer=wrong)


def test_state_of_several_gpus_is_refused(open_store: Any, tmp_path: Path) -> None:
    keys = torch.arange(200)
    keys = keys[(keys % 4).sort(stable=True).indices]  # Each GPU has its remainder.
    model = tmp_path / "m0_sparse_1.model"
    sparse_model(model, keys, torch.randn(200, DIM))
    torch.rand(400, DIM).numpy().tofile(tmp_path / "m0_opt_sparse_1.model")
    with pytest.raises(tb.UnsupportedError, match=r"of [24] GPUs.*import without state"):
        import_tables(open_store(), model, "item", optimizer=tb.Adagrad())
    assert import_tables(open_store(), model, "i", optimizer=tb.Adagrad(), state=False)[0].rows


def test_hugectr_gets_its_files(open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(30, DIM, "fixed"), tb.SGD())
    store.add_table(tb.EmbeddingBagConfig(None, DIM, "open"), tb.SGD())
    rows = store.assign_ids("open", KEYS)
    store.scatter_rows("open", rows, torch.randn(len(KEYS), DIM))
    done = export_tables(store, tmp_path / "out", file_format="hugectr", chunk_rows=7)
    assert [one.rows for one in done] == [30, len(KEYS)]
    keys = np.fromfile(tmp_path / "out" / "open" / "key", dtype="<i8")
    vectors = np.fromfile(tmp_path / "out" / "open" / "emb_vector", dtype="<f4")
    assert sorted(keys) == sorted(KEYS.tolist())
    assert_rows_of(store, "open", torch.from_numpy(keys), torch.from_numpy(vectors).view(-1, DIM))
    keys = np.fromfile(tmp_path / "out" / "fixed" / "key", dtype="<i8")
    assert keys.tolist() == list(range(30))
    with pytest.raises(tb.InvalidError, match=r"hugectr has no optimizer state.*export without"):
        export_tables(store, tmp_path / "with", file_format="hugectr", state=True)


@pytest.mark.parametrize(("kind", "keys"), [("<u4", [7, 2**32 - 1, 0]), ("<i8", [7, -5, 2**40])])
def test_embedding_collections_of_hugectr_come_in(
    open_store: Any, tmp_path: Path, kind: str, keys: list[int]
) -> None:
    """As ``dump_metadata``, ``write_file_head`` and ``dump_embedding_weight`` write them."""
    folder = tmp_path / "dump" / "embedding_collection_0"
    folder.mkdir(parents=True)
    rows = {0: torch.randn(3, DIM), 1: torch.randn(3, 2)}
    numbers = [2, int(kind == "<i8"), 0, 0, 0, 0, 1]
    meta = np.array(numbers, "<i4").tobytes() + np.array([3, 3], "<u8").tobytes()
    (folder / "meta_data").write_bytes(meta + np.array([DIM, 2], "<i4").tobytes())
    for at, weights in rows.items():
        head = [np.array([which, at, *[0] * 30], "<i4").tobytes() for which in (1, 2)]
        (folder / f"key{at}").write_bytes(head[0] + np.array(keys, kind).tobytes())
        (folder / f"weight{at}").write_bytes(head[1] + weights.numpy().tobytes())
    store = open_store()
    done = import_tables(store, tmp_path / "dump", optimizer=tb.SGD(), chunk_rows=2)
    assert [(one.table, one.has_ids) for one in done] == [("table_0", True), ("table_1", True)]
    for at, weights in rows.items():
        assert_rows_of(store, f"table_{at}", torch.tensor(keys), weights)
    with (folder / "weight1").open("ab") as file:
        file.write(b"more")
    with pytest.raises(tb.CorruptionError, match="weight1 is missing or not as long as meta_data"):
        find_tables(folder)
    (folder / "meta_data").write_bytes(meta[:8] + b"\1\0\0\0" + meta[12:] + b"\0" * 8)
    with pytest.raises(tb.UnsupportedError, match="dump a model whose embeddings are float32"):
        find_tables(folder)


# ---------------------------------------------------------------- dynamicemb


def dump(folder: Path, table: str, ranks: int, keys: Tensor, rows: Tensor, **more: Any) -> None:
    """Writes what ``DynamicEmbDump`` does: each rank the keys with its remainder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        mine = torch.remainder(keys, ranks) == rank
        end = f"rank_{rank}.world_size_{ranks}"
        keys[mine].numpy().tofile(folder / f"{table}_emb_keys.{end}")
        rows[mine].numpy().tofile(folder / f"{table}_emb_values.{end}")
        np.zeros(int(mine.sum()), "<i8").tofile(folder / f"{table}_emb_scores.{end}")
        if "state" in more:
            more["state"][mine].numpy().tofile(folder / f"{table}_emb_opt_values.{end}")
    (folder / f"{table}_opt_args.json").write_text(json.dumps(more.get("told", {})))


ADAM = {"opt_type": "adam", "lr": 0.1, "iters": 17, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
KINDS = [
    (tb.Adam(), 2 * DIM, ADAM, 17),
    (tb.Adagrad(), DIM, {"opt_type": "exact_adagrad", "lr": 0.1, "eps": 1e-8}, 0),
    (tb.RowWiseAdagrad(), 1, {"opt_type": "exact_row_wise_adagrad", "lr": 0.1}, 0),
]


@pytest.mark.parametrize(("optimizer", "width", "told", "steps"), KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_dump_of_dynamicemb_comes_in_from_all_ranks(
    open_store: Any, tmp_path: Path, ranks: int, optimizer: Any, width: int, told: Any, steps: int
) -> None:
    rows, state = torch.randn(len(KEYS), DIM), torch.rand(len(KEYS), width)
    folder = tmp_path / "model" / "ebc"
    dump(folder, "item", ranks, KEYS, rows, state=state, told={**told, "evict_strategy": "KLru"})
    assert [table.name for table in find_tables(tmp_path / "model").tables] == ["ebc.item"]
    store = open_store()
    assert import_tables(store, folder, optimizer=optimizer, chunk_rows=3)[0].has_state
    assert_rows_of(store, "item", KEYS, rows)
    assert store.steps_done("item") == steps
    at = store.translate("item", KEYS)
    for row, wanted in zip(at.tolist(), state, strict=True):
        assert torch.equal(store.read_rows_and_state("item", row, 1)[1][0], wanted)
    with pytest.raises(tb.UnsupportedError, match="trains by sgd"):
        import_tables(open_store(), folder, optimizer=tb.SGD())


def test_ids_of_dynamicemb_are_rows_of_a_table_that_has_no_vocabulary(
    open_store: Any, tmp_path: Path
) -> None:
    keys = torch.randperm(50)[:20]
    rows = torch.randn(20, DIM)
    dump(tmp_path / "dump", "item", 2, keys, rows)
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(50, DIM, "item"), tb.SGD())
    before = store.read_rows("item", 0, 50)
    with pytest.raises(tb.InvalidError, match=r"only 20 rows.*allow_fewer"):
        import_tables(store, tmp_path / "dump")
    assert torch.equal(store.read_rows("item", 0, 50), before)
    import_tables(store, tmp_path / "dump", allow_fewer=True, chunk_rows=6)
    before[keys] = rows
    assert torch.equal(store.read_rows("item", 0, 50), before)


@pytest.mark.parametrize("told", KINDS, ids=[type(kind[0]).__name__ for kind in KINDS])
def test_dynamicemb_gets_its_files(open_store: Any, tmp_path: Path, told: Any) -> None:
    optimizer, width, names, _ = told
    store = open_store()
    tables = [tb.EmbeddingBagConfig(None, DIM, "item")]
    emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=optimizer)
    lengths = torch.ones(len(KEYS), dtype=torch.int64)
    for _ in range(3):
        features = tb.KeyedJaggedTensor(["item"], KEYS, lengths=lengths)
        emb(features).values().square().sum().backward()
    export_tables(store, tmp_path / "d", file_format="dynamicemb", state=True, chunk_rows=3)
    end = "rank_0.world_size_1"
    names_there = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert names_there == [
        f"item_emb_keys.{end}",
        f"item_emb_opt_values.{end}",
        f"item_emb_values.{end}",
        "item_opt_args.json",
    ]
    keys = torch.from_numpy(np.fromfile(tmp_path / "d" / f"item_emb_keys.{end}", "<i8"))
    rows = torch.from_numpy(np.fromfile(tmp_path / "d" / f"item_emb_values.{end}", "<f4"))
    assert_rows_of(store, "item", keys, rows.view(-1, DIM))
    state = torch.from_numpy(np.fromfile(tmp_path / "d" / f"item_emb_opt_values.{end}", "<f4"))
    assert torch.equal(state.view(-1, width), store.read_rows_and_state("item", 1, len(KEYS))[1])
    args = json.loads((tmp_path / "d" / "item_opt_args.json").read_text())
    # What their optimizers ask of the file: `get_required_arg` in optimizer.py.
    assert args["opt_type"] == names["opt_type"]
    assert set(args) >= {"lr", *({"iters", "beta1", "beta2", "eps"} if width > DIM else {"eps"})}
    if width > DIM:
        assert args["iters"] == 3
