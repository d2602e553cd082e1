"""Do placements from Python keep their promises, and is what is counted what a loop counts?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed._native import placement_methods
from tierbed.errors import CorruptionError, InvalidError
from tierbed.placement import measure_drift, read_log, rows_per_page_of

ROWS = 300


def circles(queries: int, seed: int, groups: int = 60) -> list[list[int]]:
    """Queries of two to five rows of one circle; the circles change with ``groups``."""
    luck = random.Random(seed)
    found = []
    for _ in range(queries):
        circle = luck.randrange(groups)
        found.append([circle + groups * at for at in luck.sample(range(5), luck.randint(2, 5))])
    return found


def log_of(queries: list[list[int]], row_count: int = ROWS) -> tb.QueryLog:
    offsets = [0]
    for query in queries:
        offsets.append(offsets[-1] + len(query))
    values = torch.tensor([row for query in queries for row in query])
    return tb.QueryLog.from_batches(row_count, [(values, torch.tensor(offsets))])


def text_of(path: Path, queries: list[list[int]]) -> Path:
    path.write_text("".join(" ".join(map(str, query)) + "\n" for query in queries))
    return path


def test_a_log_comes_in_as_it_was_written(tmp_path: Path) -> None:
    queries = circles(50, seed=1)
    log = tb.QueryLog.read(text_of(tmp_path / "log.txt", queries))
    assert [log[at] for at in range(len(log))] == queries
    log.write(tmp_path / "log.bin")
    again = tb.QueryLog.read(tmp_path / "log.bin", "maxembed")
    assert [again[at] for at in range(len(again))] == queries
    assert again.row_count == log.row_count == 1 + max(map(max, queries))
    earlier, later = log.split(0.8)
    assert (len(earlier), len(later)) == (40, 10)
    assert sorted(map(tuple, (log.shuffled(1)[at] for at in range(50)))) == sorted(
        map(tuple, queries)
    )
    assert len(log.sample(7)) == 7
    with pytest.raises(IndexError):
        log[50]


def test_samples_are_queries_over_all_their_features() -> None:
    # Feature a: [0, 2] and []; feature b: [1] and [0, 1]; rows of b begin at 3.
    samples = tb.KeyedJaggedTensor(
        ["a", "b"], torch.tensor([0, 2, 1, 0, 1]), lengths=torch.tensor([2, 0, 1, 2]), stride=2
    )
    log = tb.QueryLog.from_samples({"a": 3, "b": 2}, [samples, samples])
    assert [log[at] for at in range(4)] == [[0, 2, 4], [3, 4]] * 2
    assert log.row_count == 5
    with pytest.raises(InvalidError, match="beyond its table"):
        tb.QueryLog.from_samples({"a": 2, "b": 2}, [samples])
    only_b = tb.QueryLog.from_samples({"b": 2}, [samples])
    assert [only_b[at] for at in range(2)] == [[1], [0, 1]]
    with pytest.raises(InvalidError, match="lacks the features"):
        tb.QueryLog.from_samples({"a": 3, "c": 2}, [samples])


def test_columns_without_any_token_are_no_features_of_a_click_log(tmp_path: Path) -> None:
    # C1 has the tokens x, y and x; C3 z and twice none; all other columns are empty.
    lines = [("x", "", "z"), ("y", "", ""), ("x", "", "")]
    path = tmp_path / "clicks.tsv"
    path.write_text("".join("\t".join(["0", *[""] * 13, *t, *[""] * 23]) + "\n" for t in lines))
    log = read_log(path)
    # Rows 0, 1, 2 are C1's none, x and y; rows 3 and 4 C3's none and z. As in training, none is
    # a row of a column that has tokens.
    assert [log[at] for at in range(3)] == [[1, 4], [2, 3], [1, 3]]
    assert log.row_count == 5


def test_bad_logs_are_refused_with_their_line(tmp_path: Path) -> None:
    path = text_of(tmp_path / "log.txt", [[1, 2], [3]])
    path.write_text(path.read_text() + "4 five\n")
    with pytest.raises(InvalidError, match="line: 3"):
        tb.QueryLog.read(path)
    with pytest.raises(InvalidError, match="allowed"):
        tb.QueryLog.read(path, "csv")
    with pytest.raises(CorruptionError):
        tb.QueryLog.read(path, "maxembed")
    with pytest.raises(InvalidError, match="beyond the table"):
        log_of([[1, ROWS]])
    with pytest.raises(InvalidError, match="below 2"):
        log_of([[-1]])


def test_every_method_places_every_row_within_its_space() -> None:
    log = log_of(circles(400, seed=2))
    for method, replicates in placement_methods():
        placement = tb.place(log, rows_per_page=5, method=method, ratio=0.2 if replicates else 0.0)
        info = placement.info()
        pages = [placement.page(at) for at in range(info.page_count)]
        assert all(1 <= len(page) <= 5 for page in pages), method
        assert {row for page in pages for row in page} == set(range(ROWS)), method
        assert info.replica_count <= 0.2 * ROWS, method
        assert sum(map(len, pages)) == ROWS + info.replica_count, method


def test_reads_are_those_of_a_plain_loop() -> None:
    log = log_of(circles(200, seed=3))
    placement = tb.place(log, rows_per_page=4, method="shp", ratio=0.0)
    home = {}
    for at in range(placement.info().page_count):
        home.update(dict.fromkeys(placement.page(at), at))
    expected: dict[int, int] = {}
    for at in range(len(log)):
        pages = [home[row] for row in log[at]]
        for page in set(pages):
            expected[pages.count(page)] = expected.get(pages.count(page), 0) + 1
    for select in ("one_pass", "greedy"):
        reads = placement.reads(log, select=select, threads=2)
        found = {at: count for at, count in enumerate(reads.reads_by_useful_rows) if count}
        assert found == expected
        assert reads.pages / len(log) == pytest.approx(placement.connectivity(log))
    with pytest.raises(InvalidError, match="one_pass, greedy"):
        placement.reads(log, select="best")


def test_a_cache_in_front_takes_its_hits_away() -> None:
    log = log_of([[1, 2], [2, 3], [1, 2]])
    # Two rows of the table fit.
    stream = log.misses(log_of([[1, 2]]), 2 / ROWS, policy="lru")
    assert [stream.log[at] for at in range(3)] == [[], [3], [1]]
    assert stream.hit_ratio == pytest.approx(4 / 6)
    batch = log.misses(log, 0.0, batch=2)
    assert [batch.log[at] for at in range(2)] == [[1, 2, 3], [1, 2]]
    assert batch.query_count == 3


def test_files_come_back_and_damage_is_told(tmp_path: Path) -> None:
    log = log_of(circles(200, seed=4))
    placement = tb.place(log, rows_per_page=5, ratio=0.3).ordered_by_use(log)
    placement.write(tmp_path / "p.tbp")
    again = tb.Placement.read(tmp_path / "p.tbp")
    assert again.info() == placement.info()
    assert again.reads(log, index_limit=1) == placement.reads(log, index_limit=1)
    placement.write_mapping(tmp_path / "p.map")
    mapped = tb.Placement.read_mapping(tmp_path / "p.map", 5)
    assert mapped.reads(log, index_limit=None).pages == placement.reads(log, index_limit=None).pages
    damaged = bytearray((tmp_path / "p.tbp").read_bytes())
    damaged[100] ^= 1
    (tmp_path / "p.tbp").write_bytes(damaged)
    with pytest.raises(CorruptionError, match=r"p\.tbp"):
        tb.Placement.read(tmp_path / "p.tbp")


def test_a_page_holds_what_the_snapshot_format_has_room_for() -> None:
    assert [rows_per_page_of(dim) for dim in (16, 32, 64, 1000)] == [59, 30, 15, 1]
    for dim in (0, -1, 1018):
        with pytest.raises(InvalidError, match="dim must be"):
            rows_per_page_of(dim)


def test_a_placement_ages_when_the_circles_change() -> None:
    old = log_of(circles(600, seed=5))
    placement = tb.place(old, rows_per_page=5, method="shp", ratio=0.0)
    same = measure_drift(
        placement, log_of(circles(600, seed=6)), slices=4, method="shp", tolerance=0.5
    )
    assert same.rebuild_at is None
    changed = log_of(circles(2000, seed=7, groups=50))
    told = measure_drift(placement, changed, slices=4, method="shp", tolerance=0.02)
    assert told.rebuild_at == 1
    assert told.slices[0]["aged"] is None
    assert told.slices[3]["aged"] > 1.02
    with pytest.raises(InvalidError, match="slices"):
        measure_drift(placement, changed, slices=1)
