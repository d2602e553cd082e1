"""Neighbours: rows that answer for others that are in no tier.

:func:`find_neighbours` looks for them once, offline; :meth:`Neighbours.write` puts them into a file
that a snapshot's cache asks for the rows that left its tiers (:class:`tierbed.NeighbourTier`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tierbed.errors import InvalidError
from tierbed.serve.snapshot import Snapshot

__all__ = ["Neighbours", "find_neighbours"]

PathLike: TypeAlias = "str | os.PathLike[str]"
# Distances that are held at once.
_DISTANCES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """What stands for each row of some tables; other tables are never answered so.

    Args:
        tables: Names of tables.
        of: By table, ``[N, 2]`` i64: the table of the neighbour as its place in ``tables``, and
            its row; a table below 0 for none. Of the same dim.

    Examples:
        >>> rows, counts = {"item": torch.rand(1000, 8)}, {"item": torch.arange(1000)}
        >>> tb.find_neighbours(rows, counts).of["item"].shape
        torch.Size([1000, 2])
    """

    tables: tuple[str, ...]
    of: Mapping[str, Tensor]

    def write(self, snapshot: Snapshot, path: PathLike | None = None) -> str:
        """Writes them for a snapshot, 8 bytes a row; the file appears whole or not at all.

        A snapshot that is open goes on with the file it opened. Rows of another training may be
        worse neighbours, but never wrong ones: answers are always rows of the open snapshot.

        Args:
            snapshot: It has these tables, with as many rows.
            path: The file; by default beside the snapshot, where it is looked for.

        Returns:
            The path of the file.

        Raises:
            InvalidError: The snapshot has no such tables or rows, or dims differ.
        """
        ids = torch.tensor(
            [snapshot.table_id(name) for name in self.tables], dtype=torch.int64, device="cpu"
        )
        given = []
        for name, near in self.of.items():
            is_pairs = near.dim() == 2 and near.shape[1] == 2
            if not is_pairs or bool((near[:, 0] >= len(ids)).any()):
                raise InvalidError(
                    f"neighbours of {name!r} must be [N, 2]: a place in tables, and a row",
                    {"table": name},
                )
            is_none = near[:, :1] < 0
            table = torch.where(is_none, -1, ids[near[:, :1].clamp_min(0)])
            whole = torch.cat([table, near[:, 1:].to(torch.int64)], 1).contiguous()
            given.append((snapshot.table_id(name), whole))
        where = None if path is None else os.fspath(path)
        return str(snapshot.native.write_neighbours(where, given))


def find_neighbours(
    rows: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    *,
    nearest: int = 10,
    candidates: int | None = 1024,
    across: bool = True,
) -> Neighbours:
    """Finds a row that may stand for each: the most used of the ``nearest`` others.

    Near is by the Euclidean distance, among the ``candidates`` most used rows, which are likely to
    be in a tier. Source: EVStore §6.2, where all rows are candidates (None here, which takes long:
    each row is compared with each).

    Args:
        rows: ``[N, D]`` f32 per table.
        counts: ``[N]``, uses of each row in a log.
        nearest: The paper's N.
        candidates: How many rows may stand for others; None: all.
        across: Neighbours may be of another table of the same dim.

    Examples:
        >>> rows, counts = {"item": torch.rand(1000, 8)}, {"item": torch.arange(1000)}
        >>> found = tb.find_neighbours(rows, counts)
    """
    names = tuple(rows)
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        key = (int(rows[name].shape[1]), "" if across else name)
        groups.setdefault(key, []).append(name)
    found: dict[str, Tensor] = {}
    for group in groups.values():
        every = torch.cat([rows[name] for name in group])
        used = torch.cat([counts[name] for name in group])
        near = _near(every, used, nearest, candidates)
        sizes = torch.tensor([rows[name].shape[0] for name in group], device="cpu")
        ends = sizes.cumsum(0)
        # The place among the tables of the group, of rows numbered through.
        place = torch.bucketize(near.clamp_min(0), ends, right=True)
        row = near - (ends - sizes)[place]
        table = torch.tensor([names.index(name) for name in group], device="cpu")[place]
        pairs = torch.stack([table, row], 1).masked_fill_((near < 0)[:, None], -1)
        found |= dict(zip(group, torch.split(pairs, sizes.tolist()), strict=True))
    return Neighbours(tables=names, of={name: found[name] for name in names})


def _near(rows: Tensor, used: Tensor, nearest: int, candidates: int | None) -> Tensor:
    """Returns the most used of the nearest others of each row, ``[N]`` i64; -1: there is none."""
    popular = used.argsort(descending=True, stable=True)[:candidates]
    if popular.numel() < 2:
        return torch.full((rows.shape[0],), -1, dtype=torch.int64, device="cpu")
    others = rows[popular]
    squares = others.pow(2).sum(1)
    nearest = min(nearest, popular.numel() - 1)
    found = []
    size = max(1, _DISTANCES // popular.numel())
    numbers = torch.arange(rows.shape[0], device="cpu")
    for part, own in zip(torch.split(rows, size), torch.split(numbers, size), strict=True):
        distance = torch.addmm(squares, part, others.T, alpha=-2)
        # A row that is missing cannot stand for itself.
        distance.masked_fill_(popular == own[:, None], torch.inf)
        # Candidates are ordered by use: the lowest number is the most used.
        best = distance.topk(nearest, largest=False).indices.min(1).values
        found.append(popular[best])
    return torch.cat(found)
