"""Every file of measurements can be read, and the README's chart shows the measured numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tierbed_bench.suite import write_suite

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "scripts" / "site"))

import charts  # noqa: E402
import results  # noqa: E402

DATA = REPOSITORY / "docs" / "results" / "data"


def test_every_suite_is_read_and_becomes_a_page() -> None:
    suites = results.load(DATA)
    assert suites
    for suite in suites:
        page = results.page(suite)
        for run in suite.runs:
            assert run.command in page
            assert run.machine[1:] in page
            assert run.date in page
    claims = [claim for suite in suites for run in suite.runs for claim in run.claims]
    assert {claim.outcome for claim in claims} >= {"better", "worse"}
    index = results.index(suites)
    assert all(claim.claim in index for claim in claims)


def test_what_a_benchmark_writes_is_read(tmp_path: Path) -> None:
    rows = [{"system": "a", "rows_per_s": 2.0}, {"system": "b", "rows_per_s": 1.0}]
    path = write_suite(tmp_path, "lookup", rows, {"a_vs_b": 2.0, "a_vs_c": None})
    suite = results.read(path)
    assert suite.runs[0].tables[0].rows == [["a", 2.0], ["b", 1.0]]
    assert [(claim.measurement, claim.baseline) for claim in suite.runs[0].claims] == [(2.0, "b")]


@pytest.mark.parametrize(
    "change",
    [
        {"suite": "other"},
        {"target": 1},
        {"runs": [{"title": "no command"}]},
    ],
)
def test_files_of_another_form_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "lookup.json"
    good = json.loads((DATA / "lookup.json").read_text())
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(ValueError, match=r"lookup\.json"):
        results.read(path)


def test_the_chart_of_the_readme_shows_the_measured_numbers() -> None:
    assert charts.digest(charts.readme_table()) in charts.README_CHART.read_text()
