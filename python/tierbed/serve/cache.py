"""Rows that serving keeps in memory: cache tiers, shared budgets, and plans of resident rows.

:class:`CacheTier` names a tier of rows that come and go; a snapshot's cache is a list of them, and
a :class:`TierBudget` holds the caches of several snapshots.
:class:`TierPlan` is what never leaves: the most used rows in one codec, and for all others a few
bytes of a product code, or the table's default row;
:func:`tierbed.serve.plan_tiers` chooses one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from tierbed._native import NativeResident, NativeTierBudget
from tierbed._util.bytes import parse_bytes
from tierbed.codec import Codec
from tierbed.errors import CorruptionError, InvalidError
from tierbed.results import TierBudgetStats, TierMemberStats

__all__ = [
    "CacheOptions",
    "CachePart",
    "CacheTier",
    "NeighbourTier",
    "TierBudget",
    "TierPlan",
    "TierTable",
    "cache_parts",
]

PathLike: TypeAlias = "str | os.PathLike[str]"
FORMAT = "tierbed-tiers-1"


@dataclass(frozen=True, kw_only=True)
class CacheTier:
    """Rows in one codec, within a share of the cache's bytes.

    Args:
        codec: One of :data:`tierbed.codec.CODECS`.
        policy: Eviction policy: ``"lru"``, ``"group_frequency"``, ``"ev_lfu"``, ....
        share: Its part of the cache's bytes, next to the shares of the other tiers.
        admit_after: The use from which on a row enters, 1 to 3 (FlashEmbedding §3.3.2).

    Examples:
        Half the bytes for rows in f32, and half for rows that left them, in int8:

        >>> cache = [tb.CacheTier(policy="ev_lfu"), tb.CacheTier(codec="int8", policy="lru")]
        >>> _ = tb.placement.import_tables({"item": torch.zeros(1000, 8)}, "snapshot")
        >>> with tb.Snapshot.open("snapshot", dram_budget="16MiB", cache=cache) as snapshot:
        ...     [tier["codec"] for tier in snapshot.stats()["snapshot"]["tiers"]]
        ['f32', 'int8']
    """

    codec: str = "f32"
    policy: str = "lru"
    share: float = 1.0
    admit_after: int = 1


@dataclass(frozen=True, kw_only=True)
class NeighbourTier:
    """Who stands for rows that left the tiers, within a share of the cache's bytes.

    A part of a snapshot's cache that holds no rows: for a row that left all tiers, the key of one
    that is like it and used often. While that one is in a tier, it answers in place of a read;
    such answers are approximate, and need ``misses="surrogate"``. Who stands for whom lies in a
    file (:func:`tierbed.find_neighbours`) that is read in the background, for the rows that leave.
    Keys that are not looked up leave first in, first out, others have a second chance. Source:
    EVStore §6 (third layer).

    Args:
        share: Its part of the cache's bytes, next to the shares of the tiers.
        inline: Lookups read the file themselves, so that counts repeat.

    Examples:
        >>> cache = [tb.CacheTier(share=1.0), tb.NeighbourTier(share=4.0)]
    """

    share: float = 4.0
    inline: bool = False


CachePart: TypeAlias = "str | CacheTier | NeighbourTier"


def cache_parts(cache: CachePart | Sequence[CachePart]) -> list[CachePart]:
    """Returns the parts of a cache; a text may hold several with commas between."""
    if isinstance(cache, CacheTier | NeighbourTier):
        return [cache]
    if isinstance(cache, str):
        return [part.strip() for part in cache.split(",") if part.strip()]
    return [part for given in cache for part in cache_parts(given)]


class TierBudget:
    """Bytes that the caches of several snapshots share, all metadata counted.

    Each snapshot has its floor; what is beyond all floors goes where it makes most hits, measured
    all the time, and comes back when a snapshot is closed. Source: EVStore §8.4, experiment 12;
    differs: the parts follow demand.

    Args:
        limit: Bytes of all caches together, never more: ``"1GiB"``.
        epoch_groups: Requests with rows of the sample, of all snapshots, from one division to the
            next; by default 2048.

    Raises:
        InvalidError: No bytes.

    Examples:
        >>> budget = tb.TierBudget("4MiB")
        >>> _ = tb.placement.import_tables({"item": torch.zeros(1000, 8)}, "snapshot")
        >>> with tb.Snapshot.open("snapshot", cache=tb.CacheOptions(budget=budget)) as snapshot:
        ...     len(budget.stats().members)
        1
    """

    def __init__(self, limit: int | str, *, epoch_groups: int | None = None) -> None:
        limit_bytes = parse_bytes(limit, "limit")
        for name, value in (("limit", limit_bytes), ("epoch_groups", epoch_groups)):
            if value is not None and not 0 <= value < 1 << 64:
                raise InvalidError(f"{name} must be from 0 to 2^64 - 1", {name: str(value)})
        self._native = NativeTierBudget(limit_bytes, epoch_groups)

    @property
    def native(self) -> NativeTierBudget:
        """The engine's budget, for snapshots."""
        return self._native

    def stats(self) -> TierBudgetStats:
        """Returns what was counted, of the budget and of each of its snapshots."""
        counted = self._native.stats()
        members = tuple(TierMemberStats(**member) for member in counted["members"])
        return TierBudgetStats(**{**counted, "members": members})

    def __repr__(self) -> str:
        stats = self.stats()
        return f"TierBudget(limit_bytes={stats.limit_bytes}, members={len(stats.members)})"


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The cache of a snapshot: rows that come and go.

    Args:
        tiers: The tiers, the first asked first: each a :class:`CacheTier` or
            ``"codec:policy:share:admit"``, of which a lone name is a policy. What leaves one falls
            to the next. A :class:`NeighbourTier`, ``"neighbours:second_chance:share"``, lets
            neighbours answer for rows that left the last.
        bytes_max: Most bytes of the tiers, metadata included; all that is left by default.
        neighbours: The file of neighbours; by default the one beside the snapshot,
            ``<path>.neighbours``.
        refresh: Tables whose approximate answers are followed by a read in the background, which
            brings the row into the cache; True: all. No request waits for it; what finds no room
            in its queue is dropped, what cannot be read stays approximate. Counted in
            ``refreshed`` of :meth:`Snapshot.stats`.
        budget: What the tiers share with other snapshots, in place of bytes of the snapshot's own
            budget; then without ``bytes_max``.
        floor: Bytes of the shared budget that these tiers always have; by default a sixteenth.

    Examples:
        >>> cache = tb.CacheOptions(tiers="int8:group_frequency", bytes_max="4MiB")
        >>> _ = tb.placement.import_tables({"item": torch.zeros(1000, 8)}, "snapshot")
        >>> tb.Snapshot.open("snapshot", cache=cache).close()
    """

    tiers: CachePart | Sequence[CachePart] = "lru"
    bytes_max: int | str | None = None
    neighbours: PathLike | None = None
    refresh: bool | Sequence[str] = False
    budget: TierBudget | None = None
    floor: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class TierTable:
    """What of one table is always in memory.

    Args:
        name: The table.
        row_count: Its rows.
        dim: Elements of a row.
        head_codec: Codec of the most used rows.
        head_rows: ``[H]`` i64, ascending.
        head_codes: ``[H, code_bytes]`` u8.
        tail_codes: ``[row_count, code_bytes]`` u8 of the plan's product codec, or None.
        default_row: ``[dim]`` f32, for rows that nothing else stands for.
    """

    name: str
    row_count: int
    dim: int
    head_codec: str
    head_rows: Tensor
    head_codes: Tensor
    tail_codes: Tensor | None = None
    default_row: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Returns its tensors by name."""
        parts = {
            "head_rows": self.head_rows,
            "head_codes": self.head_codes,
            "tail_codes": self.tail_codes,
            "default_row": self.default_row,
        }
        return {name: part.contiguous() for name, part in parts.items() if part is not None}


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """The rows that a snapshot keeps in memory as long as it is open.

    Args:
        tables: What is kept of each table.
        codebooks: By dim, ``[parts, 256, dim / parts]`` of the product codec of its tails.
        about: What was planned: shares, expected error.

    Examples:
        >>> rows, counts = {"item": torch.rand(1000, 8)}, {"item": torch.arange(1000)}
        >>> plan = tb.plan_tiers(rows, counts, dram_bytes=20_000)
        >>> plan.save("plan.safetensors")
        >>> tb.TierPlan.load("plan.safetensors").tables[0].name
        'item'
    """

    tables: tuple[TierTable, ...]
    codebooks: Mapping[int, Tensor] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def native(self, table_id: Callable[[str], int]) -> list[NativeResident]:
        """Returns it as the engine takes it. ``table_id`` gives the id of a name.

        Args:
            table_id: Gives the id of a table by name.
        """
        products = {dim: Codec("product", dim, books) for dim, books in self.codebooks.items()}
        return [
            NativeResident(
                table_id(table.name),
                table.row_count,
                (
                    Codec(table.head_codec, table.dim).native,
                    table.head_rows.contiguous(),
                    table.head_codes.contiguous(),
                ),
                None
                if table.tail_codes is None
                else (products[table.dim].native, table.tail_codes.contiguous()),
                None if table.default_row is None else table.default_row.contiguous(),
            )
            for table in self.tables
        ]

    def save(self, path: PathLike) -> None:
        """Writes the plan to a safetensors file with a checksum.

        Args:
            path: The file.
        """
        # `import tierbed` loads this file, and few programs have a plan.
        from safetensors.torch import save_file

        tensors = {
            f"{t.name}/{name}": part for t in self.tables for name, part in t.parts().items()
        }
        tensors |= {f"codebooks/{dim}": books.contiguous() for dim, books in self.codebooks.items()}
        tables = [
            {"name": t.name, "rows": t.row_count, "dim": t.dim, "head_codec": t.head_codec}
            for t in self.tables
        ]
        told = json.dumps({"tables": tables, "about": dict(self.about)})
        save_file(
            tensors,
            os.fspath(path),
            {"format": FORMAT, "plan": told, "sha256": _checksum(tensors, told)},
        )

    @classmethod
    def load(cls, path: PathLike) -> TierPlan:
        """Reads what :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            InvalidError: The file is no plan.
            CorruptionError: It is not what was written.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), "pt") as file:
                told = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise InvalidError(
                f"cannot read the plan {path}: {error}", {"path": str(path)}
            ) from error
        if told.get("format") != FORMAT:
            raise InvalidError(f"{path} holds no plan of tiers", {"path": str(path)})
        text = told.get("plan")
        if text is None or told.get("sha256") != _checksum(tensors, text):
            raise CorruptionError(f"{path} is not the plan that was written", {"path": str(path)})
        plan = json.loads(text)
        tables = []
        for table in plan["tables"]:
            first = f"{table['name']}/"
            parts = {n.removeprefix(first): t for n, t in tensors.items() if n.startswith(first)}
            tables.append(
                TierTable(
                    name=table["name"],
                    row_count=table["rows"],
                    dim=table["dim"],
                    head_codec=table["head_codec"],
                    **parts,
                )
            )
        books = {
            int(name.removeprefix("codebooks/")): tensor
            for name, tensor in tensors.items()
            if name.startswith("codebooks/")
        }
        return cls(tables=tuple(tables), codebooks=books, about=plan["about"])


def _checksum(tensors: Mapping[str, Tensor], told: str) -> str:
    found = hashlib.sha256(told.encode())
    for name in sorted(tensors):
        found.update(f"{name}{tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()
