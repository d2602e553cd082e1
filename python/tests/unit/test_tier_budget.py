"""Several snapshots on one budget of cached rows, and approximate answers that become exact."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.placement import import_tables
from tierbed.results import TierMemberStats

ROWS = 4000
DIM = 16
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(table: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "snapshot"
    import_tables({"a": table}, path)
    return path


def look(snapshot: tb.Snapshot, rows: torch.Tensor) -> torch.Tensor:
    lengths = torch.ones(rows.numel(), dtype=torch.int64)
    return snapshot.lookup(tb.KeyedJaggedTensor(["a"], rows, lengths=lengths))["a"]


def members(budget: tb.TierBudget) -> tuple[TierMemberStats, ...]:
    stats = budget.stats()
    assert stats.used_bytes <= stats.limit_bytes
    return stats.members


def test_memory_follows_demand_and_answers_stay_the_same(folder: Path, table: torch.Tensor) -> None:
    budget = tb.TierBudget("512KiB", epoch_groups=100)
    generator = torch.Generator().manual_seed(1)
    with tb.Snapshot.open(folder, cache=tb.CacheOptions(budget=budget, floor="128KiB")) as many:
        with tb.Snapshot.open(folder, cache=tb.CacheOptions(budget=budget, floor="128KiB")) as few:
            assert members(budget)[1].floor_bytes == 128 << 10
            for _ in range(2500):
                for snapshot, count in ((many, ROWS), (few, 40)):
                    rows = torch.randint(0, count, (8,), generator=generator)
                    assert torch.equal(look(snapshot, rows), table[rows])
                members(budget)
            first, second = members(budget)
            assert first.capacity_bytes > 2 * second.capacity_bytes, (first, second)
            assert first.name == str(folder)
            assert second.rows_hit > 0.9 * second.rows_asked
        assert len(members(budget)) == 1
        assert members(budget)[0].capacity_bytes > first.capacity_bytes
    assert budget.stats().used_bytes == 0
    assert repr(budget) == f"TierBudget(limit_bytes={512 << 10}, members=0)"


def test_what_does_not_fit_a_budget_is_refused(folder: Path) -> None:
    for wrong in (0, -1, "nothing"):
        with pytest.raises(tb.InvalidError):
            tb.TierBudget(wrong)
    budget = tb.TierBudget(LIMIT)
    for options in (
        {"budget": budget, "bytes_max": 1000},
        {"budget": budget, "tiers": []},
        {"budget": budget, "floor": 2 * LIMIT},
        {"budget": budget, "floor": 10},
        {"floor": 10},
    ):
        with pytest.raises(tb.InvalidError):
            tb.Snapshot.open(folder, cache=tb.CacheOptions(**options))
    assert budget.stats().members == ()


def test_approximate_answers_become_exact(folder: Path, table: torch.Tensor) -> None:
    plan = tb.plan_tiers(
        {"a": table}, {"a": torch.ones(ROWS)}, dram_bytes=30_000, tails=("product2",)
    )
    rows = torch.arange(0, ROWS, 50)
    for refresh in (True, ["a"]):
        cache = tb.CacheOptions(refresh=refresh)
        with tb.Snapshot.open(folder, resident=plan, misses="surrogate", cache=cache) as snapshot:
            first = look(snapshot, rows)
            before = snapshot.stats()["snapshot"]
            asked = before["lookups"]["rows_surrogate"]
            assert asked > 0
            assert before["lookups"]["rows_read"] == 0
            until = time.monotonic() + 30
            while snapshot.stats()["snapshot"]["refreshed"]["rows_read"] < asked:
                assert time.monotonic() < until
            refreshed = snapshot.stats()["snapshot"]["refreshed"]
            second = look(snapshot, rows)
        assert refreshed["rows_dropped"] == refreshed["rows_failed"] == 0
        assert refreshed["error"] is None
        exact = (second == table[rows]).all(dim=1)
        assert int(exact.sum()) >= asked
        assert not torch.equal(first, table[rows])


def test_only_tables_with_approximate_answers_are_refreshed(folder: Path) -> None:
    for misses, options in (
        ("read", {"refresh": True}),
        ("default", {"refresh": "a"}),
        ("default", {"refresh": []}),
        ("default", {"refresh": ["b"]}),
        ("default", {"refresh": True, "tiers": []}),
    ):
        with pytest.raises(tb.InvalidError):
            tb.Snapshot.open(folder, misses=misses, cache=tb.CacheOptions(**options))
    with tb.Snapshot.open(folder, misses="default") as snapshot:
        assert snapshot.stats()["snapshot"]["refreshed"] is None
