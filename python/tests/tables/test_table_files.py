"""Do tables come and go whole, in every file format?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tierbed as tb
from tierbed.tables import ExportedTable, ImportedTable, export_tables, find_tables, import_tables

SUFFIXES = [".npy", ".safetensors", ".pt", ".parquet", ".faiss"]
ROWS, DIM = 333, 5
ADAGRAD = tb.Adagrad(initial_accumulator_value=0.5)


def new_table(store: tb.Store, rows: int = ROWS, dim: int = DIM, name: str = "t") -> None:
    store.add_table(tb.EmbeddingBagConfig(rows, dim, name), ADAGRAD)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("chunk_rows", [30, 100, 1000])
def test_a_table_goes_out_and_comes_back(
    open_store: Any, tmp_path: Path, suffix: str, chunk_rows: int
) -> None:
    store = open_store("file", seed=1)
    new_table(store)
    store.write_rows("t", 10, torch.randn(20, DIM))
    rows = store.read_rows("t", 0, ROWS)
    file = tmp_path / f"table{suffix}"
    told: list[tuple[int, int]] = []
    done = export_tables(
        store, file, "t", chunk_rows=chunk_rows, progress=lambda *p: told.append(p)
    )
    assert done == [ExportedTable("t", ROWS, has_state=False)]
    assert told[-1] == (ROWS, ROWS)
    assert [(one.rows, one.dim) for one in find_tables(file).tables] == [(ROWS, DIM)]

    other = open_store("memory", seed=2)
    new_table(other)
    told.clear()
    read = import_tables(
        other, file, "t", chunk_rows=chunk_rows, progress=lambda *p: told.append(p)
    )
    assert [(one.rows, one.has_state, one.is_new) for one in read] == [(ROWS, False, False)]
    assert told[-1] == (ROWS, ROWS)
    weights, state = other.read_rows_and_state("t", 0, ROWS)
    assert torch.equal(weights, rows)
    assert bool((state == 0.5).all()), "imported rows start with fresh state"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", file.name]


def test_the_files_are_what_others_read(open_store: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet
    from safetensors.torch import load_file

    store = open_store()
    new_table(store)
    rows = store.read_rows("t", 0, ROWS)
    for suffix in SUFFIXES:
        export_tables(store, tmp_path / f"table{suffix}", chunk_rows=100)
    assert np.array_equal(np.load(tmp_path / "table.npy"), rows.numpy())
    assert torch.equal(load_file(tmp_path / "table.safetensors")["t.weight"], rows)
    assert torch.equal(torch.load(tmp_path / "table.pt", weights_only=True)["t.weight"], rows)
    columns = parquet.read_table(tmp_path / "table.parquet").to_pydict()
    assert columns["row"] == list(range(ROWS))
    assert torch.equal(torch.tensor(columns["weight"]), rows)


@pytest.mark.parametrize("place", ["all.safetensors", "all.pt", "npy", "parquet", "dynamicemb"])
def test_several_tables_move_at_once_with_their_state(
    open_store: Any, tmp_path: Path, place: str
) -> None:
    store = open_store()
    for name, dim in (("user", 3), ("item", 5)):
        new_table(store, 40, dim, name)
        store.write_rows(name, 0, torch.randn(40, dim), torch.rand(40, dim))
    kind: Any = None if "." in place else place
    export_tables(store, tmp_path / place, file_format=kind, state=True, chunk_rows=7)
    other = open_store()
    for name, dim in (("user", 3), ("item", 5)):
        new_table(other, 40, dim, name)
    done = import_tables(other, tmp_path / place, chunk_rows=11)
    assert sorted((one.table, one.has_state) for one in done) == [("item", True), ("user", True)]
    for name in ("user", "item"):
        for pair in zip(
            store.read_rows_and_state(name, 0, 40),
            other.read_rows_and_state(name, 0, 40),
            strict=True,
        ):
            assert torch.equal(*pair)


def test_large_safetensors_are_split_as_hugging_face_does(open_store: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = open_store()
    for name in ("a", "b", "c"):
        new_table(store, 100, 4, name)
    export_tables(store, tmp_path / "model.safetensors", shard_bytes=3300)
    names = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 4800},
        "weight_map": {"a.weight": names[0], "b.weight": names[0], "c.weight": names[1]},
    }
    assert sorted(load_file(tmp_path / names[0])) == ["a.weight", "b.weight"]
    for path in (tmp_path / "model.safetensors.index.json", tmp_path):
        found = find_tables(path)
        assert [table.name for table in found.tables] == ["a.weight", "b.weight", "c.weight"]
    other = open_store()
    import_tables(other, tmp_path, {"mine": "c"}, optimizer=tb.SGD())
    assert torch.equal(other.read_rows("mine", 0, 100), store.read_rows("c", 0, 100))


def test_a_folder_of_hugging_face_is_a_model(open_store: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    rows = torch.randn(30, 4).to(torch.bfloat16)
    save_file({"embed.weight": rows, "norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    torch.save({"embed.weight": rows}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    store = open_store()
    done = import_tables(store, tmp_path, optimizer=tb.SGD())
    assert done == [
        ImportedTable("embed", "embed.weight", 30, has_ids=False, has_state=False, is_new=True)
    ]
    assert torch.equal(store.read_rows("embed", 0, 30), rows.float())


@pytest.mark.parametrize("suffix", [".pt", ".ckpt"])
def test_a_table_in_nested_dictionaries_is_found_by_its_name(
    open_store: Any, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"model{suffix}"
    item, user = torch.randn(ROWS, DIM), torch.randn(3, DIM)
    state = {"net.item.weight": item, "net.user.weight": user, "net.head.bias": torch.ones(3)}
    torch.save({"state_dict": state, "epoch": 3, "rest": [torch.zeros(1)]}, file)
    found = find_tables(file)
    names = ["state_dict.net.item.weight", "state_dict.net.user.weight"]
    assert [table.name for table in found.tables] == names
    store = open_store()
    new_table(store)
    with pytest.raises(tb.InvalidError, match=r"holds state_dict.net.item.weight, state_dict.net"):
        import_tables(store, file, "t")
    for key in (names[0], "net.item.weight", "net.item", "item"):
        store.write_rows("t", 0, torch.zeros(ROWS, DIM))
        assert import_tables(store, file, {"t": key})[0].source == names[0]
        assert torch.equal(store.read_rows("t", 0, ROWS), item)
    new_table(store, 3, DIM, "user")
    assert [one.table for one in import_tables(store, file)] == ["user"]
    assert torch.equal(store.read_rows("user", 0, 3), user)


def test_a_dry_run_tells_and_changes_nothing(open_store: Any, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(4, DIM), "b": torch.zeros(3, DIM)}, tmp_path / "model.pt")
    store = open_store()
    done = import_tables(store, tmp_path / "model.pt", optimizer=tb.SGD(), dry_run=True)
    assert [(one.table, one.rows, one.is_new) for one in done] == [("a", 4, True), ("b", 3, True)]
    assert store.tables() == []


def test_lists_of_parquet_and_several_columns_are_read(open_store: Any, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    rows = torch.randn(10, 3)
    lists = pyarrow.array(rows.double().tolist())
    columns = {"title": ["x"] * 10, "clicks": list(range(10)), "vector": lists, "other": lists}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet", row_group_size=4)
    store = open_store()
    with pytest.raises(tb.InvalidError, match="holds vector, other; name one of them"):
        import_tables(store, tmp_path / "t.parquet", "t", optimizer=tb.SGD())
    import_tables(store, tmp_path / "t.parquet", {"t": "vector"}, optimizer=tb.SGD(), chunk_rows=3)
    assert torch.equal(store.read_rows("t", 0, 10), rows)
    found = find_tables(tmp_path / "t.parquet").pick("other").weight
    for first in (7, 3, 4, 0, 9):
        assert torch.equal(found.read(first, 1), rows[first : first + 1])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_larger_than_the_budget_moves_in_chunks(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, dim, chunk = 40_000, 16, 1000
    made = torch.randn(rows, dim)
    np.save(tmp_path / "in.npy", made.numpy())
    with tb.Store.open(tmp_path / "store", dram_budget="1MiB") as store:
        written: list[int] = []
        write_rows = store.write_rows

        def counted(table: str, first: int, weights: torch.Tensor, *rest: Any) -> None:
            written.append(len(weights))
            write_rows(table, first, weights, *rest)

        monkeypatch.setattr(store, "write_rows", counted)
        import_tables(store, tmp_path / "in.npy", "t", optimizer=tb.SGD(), chunk_rows=chunk)
        file = tmp_path / f"out{suffix}"
        export_tables(store, file, chunk_rows=chunk)
        import_tables(store, file, "t", chunk_rows=chunk)
        assert written == [chunk] * (2 * rows // chunk)
        assert torch.equal(store.read_rows("t", 0, rows), made)


@pytest.mark.parametrize("name", ["t.npy", "t.safetensors"])
def test_what_was_read_of_a_file_is_no_memory_any_more(
    open_store: Any, tmp_path: Path, name: str
) -> None:
    rows = 200_000
    written = torch.zeros(rows, 64)
    if name.endswith("npy"):
        np.save(tmp_path / name, written.numpy())
    else:
        save_file({"t.weight": written}, tmp_path / name)
    size = written.nbytes
    del written
    store = open_store("file", dram_budget="16MiB")
    new_table(store, rows, dim=64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    import_tables(store, tmp_path / name, chunk_rows=8192)
    assert peak_bytes() - before < size / 2


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def test_a_run_that_trains_is_exported_beside_it(tmp_path: Path) -> None:
    from tierbed.cli import main

    with tb.Store.open(tmp_path / "store", dram_budget="4MiB") as store:
        new_table(store)
        store.checkpoint("first")
        saved = store.read_rows("t", 0, ROWS)
        store.write_rows("t", 0, torch.zeros(ROWS, DIM))
        out = ["export", "--store", str(tmp_path / "store"), "--all", "--state", "--file"]
        assert main([*out, str(tmp_path / "t.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "t.pt")["t.weight"], saved)
