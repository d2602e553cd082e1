"""Policies on logs: what ``group_frequency`` and ``auto`` are for, as inequalities.

The quick logs are made here. Real ones are used where they lie beside the repository.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import REAL_LOG
from tierbed_bench.sim.cache import SimOptions, simulate

QUERIES = REAL_LOG.parent.parent / "queries"
REAL_LOGS = sorted(QUERIES.glob("*.txt.gz")) if QUERIES.is_dir() else []
RIVALS = ("lru", "s3_fifo", "ev_car", "ev_lfu", "group_frequency", "group_frequency_drifting")
Rates = dict[tuple[str, float], tuple[float, float]]


def _rates(log: Path, policies: tuple[str, ...], shares: tuple[float, ...]) -> Rates:
    options = SimOptions(policies=policies, capacity_shares=shares, has_bounds=False)
    return {
        (row["policy"], row["capacity_share"]): (row["perfect_hit_rate"], row["misses_per_request"])
        for row in simulate(log, options)["rows"]
    }


def _check_auto(rates: Rates, share: float) -> None:
    perfect = {name: rates[name, share][0] for name in (*RIVALS, "auto")}
    best = max(perfect[name] for name in RIVALS)
    assert perfect["auto"] >= best - 0.015, perfect
    # Strictly, but for logs on which nobody has a perfect hit.
    assert perfect["auto"] > perfect["ev_lfu"] or best < 0.005, perfect


def _write(path: Path, queries: list[list[int]]) -> Path:
    path.write_text("".join(" ".join(map(str, rows)) + "\n" for rows in queries))
    return path


@pytest.mark.parametrize("drift", [0.0, 0.2, 2.0])
def test_auto_is_near_the_best_whether_favourites_move_or_not(tmp_path: Path, drift: float) -> None:
    draw = random.Random(7)
    queries = [
        sorted({int(8_000 ** draw.random() + number * drift) for _ in range(4)})
        for number in range(20_000)
    ]
    rates = _rates(_write(tmp_path / "log.txt", queries), (*RIVALS, "auto"), (0.05,))
    _check_auto(rates, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("log", REAL_LOGS, ids=lambda log: log.name)
def test_auto_is_near_the_best_on_real_logs(log: Path) -> None:
    _check_auto(_rates(log, (*RIVALS, "auto"), (0.05,)), 0.05)


@pytest.mark.skipif(not REAL_LOG.exists(), reason="no real log beside the repository")
def test_group_frequency_has_more_perfect_hits_and_fewer_misses_than_ev_lfu() -> None:
    fewer = {0.005: 0.15, 0.01: 0.15, 0.02: 0.15, 0.05: 0.15, 0.1: 0.15, 0.2: 0.11}
    rates = _rates(REAL_LOG, ("lru", "ev_lfu", "group_frequency"), tuple(fewer))
    for share, saved in fewer.items():
        perfect, misses = rates["group_frequency", share]
        rival_perfect, rival_misses = rates["ev_lfu", share]
        assert perfect >= rival_perfect, share
        assert misses <= (1 - saved) * rival_misses, share
        # EVStore §4.3, figure 5: groups are worth more than recency.
        assert rival_perfect > rates["lru", share][0], share
    assert rates["ev_lfu", 0.05][0] > rates["lru", 0.05][0] + 0.10
