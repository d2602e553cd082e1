"""Phases of ``bench big`` with a dense part: a DLRM-DCNv2 on the tables, and torch without them.

Source: Wang et al., WWW 2021 (DCNv2); MLPerf Training, recommendation_v2. Its dense layers are
narrower than MLPerf's, as in ``examples/dlrm_dcnv2.py``.
"""

from __future__ import annotations

import itertools
import time
from statistics import median

import torch
from torch import Tensor, nn

from tierbed.nn.ctr import mlp
from tierbed.train.lookahead import lookahead
from tierbed_bench.big.data import Batches, Shape
from tierbed_bench.big.worker import WINDOW, Job, Phase, memory, open_store
from tierbed_bench.common import percentile

__all__ = ["PHASES"]

DENSE_COUNT = 13
WIDTH = 128


class _Cross(nn.Module):
    """A cross layer of low rank: ``x0 * (U V x + b) + x``."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: Tensor, inputs: Tensor) -> Tensor:
        """Maps ``[B, W]`` to the same."""
        crossed: Tensor = first * self.up(self.down(inputs)) + inputs
        return crossed


class _DcnHead(nn.Module):
    """The dense part of DLRM whose interaction is a cross network.

    Args:
        shape: Of the tables.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bottom = mlp([DENSE_COUNT, WIDTH // 2, WIDTH // 4, shape.dim])
        width = shape.dim * (shape.tables + 1)
        self.crosses = nn.ModuleList(_Cross(width, WIDTH // 2) for _ in range(3))
        self.top = mlp([width, WIDTH, WIDTH, WIDTH // 2, 1], is_output=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Computes logits ``[B]`` of ``[B, 13]`` numbers and ``[B, F * D]`` pooled rows."""
        first = hidden = torch.cat([self.bottom(dense), pooled], dim=1)
        for cross in self.crosses:
            hidden = cross(first, hidden)
        logits: Tensor = self.top(hidden)
        return logits[:, 0]


def _torch(job: Job) -> None:
    """The same dense work on a table of 64 rows: what torch and the batches take by themselves."""
    shape = job.shape
    grad = shape.gradient()
    weights = torch.zeros(64, shape.dim, requires_grad=True)
    dense = _Dense(job) if job.given["has_model"] else None
    for number in range(min(4, shape.batch_count)):
        ids = shape.ids(number).values() % 64
        pooled = nn.functional.embedding(ids.view(shape.tables, -1).T, weights).flatten(1)
        if dense is None:
            torch.autograd.backward(pooled, grad)
        else:
            dense.step(pooled)
        weights.grad = None
    job.told.row(memory())


class _Dense:
    """The dense part of the model, and its numbers and labels."""

    def __init__(self, job: Job) -> None:
        shape = job.shape
        torch.manual_seed(shape.seed)
        self.head = _DcnHead(shape)
        self._optimizer = torch.optim.Adagrad(self.head.parameters(), lr=0.01)
        self._numbers = torch.randn(shape.batch, DENSE_COUNT)
        self._labels = (torch.rand(shape.batch) < 0.2).float()

    def step(self, pooled: torch.Tensor) -> None:
        """Steps all parameters, and the rows behind ``pooled``."""
        logits = self.head(self._numbers, pooled)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, self._labels)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self._optimizer.step()


def _model(job: Job) -> None:
    """Trains a whole DLRM-DCNv2 for ``seconds`` from where the store stands."""
    shape = job.shape
    with open_store(job) as store:
        dense, bags = _Dense(job), shape.bags(store)
        start = int(store.order()["batch"])
        ahead = lookahead(Batches(shape, start), bags, WINDOW)
        steps_s: list[float] = []
        lookups_s, step_s = 0.0, time.perf_counter()
        for batch in itertools.islice(ahead, shape.batch_count - start):
            begun_s = time.perf_counter()
            pooled = bags(batch).values()
            lookups_s += time.perf_counter() - begun_s
            dense.step(pooled)
            steps_s.append(time.perf_counter() - step_s)
            step_s += steps_s[-1]
            job.told.progress(sum(steps_s), float(job.given["seconds"]), "s")
            if sum(steps_s) >= float(job.given["seconds"]):
                break
    job.told.row(
        {
            "seconds": sum(steps_s),
            "batches": len(steps_s),
            "samples_per_s": shape.batch * len(steps_s) / sum(steps_s),
            "step_ms_p50": 1e3 * median(steps_s),
            "step_ms_p99": 1e3 * percentile(steps_s, 0.99),
            "lookup_share": lookups_s / sum(steps_s),
            **memory(),
        }
    )


PHASES: dict[str, Phase] = {"torch": _torch, "model": _model}
