"""The model that both forms of the Open Inference Protocol are asked about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import tierbed as tb
from tierbed.nn import MODELS
from tierbed.testing import random_bags

SIZES = {"c1": 30, "c2": 40}


def publish(path: Path) -> Path:
    """Trains a step and publishes; returns the folder of the snapshot."""
    with tb.Store.open(path / "store", dram_budget="8MiB") as store:
        model = MODELS["dlrm"](
            3, SIZES, store=store, embedding_dim=8, optimizer=tb.RowWiseAdagrad(lr=0.1)
        )
        model(torch.rand(64, 3), random_bags(SIZES, 64, seed=0, bag_max=1)).sum().backward()
        store.publish(path / "snapshot", model)
    return path / "snapshot"


def bags() -> tb.KeyedJaggedTensor:
    """Returns three samples, an empty bag among them."""
    values = torch.tensor([1, 5, 29, 0, 7, 39, 38])
    return tb.KeyedJaggedTensor(list(SIZES), values, lengths=torch.tensor([2, 0, 2, 1, 1, 1]))


def expected(snapshot: tb.Snapshot) -> np.ndarray:
    """Returns what ``ads.rows`` answers for them, ``[3, 16]``."""
    pooled = snapshot.lookup(bags(), "sum")
    return np.concatenate([pooled[name].numpy() for name in SIZES], axis=1)
