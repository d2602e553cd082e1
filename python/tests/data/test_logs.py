"""Text logs: the samples written are the samples read, from any place on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tierbed.data import (
    AvazuData,
    Batch,
    CriteoData,
    Vocabulary,
    build_vocabulary,
)
from tierbed.errors import CorruptionError, InvalidError, IoError
from tierbed_bench.generator import GeneratedData, write_criteo_tsv

ROWS = 3_000
SCALE = 0.001


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 1,000 samples: plain, gzip, zstd; and their vocabulary."""
    folder = tmp_path_factory.mktemp("logs")
    for at, suffix in enumerate(["", ".gz", ".zst"]):
        path = folder / f"day_{at}.tsv{suffix}"
        write_criteo_tsv(path, 1_000, scale=SCALE, seed=3, first_sample=at * 1_000)
    report = build_vocabulary(str(folder / "day_*"), folder / "vocabulary")
    assert report.sample_count == ROWS
    assert report.features[2].missing_count > 0
    return folder


def data(folder: Path, **options: int) -> CriteoData:
    return CriteoData(str(folder / "day_*"), folder / "vocabulary", 128, **options)


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.dense, right.dense)
        and torch.equal(left.label, right.label)
        and torch.equal(left.sparse.values(), right.sparse.values())
        and torch.equal(left.sparse.offsets(), right.sparse.offsets())
    )


def test_generated_logs_read_back_with_ids_renamed(logs: Path) -> None:
    generated = GeneratedData(SCALE, ROWS, 128, seed=3)
    names = dict(generated.table_sizes())
    renamed: list[dict[int, int]] = [{} for _ in names]
    count = 0
    for read, made in zip(data(logs), generated, strict=True):
        assert torch.equal(read.label, made.label)
        assert torch.equal(read.dense, made.dense)
        count += len(read)
        for at, feature in enumerate(names):
            ids = read.sparse[feature].values().tolist()
            for new, old in zip(ids, made.sparse[feature].values().tolist(), strict=True):
                assert renamed[at].setdefault(old, new) == new
    assert count == ROWS
    for ids_of in renamed:
        assert len(set(ids_of.values())) == len(ids_of), "two ids became one"


def test_ids_are_dense_and_fit_the_tables(logs: Path) -> None:
    source = data(logs)
    sizes = dict(source.table_sizes())
    seen: dict[str, set[int]] = {name: set() for name in sizes}
    for batch in source:
        assert batch.sparse.keys() == source.feature_names
        assert batch.dense.shape == (len(batch), 13)
        for name in sizes:
            seen[name].update(batch.sparse[name].values().tolist())
    for name, size in sizes.items():
        assert seen[name] | {0} == set(range(size)), name


@pytest.mark.parametrize("stop_after", [0, 1, 7, 8, 23])
def test_resume_is_exact(logs: Path, stop_after: int) -> None:
    whole = list(data(logs))
    source = data(logs)
    assert source.sample_count is None
    with pytest.raises(TypeError):
        len(source)
    walk = iter(source)
    for _ in range(stop_after):
        next(walk)
    state = json.loads(json.dumps(source.state_dict()))
    fresh = data(logs)
    fresh.load_state_dict(state)
    rest = list(fresh)
    assert len(rest) == len(whole) - stop_after
    assert all(same(a, b) for a, b in zip(rest, whole[stop_after:], strict=True))
    # The next epoch begins at the beginning; the end is known now.
    assert len(list(fresh)) == len(fresh) == len(whole)


def test_state_of_other_data_is_refused(logs: Path, tmp_path: Path) -> None:
    state = data(logs).state_dict()
    write_criteo_tsv(tmp_path / "day_0", 1_000, scale=SCALE, seed=9)
    build_vocabulary(tmp_path / "day_0", tmp_path / "vocabulary")
    with pytest.raises(InvalidError, match="other data"):
        data(tmp_path).load_state_dict(state)
    with pytest.raises(InvalidError, match="other data"):
        data(logs, stop=5).load_state_dict(state)


def test_the_last_part_in_time_is_kept_for_evaluation(logs: Path) -> None:
    train, held = data(logs).split_last(0.2)
    assert (train.count(), held.count(), len(train), len(held)) == (2_400, 600, 19, 5)
    parts = [batch.label for batch in train] + [batch.label for batch in held]
    assert torch.equal(torch.cat(parts), torch.cat([batch.label for batch in data(logs)]))
    again = list(held)
    assert all(same(a, b) for a, b in zip(again, held, strict=True))
    with pytest.raises(InvalidError):
        data(logs).split_last(1.5)


def test_batches_from_anywhere(logs: Path) -> None:
    source = data(logs)
    labels = torch.cat([batch.label for batch in source])
    for first, stop, size in [(0, 10, 4), (995, 2_011, 300), (2_999, 3_500, 7), (10, 10, 5)]:
        found = [batch.label for batch in source.batches(first, stop, size)]
        assert torch.equal(torch.cat([torch.empty(0), *found]), labels[first:stop])


def test_progress_reaches_the_end(logs: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    build_vocabulary(
        str(logs / "day_*"), tmp_path / "vocabulary", progress=lambda *now: told.append(now)
    )
    assert told[-1][0] == told[-1][1] > 0
    assert told == sorted(told)


def test_a_small_budget_and_a_first_part(logs: Path, tmp_path: Path) -> None:
    small = build_vocabulary(str(logs / "day_*"), tmp_path / "small", memory_budget_bytes=64 << 10)
    assert small.run_count > 0
    assert (tmp_path / "small").read_bytes() == (logs / "vocabulary").read_bytes()
    part = build_vocabulary(logs / "day_0.tsv", tmp_path / "part", samples=10, min_count=2)
    assert part.sample_count == Vocabulary(tmp_path / "part").sample_count == 10
    assert any(feature.rare_token_count for feature in part.features)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["part", "small"]


def test_malformed_lines(logs: Path, tmp_path: Path) -> None:
    lines = (logs / "day_0.tsv").read_text().splitlines(keepends=True)
    broken = tmp_path / "broken.tsv.gz"
    broken.write_bytes(gzip.compress("".join([*lines[:41], "no\tsample\n", *lines[41:]]).encode()))
    with pytest.raises(InvalidError, match=r'broken.tsv.gz, line: 42.*found: "no"'):
        build_vocabulary(broken, tmp_path / "vocabulary")
    report = build_vocabulary(broken, tmp_path / "vocabulary", bad_lines="skip")
    assert (report.sample_count, report.skipped_line_count) == (1_000, 1)
    source = CriteoData(broken, tmp_path / "vocabulary", 64, bad_lines="skip")
    assert sum(len(batch) for batch in source) == source.count() == 1_000
    assert source.skipped_line_count == 1


def test_damaged_and_wrong_files(logs: Path, tmp_path: Path) -> None:
    packed = (logs / "day_1.tsv.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorruptionError, match="gzip"):
        list(CriteoData(tmp_path / "cut.gz", logs / "vocabulary", 64))
    raw = bytearray((logs / "vocabulary").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "flipped").write_bytes(raw)
    with pytest.raises(CorruptionError, match="flipped"):
        Vocabulary(tmp_path / "flipped")
    with pytest.raises(InvalidError, match="not a vocabulary"):
        Vocabulary(logs / "day_0.tsv")
    with pytest.raises(InvalidError, match="no file matches"):
        CriteoData(str(tmp_path / "absent*"), logs / "vocabulary", 64)
    with pytest.raises(IoError):
        CriteoData(tmp_path / "absent", logs / "vocabulary", 64)
    with pytest.raises(InvalidError, match="batch_size"):
        CriteoData(logs / "day_0.tsv", logs / "vocabulary", 0)


def test_vocabulary_answers_for_tokens(logs: Path) -> None:
    for resident_budget_bytes in [0, 1 << 30]:
        vocabulary = Vocabulary(logs / "vocabulary", resident_budget_bytes)
        assert vocabulary.resident_bytes <= resident_budget_bytes
        fields = (logs / "day_0.tsv").read_text().splitlines()[0].split("\t")
        found = vocabulary.look_up("C1", [fields[14], fields[14].encode(), "", None, "never"])
        assert found.tolist() == [1, 1, 0, 0, 0]


def test_avazu(tmp_path: Path) -> None:
    log = tmp_path / "train.csv"
    log.write_text("id,click,hour,C1\n9,0,14102100,a\n8,1,14102123,\n7,1,14102200,a\n")
    build_vocabulary(log, tmp_path / "vocabulary", layout="avazu")
    source = AvazuData(log, tmp_path / "vocabulary", 2)
    assert source.feature_names == ["hour_of_day", "C1"]
    assert source.dense_count == 0
    first, last = list(source)
    assert first.label.tolist() == [0.0, 1.0]
    assert first.dense.shape == (2, 0)
    assert first.sparse.values().tolist() == [1, 2, 1, 0]
    assert last.sparse.values().tolist() == [1, 1]
    assert source.count() == 3


def shared(name: str) -> Path:
    path = Path(__file__).resolve().parents[4] / "shared" / "data" / "ctr" / name
    if not path.exists():
        pytest.skip(f"the real log {name} is not on this machine")
    return path


def test_real_criteo_rows(tmp_path: Path) -> None:
    log = shared("criteo_rows0-59999.tsv.gz")
    report = build_vocabulary(log, tmp_path / "vocabulary")
    assert report.sample_count == 60_000
    assert report.features[2].token_count == 27_207
    source = CriteoData(log, tmp_path / "vocabulary", 4_096)
    labels = torch.cat([batch.label for batch in source])
    assert (len(labels), int(labels.sum())) == (60_000, 13_487)
    assert len(source) == 15


def test_real_avazu_rows_in_criteo_layout(tmp_path: Path) -> None:
    log = shared("avazu_first9k.tsv.gz")
    report = build_vocabulary(log, tmp_path / "vocabulary")
    assert report.sample_count == 8_999
    source = CriteoData(log, tmp_path / "vocabulary", 1_000)
    assert sum(len(batch) for batch in source) == 8_999
    # Four of the 26 columns are empty throughout, and all integers are.
    assert [size for _, size in source.table_sizes()][-4:] == [1, 1, 1, 1]
    assert all(not batch.dense.any() for batch in source)
