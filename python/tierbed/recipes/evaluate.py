"""Scores of a model on samples it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierbed.nn import CtrModel
from tierbed.recipes.metrics import summary
from tierbed.train.lookahead import lookahead

__all__ = ["evaluate", "score"]


def score(
    model: CtrModel, batches: Iterable[Any], window: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scores batches without training.

    Args:
        model: A click model; it is put into evaluation mode and back.
        batches: Batches with ``label`` ``[B]``, ``dense`` ``[B, N]`` and ``sparse``.
        window: Look-ahead window in batches.

    Returns:
        Labels and probabilities, ``[N]`` f32 each.
    """
    labels: list[NDArray[np.float32]] = []
    scores: list[NDArray[np.float32]] = []
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.inference_mode():
            for batch in lookahead(batches, model, window=window):
                probability = torch.sigmoid(model(batch.dense.to(device), batch.sparse))
                labels.append(batch.label.numpy().astype(np.float32, copy=True))
                scores.append(probability.cpu().numpy().astype(np.float32, copy=True))
    finally:
        model.train(was_training)
    empty = np.zeros(0, dtype=np.float32)
    return (
        np.concatenate(labels) if labels else empty,
        np.concatenate(scores) if scores else empty,
    )


def evaluate(model: CtrModel, batches: Iterable[Any], window: int = 0) -> dict[str, float]:
    """Returns ``auc``, ``pr_auc``, ``logloss``, ``positive_rate`` and ``eval_samples``."""
    labels, scores = score(model, batches, window)
    return {**summary(labels, scores), "eval_samples": int(labels.size)}
