"""Exact AUC, PR-AUC and log-loss."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierbed.errors import InvalidError

__all__ = ["auc", "log_loss", "pr_auc", "summary"]


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    y = np.asarray(labels).reshape(-1)
    s = np.asarray(scores, dtype=np.float64).reshape(-1)
    if y.shape != s.shape:
        raise InvalidError(f"{y.size} labels but {s.size} scores")
    if np.isnan(s).any():
        raise InvalidError("scores contain NaN; the model diverged, try a smaller learning rate")
    return y > 0.5, s


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns the area under the ROC curve.

    That is the share of (positive, negative) pairs in the right order, ties counting one half.

    Args:
        labels: ``[N]``, 0 or 1.
        scores: ``[N]``, any order-preserving score.

    Returns:
        The area; NaN when only one class is present.
    """
    y, s = _checked(labels, scores)
    positives = int(y.sum())
    negatives = y.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, group, sizes = np.unique(s, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    mean_rank = ends - (sizes - 1) / 2.0  # ranks from 1, ties share their mean
    rank_sum = float(mean_rank[group][y].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def pr_auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns the average precision: precision at every threshold, weighted by recall gained.

    Args:
        labels: ``[N]``, 0 or 1.
        scores: ``[N]``; equal scores form one threshold.

    Returns:
        The average precision; NaN without positives.
    """
    y, s = _checked(labels, scores)
    positives = int(y.sum())
    if positives == 0:
        return float("nan")
    order = np.argsort(-s, kind="stable")
    y, s = y[order], s[order]
    is_last = np.append(s[1:] != s[:-1], True)
    hits = np.cumsum(y)[is_last]
    seen = np.arange(1, y.size + 1)[is_last]
    gained = np.diff(hits, prepend=0)
    return float((hits / seen * gained).sum() / positives)


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Returns the mean negative log-likelihood, in nats.

    Args:
        labels: ``[N]``, 0 or 1.
        probabilities: ``[N]``, clipped to ``[1e-7, 1 - 1e-7]``.
    """
    y, p = _checked(labels, probabilities)
    if y.size == 0:
        return float("nan")
    p = np.clip(p, 1e-7, 1.0 - 1e-7)
    return float(-np.where(y, np.log(p), np.log1p(-p)).mean())


def summary(labels: ArrayLike, probabilities: ArrayLike) -> dict[str, float]:
    """Returns ``auc``, ``pr_auc``, ``logloss`` and ``positive_rate``."""
    y, p = _checked(labels, probabilities)
    return {
        "auc": auc(y, p),
        "pr_auc": pr_auc(y, p),
        "logloss": log_loss(y, p),
        "positive_rate": float(y.mean()) if y.size else float("nan"),
    }
