"""Columns of Polars, Hugging Face, pandas and stores of objects: the samples of a plain table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb
from tierbed.data import ColumnData, Hashed, OpenIds, Rows, columns
from tierbed.data.order import known_order
from tierbed.errors import InvalidError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SAMPLES = 61
IDS = {"user": Rows(1000), "site": Hashed(64), "tags": Hashed(32), "query": OpenIds()}
ROWS: list[dict[str, Any]] = [
    {
        "number": float(row),
        "user": row * 7,
        "site": f"site-{row % 11}",
        "tags": [f"t{row % 5}"] * (row % 4),
        "query": row << 40,
        "price": row / 4,
    }
    for row in range(SAMPLES)
]


def read(source: Any, **more: Any) -> ColumnData:
    more = {"batch_size": 8, "label": "number", "dense": ["price"], **more}
    return columns(source, ids=IDS, **more)


def table() -> Any:
    return pyarrow.Table.from_pylist(ROWS)


def same(found: Any, expected: Any) -> bool:
    for one, other in zip(found, expected, strict=True):
        for name in ("dense", "label"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert torch.equal(one.sparse.values(), other.sparse.values())
        assert torch.equal(one.sparse.lengths(), other.sparse.lengths())
    return True


def test_frames_of_polars() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(ROWS)
    expected = list(read(table()))
    assert same(read(frame), expected)
    coded = frame.with_columns(polars.col("site").cast(polars.Categorical))
    assert same(read(coded), expected)
    assert same(read(frame, shuffle=20, seed=1), read(table(), shuffle=20, seed=1))
    assert not isinstance(known_order(read(frame), None), str)


def test_lazy_frames_of_polars(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    parquet.write_table(table(), tmp_path / "log.parquet", row_group_size=10)
    lazy = polars.scan_parquet(tmp_path / "log.parquet").filter(polars.col("number") >= 10)
    data = read(lazy)
    expected = list(read(table().slice(10)))
    for _ in range(2):
        assert same(data, expected)
    assert data.count() == SAMPLES - 10
    walk = iter(data)
    next(walk), next(walk)
    again = read(lazy)
    again.load_state_dict(data.state_dict())
    assert same(again, expected[2:])
    assert known_order(data, None) == "a LazyFrame does not tell its order"


def test_frames_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    assert same(read(pandas.DataFrame(ROWS)), list(read(table())))


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    assert same(read(made), list(read(table())))
    assert same(read(made, shuffle=20, seed=1), read(table(), shuffle=20, seed=1))
    picked = made.select(range(0, SAMPLES, 3))
    assert same(read(picked), list(read(table().take(list(range(0, SAMPLES, 3))))))
    shuffled = made.shuffle(seed=3)
    first = next(iter(read(shuffled)))
    assert first.label.tolist() == shuffled["number"][:8]
    order, other = known_order(read(made), None), known_order(read(shuffled), None)
    assert not isinstance(order, str)
    assert not isinstance(other, str)
    assert order.fingerprint != other.fingerprint


def test_one_split_of_hugging_face_is_given() -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    with pytest.raises(InvalidError, match="has the splits train; give one of them"):
        read(splits)
    assert same(read(splits["train"]), list(read(table())))


def test_streams_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=4)
    expected = list(read(table()))
    data = read(made)
    assert same(data, expected)
    assert same(DataLoader(data, batch_size=None, num_workers=2), expected)
    assert sorted(
        number for at in range(3) for batch in data.shard(at, 3) for number in batch.label.tolist()
    ) == list(range(SAMPLES))
    walk = iter(data)
    next(walk)
    again = read(made)
    again.load_state_dict(data.state_dict())
    assert same(again, expected[1:])

    def rows() -> Iterator[dict[str, Any]]:
        yield from ROWS

    features = datasets.Dataset.from_list(ROWS).features
    assert same(read(datasets.IterableDataset.from_generator(rows, features=features)), expected)


def test_training_on_a_frame_of_polars() -> None:
    polars = pytest.importorskip("polars")
    data = read(polars.DataFrame(ROWS))
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = tb.EmbeddingBagCollection(data.tables(4), store=store)
        for batch in tb.lookahead(data, emb, window=2):
            emb(batch.sparse).values().sum().backward()
        assert store.steps_done("user") == 8


def test_a_filesystem_of_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for at in range(3):
        with memory.open(f"/columns/day={at}/part.parquet", "wb") as file:
            parquet.write_table(table().slice(21 * at, 21), file, row_group_size=8)
    data = read("/columns/day=*/part.parquet", filesystem=memory)
    assert same(data, list(read(table())))
    assert same(read("/columns/", filesystem=memory, file_format="parquet"), list(read(table())))
    with pytest.raises(InvalidError, match="no file matches"):
        read("/columns/day=*/none.parquet", filesystem=memory)


def test_a_filesystem_of_pyarrow_and_addresses(tmp_path: Path) -> None:
    import pyarrow.fs

    for at in range(3):
        parquet.write_table(table().slice(21 * at, 21), tmp_path / f"part-{at}.parquet")
    expected = list(read(table()))
    below = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    assert same(read("part-*.parquet", filesystem=below), expected)
    assert same(read(f"file://{tmp_path}/part-*.parquet"), expected)
    assert same(read([f"file://{tmp_path}/part-{at}.parquet" for at in range(3)]), expected)


def test_the_loader_of_torchdata_resumes_exactly(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    parquet.write_table(table(), tmp_path / "log.parquet", row_group_size=10)
    expected = list(read(tmp_path / "log.parquet", shuffle=20))
    for workers in (0, 2):
        for done in (1, 4):

            def loader(workers: int = workers) -> Any:
                data = read(tmp_path / "log.parquet", shuffle=20)
                return loaders.StatefulDataLoader(data, batch_size=None, num_workers=workers)

            first = loader()
            walk = iter(first)
            assert same([next(walk) for _ in range(done)], expected[:done])
            again = loader()
            again.load_state_dict(first.state_dict())
            assert same(again, expected[done:])
