"""Remedies of columns, hashed ids and published layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.data import (
    CriteoMultiHotData,
    Hashed,
    OpenIds,
    Rows,
    Tokens,
    build_column_vocabulary,
    columns,
    dataset,
    read_ratings,
)

from .kit import refused

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LOG = {
    "click": [0, 1, 0, 1],
    "user": [5, 6, 7, 8],
    "site": ["a", "b", "a", "c"],
    "price": [1.5, 2.5, None, 4.0],
    "tags": [[1, 2], [], [3], [4]],
    "weight": [[1.0, 2.0], [], [3.0], [4.0]],
}


def log(**changes: Any) -> Any:
    return pyarrow.table({**LOG, **changes})


def read(ids: Any, source: Any = None, **more: Any) -> list[tb.data.Batch]:
    return list(columns(log() if source is None else source, ids=ids, batch_size=4, **more))


def test_ids_are_named_by_kind() -> None:
    with refused(tb.InvalidError, 'name the columns, such as ids={"user": 1000}'):
        read({})
    wrong: Any = {"user": "hashed"}
    with refused(tb.InvalidError, "give a number of rows, Rows, Hashed, Tokens or OpenIds"):
        read(wrong)
    for kind in (1000, Rows(1000), Hashed(1000), OpenIds()):
        assert read({"user": kind})[0].sparse.values().numel() == 4


def test_features_of_a_table_are_of_one_kind() -> None:
    remedy = "give them the same kind and rows, or a table each"
    with refused(tb.InvalidError, remedy):
        read({"user": Rows(10), "tags": Rows(20, table="user")})
    read({"user": Rows(10), "tags": Rows(10, table="user")})
    read({"user": Rows(10), "tags": Rows(20)})


def test_ids_that_are_no_rows() -> None:
    with refused(tb.InvalidError, "take Hashed or Tokens for it"):
        read({"site": 10})
    read({"site": Hashed(10)})
    with refused(tb.InvalidError, "give it more rows, or take Hashed or Tokens"):
        read({"user": 8})
    read({"user": 9})
    read({"user": Hashed(8)})
    with refused(tb.InvalidError, "cast it to one of them"):
        read({"price": Hashed(10)}, log(price=[1.5] * 4))
    cast = log().set_column(3, "price", log()["user"].cast(pyarrow.float64()).cast("int64"))
    read({"price": Hashed(10)}, cast)


def test_lists_of_lists_are_flattened() -> None:
    with refused(tb.InvalidError, "flatten them to one list per sample"):
        read({"tags": 5}, log(tags=[[[1]], [[2]], [], []]))
    read({"tags": 5}, log(tags=[[1], [2], [], []]))


def test_missing_values_are_filled() -> None:
    remedy = 'give missing="fill" to take a missing number as 0 and a missing id as none, or fill'
    with refused(tb.InvalidError, remedy):
        read({"user": 9}, dense=["price"])
    (batch,) = read({"user": 9}, dense=["price"], missing="fill")
    assert batch.dense[2].item() == 0.0
    read({"user": 9}, log(price=[0.0] * 4), dense=["price"])
    vectors = pyarrow.array([[1.0], None, [2.0], [3.0]], pyarrow.list_(pyarrow.float32(), 1))
    with refused(tb.InvalidError, "fill them"):
        read({"user": 9}, log(price=vectors), dense=["price"])
    read({"user": 9}, log(price=vectors.fill_null([0.0])), dense=["price"])


def test_each_id_has_a_weight() -> None:
    given = {"weights": {"tags": "weight"}}
    with refused(tb.InvalidError, "give each id a weight"):
        read({"tags": 5}, log(weight=[[1.0], [], [], []]), **given)
    read({"tags": 5}, **given)


def test_tokens_have_a_vocabulary(tmp_path: Path) -> None:
    ids = {"site": Tokens()}
    with refused(tb.InvalidError, "give vocabulary= a path"):
        read(ids)
    read(ids, vocabulary=tmp_path / "v")
    with refused(tb.InvalidError, "give the path of another file, which is built"):
        read({"user": Tokens()}, vocabulary=tmp_path / "v")
    read({"user": Tokens()}, vocabulary=tmp_path / "w")
    with refused(tb.InvalidError, "a vocabulary is for ids of the kind Tokens"):
        build_column_vocabulary(log(), tmp_path / "x", {"user": 9})
    build_column_vocabulary(log(), tmp_path / "x", ids)


def test_what_is_read_once_has_its_vocabulary_before(tmp_path: Path) -> None:
    ids = {"site": Tokens()}
    remedy = "give the path of a vocabulary that is built, or a source that begins again"
    with refused(tb.InvalidError, remedy):
        read(ids, log().to_reader(), vocabulary=tmp_path / "v")
    build_column_vocabulary(log(), tmp_path / "v", ids)
    read(ids, log().to_reader(), vocabulary=tmp_path / "v")
    once = columns(log().to_reader(), ids={"user": 9}, batch_size=4)
    list(once)
    with refused(tb.InvalidError, "for several epochs give paths, a table or a dataset"):
        list(once)
    parquet.write_table(log(), tmp_path / "log.parquet")
    for source in (log(), tmp_path / "log.parquet"):
        again = columns(source, ids={"user": 9}, batch_size=4)
        assert len(list(again)) == len(list(again)) == 1


def test_sources_of_columns(tmp_path: Path) -> None:
    remedy = (
        "give paths, a table or dataset of pyarrow, Polars, pandas or Hugging Face, or a Record"
    )
    with refused(tb.InvalidError, remedy):
        read({"user": 9}, 7)
    parquet.write_table(log(), tmp_path / "log.parquet")
    for source in (tmp_path / "log.parquet", log(), log().to_reader()):
        read({"user": 9}, source)


def test_a_file_that_goes_on_with_other_values(tmp_path: Path) -> None:
    import pyarrow.dataset

    # The first block of a CSV has numbers only, and its types are those of the first block.
    (tmp_path / "log.csv").write_text("user\n" + "1234567\n" * 200_000 + "anonymous\n")
    ids = {"user": Hashed(9)}
    with refused(tb.InvalidError, "give a dataset of pyarrow with the schema of all"):
        list(columns(tmp_path / "log.csv", ids=ids, batch_size=50_000))
    schema = pyarrow.schema([("user", pyarrow.string())])
    whole = pyarrow.dataset.dataset(tmp_path / "log.csv", format="csv", schema=schema)
    assert sum(map(len, columns(whole, ids=ids, batch_size=50_000))) == 200_001


def test_a_file_that_is_written_anew(tmp_path: Path) -> None:
    feather = pytest.importorskip("pyarrow.feather")
    path = tmp_path / "log.arrow"
    feather.write_feather(log(), path)
    data = columns(path, ids={"user": 9}, batch_size=4)
    feather.write_feather(log().slice(1), path)
    with refused(tb.InvalidError, "open it again"):
        list(data)
    assert len(list(columns(path, ids={"user": 9}, batch_size=4))) == 1


def _of(library: str, **members: Any) -> Any:
    return type("Given", (), {"__module__": library, **members})()


def test_a_split_of_hugging_face_and_a_frame_of_polars() -> None:
    """Stands in for both; tests of frameworks have the real packages."""
    part = _of(
        "datasets.x",
        with_format=lambda self, _: self,
        __len__=lambda self: 4,
        __getitem__=lambda self, rows: log()[rows],
        select_columns=lambda self, names: log().select(names),
        features=SimpleNamespace(arrow_schema=log().schema),
    )
    members = {"keys": lambda self: ["train"], "with_format": None}
    splits = _of("datasets.x", **members, __getitem__=lambda self, name: part)
    with refused(tb.InvalidError, 'give one of them, such as source["train"]'):
        read({"user": 9}, splits)
    read({"user": 9}, splits["train"])
    frame = _of("polars.x", collect_schema=None, to_arrow=lambda self: log())
    lazy = _of("polars.x", collect_schema=None, collect=lambda self: frame)
    with refused(tb.UnsupportedError, "collect() it, or install a newer one"):
        read({"user": 9}, lazy)
    read({"user": 9}, lazy.collect())


def test_sizes_and_shares() -> None:
    data = columns(log(), ids={"user": OpenIds()}, batch_size=1)
    with refused(tb.InvalidError, "call tables()"):
        data.table_sizes()
    assert data.tables(4)[0].num_embeddings is None
    with refused(tb.InvalidError, "divide those of all ranks"):
        data.shard(0, 2).shard(0, 2)
    assert [data.shard(at, 4).count() for at in range(4)] == [1, 1, 1, 1]


def test_as_many_workers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(of: int) -> Any:
        worker = SimpleNamespace(id=0, num_workers=of)
        monkeypatch.setattr(dataset, "get_worker_info", lambda: worker)
        return columns(log(), ids={"user": 9}, batch_size=1)

    first = inside(2)
    next(iter(first))
    state = first.state_dict()
    other = inside(3)
    other.load_state_dict(state)
    with refused(tb.InvalidError, "resume with as many workers, by the loader that saved it"):
        next(iter(other))
    again = inside(2)
    again.load_state_dict(state)
    assert next(iter(again)).sparse.values().tolist() == [7]


# ---------------------------------------------------------------- published layouts


def test_lines_of_ratings(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("1,2\n")
    with refused(tb.InvalidError, "a line has user, item, rating and seconds"):
        read_ratings(tmp_path / "r.csv")
    (tmp_path / "r.csv").write_text("1,2,3.5,9\n")
    assert len(read_ratings(tmp_path / "r.csv")) == 1


def _day(folder: Path, save: Any = np.savez, dense: Path | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save(folder / "day_0_sparse_multi_hot.npz", **{"0": np.array([[4, 5], [6, 7]], "i4")})
    np.save((dense or folder) / "day_0_dense.npy", np.zeros((2, 13), "f4"))
    np.save((dense or folder) / "day_0_labels.npy", np.array([[1], [0]], "i4"))
    return folder


def test_days_of_criteo(tmp_path: Path) -> None:
    with refused(tb.InvalidError, "name the folder where the days lie"):
        CriteoMultiHotData(tmp_path, 2)
    days = _day(tmp_path / "days")
    for rows in (None, [7]):
        given: Any = {} if rows is None else {"rows": rows}
        with refused(tb.InvalidError, "give the rows of each table"):
            list(CriteoMultiHotData(days, 2, **given))
    (batch,) = CriteoMultiHotData(days, 2, rows=[8])
    assert torch.equal(batch.sparse.values(), torch.tensor([4, 5, 6, 7]))
    apart = _day(tmp_path / "apart", dense=days)
    remedy = "name the folder of dense features and labels as dense_folder"
    with refused(tb.InvalidError, remedy):
        CriteoMultiHotData(apart, 2, rows=[8])
    CriteoMultiHotData(apart, 2, rows=[8], dense_folder=days)
    packed = _day(tmp_path / "packed", np.savez_compressed)
    with refused(tb.InvalidError, "write the file with numpy.savez"):
        CriteoMultiHotData(packed, 2, rows=[8])
    CriteoMultiHotData(_day(packed), 2, rows=[8])


def _run(capsys: Any, remedy: str, *given: Any) -> None:
    """Expects a run to end with a remedy, if there is one."""
    failed = main(["train", *map(str, given), "--dim", "4", "--dram-budget", "4MiB"])
    assert bool(failed) == bool(remedy)
    assert remedy in capsys.readouterr().err


def test_runs_on_columns_and_days(tmp_path: Path, capsys: Any) -> None:
    parquet.write_table(log(), tmp_path / "log.parquet")
    given = ("--format", "parquet", "--data", tmp_path / "log.parquet", "--categorical", "site")
    _run(capsys, "name another column", *given, "--label", "user", "--store", tmp_path / "a")
    _run(capsys, "", *given, "--label", "click", "--store", tmp_path / "b")
    days = _day(tmp_path / "days")
    given = ("--format", "criteo_multi_hot", "--table-rows", 8, "--store", tmp_path / "c")
    _run(capsys, "name it with --data", *given, "--data", days, "--data", tmp_path)
    _run(capsys, "", *given, "--data", days)
