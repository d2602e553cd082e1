"""Snapshots laid out by placements, from stores and from plain tables."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from safetensors.torch import save_file

import tierbed as tb
from tierbed.errors import CorruptionError, InvalidError, IoError
from tierbed.placement import (
    LogOptions,
    QueryLog,
    import_files,
    import_tables,
    place,
    read_tables,
)


def _placement(folder: Path, rows: int, rows_per_page: int) -> Path:
    text = "\n".join(f"{at} {(at * 7 + 1) % rows} {(at * 3 + 2) % rows}" for at in range(rows))
    path = folder / f"log{rows}.txt"
    path.write_text(text + "\n")
    log = QueryLog.read(path, options=LogOptions(row_count=rows))
    out = folder / f"placed{rows}.tbp"
    place(log, rows_per_page=rows_per_page, method="maxembed", ratio=0.3).write(out)
    return out


def _check(path: Path, tables: dict[str, torch.Tensor]) -> None:
    with tb.Snapshot.open(path) as snapshot:
        snapshot.verify()
        for name, rows in tables.items():
            ids = torch.arange(rows.shape[0])
            found = snapshot.lookup(
                tb.KeyedJaggedTensor([name], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
            )
            assert torch.equal(found.values(), rows)


def test_plain_tables_come_back_row_for_row(tmp_path: Path) -> None:
    tables = {
        "a": torch.arange(200.0).view(50, 4),
        "b": -torch.arange(120.0).view(30, 4),
        "c": torch.rand(20, 6),
    }
    numpy.save(tmp_path / "a.npy", tables["a"].numpy())
    save_file({"b.weight": tables["b"]}, tmp_path / "b.safetensors")
    torch.save({"state_dict": {"c.weight": tables["c"], "bias": torch.ones(3)}}, tmp_path / "c.pt")
    read = read_tables([tmp_path / name for name in ("a.npy", "b.safetensors", "c.pt")])
    assert {name: list(rows.shape) for name, rows in read.items()} == {
        "a": [50, 4],
        "b": [30, 4],
        "c": [20, 6],
    }
    placement = _placement(tmp_path, 80, 16)
    report = import_tables(read, tmp_path / "out", placement={("a", "b"): placement})
    assert report.row_count == 100
    assert report.replica_count > 0
    _check(tmp_path / "out", tables)


def test_tables_in_files_of_every_format_come_back_row_for_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = {
        name: torch.rand(rows, 6) for name, rows in zip("abcdefg", range(70, 77), strict=True)
    }
    half, double = tables["b"].half(), tables["c"].double()
    tables["b"] = half.float()
    numpy.save(tmp_path / "a.npy", tables["a"].numpy())
    numpy.save(tmp_path / "b.npy", half.numpy())
    numpy.save(tmp_path / "c.npy", numpy.asfortranarray(double.numpy()))
    save_file({"d.weight": tables["d"], "other": torch.rand(2, 2)}, tmp_path / "d.safetensors")
    torch.save({"model": {"e": tables["e"]}}, tmp_path / "e.pt")
    flat = pyarrow.array(tables["f"].reshape(-1).numpy())
    column = pyarrow.FixedSizeListArray.from_arrays(flat, 6)
    parquet.write_table(pyarrow.table({"f": column}), tmp_path / "f.parquet", row_group_size=9)
    numpy.save(tmp_path / "g.npy", tables["g"].numpy().astype(">f4"))
    files = {path.stem: path for path in sorted(tmp_path.iterdir())}
    streamed: list[tuple[int, int]] = []
    report = import_files(
        files,
        tmp_path / "out",
        keys={"d": "d.weight"},
        progress=lambda done, rows: streamed.append((done, rows)),
    )
    assert report.row_count == sum(len(rows) for rows in tables.values())
    # All but the npy file of float32 in the order of this machine.
    assert [rows for _, rows in streamed] == [71, 72, 73, 74, 75, 76]
    _check(tmp_path / "out", tables)
    # Nothing is left beside it.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *sorted(p.name for p in files.values()),
        "out",
    ]


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.random.rand(3, 2).astype("float32"))
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-4])
    with pytest.raises(InvalidError, match="no table"):
        import_files({}, tmp_path / "out")
    with pytest.raises(InvalidError, match="have no file"):
        import_files({"a": tmp_path / "a.npy"}, tmp_path / "out", keys={"b": "x"})
    with pytest.raises(CorruptionError, match="not a whole npy"):
        import_files({"b": tmp_path / "b.npy"}, tmp_path / "out")
    full = Path("/dev/full")
    numpy.save(tmp_path / "c.npy", numpy.random.rand(3, 2))
    if full.exists():
        opened = full.open("r+b", buffering=0)
        with (
            mock.patch("tempfile.TemporaryFile", return_value=opened),
            pytest.raises(IoError, match=r"do not fit into .*: No space left on device"),
        ):
            import_files({"c": tmp_path / "c.npy"}, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    report = import_files({"c": tmp_path / "c.npy"}, tmp_path / "out", scratch=tmp_path / "other")
    assert report.row_count == 3


def test_what_does_not_fit_a_placement_is_refused(tmp_path: Path) -> None:
    tables = {"a": torch.rand(50, 4), "b": torch.rand(30, 4)}
    placement = _placement(tmp_path, 80, 16)
    with pytest.raises(tb.InvalidError, match="another number of rows"):
        import_tables(tables, tmp_path / "x", placement={"a": placement})
    with pytest.raises(tb.InvalidError, match="say which"):
        import_tables(tables, tmp_path / "y", placement=placement)
    with pytest.raises(tb.InvalidError, match="no table"):
        import_tables(tables, tmp_path / "z", placement={"c": placement})
    with pytest.raises(tb.InvalidError, match="float32"):
        import_tables({"a": torch.ones(3, 2, dtype=torch.int64)}, tmp_path / "w")


def test_a_store_publishes_by_a_placement(tmp_path: Path) -> None:
    placement = _placement(tmp_path, 60, 16)
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB") as store:
        emb = tb.EmbeddingBagCollection(
            [tb.EmbeddingBagConfig(name="a", num_embeddings=60, embedding_dim=8)],
            store=store,
            optimizer=tb.SGD(lr=0.1),
        )
        ids = torch.arange(60)
        bags = tb.KeyedJaggedTensor(["a"], ids, lengths=torch.ones(60, dtype=torch.int64))
        emb(bags).values().sum().backward()
        report = store.publish(tmp_path / "out", placement=placement)
        assert report.replica_count > 0
        _check(tmp_path / "out", {"a": store.read_rows("a", 0, 60)})
