"""What do others do with the same tables in memory? One interface, three systems.

Each holds all tables in DRAM and applies one optimizer step per batch: lookup with sum pooling,
gradients of the bags, optimizer of the touched rows. No dense model. :class:`TorchTables` is what
torch offers by itself, :class:`FbgemmTables` FBGEMM's fused tables on the CPU (TorchRec's engine;
``fbgemm-gpu-cpu``, the dependency group ``bench``), :class:`TierbedTables` ours over any store.
A test holds them against each other, so that a comparison compares the same thing.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tierbed.config.optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from tierbed.config.tables import EmbeddingBagConfig, Uniform
from tierbed.errors import UnsupportedError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn import EmbeddingBagCollection
from tierbed.train.store import Store

__all__ = ["FbgemmTables", "InMemoryTables", "TierbedTables", "TorchTables", "has_fbgemm"]

INIT = 0.01


class InMemoryTables(Protocol):
    """Tables that are trained batch by batch."""

    name: str

    def step(self, batch: KeyedJaggedTensor, grad: Tensor | None = None) -> None:
        """Looks ``batch`` up and applies ``grad`` ``[B, F*D]`` (ones without it)."""

    def read_rows(self, feature: str) -> Tensor:
        """Copies all rows of a feature's table, ``[N, D]`` f32."""

    def write_rows(self, feature: str, rows: Tensor) -> None:
        """Overwrites all rows of a feature's table."""


class _Ones:
    """The gradient of the plain sum, made once per shape."""

    def __init__(self) -> None:
        self._ones = torch.ones(0, 0)

    def like(self, out: Tensor, grad: Tensor | None) -> Tensor:
        if grad is not None:
            return grad
        if self._ones.shape != out.shape:
            self._ones = torch.ones_like(out)
        return self._ones


class TorchTables:
    """``torch.nn.EmbeddingBag(sparse=True)`` per feature and a ``torch.optim`` optimizer.

    Args:
        features: Rows of the table of each feature.
        dim: Elements per row.
        optimizer: SGD, Adagrad or Adam (``torch.optim.SparseAdam``).

    Raises:
        UnsupportedError: torch has no sparse form of the optimizer (the row-wise ones).
    """

    name = "torch_embedding_bag"

    def __init__(self, features: Mapping[str, int], dim: int, optimizer: Optimizer) -> None:
        self._bags = {
            feature: torch.nn.EmbeddingBag(
                rows,
                dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                # Drawing normal numbers for all rows would take longer than the benchmark.
                _weight=torch.empty(rows, dim).uniform_(-INIT, INIT),
            )
            for feature, rows in features.items()
        }
        self._optimizer = _torch_optimizer(optimizer, [bag.weight for bag in self._bags.values()])
        self._ones = _Ones()

    def step(self, batch: KeyedJaggedTensor, grad: Tensor | None = None) -> None:
        """See :meth:`InMemoryTables.step`."""
        jagged = [(self._bags[key], batch[key]) for key in batch.keys()]
        out = torch.cat([bag(ids.values(), ids.offsets()) for bag, ids in jagged], dim=1)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(out, self._ones.like(out, grad))
        self._optimizer.step()

    def read_rows(self, feature: str) -> Tensor:
        """See :meth:`InMemoryTables.read_rows`."""
        return self._bags[feature].weight.detach().clone()

    def write_rows(self, feature: str, rows: Tensor) -> None:
        """See :meth:`InMemoryTables.write_rows`."""
        with torch.no_grad():
            self._bags[feature].weight.copy_(rows)


def _torch_optimizer(optimizer: Optimizer, weights: list[Tensor]) -> torch.optim.Optimizer:
    if optimizer.weight_decay:
        raise UnsupportedError("torch's sparse optimizers have no weight decay")
    if isinstance(optimizer, Adagrad):
        return torch.optim.Adagrad(
            weights,
            lr=optimizer.lr,
            eps=optimizer.eps,
            initial_accumulator_value=optimizer.initial_accumulator_value,
        )
    if isinstance(optimizer, Adam):
        return torch.optim.SparseAdam(
            weights, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps
        )
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(weights, lr=optimizer.lr)
    raise UnsupportedError(f"torch has no sparse {type(optimizer).__name__}")


def _fbgemm(module: str) -> Any:
    """Imports a module of FBGEMM without its table of torch versions on the screen."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"fbgemm_gpu.{module}")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            "FBGEMM is not installed or does not fit this torch; "
            f"uv sync --inexact --group bench installs it: {error}"
        ) from error
    finally:
        logging.disable(disabled)


def has_fbgemm() -> bool:
    """Says whether FBGEMM's tables can be used here."""
    try:
        _fbgemm("split_table_batched_embeddings_ops_training")
    except UnsupportedError:
        return False
    return True


class FbgemmTables:
    """FBGEMM's table-batched embeddings on the CPU: pooling and fused optimizer in one operator.

    Args:
        features: Rows of the table of each feature.
        dim: Elements per row, a multiple of 4.
        optimizer: SGD, Adagrad or RowWiseAdagrad (all that FBGEMM has on the CPU).

    Raises:
        UnsupportedError: FBGEMM is not installed, or has not the optimizer on the CPU.
    """

    name = "fbgemm_cpu_tbe"

    def __init__(self, features: Mapping[str, int], dim: int, optimizer: Optimizer) -> None:
        training = _fbgemm("split_table_batched_embeddings_ops_training")
        common = _fbgemm("split_table_batched_embeddings_ops_common")
        kinds = _fbgemm("split_embedding_configs").EmbOptimType
        known: dict[type[Optimizer], Any] = {
            SGD: kinds.EXACT_SGD,
            Adagrad: kinds.EXACT_ADAGRAD,
            RowWiseAdagrad: kinds.EXACT_ROWWISE_ADAGRAD,
        }
        if type(optimizer) not in known or optimizer.weight_decay or optimizer.state_init:
            raise UnsupportedError(
                f"FBGEMM on the CPU has no {optimizer!r}; it knows SGD, Adagrad and "
                "RowWiseAdagrad without weight decay and initial accumulator"
            )
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self._features = list(features)
        self._tables: Callable[[Tensor, Tensor], Tensor]
        self._tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place) for rows in features.values()],
            optimizer=known[type(optimizer)],
            learning_rate=optimizer.lr,
            eps=float(getattr(optimizer, "eps", 1e-8)),
        )
        self._ones = _Ones()
        for weights in self._weights():
            weights.uniform_(-INIT, INIT)

    def _weights(self) -> list[Tensor]:
        tables: Any = self._tables
        weights: list[Tensor] = tables.split_embedding_weights()
        return weights

    def step(self, batch: KeyedJaggedTensor, grad: Tensor | None = None) -> None:
        """See :meth:`InMemoryTables.step`; features in the order of the tables."""
        out = self._tables(batch.values(), batch.offsets())
        torch.autograd.backward(out, self._ones.like(out, grad))

    def read_rows(self, feature: str) -> Tensor:
        """See :meth:`InMemoryTables.read_rows`."""
        return self._weights()[self._features.index(feature)].detach().clone()

    def write_rows(self, feature: str, rows: Tensor) -> None:
        """See :meth:`InMemoryTables.write_rows`."""
        self._weights()[self._features.index(feature)].copy_(rows)


class TierbedTables:
    """Our tables over ``store``: in memory with ``backend="memory"``.

    Args:
        store: Where the rows live; its budget says how much memory.
        features: Rows of the table of each feature.
        dim: Elements per row.
        optimizer: Any of ours.
    """

    name = "tierbed"

    def __init__(
        self, store: Store, features: Mapping[str, int], dim: int, optimizer: Optimizer
    ) -> None:
        self._store = store
        self._bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=feature,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    init=Uniform(-INIT, INIT),
                )
                for feature, rows in features.items()
            ],
            store=store,
            optimizer=optimizer,
        )
        self._features = dict(features)
        self._ones = _Ones()

    def step(self, batch: KeyedJaggedTensor, grad: Tensor | None = None) -> None:
        """See :meth:`InMemoryTables.step`."""
        out = self._bags(batch).values()
        torch.autograd.backward(out, self._ones.like(out, grad))

    def read_rows(self, feature: str) -> Tensor:
        """See :meth:`InMemoryTables.read_rows`."""
        return self._store.read_rows(feature, 0, self._features[feature])

    def write_rows(self, feature: str, rows: Tensor) -> None:
        """See :meth:`InMemoryTables.write_rows`."""
        self._store.write_rows(feature, 0, rows)
