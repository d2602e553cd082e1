"""The suite of checkpoints: small, against SeaweedFS; it compares what it loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from s3_kit import WEED

pytest.importorskip("obstore")


@pytest.mark.skipif(not WEED.exists(), reason="no SeaweedFS; call scripts/s3-server")
def test_the_suite_measures_both_ways_beside_obstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierbed_bench import checkpoints

    monkeypatch.setattr(checkpoints, "QUICK_ROWS", 2_000)
    path = checkpoints.run_checkpoints(tmp_path, checkpoints.CheckpointOptions(quick=True))
    found = json.loads(path.read_text())
    assert {(row["variant"], row["way"]) for row in found["rows"]} == {
        (system, way) for system in ("tierbed", "obstore") for way in ("upload", "download")
    }
    assert all(row["bytes"] > 2_000 * 64 * 8 and row["bytes_per_s"] > 0 for row in found["rows"])
    assert set(found["ratios"]) == {"upload_vs_obstore", "download_vs_obstore"}
