"""Layouts as they are published: days of MLPerf, ratings of MovieLens, logs of sessions."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tierbed.data import CriteoMultiHotData, columns, movielens, read_ratings, sequences
from tierbed.errors import InvalidError

HOTNESS, ROWS = [3, 1, 2], [50, 4, 9]
DAYS = {0: 5, 2: 9, 10: 7}


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Three days of three features; the label of a sample is its number, modulo 2."""
    generator = np.random.default_rng(1)
    first = 0
    for day, samples in DAYS.items():
        ids = {
            str(at): generator.integers(0, rows, (samples, hotness), dtype=np.int32)
            for at, (rows, hotness) in enumerate(zip(ROWS, HOTNESS, strict=True))
        }
        np.savez(tmp_path / f"day_{day}_sparse_multi_hot.npz", **ids)
        numbers = np.arange(first, first + samples)
        dense = numbers[:, None] + np.arange(13) / 16
        np.save(tmp_path / f"day_{day}_dense.npy", dense.astype(np.float32))
        np.save(tmp_path / f"day_{day}_labels.npy", (numbers[:, None] % 2).astype(np.int32))
        first += samples
    return tmp_path


def test_days_are_read_in_their_order(days: Path) -> None:
    data = CriteoMultiHotData(days, 4, rows=ROWS)
    batches = list(data)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 1]
    assert data.table_sizes() == [("cat_0", 50), ("cat_1", 4), ("cat_2", 9)]
    dense = torch.cat([batch.dense for batch in batches])
    assert torch.equal(dense[:, 0], torch.arange(21.0))
    assert dense.shape == (21, data.dense_count)
    labels = torch.cat([batch.label for batch in batches])
    assert torch.equal(labels, torch.arange(21.0) % 2)
    arrays = [np.load(days / f"day_{day}_sparse_multi_hot.npz") for day in DAYS]
    for at, hotness in enumerate(HOTNESS):
        expected = np.concatenate([array[str(at)] for array in arrays])
        bags = [batch.sparse[f"cat_{at}"] for batch in batches]
        found = torch.cat([bag.values() for bag in bags]).view(-1, hotness)
        assert np.array_equal(found.numpy(), expected)
        assert all(bag.lengths().tolist() == [hotness] * bag.lengths().numel() for bag in bags)
    picked = CriteoMultiHotData(days, 30, rows=ROWS, days=[10, 0])
    (batch,) = picked
    assert batch.dense[:, 0].tolist() == [*range(14, 21), *range(5)]


def test_days_are_shared_resumed_and_read_by_workers(days: Path) -> None:
    data = CriteoMultiHotData(days, 4, rows=ROWS)
    whole = [batch.dense[:, 0].tolist() for batch in data]
    assert len(pickle.dumps(data)) < 10_000, "arrays are sent by path"
    loader = DataLoader(pickle.loads(pickle.dumps(data)), batch_size=None, num_workers=2)
    assert [batch.dense[:, 0].tolist() for batch in loader] == whole
    walk = iter(data)
    next(walk)
    again = CriteoMultiHotData(days, 4, rows=ROWS)
    again.load_state_dict(data.state_dict())
    assert [batch.dense[:, 0].tolist() for batch in again] == whole[1:]
    train, held = CriteoMultiHotData(days, 4, rows=ROWS).split_last(0.5)
    shares = [batch for part in (train, held) for at in range(2) for batch in part.shard(at, 2)]
    assert torch.cat([batch.dense[:, 0] for batch in shares]).tolist() == list(range(21))


def test_other_files_are_refused(days: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"ids from 0 to \d+, its table has rows 0 to 1; give"):
        list(CriteoMultiHotData(days, 4, rows=[50, 2, 9]))
    with pytest.raises(InvalidError, match="has 3 features, rows are given for 26"):
        CriteoMultiHotData(days, 4)
    with pytest.raises(InvalidError, match="has no day_1_sparse"):
        CriteoMultiHotData(days, 4, rows=ROWS, days=[1])
    with pytest.raises(InvalidError, match="as dense_folder"):
        CriteoMultiHotData(days, 4, rows=ROWS, dense_folder=tmp_path / "none")
    arrays = dict(np.load(days / "day_0_sparse_multi_hot.npz"))
    np.savez_compressed(days / "day_0_sparse_multi_hot.npz", **arrays)
    with pytest.raises(InvalidError, match=r"write the file with numpy.savez"):
        CriteoMultiHotData(days, 4, rows=ROWS)
    np.savez(days / "day_0_sparse_multi_hot.npz", **{**arrays, "1": arrays["1"][:3]})
    with pytest.raises(InvalidError, match="do not fit together"):
        CriteoMultiHotData(days, 4, rows=ROWS)
    (days / "day_0_sparse_multi_hot.npz").write_bytes(b"PK no zip")
    with pytest.raises(InvalidError, match=r"no file of numpy.savez"):
        CriteoMultiHotData(days, 4, rows=ROWS)


# ---------------------------------------------------------------- ratings and sequences

LINES = [(1, 1193, 5.0, 30), (2, 661, 3.0, 10), (1, 914, 3.0, 20), (2, 3408, 4.0, 20)]
BY_TIME = [661, 914, 3408, 1193]
FILES = {
    "u.data": "".join(f"{u}\t{i}\t{r:.0f}\t{t}\n" for u, i, r, t in LINES),
    "ratings.dat": "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in LINES),
    "ratings.csv": "userId,movieId,rating,timestamp\n"
    + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in LINES),
    "plain.txt": "".join(f"{u} {i} {r} {t}\n" for u, i, r, t in LINES),
}


@pytest.mark.parametrize("name", FILES)
def test_ratings_of_every_edition(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FILES[name].encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        table = read_ratings(path)
        assert table.column_names == ["user", "item", "rating", "time"]
        assert table["item"].to_pylist() == BY_TIME
        assert table["time"].to_pylist() == [10, 20, 20, 30]
    data = movielens(tmp_path / name, 4)
    (batch,) = data
    assert data.table_sizes() == [("user", 3), ("item", 3409)]
    assert batch.label[0] == 3.0
    (batch,) = movielens(tmp_path / name, 4, like=4.0)
    assert batch.label.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_ratings_without_times_keep_their_order(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "r.csv").write_text("".join(f"{u},{i},{r}\n" for u, i, r, _ in LINES))
    assert read_ratings(tmp_path / "r.csv")["item"].to_pylist() == [1193, 661, 914, 3408]
    (tmp_path / "bad.csv").write_text("1,2,3,4\n1,two,3,4\n")
    with pytest.raises(InvalidError, match="a line that is no rating"):
        read_ratings(tmp_path / "bad.csv")
    (tmp_path / "text").write_text("no ratings\n")
    with pytest.raises(InvalidError, match="a line has user, item, rating and seconds"):
        read_ratings(tmp_path / "text")


def by_loop(log: dict[str, list[Any]], least: int, most: int | None) -> list[list[Any]]:
    """Sequences by a plain loop: newest last."""
    of: dict[Any, list[tuple[int, int, Any]]] = {}
    rows = zip(log["time"], range(len(log["time"])), log["item"], log["user"], strict=True)
    for time, at, item, user in rows:
        of.setdefault(user, []).append((time, at, item))
    kept = [(user, sorted(events)) for user, events in of.items() if len(events) >= least]
    kept.sort(key=lambda one: (one[1][-1][0], one[0]))
    cut = [(user, events if most is None else events[-most:]) for user, events in kept]
    return [[user, [item for *_, item in events]] for user, events in cut]


@pytest.mark.parametrize(("least", "most"), [(1, None), (3, None), (2, 4), (1, 1), (99, 1)])
def test_sequences_are_those_of_a_plain_loop(least: int, most: int | None) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    generator = np.random.default_rng(2)
    log = {
        "user": [f"u{at:02}" for at in generator.integers(0, 30, 200)],
        "item": generator.integers(0, 50, 200).tolist(),
        "time": generator.integers(0, 90, 200).tolist(),
    }
    made = sequences(
        pyarrow.table(log), by="user", order="time", items=["item"], least=least, most=most
    )
    expected = by_loop(log, least, most)
    assert made["user"].to_pylist() == [user for user, _ in expected]
    assert made["item"].to_pylist() == [items for _, items in expected]
    last = sequences(
        pyarrow.table(log), by="user", order="time", items=["item"], least=least, last="_next"
    )
    whole = by_loop(log, least, None)
    assert last["item_next"].to_pylist() == [items[-1] for _, items in whole]
    assert last["item"].to_pylist() == [items[:-1] for _, items in whole]


def test_sequences_of_files_become_batches(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    log = {"s": [1, 2, 1, 1], "item": [5, 6, 7, 8], "kind": [0, 1, 1, 0], "t": [3, 9, 1, 2]}
    parquet.write_table(pyarrow.table(log), tmp_path / "log.parquet", row_group_size=2)
    made = sequences(
        tmp_path / "log.parquet", by="s", order="t", items=["item", "kind"], last="_next"
    )
    data = columns(made, ids={"item": 9, "item_next": 9, "kind": 2}, batch_size=2)
    (batch,) = data
    assert batch.sparse["item"].lengths().tolist() == [2, 0]
    assert batch.sparse["item"].values().tolist() == [7, 8]
    assert batch.sparse["kind"].values().tolist() == [1, 0]
    assert batch.sparse["item_next"].values().tolist() == [5, 6]
    with pytest.raises(InvalidError, match="no column nope"):
        sequences(pyarrow.table(log), by="s", order="nope", items=["item"])
    with pytest.raises(InvalidError, match="at least 1"):
        sequences(pyarrow.table(log), by="s", order="t", items=["item"], least=0)
