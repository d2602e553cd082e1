"""Formulas of sizing: by hand, in their units, and in the direction that they must go."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tierbed.errors import InvalidError
from tierbed.sizing import Inputs, plan_freshness, plan_serving, plan_training
from tierbed.sizing.inputs import DEFAULTS, PAGES_BY_SHARE
from tierbed.sizing.serving import least_shards
from tierbed.sizing.training import least_hosts, wire_bytes

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "data"
SERVED = {
    "table": 10e12,
    "requests_per_s": 1e6,
    "request_us": 30,
    "sample_us": 3,
    "page_us": 4,
    "rpc_us": 40,
    "pages": 1.64,
    "changed_rows_per_s": 0,
}
TRAINED = {
    "table": 1e12,
    "ids": 10,
    "dim": 32,
    "ranks": 4,
    "batch": 1000,
    "step_us": 20,
    "disk_bytes": 6000,
    "host_ssd_gb_per_s": 2,
    "host_gbit": 8,
}


def test_a_full_copy_is_computed_as_by_hand() -> None:
    found = plan_serving(Inputs(SERVED))
    # 30 + 3 + 1.64 x 4 = 39.56 us of a core for each of a million, of which half is used.
    assert found.cores == pytest.approx(79.12)
    assert found.iops == pytest.approx(3.28e6)
    # 200 B, 26 ids of 8 B and a score of 4 B.
    assert found.network_bytes_per_s == pytest.approx(2e6 * (200 + 26 * 8 + 4))
    # 39.06 G rows: 32 bits of a twentieth and a bit of each; and a hundredth of the bytes.
    assert found.dram_bytes == pytest.approx(10e12 / 256 * (32 * 0.05 + 1) / 8 + 100e9)
    assert found.ssd_bytes == pytest.approx(13e12)
    assert found.hosts_by_resource == {"cores": 3, "iops": 2, "network": 1, "copies": 2}
    assert (found.hosts, found.binds, found.fits) == (3, "cores", True)
    # 15,360 GB at 0.3125, over 36 months.
    assert found.money_per_month == pytest.approx(3 * (1588 + 4800 / 36))


def test_shards_are_computed_as_by_hand() -> None:
    found = plan_serving(Inputs(SERVED), 10)
    asked = 10 * (1 - 0.9**26)
    assert found.shards_per_request == pytest.approx(asked) == pytest.approx(9.354, abs=1e-3)
    assert found.cores == pytest.approx((39.56 + asked * 40) * 2)
    assert found.network_bytes_per_s == pytest.approx(2e6 * (412 + 26 * 256))
    assert found.hosts == math.ceil(found.cores / 32)
    assert found.dram_bytes == pytest.approx(plan_serving(Inputs(SERVED)).dram_bytes / 10)
    by_placement = plan_serving(Inputs({**SERVED, "shards_per_request": 3.0}), 10)
    assert by_placement.cores == pytest.approx((39.56 + 3 * 40) * 2)
    assert plan_serving(Inputs(SERVED), 50).binds == "copies"


def test_all_rows_in_the_index_take_no_bit_more() -> None:
    found = plan_serving(Inputs({**SERVED, "head_share": 1, "dram_share": 0.01}))
    assert found.dram_bytes == pytest.approx(10e12 / 256 * 4 + 100e9)


def test_deltas_take_memory_for_the_rows_that_change() -> None:
    still = plan_serving(Inputs(SERVED)).dram_bytes
    moving = plan_serving(Inputs({**SERVED, "changed_rows_per_s": 1000})).dram_bytes
    assert moving - still == pytest.approx(8 * 2.5 * 60_000)


def test_freshness_is_computed_as_by_hand() -> None:
    found = plan_freshness(Inputs({"table": 10e12, "changed_rows_per_s": 100_000}))
    changed = 100_000 * 60 * 256
    assert found.delta_bytes == changed
    assert found.fresh_s == pytest.approx(60 + 5 + changed / 3.125e9 + changed / 1e9)
    assert found.first_copy_s == pytest.approx(3200)


def test_a_step_is_computed_as_by_hand() -> None:
    found = plan_training(Inputs(TRAINED), 2)
    # 1,000 samples of 20 us; 24 MB at 2 GB/s; 4,000 x 10 x (2 x 128 + 8) / 2 B at 1 GB/s.
    wanted = {"compute": 0.020, "disk": 0.012, "network": 0.00528}
    assert found.parts_s == pytest.approx(wanted)
    assert (found.step_s, found.binds) == (pytest.approx(0.020), "compute")
    assert found.samples_per_s == pytest.approx(8000 / 0.020)
    together = plan_training(Inputs(TRAINED), 2, is_overlapped=False)
    assert together.step_s == pytest.approx(sum(wanted.values()))
    alone = plan_training(Inputs(TRAINED), 1)
    assert alone.parts_s["network"] == 0.0
    assert found.dram_bytes == pytest.approx(0.5e12 * (1 + 4 / 128) * 0.01)
    assert found.ssd_bytes == pytest.approx(0.5e12 * (1 + 4 / 128) * 1.18)


def test_measured_bytes_of_two_hosts_hold_for_more() -> None:
    inputs = Inputs({**TRAINED, "wire_bytes": 1000})
    assert wire_bytes(inputs, 2) == 1000
    assert wire_bytes(inputs, 4) == pytest.approx(1500)
    assert wire_bytes(inputs, 1) == 0


def test_what_does_not_fit_is_named() -> None:
    small = Inputs({**SERVED, "host_dram": 50e9})
    assert plan_serving(small).binds == "memory of a host"
    assert not plan_serving(small).fits
    shards = least_shards(small)
    assert plan_serving(small, shards).fits
    assert not plan_serving(small, shards - 1).fits
    crowded = plan_training(Inputs({**TRAINED, "ranks": 64}), 2)
    assert (crowded.fits, crowded.binds) == (False, "cores of a host")
    full = plan_training(Inputs({**TRAINED, "host_ssd": 100e9}), 2)
    assert full.binds == "disk of a host"


def test_the_fewest_hosts_train_what_is_wanted() -> None:
    inputs = Inputs({**TRAINED, "samples_per_s": 1_500_000})
    hosts = least_hosts(inputs)
    assert plan_training(inputs, hosts).samples_per_s >= 1_500_000
    assert plan_training(inputs, hosts - 1).samples_per_s < 1_500_000


AMOUNT = st.floats(1.0, 1e6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["requests_per_s", "request_us", "sample_us", "page_us", "pages"]), AMOUNT)
def test_more_work_needs_no_fewer_hosts(name: str, factor: float) -> None:
    less, more = Inputs(SERVED), Inputs({**SERVED, name: SERVED[name] * factor})
    for shards in (1, 10):
        before, after = plan_serving(less, shards), plan_serving(more, shards)
        assert after.cores >= before.cores
        assert after.hosts >= before.hosts
        assert after.money_per_month >= before.money_per_month


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["host_cores", "host_iops", "host_gbit", "utilization"]),
    st.floats(1.0, 1e3),
    st.integers(1, 40),
)
def test_larger_hosts_are_no_more_hosts(name: str, factor: float, shards: int) -> None:
    of = {"host_cores": 32, "host_iops": 3.2e6, "host_gbit": 100, "utilization": 0.5}[name]
    larger = min(1.0, of * factor) if name == "utilization" else of * factor
    before = plan_serving(Inputs(SERVED), shards)
    after = plan_serving(Inputs({**SERVED, name: larger}), shards)
    assert after.hosts <= before.hosts


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_more_memory_reads_no_more_pages(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert Inputs({"dram_share": high}).pages <= Inputs({"dram_share": low}).pages + 1e-12


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.booleans())
def test_a_host_more_trains_no_slower_where_compute_binds(hosts: int, is_overlapped: bool) -> None:
    inputs = Inputs({**TRAINED, "host_gbit": 100})
    before = plan_training(inputs, hosts, is_overlapped=is_overlapped)
    after = plan_training(inputs, hosts + 1, is_overlapped=is_overlapped)
    if before.hosts > 1 or is_overlapped:
        assert after.samples_per_s >= before.samples_per_s
    assert after.step_s >= before.step_s * (1 - 1e-12)
    assert after.ssd_bytes < before.ssd_bytes


def test_defaults_that_are_measured_are_those_of_their_files() -> None:
    def rows(suite: str, run: str, title: str) -> dict[str, list[float]]:
        found = json.loads((RESULTS / f"{suite}.json").read_text())["runs"]
        [tables] = [one["tables"] for one in found if one["title"] == run]
        [table] = [one for one in tables if one["title"] == title]
        return {row[0]: row[1:] for row in table["rows"]}

    value = {one.name: one.value for one in DEFAULTS}
    one = rows("serving", "Cost of a lookup at 4,000 requests a second", CPU)["tierbed_infer"][0]
    many = rows("serving", "Cost of a batch of 128 samples", "Measurements")["tierbed_infer"][0]
    assert value["sample_us"] == pytest.approx((many - one) / 127, rel=0.005)
    assert value["request_us"] == pytest.approx(one - value["sample_us"], rel=0.005)
    stores = rows("training", "Against stores on disk", "Stores on disk")["`forward`, 5 %"]
    assert value["disk_id_bytes"] == pytest.approx(stores[4] + stores[5])
    assert value["train_disk_ratio"] == stores[6]
    steps = rows("training", "Whole steps with a dense model", "Step time by batch size")
    assert value["step_us"] == pytest.approx(steps["DLRM, forward"][2] * 1e3 / 1024, rel=0.005)
    reads = rows("tiers", "Reads and accuracy", "Reads per request")
    for share, pages in PAGES_BY_SHARE[:2]:
        assert reads[f"{share * 100:.0f} %: `group-frequency`, f32, placed"][1] == pages
    # What a page costs beyond a request whose rows are all in memory: of 26 ids some miss.
    limited = json.loads((RESULTS / "serving.json").read_text())["runs"]
    half = {run["title"]: run["tables"][0] for run in limited}
    load = half["Half load and overload; 5 % of the rows in memory"]["rows"]
    cost = next(row[8] for row in load if row[0] == "limited" and row[2] == 4000.0)
    kept = half["Deltas and reloads at half load; 5 % of the rows in memory"]["rows"][0][13]
    assert value["page_us"] == pytest.approx((cost - one) / (26 * (1 - kept)), rel=0.005)


CPU = "Processor time for a request"


def test_inputs_are_checked() -> None:
    with pytest.raises(InvalidError, match="there is no input 'cores'"):
        Inputs({"cores": 1})
    with pytest.raises(InvalidError, match="the plan needs table; give --table"):
        plan_serving(Inputs({"requests_per_s": 1}))
    with pytest.raises(InvalidError, match="give --pages"):
        Inputs({"dram_share": 0.001}).pages  # noqa: B018
    assert {one.name for one in Inputs({}).used} == set()
