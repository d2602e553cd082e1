"""Rows of dynamicemb in a table of a store: weights, optimizer state, a score and a mark.

A row is ``[D | S | 2 | 1]`` numbers: weights, state, the 64 bits of the score in two words, and a
mark. The mark is 1 in a row that was written, and 0 in its initial value. So a row that was given
to an id without being written, or freed, is never taken for one that is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierbed.config.admission import EvictionPolicy
from tierbed.config.optim import SGD
from tierbed.config.tables import Constant, EmbeddingConfig
from tierbed.errors import UnsupportedError
from tierbed.train.store import Store

__all__ = ["RecordTable"]

_SCORE_WORDS, _MARK_WORDS = 2, 1
# What the engine takes as the dim of a table.
_DIM_MAX = 4096


class RecordTable:
    """A table of open vocabulary whose rows are records of dynamicemb.

    Args:
        store: Has the table, or gets it.
        name: Name of the table.
        dim: Weights of a row.
        state_dim: Numbers of optimizer state of a row.
        eviction_policy: Which keys :meth:`tierbed.Store.evict` takes.

    Raises:
        InvalidError: A table of that name with another shape or policy, or one whose ids are rows.
        UnsupportedError: Records that are wider than a table may be.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        dim: int,
        state_dim: int,
        eviction_policy: EvictionPolicy | None = None,
    ) -> None:
        self._store = store
        self._name = name
        self.dim = dim
        self.state_dim = state_dim
        width = dim + state_dim + _SCORE_WORDS + _MARK_WORDS
        if width > _DIM_MAX:
            raise UnsupportedError(
                f"rows of {name!r} are {width} numbers with their state, and a table has at most "
                f"{_DIM_MAX}; choose an optimizer with less state, or a smaller dim",
                {"table": name},
            )
        config = EmbeddingConfig(
            num_embeddings=None,
            embedding_dim=width,
            name=name,
            init=Constant(0.0),
            virtual_table_eviction_policy=eviction_policy,
        )
        # Rows are never trained here.
        store.add_table(config, SGD(lr=0.0))

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which keys are there, ``[N]`` bool, and their records ``[M, width]``.

        Args:
            keys: Keys ``[N]`` i64.
        """
        rows = self._store.translate(self._name, keys)
        known = rows > 0
        records = self._store.gather_rows(self._name, rows[known])
        is_written = records[:, -1] == 1
        known[known.clone()] = is_written
        return known, records[is_written]

    def write(self, keys: Tensor, values: Tensor, scores: Tensor | None) -> None:
        """Writes records.

        Args:
            keys: Keys ``[N]`` i64, none twice.
            values: Weights and state, ``[N, D + S]`` f32.
            scores: ``[N]`` i64; without them keys keep theirs, and new ones have 0.
        """
        if not len(keys):
            return
        if scores is None:
            known, records = self.read(keys)
            scores = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
            scores[known] = self.scores(records)
        words = scores.contiguous().view(torch.float32).view(-1, _SCORE_WORDS)
        marks = torch.ones(len(keys), _MARK_WORDS, dtype=torch.float32, device="cpu")
        rows = self._store.assign_ids(self._name, keys)
        self._store.scatter_rows(self._name, rows, torch.cat([values, words, marks], 1))

    def state(self, records: Tensor) -> Tensor:
        """Returns the optimizer state of records, ``[N, S]``.

        Args:
            records: ``[N, width]``.
        """
        return records[:, self.dim : self.dim + self.state_dim]

    def scores(self, records: Tensor) -> Tensor:
        """Returns the scores of records, ``[N]`` i64.

        Args:
            records: ``[N, width]``.
        """
        first = self.dim + self.state_dim
        # Of one row, a slice counts as contiguous whatever its strides are.
        words = torch.empty(len(records), _SCORE_WORDS, dtype=torch.float32, device="cpu")
        words.copy_(records[:, first : first + _SCORE_WORDS])
        return words.view(torch.int64).view(-1)

    def keys(self) -> Tensor:
        """Returns all keys, ``[N]`` i64, in the order of their rows."""
        return self._store.ids(self._name)[0]

    def count(self) -> int:
        """Returns how many keys there are."""
        return int(self._store.vocabularies()[self._name]["id_count"])
