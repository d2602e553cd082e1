"""The suite of peers: equal queries, exact rows, and killed systems as rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tierbed.errors import InvalidError, UnsupportedError
from tierbed_bench.common import StolenTime, least_stolen
from tierbed_bench.memory_group import MemoryGroup
from tierbed_bench.peers.queries import Queries
from tierbed_bench.peers.report import compared, medians, ratios
from tierbed_bench.peers.suite import PeersOptions, run_peers
from tierbed_bench.peers.systems import SYSTEMS
from tierbed_bench.peers.table import Table, forget_pages


def made(system: str, rows_per_s: float, **fields: object) -> dict[str, object]:
    measures = ("disk_bytes_per_query", "peak_bytes", "used_bytes", "open_s", "warm_queries")
    cell = {"rows": 26, "clients": 1, "memory_share": 0.01, "memory_bytes": 9, "round": 0}
    waits = {"p50_ms": 10 / rows_per_s, "p99_ms": 100 / rows_per_s, "queries": 5}
    return {
        "system": system,
        **cell,
        **dict.fromkeys((*measures, "stolen_share"), 0),
        "rows_per_s": rows_per_s,
        **waits,
        **fields,
    }


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_that_is_here_reads_the_rows(name: str, tmp_path: Path) -> None:
    table = Table(folder=tmp_path, row_count=40_000, dim=8)
    table.write()
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    try:
        peer = SYSTEMS[name](table, folder)
    except UnsupportedError as error:
        pytest.skip(str(error))
    peer.load()
    forget_pages(folder)
    peer.open(0 if peer.is_in_memory else 8 << 20, 1)
    try:
        for ids in Queries(table.row_count, 1.05, 3).drawn(20, 26):
            assert np.array_equal(peer.read(ids), table.rows(ids))
        ends = np.array([table.row_count - 1, 0])
        assert np.array_equal(peer.read(ends), table.rows(ends))
    finally:
        peer.close()


def test_queries_repeat_have_distinct_ids_and_follow_a_log(tmp_path: Path) -> None:
    drawn = Queries(10_000, 1.05, 1).drawn(50, 200)
    assert drawn.shape == (50, 200)
    assert all(len(set(ids)) == 200 for ids in drawn.tolist())
    assert 0 <= drawn.min() <= drawn.max() < 10_000
    assert np.array_equal(drawn, Queries(10_000, 1.05, 1).drawn(50, 200))
    assert not np.array_equal(drawn, Queries(10_000, 1.05, 2).drawn(50, 200))
    log = tmp_path / "log"
    log.write_text("0 1\n2 3\n1 2\n")
    # One copy of four rows: the first two queries are one of four, spread over the table.
    spread = [at * 2_654_435_761 % 5 for at in range(4)]
    assert Queries(5, 1.0, 1, log).drawn(1, 4).tolist() == [spread]
    with pytest.raises(InvalidError, match="the log has 4 rows"):
        Queries(5, 1.0, 1, log).drawn(1, 5)
    with pytest.raises(InvalidError, match="larger table"):
        Queries(30, 1.0, 1).drawn(1, 26)


def test_losses_and_killed_systems_are_rows() -> None:
    told = [made("tierbed", 50.0), made("memory_map", 100.0), made("lmdb", 25.0)]
    told.append({**made("redis", 1.0), "note": "killed"})
    del told[-1]["rows_per_s"]
    told.append(made("redis", 200.0, memory_share=None))
    rows = medians(told)
    assert [row.get("note") for row in rows if row["system"] == "redis"] == ["killed", None]
    (cell,) = compared(rows)
    assert (cell["best"], cell["rows_per_s_vs_best"], cell["p99_ms_vs_best"]) == (
        "memory_map",
        0.5,
        0.5,
    )
    found = ratios(told)
    assert found["26x1_memory0.01_rows_per_s_vs_lmdb"] == 2.0
    assert found["26x1_memory0.01_p99_vs_memory_map"] == 0.5
    assert found["26x1_memory0.01_rows_per_s_vs_redis_without_limit"] == 0.25
    (cell,) = compared([row for row in rows if row["system"] != "tierbed"])
    assert cell["rows_per_s_vs_best"] is None


def test_what_others_took_is_measured_again() -> None:
    shares = [0.3, 0.02, 0.05, 0.04, 0.0]
    rows = iter([{"stolen_share": share} for share in shares])
    assert least_stolen(lambda: next(rows), pause_s=0.0) == {"stolen_share": 0.02, "tries": 4}
    assert least_stolen(lambda: next(rows), pause_s=0.0) == {"stolen_share": 0.0, "tries": 1}
    assert least_stolen(lambda: {"note": "killed"}) == {"note": "killed"}
    assert 0.0 <= StolenTime().share() <= 1.0


def test_a_group_tells_its_peak_and_whom_the_limit_ended() -> None:
    try:
        group = MemoryGroup.make(f"tierbed-test-peers-{os.getpid()}")
    except UnsupportedError as error:
        pytest.skip(str(error))
    with group:
        group.allow(32 << 20)
        code = "import sys; sys.stdin.readline(); print(len(b'1' * (256 << 20)))"
        call = [sys.executable, "-c", code]
        with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as greedy:
            group.add(greedy.pid)
            greedy.communicate(b"go\n")
        assert greedy.returncode == -9
        assert group.killed_count() == 1
        assert (group.peak_bytes() or 32 << 20) <= 32 << 20
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
            group.add(waiting.pid)
            group.end_processes()
        assert waiting.returncode == -9
        group.allow(0)


@pytest.mark.slow
def test_systems_are_measured_under_one_limit(tmp_path: Path) -> None:
    options = PeersOptions(
        systems=("memory_map", "sqlite"),
        rows=(26,),
        clients=(2,),
        memory=(0.05,),
        table_bytes=32 << 20,
        quick=True,
    )
    try:
        path = run_peers(tmp_path, options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    found = json.loads(path.read_text())
    assert [row["system"] for row in found["rows"]] == ["tierbed", "memory_map", "sqlite"]
    limit = int(0.05 * (32 << 20)) + found["slack_bytes"]
    for row in found["rows"]:
        assert row["rows_per_s"] > 0.0
        assert row["peak_bytes"] is None or row["peak_bytes"] <= limit
    assert [row["rows"] for row in found["compared"]] == [26]
    assert (tmp_path / "peers.png").is_file()


def test_wrong_options_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="unknown systems"):
        run_peers(tmp_path, PeersOptions(systems=("leveldb",)))
    with pytest.raises(InvalidError, match="a share"):
        run_peers(tmp_path, PeersOptions(memory=(5.0,)))
