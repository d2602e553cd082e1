"""Parquet: columns by name, lists as bags."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierbed.data import ParquetColumns, ParquetData, build_parquet_vocabulary
from tierbed.errors import InvalidError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COLUMNS = ParquetColumns(label="y", dense=["x"], categorical=["site", "tags"])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two files of 50 rows in row groups of 20."""
    for part in range(2):
        rows = range(part * 50, part * 50 + 50)
        table = pyarrow.table(
            {
                "y": [row % 2 for row in rows],
                "x": [None if row == 3 else float(row) - 1 for row in rows],
                "site": [None if row == 4 else f"s{row % 7}" for row in rows],
                "tags": [None if row == 5 else [row % 3] * (row % 4) for row in rows],
                "unused": ["u"] * 50,
            }
        )
        parquet.write_table(table, tmp_path / f"part_{part}.parquet", row_group_size=20)
    return tmp_path


def data(files: Path, batch_size: int = 32) -> ParquetData:
    build_parquet_vocabulary(
        str(files / "part_*"), files / "vocabulary", ["site", "tags"], memory_budget_bytes=64 << 10
    )
    return ParquetData(str(files / "part_*"), COLUMNS, files / "vocabulary", batch_size)


def test_columns_become_batches(files: Path) -> None:
    source = data(files)
    assert source.table_sizes() == [("site", 8), ("tags", 4)]
    assert (source.count(), len(source), source.dense_count) == (100, 4, 1)
    batches = list(source)
    assert [len(batch) for batch in batches] == [32, 32, 32, 4]
    first = batches[0]
    assert torch.allclose(first.dense[:5, 0], torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0]).log1p())
    assert first.label[:3].tolist() == [0.0, 1.0, 0.0]
    assert first.sparse["site"].values()[:8].tolist() == [1, 2, 3, 4, 0, 5, 6, 1]
    tags = first.sparse["tags"]
    # Row 1 has one tag 1 (seen first, row 1 of the table), row 2 two tags 2, row 5 is null.
    assert tags.lengths()[:8].tolist() == [0, 1, 2, 3, 0, 0, 2, 3]
    assert tags.values()[:6].tolist() == [1, 2, 2, 3, 3, 3]


def test_any_place_can_be_resumed_at(files: Path) -> None:
    whole = list(data(files, 7))
    for done in range(len(whole)):
        source = data(files, 7)
        walk = iter(source)
        for _ in range(done):
            next(walk)
        fresh = data(files, 7)
        fresh.load_state_dict(source.state_dict())
        for found, expected in zip(fresh, whole[done:], strict=True):
            assert torch.equal(found.label, expected.label)
            assert torch.equal(found.sparse.values(), expected.sparse.values())
            assert torch.equal(found.sparse.lengths(), expected.sparse.lengths())
    train, held = data(files, 7).split_last(0.25)
    assert (sum(map(len, train)), sum(map(len, held))) == (75, 25)


def test_ids_may_be_given_directly(files: Path) -> None:
    columns = ParquetColumns(label="y", categorical=["tags"])
    source = ParquetData(files / "part_0.parquet", columns, {"tags": 3}, 50)
    (batch,) = list(source)
    assert batch.dense.shape == (50, 0)
    assert set(batch.sparse.values().tolist()) == {0, 1, 2}
    with pytest.raises(InvalidError, match="rows 0 to 1"):
        list(ParquetData(files / "part_0.parquet", columns, {"tags": 2}, 50))
    columns = ParquetColumns(label="y", categorical=["site"])
    with pytest.raises(InvalidError, match="build a vocabulary"):
        list(ParquetData(files / "part_0.parquet", columns, {"site": 9}, 50))


def test_wrong_columns_and_files_are_named(files: Path) -> None:
    with pytest.raises(InvalidError, match="no column nope"):
        build_parquet_vocabulary(files / "part_0.parquet", files / "v", ["nope"])
    (files / "text").write_text("not parquet")
    with pytest.raises(InvalidError, match="not a Parquet file"):
        build_parquet_vocabulary(files / "text", files / "v", ["site"])
    columns = ParquetColumns(label="site", categorical=["tags"])
    with pytest.raises(InvalidError, match="not numeric"):
        list(ParquetData(files / "part_0.parquet", columns, {"tags": 3}, 50))
    data(files)
    with pytest.raises(InvalidError, match="same order"):
        ParquetData(files / "part_0.parquet", columns, files / "vocabulary", 50)
    with pytest.raises(InvalidError, match="categorical"):
        ParquetColumns(label="y")
