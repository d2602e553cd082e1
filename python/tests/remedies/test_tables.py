"""What errors about tables of other tools advise: each is raised, and its remedy followed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import tierbed as tb
from tierbed.cli import main
from tierbed.tables import export_tables, find_tables, import_tables

from .kit import opened, refused, table

DIM = 8
SGD, ADAGRAD = tb.SGD(), tb.Adagrad()


def saved(path: Path, **tensors: Any) -> Path:
    torch.save({name.replace("__", "."): one for name, one in tensors.items()}, path)
    return path


def rows(count: int = 6, dim: int = DIM) -> torch.Tensor:
    return torch.rand(count, dim)


@pytest.fixture
def store() -> Any:
    with opened(None, backend="memory", dram_budget="64MiB") as one:
        yield one


def test_tables_of_a_file_are_named(store: Any, tmp_path: Path) -> None:
    both = saved(tmp_path / "both.pt", a__item__weight=rows(), b__item__weight=rows())
    store.add_table(table(rows=6), SGD)
    with refused(tb.InvalidError, "name one of them, as in item=a.item.weight"):
        import_tables(store, both, "item")
    with refused(tb.InvalidError, "give one of these names"):
        import_tables(store, both, {"item": "c"})
    advice = "name the tables: tables={'item': 'item.weight'} (--table item=item.weight)"
    with refused(tb.InvalidError, advice):
        import_tables(store, both)
    with refused(tb.InvalidError, "name those tables"):
        import_tables(store, both, {"item": "a.item"}, state_keys={"user": "x"})
    import_tables(store, both, {"item": "a.item.weight"})
    with refused(tb.InvalidError, "one is a tensor of floats [N, D], alone or in dictionaries"):
        import_tables(store, saved(tmp_path / "none.pt", bias=torch.ones(3)), "item")
    torch.save(rows(), tmp_path / "alone.pt")
    import_tables(store, tmp_path / "alone.pt", "item")


def test_a_folder_holds_tables(store: Any, tmp_path: Path) -> None:
    advice = "name a file, or a folder with a checkpoint of torch, a dump of dynamicemb or a model"
    with refused(tb.InvalidError, advice):
        import_tables(store, tmp_path, "item", optimizer=SGD)
    folder = tmp_path / "dcp"
    dcp.save({"item.weight": rows()}, checkpoint_id=folder, no_dist=True)
    import_tables(store, folder, "item", optimizer=SGD)


def test_tables_are_as_large_as_the_file_says(store: Any, tmp_path: Path) -> None:
    file = saved(tmp_path / "t.pt", item__weight=rows())
    with refused(tb.InvalidError, "give optimizer= (--create --optimizer), that of the model"):
        import_tables(store, file, "new")
    import_tables(store, file, "new", optimizer=SGD)
    for name, size, dim, advice in (
        ("wide", 6, DIM + 1, "make the table with that embedding_dim"),
        ("few", 5, DIM, "make the table with as many"),
        ("many", 7, DIM, "allow_fewer=True (--allow-fewer) leaves the others as they are"),
    ):
        store.add_table(tb.EmbeddingBagConfig(size, dim, name), SGD)
        with refused(tb.InvalidError, advice):
            import_tables(store, file, {name: "item"})
    import_tables(store, file, {"many": "item"}, allow_fewer=True)


def test_ids_are_whole_and_each_once(store: Any, tmp_path: Path) -> None:
    store.add_table(table("open", None), SGD)
    store.add_table(table("fixed", 6), SGD)
    file = saved(tmp_path / "t.pt", open__weight=rows())
    with refused(tb.InvalidError, "give them as an npy file: ids= (--ids TABLE=FILE)"):
        import_tables(store, file, "open")
    ids = tmp_path / "ids.npy"
    for wrong, advice in (
        ([1, 2], "give one whole number for each of its 6 rows"),
        ([1, 2, 3, 4, 5, 1], "leave one of its rows out"),
    ):
        np.save(ids, np.array(wrong))
        with refused(tb.InvalidError, advice):
            import_tables(store, file, "open", ids={"open": ids})
    np.save(ids, np.arange(10, 16))
    with refused(
        tb.InvalidError, "import into a table with an open vocabulary, which takes any id"
    ):
        import_tables(store, file, {"fixed": "open"}, ids={"fixed": ids})
    import_tables(store, file, "open", ids={"open": ids})


def test_rows_of_parquet_are_whole(store: Any, tmp_path: Path) -> None:
    def written(ids: list[int | None], vectors: list[list[float]]) -> Path:
        file = tmp_path / "t.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": ids, "vector": vectors}), file)
        return file

    with refused(tb.InvalidError, "only the last row may have none, which is that of all ids"):
        import_tables(store, written([None, 2, 3], [[1.0]] * 3), "a", optimizer=SGD)
    with refused(tb.InvalidError, "leave rows without a whole vector out"):
        import_tables(store, written([1, 2, 3], [[1.0], [], [2.0]]), "a", optimizer=SGD)
    with opened(None, backend="memory", dram_budget="64MiB") as other:
        import_tables(other, written([1, 3, None], [[1.0]] * 3), "a", optimizer=SGD)


def test_optimizer_state_is_that_of_the_table(store: Any, tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": rows(), "exp_avg_sq": rows()}}}
    file = saved(tmp_path / "t.pt", item__weight=rows(), optim=state)
    with refused(
        tb.InvalidError, "say where it is: state_keys= (--state-key TABLE=NAME), or begin"
    ):
        import_tables(store, file, "item", optimizer=ADAGRAD, state=True)
    with refused(tb.InvalidError, "give one of these names"):
        import_tables(store, file, "item", state_keys={"item": "optim.0"}, optimizer=ADAGRAD)
    keys = {"item": "optim.state.0"}
    advice = (
        "make the table with the optimizer it is of, or begin it anew: state=False (--no-state)"
    )
    with refused(tb.UnsupportedError, advice):
        import_tables(store, file, "item", state_keys=keys, optimizer=ADAGRAD)
    with refused(tb.InvalidError, "give steps= (--steps)"):
        import_tables(store, file, "item", state_keys=keys, optimizer=tb.Adam())
    half = saved(tmp_path / "half.pt", item__weight=rows(), item__exp_avg=rows())
    with refused(tb.InvalidError, "begin it anew: state=False (--no-state)"):
        import_tables(store, half, "half", optimizer=tb.Adam(), steps=1)
    import_tables(store, half, "half", optimizer=tb.Adam(), state=False)
    import_tables(store, file, "item", state_keys=keys, optimizer=tb.Adam(), steps=1)


def test_state_of_hugectr_is_of_one_gpu_and_its_optimizer(store: Any, tmp_path: Path) -> None:
    model = tmp_path / "m0_sparse_1.model"
    model.mkdir()
    keys = torch.arange(100)
    keys[(keys % 2).sort(stable=True).indices].numpy().tofile(model / "key")
    rows(100).numpy().tofile(model / "emb_vector")
    rows(150).numpy().tofile(tmp_path / "m0_opt_sparse_1.model")
    with refused(tb.UnsupportedError, "save the model on one GPU, or import without state"):
        import_tables(store, model, "item", optimizer=ADAGRAD)
    keys.numpy().tofile(model / "key")
    with refused(tb.InvalidError, "import without state, or give the optimizer that it is of"):
        import_tables(store, model, "item", optimizer=tb.Adam(), steps=1)
    import_tables(store, model, "item", optimizer=ADAGRAD)
    import_tables(store, model, "other", optimizer=tb.Adam(), state=False)


def test_files_that_lack_something_are_brought_again(store: Any, tmp_path: Path) -> None:
    store.add_table(table("open", None), ADAGRAD)
    store.scatter_rows("open", store.assign_ids("open", torch.arange(9)), rows(9))
    for kind in ("hugectr", "dynamicemb", "faiss", "npy"):
        export_tables(store, tmp_path / kind, file_format=kind, state=kind == "dynamicemb")
    save_file({"a.weight": rows()}, tmp_path / "a-1.safetensors")
    index = '{"weight_map": {"a.weight": "a-1.safetensors", "b.weight": "a-1.safetensors"}}'
    (tmp_path / "a.safetensors.index.json").write_text(index)
    with refused(tb.CorruptionError, "bring all its files again from where they were written"):
        find_tables(tmp_path / "a.safetensors.index.json")
    end = "rank_0.world_size_1"
    for kind, hurt, deleted in (
        ("hugectr", "open/emb_vector", False),
        ("hugectr", "open/key", True),
        ("dynamicemb", f"open_emb_values.{end}", False),
        ("dynamicemb", f"open_emb_values.{end}", True),
        ("dynamicemb", f"open_emb_opt_values.{end}", False),
        ("faiss", "open.faiss", False),
    ):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / kind, copy)
        if deleted:
            (copy / hurt).unlink()
        else:
            (copy / hurt).write_bytes((copy / hurt).read_bytes()[:-7])
        with refused(tb.CorruptionError, "bring all its files again from where they were written"):
            import_tables(store, copy, "open")
        shutil.rmtree(copy)
        shutil.copytree(tmp_path / kind, copy)
        import_tables(store, copy, "open")
        shutil.rmtree(copy)


def test_an_index_that_is_not_flat_gives_its_vectors(store: Any, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss", reason="faiss is not installed")
    vectors = rows(50).numpy()
    index = faiss.IndexHNSWFlat(DIM, 4)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "t.faiss"))
    advice = (
        "take the vectors that it was built of, or save index.reconstruct_n(0, index.ntotal) as"
    )
    with refused(tb.UnsupportedError, advice):
        import_tables(store, tmp_path / "t.faiss", "item", optimizer=SGD)
    np.save(tmp_path / "t.npy", index.reconstruct_n(0, index.ntotal))
    import_tables(store, tmp_path / "t.npy", "item", optimizer=SGD)
    assert torch.equal(store.read_rows("item", 0, 50), torch.from_numpy(vectors))


def test_exports_hold_what_is_asked_for(store: Any, tmp_path: Path) -> None:
    for name, optimizer in (("a", tb.PartialRowWiseAdam()), ("b", ADAGRAD)):
        store.add_table(table(name, 5), optimizer)
    with refused(tb.InvalidError, "name a folder and the format, or one table"):
        export_tables(store, tmp_path / "all.npy")
    export_tables(store, tmp_path / "all", file_format="npy")
    export_tables(store, tmp_path / "one.npy", "a")
    with refused(tb.InvalidError, "give file_format= (--format) for a folder"):
        export_tables(store, tmp_path / "one.npy", "a", file_format="parquet")
    with refused(tb.InvalidError, "give a new folder for the tables"):
        export_tables(store, tmp_path / "all", file_format="npy")
    advice = "export without state, or as safetensors, pt, parquet, npy or dynamicemb"
    with refused(tb.InvalidError, advice):
        export_tables(store, tmp_path / "h", file_format="hugectr", state=True)
    with refused(tb.UnsupportedError, "export without state"):
        export_tables(store, tmp_path / "d", "a", file_format="dynamicemb", state=True)
    export_tables(store, tmp_path / "d", "a", file_format="dynamicemb")
    export_tables(store, tmp_path / "b", "b", file_format="dynamicemb", state=True)


def test_initial_rows_are_said(tmp_path: Path, capsys: Any) -> None:
    file = str(saved(tmp_path / "t.pt", item__weight=rows()))
    make = ["import", "--file", file, "--store", str(tmp_path / "s"), "--all", "--create"]
    make += ["--optimizer", "sgd", "--init"]
    assert main([*make, "uniform:1"]) == 2
    assert "say uniform:LOW,HIGH or normal:MEAN,STD or constant:VALUE" in capsys.readouterr().err
    assert main([*make, "normal:0,0.02"]) == 0


def test_an_optimizer_is_of_new_tables(tmp_path: Path, capsys: Any) -> None:
    file = str(saved(tmp_path / "t.pt", item__weight=rows()))
    make = ["import", "--file", file, "--store", str(tmp_path / "s"), "--all"]
    make += ["--optimizer", "sgd"]
    assert main(make) == 2
    assert "say --create too, or leave it out" in capsys.readouterr().err
    assert main([*make, "--create"]) == 0
    assert main(make[:-2]) == 0


def test_a_snapshot_is_exported_from_its_run(store: Any, tmp_path: Path, capsys: Any) -> None:
    with opened(tmp_path / "run") as run:
        run.add_table(table(), SGD)
        run.checkpoint("last")
        run.publish(tmp_path / "snapshot")
    out = ["--all", "--file", str(tmp_path / "t.npy")]
    assert main(["export", "--store", str(tmp_path / "snapshot"), *out]) == 2
    assert "export the tables of its run" in capsys.readouterr().err
    assert main(["export", "--store", str(tmp_path / "run"), *out]) == 0
