"""Columns: what they become, the same from every source, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import tierbed as tb
from tierbed.data import Hashed, OpenIds, Rows, Tokens, build_column_vocabulary, columns, hash_ids
from tierbed.errors import InvalidError, IoError

pyarrow = pytest.importorskip("pyarrow")

from columns_kit import FLAT, SAMPLES, log, numbers, parquet_files, read, same  # noqa: E402


def test_columns_become_batches() -> None:
    table = log(5)
    (batch,) = read(table, batch_size=8, label=["number", "click"])
    assert batch.label.tolist() == [[row, float(row % 3 == 0)] for row in range(5)]
    assert batch.dense.tolist() == [[row / 4] for row in range(5)]
    assert batch.sparse.keys() == ["user", "site", "tags", "query"]
    assert batch.sparse["user"].values().tolist() == [0, 7, 14, 21, 28]
    assert batch.sparse["tags"].lengths().tolist() == [0, 1, 2, 3, 0]
    tags = ["t1", "t2", "t2", "t3", "t3", "t3"]
    assert torch.equal(batch.sparse["tags"].values(), hash_ids(tags, 32, seed=3))
    assert batch.sparse["query"].values().tolist() == table["query"].to_pylist()
    assert torch.equal(batch.sparse["site"].values(), hash_ids(table["site"].to_pylist(), 64))


def test_tables_of_a_collection_fit_the_batches() -> None:
    data = read(log())
    tables = data.tables(4)
    assert [one.num_embeddings for one in tables] == [1000, 64, 32, None]
    with pytest.raises(InvalidError, match=r"call tables\(\)"):
        data.table_sizes()
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = tb.EmbeddingBagCollection(tables, store=store)
        for batch in tb.lookahead(data, emb, window=2):
            emb(batch.sparse).values().sum().backward()


def test_features_may_share_a_table() -> None:
    table = pyarrow.table({"item": ["a", "b"], "seen": [["b", "c"], []]})
    ids = {"item": Hashed(50), "history": Hashed(50, column="seen", table="item")}
    data = columns(table, ids=ids, batch_size=2)
    (config,) = data.tables(4)
    assert (config.name, config.feature_names) == ("item", ("item", "history"))
    assert data.table_sizes() == [("item", 50)]
    (batch,) = data
    assert batch.sparse["history"].values()[0] == batch.sparse["item"].values()[1]
    assert batch.label.shape == (2, 0)
    with pytest.raises(InvalidError, match="differ in kind"):
        columns(table, ids={"item": 5, "seen": Rows(6, table="item")}, batch_size=2)


@pytest.mark.parametrize("kind", ["int8", "uint32", "int64", "uint64", "bool"])
def test_an_id_has_the_same_hash_whatever_its_width(kind: str) -> None:
    values = pyarrow.array([0, 1, 1, 0]).cast(getattr(pyarrow, kind.replace("bool", "bool_"))())
    (batch,) = columns(pyarrow.table({"a": values}), ids={"a": Hashed(99)}, batch_size=4)
    assert torch.equal(batch.sparse.values(), hash_ids([0, 1, 1, 0], 99))


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "binary", "large_binary", "string_view", "dictionary"]
)
def test_a_token_has_the_same_hash_however_it_is_kept(kind: str) -> None:
    tokens = ["", "a", "12345678", "123456789", "a" * 40, "ä"]
    array = pyarrow.array(["x", *tokens])
    if kind == "dictionary":
        array = array.dictionary_encode()
    else:
        try:
            array = array.cast(getattr(pyarrow, kind)())
        except pyarrow.ArrowNotImplementedError:
            pytest.skip("this pyarrow makes no such column")
    table = pyarrow.table({"a": array}).slice(1)
    for named in (Hashed(1 << 40), OpenIds()):
        (batch,) = columns(table, ids={"a": named}, batch_size=9)
        found = batch.sparse.values()
        assert len(set(found.tolist())) == len(tokens)
        if isinstance(named, Hashed):
            assert torch.equal(found, hash_ids(tokens, 1 << 40))


def by_hand(token: bytes) -> int:
    """The hash as its document says, a word at a time."""

    def mixed(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return state ^ (state >> 31)

    state = (len(token) + mixed(0)) % (1 << 64)
    for at in range(0, len(token), 8):
        state = mixed(state ^ int.from_bytes(token[at : at + 8], "little"))
    return mixed(state)


def test_hashes_are_those_of_a_plain_loop() -> None:
    tokens = ["", "a", "12345678", "123456789", "a" * 40]
    expected = [by_hand(token.encode()) % 997 for token in tokens]
    assert hash_ids(tokens, 997).tolist() == expected


def test_hashes_spread_over_the_rows() -> None:
    for ids in (list(range(40_000)), [f"token {at}" for at in range(40_000)]):
        counts = np.bincount(hash_ids(ids, 100).numpy(), minlength=100)
        assert counts.min() > 300, counts.max() < 500


@pytest.mark.parametrize("name", ["parquet", "arrow", "feather", "csv", "csv.gz", "jsonl"])
def test_files_of_every_format_have_the_same_samples(tmp_path: Path, name: str) -> None:
    table = log().drop_columns(["tags"])
    path = tmp_path / f"log.{name}"
    if name == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=20)
    elif name in ("arrow", "feather"):
        pyarrow.feather.write_feather(table, path)
    elif name.startswith("csv"):
        with (
            pyarrow.CompressedOutputStream(path, "gzip") if "gz" in name else path.open("wb") as to
        ):
            pyarrow.csv.write_csv(table, to)
    else:
        lines = [pyarrow.types and str(row).replace("'", '"') for row in table.to_pylist()]
        text = "\n".join(lines).replace("True", "true").replace("False", "false")
        path.write_text(text + "\n")
    found = list(read(path, ids=FLAT))
    expected = list(read(table, ids=FLAT))
    assert len(found) == len(expected)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_other_sources_have_the_same_samples(tmp_path: Path) -> None:
    import pyarrow.dataset

    expected = list(read(log()))
    files = parquet_files(tmp_path)
    dataset = pyarrow.dataset.dataset(sorted(map(str, tmp_path.glob("*.parquet"))))
    sources: list[Any] = [
        files,
        sorted(tmp_path.glob("*.parquet")),
        dataset,
        pyarrow.dataset.dataset([dataset]),
        pyarrow.dataset.dataset(log()),
        log().to_reader(7),
        pyarrow.Table.from_batches(log().to_batches(max_chunksize=9)),
        log().combine_chunks().to_batches()[0],
    ]
    for source in sources:
        found = list(read(source))
        assert all(same(one, other) for one, other in zip(found, expected, strict=True)), source


def test_a_filtered_dataset_yields_what_the_filter_leaves(tmp_path: Path) -> None:
    import pyarrow.compute
    import pyarrow.dataset

    parquet_files(tmp_path)
    dataset = pyarrow.dataset.dataset(tmp_path).filter(pyarrow.compute.field("number") >= 90)
    assert numbers(read(dataset)) == list(range(90, SAMPLES))


def test_folders_with_keys_have_a_column_more(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pyarrow.parquet.write_table(log(4), tmp_path / f"day={day}" / "a.parquet")
    data = read(tmp_path, ids={"day": 3}, batch_size=8)
    (batch,) = data
    assert batch.sparse["day"].values().tolist() == [1] * 4 + [2] * 4


def test_a_vocabulary_is_built_in_the_call_or_before(tmp_path: Path) -> None:
    table = pyarrow.table({"site": ["a", "b", None, "a"], "tags": [["x", None], [], ["y"], ["x"]]})
    ids = {"site": Tokens(), "tags": Tokens()}
    data = columns(table, ids=ids, batch_size=4, vocabulary=tmp_path / "v")
    assert data.table_sizes() == [("site", 3), ("tags", 3)]
    (batch,) = data
    assert batch.sparse["site"].values().tolist() == [1, 2, 0, 1]
    assert batch.sparse["tags"].values().tolist() == [1, 0, 2, 1]
    assert batch.sparse["tags"].lengths().tolist() == [2, 0, 1, 1]
    assert data.missing_counts == {"site": 1, "tags": 1}
    report = build_column_vocabulary(table, tmp_path / "w", ids, samples=1, min_count=2)
    assert (report.sample_count, report.features[0].rare_token_count) == (1, 1)
    (batch,) = columns(table, ids=ids, batch_size=4, vocabulary=tmp_path / "w")
    assert batch.sparse["site"].values().tolist() == [0, 0, 0, 0]
    again = build_column_vocabulary(table, tmp_path / "x", ids, memory_budget_bytes=64 << 10)
    assert again.sample_count == 4
    assert (tmp_path / "x").read_bytes() == (tmp_path / "v").read_bytes()


def test_weights_stand_beside_their_ids() -> None:
    table = pyarrow.table({"tags": [[1, 2], [], [3]], "w": [[0.5, 2.0], [], [1.5]], "u": [1, 2, 3]})
    data = columns(table, ids={"tags": 9, "u": 9}, weights={"tags": "w"}, batch_size=3)
    (batch,) = data
    assert batch.sparse["tags"].weights_or_none().tolist() == [0.5, 2.0, 1.5]
    assert batch.sparse["u"].weights_or_none().tolist() == [1.0, 1.0, 1.0]
    short = table.set_column(1, "w", pyarrow.array([[0.5], [], [1.5]]))
    with pytest.raises(InvalidError, match="give each id a weight"):
        list(columns(short, ids={"tags": 9}, weights={"tags": "w"}, batch_size=3))
    with pytest.raises(InvalidError, match="whose ids are not"):
        columns(table, ids={"u": 9}, weights={"tags": "w"}, batch_size=3)


def test_a_column_of_vectors_is_dense() -> None:
    vectors = pyarrow.array([[1.0, 2.0], [3.0, -4.0]], pyarrow.list_(pyarrow.float32(), 2))
    table = pyarrow.table({"v": vectors, "x": [5, 6], "u": [0, 1]})
    data = columns(table, ids={"u": 2}, dense=["v", "x"], batch_size=2)
    assert data.dense_count == 3
    (batch,) = data
    assert batch.dense.tolist() == [[1.0, 2.0, 5.0], [3.0, -4.0, 6.0]]
    (batch,) = columns(table, ids={"u": 2}, dense=["v"], batch_size=2, log_dense=True)
    assert torch.equal(batch.dense, torch.tensor([[1.0, 2.0], [3.0, 0.0]]).log1p())


MISSING = {"x": [1.0, None, float("nan")], "u": [1, None, 2], "l": [[1, None], None, [2]]}


def test_missing_values_are_said_or_filled() -> None:
    table = pyarrow.table(MISSING)
    for name, dense in (("u", ()), ("l", ()), ("x", ("x",))):
        ids = {"n": Rows(3, column="u" if name == "x" else name)}
        plain = table if name != "x" else table.set_column(1, "u", pyarrow.array([0, 0, 0]))
        with pytest.raises(InvalidError, match=f"column {name} has . missing values"):
            list(columns(plain, ids=ids, dense=dense, batch_size=3))
    data = columns(table, ids={"u": 3, "l": 3}, dense=["x"], batch_size=3, missing="fill")
    (batch,) = data
    assert batch.dense.tolist() == [[1.0], [0.0], [0.0]]
    assert batch.sparse["u"].lengths().tolist() == [1, 0, 1]
    assert batch.sparse["l"].to_dense()[0].tolist() == [1]
    assert batch.sparse["l"].lengths().tolist() == [1, 0, 1]
    assert data.missing_counts == {"x": 2, "u": 1, "l": 2}
    with pytest.raises(InvalidError, match="column x has 2 missing"):
        list(columns(table, ids={"u": 3}, label="x", batch_size=3, missing="fill"))


def test_wrong_columns_and_values_are_named(tmp_path: Path) -> None:
    table = log(20)
    for source in (table, parquet_files(tmp_path)):
        with pytest.raises(InvalidError, match="no column nope; it has number"):
            read(source, ids={"nope": 3})
    with pytest.raises(InvalidError, match=r"row ids from 0 to 49, its table has rows 0 to 9"):
        list(read(table, ids={"user": 10}))
    with pytest.raises(InvalidError, match="take Hashed or Tokens"):
        list(read(table, ids={"site": 10}))
    with pytest.raises(InvalidError, match="neither integers nor texts"):
        list(read(table, ids={"price": Hashed(10)}))
    with pytest.raises(InvalidError, match="not numeric"):
        list(read(table, dense=["site"]))
    with pytest.raises(InvalidError, match="vocabulary="):
        read(table, ids={"site": Tokens()})
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(InvalidError, match="not a Parquet file"):
        read(tmp_path / "text.parquet")
    with pytest.raises(InvalidError, match="holds no columns"):
        read(7)
    with pytest.raises(InvalidError, match="rows of a table"):
        read(table, ids={"user": 0})


def test_a_damaged_file_is_an_error_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pyarrow.parquet.write_table(log(2000), path, row_group_size=500)
    data = read(path)
    raw = path.read_bytes()
    path.write_bytes(raw[:200] + bytes(len(raw) - 200))
    with pytest.raises(IoError, match="cannot be read"):
        list(data)


def test_a_file_that_lacks_a_column_is_not_read_as_nulls(tmp_path: Path) -> None:
    pattern = parquet_files(tmp_path)
    part = log(5).drop_columns(["site"])
    pyarrow.parquet.write_table(part, tmp_path / "part_9.parquet")
    with pytest.raises(InvalidError, match=r"part_9.parquet has no column site"):
        read(pattern)


def test_lists_of_every_kind_and_slices_of_them() -> None:
    lists = [[9], [1, 2], [], [3, 4, 5], [6]]
    for kind in (pyarrow.list_(pyarrow.int16()), pyarrow.large_list(pyarrow.int64())):
        table = pyarrow.table({"a": pyarrow.array(lists, kind)}).slice(1, 3)
        (batch,) = columns(table, ids={"a": 10}, batch_size=5)
        assert batch.sparse.lengths().tolist() == [2, 0, 3]
        assert batch.sparse.values().tolist() == [1, 2, 3, 4, 5]
    fixed = pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int64(), 2))
    (batch,) = columns(pyarrow.table({"a": fixed}).slice(1), ids={"a": 10}, batch_size=5)
    assert batch.sparse.values().tolist() == [3, 4]
    nested = pyarrow.table({"a": [[[1]]]})
    with pytest.raises(InvalidError, match="flatten them"):
        list(columns(nested, ids={"a": 10}, batch_size=5))


def test_pyarrow_is_asked_for_no_more_than_the_named_columns(tmp_path: Path) -> None:
    """A column that cannot be decoded does not matter."""
    path = tmp_path / "log.csv"
    path.write_text("user,text\n1,a\n2,b\n")
    (batch,) = columns(path, ids={"user": 3}, batch_size=4)
    assert batch.sparse.values().tolist() == [1, 2]


class Opened:
    """A file whose large reads are noted."""

    def __init__(self, path: str, mode: str, begins: list[int]) -> None:
        self.file = Path(path).open(mode)  # noqa: SIM115 - closed when pyarrow drops it
        self.begins = begins

    def __del__(self) -> None:
        self.file.close()

    def read(self, size: int = -1) -> Any:
        self.begins.extend([self.file.tell()] if size > 8_000 else [])
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Counting(LocalFileSystem):
    """Files of this machine, whose large reads are noted."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[int] = []

    def open(self, path: Any, mode: str = "rb", **_: Any) -> Any:
        return Opened(path, mode, self.begins)


@pytest.mark.parametrize("shuffle", [0, 4096])
def test_row_groups_are_read_as_they_are_needed(tmp_path: Path, shuffle: int) -> None:
    """A slow consumer is not overtaken: a few groups are read ahead, and each is read once."""
    rows, group = 1 << 16, 1 << 11
    table = pyarrow.table({"a": np.random.default_rng(1).integers(0, 1 << 60, rows)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    files = Counting()
    data = columns(
        tmp_path / "a.parquet",
        ids={"a": OpenIds()},
        batch_size=512,
        filesystem=files,
        shuffle=shuffle,
    )
    files.begins.clear()
    for at, _ in enumerate(data, 1):
        time.sleep(0.001)
        window = max(shuffle, 1)
        needed = -(-(-(-at * 512 // window) * window) // group)
        # The coming one, and that which the window reaches into.
        assert needed <= len(files.begins) <= needed + 2, at
    assert len(set(files.begins)) == len(files.begins) == rows // group


@pytest.mark.parametrize(("name", "ahead"), [("a.arrow", 1 << 18), ("a.csv", 9 << 20)])
def test_other_files_are_read_as_they_are_needed(tmp_path: Path, name: str, ahead: int) -> None:
    """A record batch of Arrow; of CSV, 32 blocks of 256 KiB and those that are parsed."""
    rows = 1 << 21
    table = pyarrow.table({"a": np.random.default_rng(1).integers(0, 1 << 40, rows)})
    if name == "a.csv":
        pyarrow.csv.write_csv(table, tmp_path / name)
    else:
        pyarrow.feather.write_feather(table, tmp_path / name, chunksize=1 << 13)
    size = (tmp_path / name).stat().st_size
    files = Counting()
    data = columns(tmp_path / name, ids={"a": OpenIds()}, batch_size=1024, filesystem=files)
    files.begins.clear()
    for at, _ in enumerate(data, 1):
        time.sleep(0.05)  # so that what reads ahead comes as far as it may
        done = at * 1024 / rows
        assert max(files.begins) <= done * size + ahead, (at, max(files.begins), size)
        if at == 20:
            return
