"""Do the metrics agree with brute force?"""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tierbed.errors import InvalidError
from tierbed.recipes.metrics import auc, log_loss, pr_auc, summary


def brute_auc(labels: list[int], scores: list[float]) -> float:
    pairs = [
        (s > t) + 0.5 * (s == t)
        for y, s in zip(labels, scores, strict=True)
        if y
        for z, t in zip(labels, scores, strict=True)
        if not z
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def brute_average_precision(labels: list[int], scores: list[float]) -> float:
    positives = sum(labels)
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [y for y, s in zip(labels, scores, strict=True) if s >= threshold]
        recall = sum(chosen) / positives
        total += (recall - recall_before) * sum(chosen) / len(chosen)
        recall_before = recall
    return total


samples = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])),
    min_size=2,
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(samples)
def test_areas_equal_their_definitions_with_ties(pairs: list[tuple[int, float]]) -> None:
    labels, scores = [y for y, _ in pairs], [s for _, s in pairs]
    if 0 < sum(labels) < len(labels):
        assert auc(labels, scores) == pytest.approx(brute_auc(labels, scores))
    if sum(labels):
        assert pr_auc(labels, scores) == pytest.approx(brute_average_precision(labels, scores))


def test_a_perfect_and_a_reversed_order() -> None:
    labels = np.array([0, 0, 1, 1])
    assert auc(labels, np.array([1, 2, 3, 4])) == 1.0
    assert auc(labels, np.array([4, 3, 2, 1])) == 0.0
    assert auc(labels, np.zeros(4)) == 0.5


def test_one_class_has_no_area() -> None:
    assert math.isnan(auc([1, 1], [0.1, 0.2]))
    assert math.isnan(pr_auc([0, 0], [0.1, 0.2]))


def test_log_loss_is_the_mean_negative_log_likelihood() -> None:
    expected = -(math.log(0.9) + math.log(1 - 0.2)) / 2
    assert log_loss([1, 0], [0.9, 0.2]) == pytest.approx(expected)
    assert math.isfinite(log_loss([1, 0], [0.0, 1.0]))


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidError, match="2 labels but 3 scores"):
        auc([1, 0], [0.1, 0.2, 0.3])
    with pytest.raises(InvalidError, match="NaN"):
        summary([1, 0], [0.1, float("nan")])
