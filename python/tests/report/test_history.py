"""Counts over time, and the file beside a store that tells of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from report_kit import batches, store_in, train

import tierbed as tb
from tierbed.errors import InvalidError
from tierbed.report.counts import Counts
from tierbed.report.history import History, is_alive, progress_path, read_progress
from tierbed.report.observer import Observer


def counts(steps: int, **tiers: int) -> Counts:
    return Counts(
        steps=steps,
        ids=10 * steps,
        tiers=tiers or {"memory": steps},
        read_count=0,
        read_bytes=0,
        write_bytes=0,
        used_bytes=0,
    )


def test_a_long_history_stays_short_and_keeps_its_ends() -> None:
    history = History(0.0)
    for second in range(5000):
        history.add(float(second), counts(second))
    columns = history.columns
    assert len(history) <= 241
    assert columns["at_s"][0] == 0
    assert columns["at_s"][-1] >= 4950
    assert columns["steps"] == columns["at_s"], "counts stay with their moments"
    assert {len(column) for column in columns.values()} == {len(history)}


def test_a_tier_that_comes_later_was_empty_before() -> None:
    history = History(0.0)
    history.add(0.0, counts(1, memory=3))
    history.add(1.0, counts(2, memory=4, storage=5))
    assert history.columns["tier:storage"] == [0, 5]


def test_a_store_tells_its_progress_while_it_trains_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierbed.report.observer._TICK_S", 0.0)
    monkeypatch.setattr("tierbed.report.observer._WRITE_S", 0.0)
    folder = tmp_path / "store"
    with store_in(folder) as (store, emb):
        assert read_progress(folder) is None
        train(emb, batches(5))
        told = read_progress(folder)
        assert told is not None
        assert (told["state"], told["pid"], is_alive(told)) == ("running", os.getpid(), True)
        assert told["counts"]["ids"] == 5 * 64
        # The lookup of a step is told before its backward.
        assert told["counts"]["steps"] == 4
        stats = store.stats()
    told = read_progress(folder)
    assert told is not None
    assert (told["state"], told["counts"]["steps"]) == ("closed", 5)
    assert told["budget"] == stats["budget"]
    assert [table["name"] for table in told["tables"]] == ["item", "user"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "store.progress"]


def test_a_store_that_was_only_looked_at_tells_nothing(tmp_path: Path) -> None:
    with store_in(tmp_path / "store") as (store, _):
        store.checkpoint("empty")
    with tb.Store.open(tmp_path / "store", dram_budget="1MiB", read_only=True):
        pass
    assert not progress_path(tmp_path / "store").exists()


def test_a_place_that_cannot_be_written_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    progress_path(tmp_path / "store").mkdir()
    with store_in(tmp_path / "store") as (store, emb):
        train(emb, batches(2))
        assert store.stats()["steps"] == 2
    assert "tierbed top will not see this run" in caplog.text


def test_a_forked_child_tells_nothing(tmp_path: Path) -> None:
    with store_in(tmp_path / "store") as (store, emb):
        train(emb, batches(1))
        child = os.fork()
        if child == 0:
            Observer.close(store._observer)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert read_progress(tmp_path / "store") is None


def test_a_process_that_ended_is_known(tmp_path: Path) -> None:
    with store_in(tmp_path / "store") as (_, emb):
        train(emb, batches(1))
    told = read_progress(tmp_path / "store")
    assert told is not None
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_alive({**told, "pid": ended.pid}) is False
    assert is_alive({**told, "host": "elsewhere"}) is None


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"format": "tierbed-progress 99"})])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    progress_path(tmp_path / "store").write_text(text)
    with pytest.raises(InvalidError, match="remove it, training writes it anew"):
        read_progress(tmp_path / "store")


class Idle:
    """A store of the engine in which nothing happens."""

    def stats(self) -> dict[str, Any]:
        return {"budget": {"used_bytes": 0}, "order": {"kind": "window"}, **COUNTED}

    def schema(self) -> dict[str, Any]:
        return {"tables": []}


COUNTED = {
    "steps": 0,
    "buffer": {"row_capacity": 0},
    "store": {
        "io": {"read_count": 0, "read_bytes": 0, "write_bytes": 0},
        "rows_absent": 0,
        "rows_read": 0,
    },
}


def test_lookups_of_several_threads_are_all_noted() -> None:
    observer = Observer(Idle())
    observer.begin_sample(64)
    failures: list[Exception] = []

    def look_up(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(1000):
                rows = torch.randint(0, 5000, (8,), generator=generator)
                observer.note([0], rows, torch.arange(9))
        except Exception as error:
            failures.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert not failures
    assert observer.sample is not None
    assert observer.ids == observer.sample.use_count == 4 * 1000 * 8
    assert observer.sample.row_count <= 64
