"""Checks of what every store must do.

:func:`check_row_store` runs one suite against any object with the row interface of
:class:`tierbed.Store` (``read_rows``, ``write_rows``, ``gather_rows``, ``use_counts``), with a
numpy array as the model of the truth. A store of your own
(:class:`tierbed.backends.RowStoreProtocol`) is first driven by the conformance kit that our
stores pass too: seeded reads, writes, scans, commits and crashes beside a plain map. Every check
names the operation that differed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from tierbed._native import check_python_store
from tierbed.backends.bridge import Bridge
from tierbed.backends.protocol import RowStoreProtocol
from tierbed.config.optim import Adagrad
from tierbed.config.tables import Constant, EmbeddingBagConfig, Uniform
from tierbed.jagged import KeyedJaggedTensor
from tierbed.train.store import Store

__all__ = ["RowStore", "check_row_store", "random_bags"]


class RowStore(Protocol):
    """What :func:`check_row_store` needs."""

    def add_table(self, config: Any, optimizer: Any) -> int:
        """Adds a table.

        Args:
            config: The table.
            optimizer: That of its rows.
        """

    def read_rows(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Reads consecutive rows.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """

    def read_rows_and_state(
        self, table: str, first_row: int, row_count: int
    ) -> tuple[Tensor, Tensor]:
        """Reads consecutive rows and their state.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """

    def gather_rows(self, table: str, rows: Tensor) -> Tensor:
        """Reads any rows.

        Args:
            table: Name of the table.
            rows: Rows ``[N]`` i64.
        """

    def write_rows(
        self, table: str, first_row: int, weights: Tensor, rows_state: Tensor | None = None
    ) -> None:
        """Writes consecutive rows.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            weights: Rows ``[N, D]`` f32.
            rows_state: Optimizer state ``[N, S]`` f32.
        """

    def use_counts(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Reads use counts.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """

    def close(self) -> None:
        """Closes the store."""


def check_row_store(
    factory: Callable[[], RowStore | RowStoreProtocol],
    *,
    row_count: int = 997,
    dim: int = 7,
    seed: int = 0,
    step_count: int = 150,
    keeps: bool = True,
) -> None:
    """Checks a store against a numpy model: reads, writes, state, gathers, refusals.

    Args:
        factory: Makes a store; it is closed afterwards. The first is new and empty. A
            :class:`~tierbed.backends.RowStoreProtocol` that keeps what it committed is made
            again over the same place, as after a crash.
        row_count: Rows of the checked table.
        dim: Elements per row; odd on purpose.
        seed: Of the random writes and reads.
        step_count: Operations of the conformance kit, for a ``RowStoreProtocol``.
        keeps: Whether a ``RowStoreProtocol`` made again continues at its last commit.

    Raises:
        AssertionError: The store differs from the model.
        TierbedError: It differs from the conformance kit's map (``CorruptionError``), or failed.
    """
    made = factory()
    if not hasattr(made, "read_rows"):
        assert isinstance(made, RowStoreProtocol), f"{type(made).__name__} is no row store"
        # Nothing was committed, so the kit begins with an empty store too.
        made.close()
        check_python_store(
            lambda: Bridge(cast(RowStoreProtocol, factory())), seed, step_count, keeps
        )
        made = Store.over(cast(RowStoreProtocol, factory()), dram_budget="16MiB")
    store = cast(RowStore, made)
    try:
        _check_initial_rows(store, row_count, dim)
        _check_random_writes(store, row_count, dim, np.random.default_rng(seed))
        _check_refusals(store, row_count, dim)
    finally:
        store.close()


def _check_initial_rows(store: RowStore, row_count: int, dim: int) -> None:
    constant = EmbeddingBagConfig(
        name="constant", num_embeddings=row_count, embedding_dim=dim, init=Constant(0.25)
    )
    uniform = EmbeddingBagConfig(
        name="uniform", num_embeddings=row_count, embedding_dim=dim, init=Uniform(-0.5, 0.5)
    )
    table = store.add_table(constant, Adagrad(initial_accumulator_value=0.125))
    assert store.add_table(uniform, Adagrad()) != table, "two tables share an id"
    assert store.add_table(constant, Adagrad(initial_accumulator_value=0.125)) == table, (
        "adding the same table again must find it"
    )
    weights, state = store.read_rows_and_state("constant", 0, row_count)
    assert bool((weights == 0.25).all()), "rows never written must have their initial value"
    assert bool((state == 0.125).all()), "state never written must have its initial value"
    drawn = store.read_rows("uniform", 0, row_count)
    assert bool(((drawn >= -0.5) & (drawn < 0.5)).all()), "initial rows outside their bounds"
    assert np.unique(drawn.numpy()).size > row_count * dim // 2, "initial rows repeat"
    assert torch.equal(drawn[5:9], store.read_rows("uniform", 5, 4)), "initial rows must not vary"


def _check_random_writes(
    store: RowStore, row_count: int, dim: int, random: np.random.Generator
) -> None:
    model = store.read_rows("uniform", 0, row_count).numpy().copy()
    model_state = np.zeros((row_count, dim), dtype=np.float32)
    for step in range(40):
        first = int(random.integers(0, row_count))
        count = int(random.integers(1, min(64, row_count - first) + 1))
        rows = random.standard_normal((count, dim)).astype(np.float32)
        state = random.random((count, dim)).astype(np.float32) if step % 2 else None
        store.write_rows(
            "uniform",
            first,
            torch.from_numpy(rows),
            None if state is None else torch.from_numpy(state),
        )
        model[first : first + count] = rows
        model_state[first : first + count] = 0.0 if state is None else state
        ids = random.integers(0, row_count, size=33)
        found = store.gather_rows("uniform", torch.from_numpy(ids)).numpy()
        assert np.array_equal(found, model[ids]), f"gather_rows differs after write {step}"
    weights, states = store.read_rows_and_state("uniform", 0, row_count)
    assert np.array_equal(weights.numpy(), model), "read_rows differs from what was written"
    assert np.array_equal(states.numpy(), model_state), "state differs from what was written"
    counts = store.use_counts("uniform", 0, row_count)
    assert bool((counts == 0).all()), "writing rows is not using them"


def _check_refusals(store: RowStore, row_count: int, dim: int) -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("reading past the end", lambda: store.read_rows("uniform", row_count - 1, 2)),
        ("gathering row_count", lambda: store.gather_rows("uniform", torch.tensor([row_count]))),
        ("gathering -1", lambda: store.gather_rows("uniform", torch.tensor([-1]))),
        (
            "writing past the end",
            lambda: store.write_rows("uniform", row_count, torch.zeros(1, dim)),
        ),
        ("another dim", lambda: store.write_rows("uniform", 0, torch.zeros(1, dim + 1))),
        ("another dtype", lambda: store.write_rows("uniform", 0, torch.zeros(1, dim).double())),
        ("an unknown table", lambda: store.read_rows("nowhere", 0, 1)),
    ]
    for what, call in calls:
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"{what} must be a ValueError")


def random_bags(
    features: dict[str, int],
    batch_size: int,
    *,
    seed: int,
    bag_max: int = 3,
    is_weighted: bool = False,
) -> KeyedJaggedTensor:
    """Draws a batch with empty bags and duplicates, skewed to small ids.

    Args:
        features: Rows of the table of each feature.
        batch_size: ``B``.
        seed: Equal seeds draw equal batches.
        bag_max: Longest bag; bags of 0 occur.
        is_weighted: Draw weights in ``[0.5, 1.5)`` too.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(
        0, bag_max + 1, (len(features) * batch_size,), generator=generator, dtype=torch.int64
    )
    values = []
    for at, rows in enumerate(features.values()):
        count = int(lengths[at * batch_size : (at + 1) * batch_size].sum())
        drawn = torch.rand(count, generator=generator).pow(4) * rows
        values.append(drawn.to(torch.int64).clamp(max=rows - 1))
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) + 0.5 if is_weighted else None
    return KeyedJaggedTensor(list(features), ids, weights, lengths=lengths, stride=batch_size)
