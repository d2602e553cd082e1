"""Tiers of a snapshot from Python: plans fit their budget, answer without reading, and survive a
file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.codec import Codec
from tierbed.placement import import_tables
from tierbed.serve.cache import cache_parts

SIZES = {"a": 900, "b": 300}
DIM = 8


@pytest.fixture(scope="module")
def tables() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(n, DIM, generator=generator) for name, n in SIZES.items()}


@pytest.fixture(scope="module")
def folder(tables: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiers") / "snapshot"
    import_tables(tables, path)
    return path


def counts() -> dict[str, torch.Tensor]:
    return {name: 1000.0 / (1 + torch.arange(n)) for name, n in SIZES.items()}


def every_row(snapshot: tb.Snapshot) -> dict[str, torch.Tensor]:
    found = {}
    for name, count in SIZES.items():
        bags = tb.KeyedJaggedTensor([name], torch.arange(count), lengths=torch.ones(count).long())
        found[name] = snapshot.lookup(bags)[name]
    return found


def test_a_plan_answers_without_reading(
    folder: Path, tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    budget = 20_000
    plan = tb.plan_tiers(tables, counts(), dram_bytes=budget, tails=("product2",))
    with tb.Snapshot.open(folder, cache=[], resident=plan, misses="surrogate") as snapshot:
        found = every_row(snapshot)
        stats = snapshot.stats()["snapshot"]
    assert stats["io"]["read_count"] == 0
    assert 0.9 * budget < stats["resident_bytes"] <= budget
    lookups = stats["lookups"]
    assert lookups["rows_resident"] == plan.about["head_rows"] > 0
    assert lookups["rows_surrogate"] == sum(SIZES.values()) - plan.about["head_rows"]
    for table in plan.tables:
        head = Codec(table.head_codec, DIM)
        assert torch.equal(found[table.name][table.head_rows], head.decode(table.head_codes))
        tail = Codec("product", DIM, plan.codebooks[DIM])
        expected = tail.decode(table.tail_codes)
        expected[table.head_rows] = head.decode(table.head_codes)
        assert torch.equal(found[table.name], expected)
    # Rows used often come first.
    assert torch.equal(plan.tables[0].head_rows[:20], torch.arange(20))
    plan.save(tmp_path / "plan")
    with tb.Snapshot.open(
        folder, cache=[], resident=tmp_path / "plan", misses="default"
    ) as snapshot:
        again = every_row(snapshot)
    assert all(torch.equal(again[name], found[name]) for name in SIZES)


def test_a_larger_budget_errs_less(tables: dict[str, torch.Tensor]) -> None:
    errors = [
        tb.plan_tiers(tables, counts(), dram_bytes=b).about["relative_error_by_use"]
        for b in (2_000, 15_000, 25_000)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[2]
    with pytest.raises(tb.InvalidError, match="no plan fits"):
        tb.plan_tiers(tables, counts(), dram_bytes=100)


def test_a_changed_plan_is_refused(
    folder: Path, tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    plan = tb.plan_tiers(tables, counts(), dram_bytes=2_000, tails=("default",))
    path = tmp_path / "plan"
    plan.save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(tb.CorruptionError):
        tb.TierPlan.load(path)
    path.write_bytes(b"x")
    with pytest.raises(tb.InvalidError):
        tb.Snapshot.open(folder, resident=path)
    other = tb.TierPlan(tables=plan.tables, about={"snapshot": "of another"})
    with pytest.raises(tb.InvalidError, match="another snapshot"):
        tb.Snapshot.open(folder, resident=other)


def test_misses_without_a_plan(folder: Path, tables: dict[str, torch.Tensor]) -> None:
    with tb.Snapshot.open(folder, misses="surrogate") as snapshot:
        assert all(torch.equal(every_row(snapshot)[name], tables[name]) for name in SIZES)
    with tb.Snapshot.open(folder, cache=[], misses="default") as snapshot:
        assert all(not bool(rows.any()) for rows in every_row(snapshot).values())
        assert snapshot.stats()["snapshot"]["lookups"]["rows_default"] == sum(SIZES.values())


def test_tiers_by_name(folder: Path, tables: dict[str, torch.Tensor]) -> None:
    wide = tb.CacheTier(codec="int8", policy="group_frequency", share=3.0)
    assert cache_parts([wide, "int4:lru, lru"]) == [wide, "int4:lru", "lru"]
    often = tb.KeyedJaggedTensor(["a"], torch.arange(20), lengths=torch.ones(20).long())
    with tb.Snapshot.open(
        folder, cache=tb.CacheOptions(tiers=[wide, "int4:lru"], bytes_max=30_000)
    ) as snapshot:
        for _ in range(4):
            snapshot.lookup(often)
        found = every_row(snapshot)
        before = snapshot.stats()["snapshot"]["tiers"][0]["hits"]
        snapshot.lookup(often)
        tiers = snapshot.stats()["snapshot"]["tiers"]
    assert [(tier["codec"], tier["policy"]) for tier in tiers] == [
        ("int8", "group_frequency"),
        ("int4", "lru"),
    ]
    # A scan of all rows leaves those that are used often, and what leaves falls a tier.
    assert tiers[0]["hits"] == before + 20
    assert tiers[1]["insertions"] > 0
    assert sum(tier["data_bytes"] + tier["metadata_bytes"] for tier in tiers) <= 30_000
    error = (found["a"] - tables["a"]).norm() / tables["a"].norm()
    assert 0.0 < float(error) < 0.15
    for wrong in ("int8:fifo2", "product", "int8:lru:0"):
        with pytest.raises(tb.InvalidError):
            tb.Snapshot.open(folder, cache=wrong)


def test_a_tier_too_small_for_any_row_says_so(folder: Path) -> None:
    def small(bytes_max: int) -> tb.CacheOptions:
        return tb.CacheOptions(tiers="int8:group_frequency", bytes_max=bytes_max)

    with pytest.warns(RuntimeWarning, match="int8:group_frequency has too few bytes"):
        tb.Snapshot.open(folder, cache=small(500)).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.Snapshot.open(folder, cache=small(0)).close()
        tb.Snapshot.open(folder, cache=small(30_000)).close()
