"""A stream of clicks whose items come and go, as news, offers or short videos do.

A user sees an item on a site. Some hundred items are shown at a time, few of them often. Each is
replaced after its lifetime by one that no sample had before. Clicks depend on the item, the user,
and on both together, so a model that does not learn the new items gets worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.data.batch import Batch
from tierbed.jagged import KeyedJaggedTensor

__all__ = ["BLOCK", "Stream"]

BLOCK = 128
"""Samples drawn together; batches begin at multiples of it."""

ITEMS_SHOWN = 400
TURN = 153  # has no factor in common with ITEMS_SHOWN
TASTES = 8


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Samples by number; sample ``n`` depends on the options and ``n`` alone.

    Args:
        users: Rows of the users' table.
        items: Rows of the items' table.
        item_life: Samples until an item is replaced.
        seed: Another seed, another stream.
    """

    users: int
    items: int
    item_life: int
    seed: int

    @property
    def dense_count(self) -> int:
        """Numerical features of a sample."""
        return 2

    @property
    def table_sizes(self) -> Mapping[str, int]:
        """Rows of each feature's table."""
        return {"user": self.users, "item": self.items, "site": 64}

    def batch(self, first: int, count: int) -> Batch:
        """Returns the samples ``first..first + count``, both multiples of :data:`BLOCK`."""
        assert first % BLOCK == 0, "batches begin where blocks do"
        assert count % BLOCK == 0, "batches end where blocks do"
        blocks = [self._drawn(block) for block in range(first // BLOCK, (first + count) // BLOCK)]
        drawn = torch.cat(blocks, 1)
        number = torch.arange(first, first + count)
        user = (drawn[0] ** 3 * self.users).long()
        rank = torch.pow(float(ITEMS_SHOWN), drawn[1]).long() - 1
        # Ranks are replaced at times of their own, the most shown ones far from each other.
        turn = rank * TURN % ITEMS_SHOWN
        life = (number + turn * self.item_life // ITEMS_SHOWN) // self.item_life
        item = self._hash(rank, life, 1) % self.items
        site = (drawn[2] * 64).long()
        dense = 2.0 * drawn[3:5] - 1.0
        chance = torch.sigmoid(self._logit(user, item, site, dense[0]))
        ids = torch.cat([user, item, site])
        sparse = KeyedJaggedTensor(list(self.table_sizes), ids, lengths=torch.ones_like(ids))
        return Batch(dense.t().contiguous().float(), sparse, (drawn[5] < chance).float())

    def _drawn(self, block: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed << 32) + block)
        return torch.rand(6, BLOCK, generator=generator, dtype=torch.float64)

    def _logit(self, user: Tensor, item: Tensor, site: Tensor, dense: Tensor) -> Tensor:
        parts = 1.2 * self._normal(item, item, 2) + 0.5 * self._normal(user, user, 3)
        parts += 0.8 * self._normal(user % TASTES, item, 4) + 0.3 * self._normal(site, site, 5)
        return parts + 0.3 * dense - 1.0

    def _normal(self, a: Tensor, b: Tensor, salt: int) -> Tensor:
        share = (self._hash(a, b, salt).double() + 0.5) / 2.0**40
        normal: Tensor = torch.special.ndtri(share)
        return normal

    def _hash(self, a: Tensor, b: Tensor, salt: int) -> Tensor:
        """Returns 40 bits of two numbers, mixed as in SplitMix64; products wrap around."""
        mixed = a * -7046029254386353131 + b * -4417276706812531889 + salt * 7 + self.seed * 31
        for factor in (-4658895280553007687, -7723592293110705685):
            mixed = (mixed ^ (mixed >> 29)) * factor
        return (mixed ^ (mixed >> 32)) & ((1 << 40) - 1)
