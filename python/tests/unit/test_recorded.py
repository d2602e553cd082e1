"""What a snapshot is asked becomes the log of the next placement."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.placement import LogOptions, QueryLog, import_tables, place
from tierbed.serve import Server

ROWS = 40


def _snapshot(path: Path) -> Path:
    tables = {"a": torch.rand(ROWS, 4), "b": torch.rand(30, 4), "wide": torch.rand(20, 8)}
    import_tables(tables, path)
    return path


def _bags(samples: int) -> tb.KeyedJaggedTensor:
    """Sample ``s`` asks for rows ``s`` and ``s + 1`` of both tables."""
    ids = torch.stack([torch.arange(samples), torch.arange(samples) + 1], 1).flatten()
    return tb.KeyedJaggedTensor(
        ["a", "b"], ids.repeat(2), lengths=torch.full((2 * samples,), 2, dtype=torch.int64)
    )


def test_recorded_queries_are_a_log_to_place_by(tmp_path: Path) -> None:
    with tb.Snapshot.open(_snapshot(tmp_path / "snapshot")) as snapshot:
        assert snapshot.stats()["snapshot"]["recorded"] is None
        paths = snapshot.record(tmp_path / "logs", tables=[("a", "b"), "wide"])
        for _ in range(5):
            snapshot.lookup(_bags(20))
        assert snapshot.stats()["snapshot"]["recorded"]["queries_recorded"] == 100
        with pytest.raises(tb.InvalidError, match="already"):
            snapshot.record(tmp_path / "again")
    assert paths == [tmp_path / "logs" / "a+b", tmp_path / "logs" / "wide"]
    log = QueryLog.read(paths[0], options=LogOptions(row_count=70))
    assert len(log) == 100
    assert log[3] == [3, 4, ROWS + 3, ROWS + 4]
    placement = place(log, rows_per_page=8, ratio=0.1)
    placement.write(tmp_path / "placed.tbp")
    tables = {"a": torch.rand(ROWS, 4), "b": torch.rand(30, 4)}
    import_tables(tables, tmp_path / "next", placement={("a", "b"): tmp_path / "placed.tbp"})


def test_a_server_records_what_it_answers(tmp_path: Path) -> None:
    from tierbed.cli.serving import ask

    with tb.Snapshot.open(_snapshot(tmp_path / "snapshot")) as snapshot:
        paths = snapshot.record(tmp_path / "logs")
        with Server(snapshot, "127.0.0.1:0") as server:
            features = {"a": {"values": [7, 5, 9], "offsets": [0, 2, 3]}}
            ask(f"http://{server.address}", "/v1/lookup", {"features": features})
    assert [path.name for path in paths] == ["a", "b", "wide"]
    log = QueryLog.read(paths[0])
    assert [log[at] for at in range(len(log))] == [[7, 5], [9]]
    assert list(paths[1].iterdir()) == []


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with tb.Snapshot.open(_snapshot(tmp_path / "snapshot")) as snapshot:
        with pytest.raises(tb.InvalidError, match="same dim"):
            snapshot.record(tmp_path / "logs", tables=[("a", "wide")])
        with pytest.raises(tb.InvalidError, match="no table"):
            snapshot.record(tmp_path / "logs", tables=["c"])
        with pytest.raises(tb.InvalidError, match="sample"):
            snapshot.record(tmp_path / "logs", sample=2.0)


def _record(path: Path, queries: str) -> None:
    """Writes a file as the recorder does: it appears whole."""
    partial = path.with_suffix(".tmp")
    partial.write_text(queries)
    partial.rename(path)


def test_uploads_that_fail_are_tried_again_and_losses_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    from tierbed.serve.recorded_upload import RecordUpload

    target = tmp_path / "store"
    target.write_text("a file where a folder must be")
    upload = RecordUpload(f"file://{target}", interval_s=0.02)
    group = upload.folder / "a+b"
    with upload:
        group.mkdir()
        _record(group / "queries-00000001.txt", "1\n")
        until = time.monotonic() + 10
        while "recorded queries wait" not in capsys.readouterr().err:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert upload.uploaded_count == 0
        # The recorder makes room.
        (group / "queries-00000001.txt").unlink()
        target.unlink()
        _record(group / "queries-00000002.txt", "2\n")
    assert (upload.uploaded_count, upload.lost_count) == (1, 1)
    assert [path.read_text() for path in target.rglob("queries-*")] == ["2\n"]
    assert not upload.folder.exists()
