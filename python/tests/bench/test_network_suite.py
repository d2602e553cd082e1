"""What crosses between hosts is what must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed_bench.hosts import why_no_hosts
from tierbed_bench.network import NetworkOptions, run_network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]


def test_rows_cross_once_for_a_host_and_ids_go_to_their_holder(tmp_path: Path) -> None:
    path = run_network(tmp_path, NetworkOptions(quick=True))
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        assert 1.0 < row["wire_vs_least"] <= 1.02
        assert row["ids_vs_gathered"] <= 0.1
        # Announced ids are not sent again.
        assert row["ids_bytes"] == rows[0]["ids_bytes"] or row["ids_per_bag"] == 4
