"""dynamicemb's options and optimizers as far as a storage sees them, and a naive storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import tierbed as tb
from tierbed.adapters.dynamicemb import TierbedStorage, external_storage

LRU = SimpleNamespace(name="LRU", value="EvictStrategy.KLru")
LFU = SimpleNamespace(name="LFU", value="EvictStrategy.KLfu")


@dataclass
class Options:
    dim: int
    embedding_dtype: torch.dtype = torch.float32
    evict_strategy: Any = field(default_factory=lambda: LFU)
    score_strategy: Any = 3
    dist_type: str = "roundrobin"


class Optimizer:
    """Adam, Adagrad, SGD or row-wise Adagrad, which is wider in memory than in files."""

    def __init__(self, kind: str = "adam", start: float = 0.0) -> None:
        self.kind, self.start = kind, start
        self.numbers: dict[str, Any] = {"opt_type": kind, "lr": 0.1, "iters": 3}

    def get_state_dim(self, dim: int) -> int:
        widths = {"adam": 2 * dim, "exact_adagrad": dim, "exact_row_wise_adagrad": 4, "sgd": 0}
        return widths[self.kind]

    def get_ckpt_state_dim(self, dim: int) -> int:
        return 1 if self.kind == "exact_row_wise_adagrad" else self.get_state_dim(dim)

    def get_initial_optim_states(self) -> float:
        return self.start

    def get_opt_args(self) -> dict[str, Any]:
        return dict(self.numbers)

    def set_opt_args(self, numbers: dict[str, Any]) -> None:
        self.numbers = {name: numbers[name] for name in self.numbers}


def storage_of(store: tb.Store, *dims: int, kind: str = "adam", **options: Any) -> TierbedStorage:
    tables = [f"t{at}" for at in range(len(dims))]
    given = [Options(dim, **options) for dim in dims]
    return external_storage(store, tables)(given, Optimizer(kind))


class Naive:
    """What a storage holds, in a dictionary: by table and key, numbers and score."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def insert(
        self, keys: Tensor, tables: Tensor, values: Tensor, scores: Tensor | None, keeps: bool
    ) -> None:
        for at, key in enumerate(zip(tables.tolist(), keys.tolist(), strict=True)):
            old = self.rows.get(key, (None, 0))[1]
            score = old if scores is None or keeps else int(scores[at])
            self.rows[key] = (values[at].clone(), score)


def bits(tensor: Tensor) -> Tensor:
    """Returns floats by their bits, so that signs of zero and NaNs count."""
    return tensor.contiguous().view(torch.int32)
