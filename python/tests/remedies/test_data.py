"""Remedies of logs, vocabularies, query logs and placements."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed._native import NativeQueryLogBuilder
from tierbed.data import AvazuData, CriteoData, Vocabulary, build_vocabulary
from tierbed.placement import LogOptions, QueryLog, place
from tierbed_bench.generator import write_criteo_tsv

from .kit import refused

AVAZU = "id,click,hour,C1\n9,0,14102100,a\n8,1,14102123,\n7,1,14102200,a\n"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for at in range(2):
        write_criteo_tsv(folder / f"day_{at}.tsv", 200, scale=0.001, seed=3, first_sample=200 * at)
    build_vocabulary(str(folder / "day_*"), folder / "vocabulary")
    return folder


def samples(source: Any) -> int:
    return sum(len(batch) for batch in source)


def test_a_log_without_its_header(logs: Path, tmp_path: Path) -> None:
    headless, whole = tmp_path / "headless.csv", tmp_path / "whole.csv"
    headless.write_text(AVAZU.split("\n", 1)[1])
    whole.write_text(AVAZU)
    remedy = "give the file's header line, or another format"
    for log in (headless, logs / "day_0.tsv"):
        with refused(tb.InvalidError, remedy):
            build_vocabulary(log, tmp_path / "v", layout="avazu")
    build_vocabulary(whole, tmp_path / "v", layout="avazu")
    assert samples(AvazuData(whole, tmp_path / "v", 2)) == 3
    assert build_vocabulary(logs / "day_0.tsv", tmp_path / "c").sample_count == 200


def test_a_vocabulary_of_another_format(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(AVAZU)
    build_vocabulary(tmp_path / "log.csv", tmp_path / "v", layout="avazu")
    with refused(tb.InvalidError, "use the vocabulary built from logs of this format"):
        samples(CriteoData(logs / "day_0.tsv", tmp_path / "v", 64))
    assert samples(CriteoData(logs / "day_0.tsv", logs / "vocabulary", 64)) == 200


def test_a_malformed_line_is_repaired_or_skipped(logs: Path, tmp_path: Path) -> None:
    lines = (logs / "day_0.tsv").read_text().splitlines(keepends=True)
    broken = tmp_path / "broken.tsv"
    broken.write_text("".join([*lines[:41], "no\tsample\n", *lines[42:]]))
    with refused(tb.InvalidError, "repair the line, or set bad_lines to skip") as caught:
        build_vocabulary(broken, tmp_path / "v")
    assert build_vocabulary(broken, tmp_path / "v", bad_lines="skip").sample_count == 199
    at = int(caught.value.context["line"]) - 1
    fixed = broken.read_text().splitlines(keepends=True)
    fixed[at] = lines[at]
    broken.write_text("".join(fixed))
    assert build_vocabulary(broken, tmp_path / "v").sample_count == 200


def test_a_folder_of_logs_is_given_by_its_files(logs: Path, tmp_path: Path) -> None:
    with refused(tb.InvalidError, "name the files inside, in time order"):
        build_vocabulary(logs, tmp_path / "v")
    files = sorted(logs.glob("day_*"))
    assert build_vocabulary(files, tmp_path / "v").sample_count == 400


def test_no_log_file_is_at_least_one(logs: Path, tmp_path: Path) -> None:
    for paths in ([], str(logs / "night_*")):
        with pytest.raises(tb.InvalidError):
            build_vocabulary(paths, tmp_path / "v")
    assert build_vocabulary(str(logs / "day_*"), tmp_path / "v").sample_count == 400


def test_every_token_is_kept_by_1(logs: Path, tmp_path: Path) -> None:
    with refused(tb.InvalidError, "1 keeps every token"):
        build_vocabulary(logs / "day_0.tsv", tmp_path / "v", min_count=0)
    report = build_vocabulary(logs / "day_0.tsv", tmp_path / "v", min_count=1)
    assert not any(feature.rare_token_count for feature in report.features)


def test_a_file_that_is_no_vocabulary(logs: Path) -> None:
    remedy = "give the file that was written when the vocabulary was built"
    with refused(tb.InvalidError, remedy):
        Vocabulary(logs / "day_0.tsv")
    assert Vocabulary(logs / "vocabulary").sample_count == 400


def test_a_line_without_an_end(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"x" * (3 << 20))
    remedy = "check that the file is a text log of the stated format"
    with refused(tb.InvalidError, remedy):
        build_vocabulary(tmp_path / "binary", tmp_path / "v")
    assert build_vocabulary(logs / "day_0.tsv", tmp_path / "v").sample_count == 200


def test_a_log_that_became_shorter_is_brought_back(logs: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.tsv.gz"
    lines = (logs / "day_0.tsv").read_bytes().splitlines(keepends=True)
    whole = gzip.compress(b"".join(lines))
    log.write_bytes(whole)

    def source() -> CriteoData:
        return CriteoData(log, logs / "vocabulary", 32)

    first = source()
    walk = iter(first)
    for _ in range(4):
        next(walk)
    state = first.state_dict()
    log.write_bytes(gzip.compress(b"".join(lines[:40])))
    again = source()
    with refused(tb.InvalidError, "resume with the same files and options"):
        again.load_state_dict(state)
    log.write_bytes(whole)
    again = source()
    again.load_state_dict(state)
    assert samples(again) == 200 - 4 * 32


# ---------------------------------------------------------------- query logs and placements


def _log(folder: Path) -> Path:
    path = folder / "log.txt"
    path.write_text("".join(f"{at} {(at + 1) % 40} {(at + 7) % 40}\n" for at in range(40)))
    return path


def test_a_log_without_queries(tmp_path: Path) -> None:
    path = _log(tmp_path)
    (tmp_path / "empty.txt").write_text("\n\n")
    remedy = "check the file and its format, or keep a larger sample"
    with refused(tb.InvalidError, remedy):
        QueryLog.read(tmp_path / "empty.txt", options=LogOptions(row_count=40))
    with refused(tb.InvalidError, remedy):
        QueryLog.read(path, options=LogOptions(row_count=40, sample=1e-9))
    assert len(QueryLog.read(path, options=LogOptions(row_count=40, sample=1.0))) == 40


def test_a_log_without_the_line_of_its_counts(tmp_path: Path) -> None:
    path = _log(tmp_path)
    with refused(tb.InvalidError, "read it as text without such a line"):
        QueryLog.read(path, "maxembed-text")
    assert len(QueryLog.read(path, "text", LogOptions(row_count=40))) == 40


def test_methods_of_placing(tmp_path: Path) -> None:
    log = QueryLog.read(_log(tmp_path), options=LogOptions(row_count=40))
    with refused(tb.InvalidError, "use one of ") as caught:
        place(log, rows_per_page=8, method="best")  # type: ignore[arg-type]
    for method in caught.value.context["remedy"].removeprefix("use one of ").split(", "):
        placed: Any = method
        try:
            place(log, rows_per_page=8, method=placed, ratio=0.3)
        except tb.InvalidError as error:
            assert "use ratio 0, or another method" in str(error)  # noqa: PT017 - some replicate
            place(log, rows_per_page=8, method=placed, ratio=0.0)


def test_a_query_log_that_is_finished_has_another_builder() -> None:
    def built() -> NativeQueryLogBuilder:
        builder = NativeQueryLogBuilder(40)
        builder.push(torch.tensor([1, 2, 3]), torch.tensor([0, 3]))
        builder.finish()
        return builder

    with refused(tb.InvalidError, "make another builder"):
        built().finish()
    built()
