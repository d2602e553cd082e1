"""Do sampled distances say what a memory of another size would have?"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tierbed.errors import InvalidError
from tierbed.report.reuse import ReuseSample


def least_recently_used(rows: list[int], capacity: int) -> float:
    """The simple loop: a memory of `capacity` rows."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        if row in kept:
            hits += 1
            kept.move_to_end(row)
        else:
            kept[row] = None
            if len(kept) > capacity:
                kept.popitem(last=False)
    return hits / len(rows)


def sampled(rows: NDArray[np.int64], row_count_max: int, at_once: int = 1) -> ReuseSample:
    sample = ReuseSample(row_count_max)
    for start in range(0, rows.size, at_once):
        some = rows[start : start + at_once]
        sample.note(np.zeros_like(some), some)
    return sample


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.sampled_from([1, 2, 3, 5, 8]))
def test_a_sample_of_all_rows_is_exact(rows: list[int], capacity: int) -> None:
    found = sampled(np.array(rows, np.int64), 1000).hit_ratio(capacity)
    assert found == pytest.approx(least_recently_used(rows, capacity))


@pytest.mark.parametrize(("row_count_max", "error_max"), [(512, 0.06), (4096, 0.04)])
def test_a_small_sample_is_near(row_count_max: int, error_max: float) -> None:
    drawn = np.random.default_rng(0).random(60_000) ** 3
    rows = (drawn * 20_000).astype(np.int64)
    sample = sampled(rows, row_count_max, at_once=64)
    assert sample.row_count <= row_count_max
    assert sample.rate < 1
    for capacity in (500, 2_000, 8_000):
        expected = least_recently_used(rows.tolist(), capacity)
        assert sample.hit_ratio(capacity) == pytest.approx(expected, abs=error_max)
    first = np.unique(rows).size / rows.size
    assert sample.first_use_ratio() == pytest.approx(first, abs=0.02)


def test_rows_of_tables_are_apart() -> None:
    sample = ReuseSample(100)
    sample.note(np.array([0, 1, 2]), np.array([7, 7, 7]))
    assert (sample.row_count, sample.first_use_ratio()) == (3, 1.0)


def test_a_row_twice_in_a_lookup_is_in_memory() -> None:
    sample = ReuseSample(100)
    sample.note(np.zeros(4, np.int64), np.array([7, 7, 7, 8]))
    assert sample.hit_ratio(1) == pytest.approx(0.5)


def test_nothing_seen_is_no_ratio() -> None:
    assert ReuseSample(10).hit_ratio(10) is None
    assert ReuseSample(10).first_use_ratio() is None
    with pytest.raises(InvalidError, match="at least 1 row"):
        ReuseSample(0)
