"""The suite of shuffled epochs: equal rows whatever the way, and what moves between epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.errors import InvalidError
from tierbed_bench.epochs import WAYS, EpochsOptions, run_epochs


def test_epochs_planned_together_move_fewer_bytes(tmp_path: Path) -> None:
    # Twice as many bytes of rows as of memory: what moves is on disk.
    options = EpochsOptions(
        epochs=2, samples=6400, rows=60_000, tables=4, dim=32, batch=64, rounds=1
    )
    found = json.loads(run_epochs(tmp_path, options).read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert tuple(rows) == WAYS
    assert [rows[way]["order"] for way in WAYS[1:]] == ["window", "forward", "forward"]
    assert (rows["one_by_one"]["replans"], rows["together"]["replans"]) == (1, 0)
    for way in WAYS:
        assert rows[way]["ids_per_s"] > 0.0
    written = {way: rows[way]["written_bytes_per_id"] for way in WAYS}
    assert written["together"] < written["one_by_one"]
    speeds = [rows[way]["ids_per_s"] for way in ("together", "window")]
    assert found["ratios"]["together_vs_window"] == pytest.approx(speeds[0] / speeds[1])
    assert (tmp_path / "epochs.png").is_file()


def test_raw_ids_are_planned_as_rows_are(tmp_path: Path) -> None:
    options = EpochsOptions(
        epochs=2, samples=3200, rows=20_000, tables=2, batch=64, rounds=1, raw_ids=True
    )
    found = json.loads(run_epochs(tmp_path, options).read_text())
    assert found["raw_ids"]
    rows = {row["way"]: row for row in found["rows"]}
    assert [rows[way]["order"] for way in WAYS[1:]] == ["window", "forward", "forward"]


def test_several_collections_follow_one_plan(tmp_path: Path) -> None:
    options = EpochsOptions(
        epochs=2, samples=3200, rows=20_000, tables=4, batch=64, rounds=1, collections=2
    )
    found = json.loads(run_epochs(tmp_path / "two", options).read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert [rows[way]["order"] for way in WAYS[1:]] == ["window", "forward", "forward"]
    assert (rows["one_by_one"]["replans"], rows["together"]["replans"]) == (1, 0)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidError, match="--epochs begin at 2"):
        EpochsOptions(epochs=1)
    with pytest.raises(InvalidError, match="--samples fill"):
        EpochsOptions(samples=10, batch=20)
    with pytest.raises(InvalidError, match="--share"):
        EpochsOptions(share=0.0)
    with pytest.raises(InvalidError, match="equal parts"):
        EpochsOptions(tables=4, collections=3)
    with pytest.raises(InvalidError, match="--raw-ids"):
        EpochsOptions(collections=2, raw_ids=True)
