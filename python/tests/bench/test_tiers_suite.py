"""The suite of tiers from one end to the other, small, and its limit of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierbed.errors import UnsupportedError
from tierbed_bench import TiersOptions, run_tiers
from tierbed_bench.memory_group import MemoryGroup


def test_a_group_counts_and_bounds_the_page_cache(tmp_path: Path) -> None:
    name = f"tierbed-test-{os.getpid()}"
    try:
        group = MemoryGroup.make(name)
    except UnsupportedError as error:
        pytest.skip(str(error))
    file = tmp_path / "pages"
    file.write_bytes(bytes(32 << 20))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read = "import sys; sys.stdin.readline(); print(len(open(sys.argv[1], 'rb').read(1 << 20)))"
    with (
        group,
        subprocess.Popen(
            [sys.executable, "-c", read, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader,
    ):
        group.add(reader.pid)
        group.allow(64 << 20)
        assert reader.communicate("go\n")[0] == f"{1 << 20}\n"
        assert 0 <= group.used_bytes() < 64 << 20
        group.allow(0)
    assert not group.folder.exists()
    with pytest.raises(UnsupportedError):
        MemoryGroup(tmp_path)


@pytest.mark.slow
def test_systems_are_counted_and_served_within_their_bytes(tmp_path: Path) -> None:
    options = TiersOptions(quick=True, requests=40, shares=(0.05,), table_bytes=16 << 20)
    run_tiers(tmp_path, options, tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    counted = {row["system"]: row for row in told["rows"] if row["part"] == "counted"}
    served = {row["system"]: row for row in told["rows"] if row["part"] == "served"}
    assert counted["memory"]["auc_change"] == 0.0
    for row in counted.values():
        used = row["cache_used_bytes"]
        assert used <= row["dram_bytes"] or row["system"] in ("memory", "mmap")
    pages = {name: row["pages_read_per_request"] for name, row in counted.items()}
    assert 0 < pages["group_frequency_f32_placed"] < pages["ev_lfu"]
    # As many bytes of narrow rows hold all that so few requests ask for.
    assert pages["group_frequency_int8_placed"] == 0
    assert served["memory"]["rows_read_per_request"] > 0
    reads = {name: row["rows_read_per_request"] for name, row in served.items() if "tiers" in row}
    assert (
        reads["group_frequency_gauss4"]
        <= reads["group_frequency_int8"]
        <= reads["group_frequency_f32"]
    )
    assert served["group_frequency_no_reads"]["pages_read_per_request"] == 0
    assert served["group_frequency_no_reads"]["approximate_rows_per_request"] > 0
    assert "auc_change" not in served["mmap"]
    # What is exact scores as the rows in memory do.
    for name in ("flash_embedding", "ev_lfu_f32", "group_frequency_f32"):
        assert abs(served[name]["auc_change"]) < 1e-9, name
        assert served[name]["latency_us_p90"] <= served[name]["latency_us_p99"]
    simulated = [row for row in served.values() if row["is_simulated"]]
    assert len(simulated) == 15
    assert all(row["system"].startswith("simulated_") for row in simulated)
    shared = {row["system"]: row for row in told["rows"] if row["part"] == "shared"}
    for traffic in ("equal", "uneven"):
        even, one = shared[f"even_{traffic}"], shared[f"shared_{traffic}"]
        assert even["answers_crc"] == one["answers_crc"], "the same bits"
        assert 0 < one["used_bytes_max"] <= one["budget_bytes"]
        assert len(one["members"]) == one["models"] == 4
        assert one["rows_read_per_request"] > 0
    mapped = served["mmap"]
    assert "note" in mapped or mapped["limit_bytes"] > mapped["rows_bytes"]
