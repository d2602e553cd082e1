"""The most used rows of a snapshot in memory of a device, where lookups pool them.

Ids are found on the host, in four bytes a row of each table: where a row is on the device, or that
it is not there. Rows that are not are read through the snapshot's tiers, once each, and copied
behind the others; then a kernel pools all of a bag in the order of its ids. So the bits are those
of the host.

```text
ids ──▶ slots ──┬─ there ──────────────────────────────▶ kernel: pool in order ──▶ [B, D]
                └─ missing ─▶ tiers, SSD ─▶ pinned ─▶ tail of the arena ─┘
```
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tierbed._util.bytes import parse_bytes
from tierbed.config.tables import is_own
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.ops.binding import Bags, Binding
from tierbed.ops.flat import FlatLayout, bounds_of
from tierbed.ops.streams import CudaStreams

__all__ = ["DeviceRows", "HotRows"]

# Rows read at a time when the device is filled.
_CHUNK_ROWS = 65536


@dataclass(frozen=True, kw_only=True)
class HotRows:
    """Which rows of a snapshot are to be on a device.

    Args:
        counts: ``[N]`` of each table, uses of each row in a log. The most used rows for their
            bytes are chosen, of all tables together; a table that is not named has none there.
        budget: Memory of the device for them, and for the rows of a lookup that are missing.
        misses_max: Most missing rows of a lookup. A lookup with more is pooled on the host.

    Examples:
        >>> counts = {"item": torch.tensor([5, 0, 9, 1])}
        >>> hot = tb.HotRows(counts=counts, budget="2GiB")
        >>> # tb.Snapshot.open("snapshot", device="cuda", hot=hot)
        >>> hot.misses_max
        65536
    """

    counts: Mapping[str, Tensor]
    budget: int | str = "1GiB"
    misses_max: int = 65536


@dataclass
class _Arena:
    """Rows of one dim: those that stay, and behind them those that a lookup misses.

    Args:
        rows: ``[H + M, dim]`` f32 on the device.
        hot: ``H``.
        tables: Ids of the tables of this dim.
        first_rows: Where the rows of each table begin, were they numbered through.
    """

    rows: Tensor
    hot: int
    tables: list[int]
    first_rows: dict[int, int]


class DeviceRows:
    """The rows on the device, and lookups that use them.

    Args:
        native: The engine's snapshot.
        tables: Its tables, by id.
        device: Where the rows go; ``cpu`` with Triton's interpreter, for tests.
        hot: Which rows.

    Raises:
        InvalidError: Counts that do not fit the tables, or a budget that holds no row.
        UnsupportedError: Triton is not installed.
    """

    def __init__(
        self, native: Any, tables: Sequence[dict[str, Any]], device: torch.device, hot: HotRows
    ) -> None:
        try:
            # Triton is optional.
            from tierbed.dist.kernels.launch import check_device
            from tierbed.dist.kernels.pool_to_ranks import pool_to_ranks_kernel
        except ImportError as error:
            raise UnsupportedError(
                f"rows on a device need Triton, and it cannot be imported ({error}); install "
                "triton, or open the snapshot without hot rows"
            ) from error
        check_device(device, pool_to_ranks_kernel)
        self._native = native
        self._device = device
        self._misses_max = hot.misses_max
        self._streams = CudaStreams(device) if device.type == "cuda" else None
        self._turn = threading.Lock()
        self._done: Any = None
        self._slots: dict[int, Tensor] = {}
        self._arenas: dict[int, _Arena] = {}
        self._groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[_Group]] = {}
        self._used = {"hits": 0, "misses": 0, "host_lookups": 0}
        self._fill(tables, _chosen(tables, hot))

    def stats(self) -> dict[str, int]:
        """Returns rows and bytes on the device, ids found there or not, and lookups without it."""
        arenas = self._arenas.values()
        kept = {
            "row_count": sum(arena.hot for arena in arenas),
            "bytes": sum(arena.rows.nbytes for arena in arenas),
        }
        return {**kept, **self._used}

    def pool(self, binding: Binding, bags: Bags) -> Tensor | None:
        """Looks bags up, as :meth:`tierbed.ops.binding.Binding.read` does.

        Args:
            binding: The features.
            bags: What is looked up.

        Returns:
            The output on the device. None when the host must do it: more rows are missing than
            there is room for, or ids are wrong, which the engine tells best.
        """
        bounds = bounds_of(bags.offsets, binding.feature_count)
        groups = self._groups_of(binding)
        samples = (bags.offsets.numel() - 1) // binding.feature_count
        rows = samples if binding.is_pooled else bags.indices.numel()
        # Missing rows are read before anybody else's turn is taken.
        placed = [self._place(binding, bags, bounds, group) for group in groups]
        with self._turn:
            if any(one is None for one in placed):
                self._used["host_lookups"] += 1
                return None
            out = torch.empty(rows, binding.output_dim, device=self._device)
            if self._streams is not None and self._done is not None:
                # The rows that the lookup before this one missed may still be read.
                self._streams.wait(self._streams.current(), self._done)
            for group, one in zip(groups, placed, strict=True):
                assert one is not None
                self._used["hits"] += len(one.slots) - one.miss_count
                self._used["misses"] += one.miss_count
                self._pool_group(binding, bags, group, one, out)
            if self._streams is not None:
                self._done = self._streams.record(self._streams.current())
        return out

    def _groups_of(self, binding: Binding) -> list[_Group]:
        """Returns the groups of a binding's features, made once."""
        key = (tuple(binding.dims), tuple(binding.poolings))
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = _groups(binding, self._device)
        return groups

    # ------------------------------------------------------------ where rows are

    def _fill(self, tables: Sequence[dict[str, Any]], chosen: dict[int, Tensor]) -> None:
        by_dim: dict[int, list[int]] = {}
        for at, table in enumerate(tables):
            if is_own(table):
                continue
            by_dim.setdefault(int(table["dim"]), []).append(at)
        for dim, ids in by_dim.items():
            counts = [int(tables[at]["row_count"]) for at in ids]
            firsts = dict(zip(ids, accumulate(counts, initial=0), strict=False))
            hot = sum(len(chosen[at]) for at in ids if at in chosen)
            rows = torch.zeros(hot + self._misses_max, dim, device=self._device)
            self._arenas[dim] = _Arena(rows, hot, ids, firsts)
            begin = 0
            for at, count in zip(ids, counts, strict=True):
                slots = torch.full((count,), -1, dtype=torch.int32, device="cpu")
                kept = chosen.get(at, slots[:0].long())
                slots[kept] = torch.arange(len(kept), dtype=torch.int32, device="cpu") + begin
                self._slots[at] = slots
                for part in torch.split(kept, _CHUNK_ROWS):
                    rows[begin : begin + len(part)] = self._read([at], [part], dim)
                    begin += len(part)

    def _read(self, tables: list[int], rows: list[Tensor], dim: int) -> Tensor:
        """Reads rows of each table through the snapshot, ``[R, dim]`` on the host."""
        flat = FlatLayout(self._native, tables, [dim] * len(tables))
        bounds = list(accumulate((len(part) for part in rows), initial=0))
        is_pinned = self._device.type == "cuda"
        out = torch.empty(bounds[-1], dim, device="cpu", pin_memory=is_pinned)
        self._native.lookup(flat.plan, torch.cat(rows), flat.offsets(bounds), None, out)
        return out

    def _place(
        self, binding: Binding, bags: Bags, bounds: list[int], group: _Group
    ) -> _Placed | None:
        """Finds the slots of a group's ids, and reads the rows that are missing.

        Those get places behind the others.
        """
        arena = self._arenas[group.dim]
        slots, numbers = [], []
        for at in group.features:
            table = binding.tables[at]
            ids = bags.indices[bounds[at] : bounds[at + 1]].long()
            known = self._slots[table]
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(known)):
                return None
            found = known[ids].long()
            slots.append(found)
            numbers.append(ids[found < 0] + arena.first_rows[table])
        missing, places = torch.unique(torch.cat(numbers), return_inverse=True)
        if len(missing) > self._misses_max:
            return None
        every = torch.cat(slots)
        every[every < 0] = places + arena.hot
        return _Placed(every, self._missing_rows(arena, missing, group.dim), len(places))

    def _missing_rows(self, arena: _Arena, missing: Tensor, dim: int) -> Tensor | None:
        """Reads rows, numbered through the arena's tables and ascending; None of none."""
        if not len(missing):
            return None
        firsts = torch.tensor([*arena.first_rows.values()], device="cpu")
        ends = torch.searchsorted(missing, firsts).tolist()
        parts = missing.tensor_split(ends[1:])
        local = [part - first for part, first in zip(parts, firsts.tolist(), strict=True)]
        return self._read(arena.tables, local, dim)

    # ------------------------------------------------------------ pooling

    def _pool_group(
        self, binding: Binding, bags: Bags, group: _Group, placed: _Placed, out: Tensor
    ) -> None:
        arena = self._arenas[group.dim]
        read = placed.read
        if read is not None:
            arena.rows[arena.hot : arena.hot + len(read)].copy_(read, non_blocking=True)
        indices = placed.slots.to(self._device)
        if not binding.is_pooled:
            torch.index_select(arena.rows, 0, indices, out=out)
            return
        from tierbed.dist.kernels.pool_to_ranks import pool_to_ranks

        offsets, weights = _bags_of(binding, bags, group)
        device = self._device
        pool_to_ranks(
            arena.rows,
            group.first_rows,
            (indices, offsets.to(device), None if weights is None else weights.to(device)),
            torch.tensor([out.data_ptr()], device=device),
            torch.tensor([0, len(out)], device=device),
            group.columns,
            binding.output_dim,
            is_mean=group.is_mean,
            is_aligned=group.is_aligned,
        )


@dataclass(frozen=True)
class _Group:
    """Features that one kernel pools.

    Args:
        features: Positions of the features.
        columns: ``[F]`` i64 on the device, where each begins in the output.
        first_rows: ``[F]`` i64 on the device: ids are places in the arena, from row 0 on.
        dim: Of all of them.
        is_mean: Whether they are means.
        is_aligned: Whether all columns allow stores of 128 bits.
    """

    features: list[int]
    columns: Tensor
    first_rows: Tensor
    dim: int
    is_mean: bool
    is_aligned: bool


@dataclass(frozen=True)
class _Placed:
    """Where the rows of a group's ids are.

    Args:
        slots: ``[E]`` i64, places in the arena.
        read: ``[M, dim]`` f32 on the host, the rows that are not there; None where all are.
        miss_count: Ids whose rows are among those.
    """

    slots: Tensor
    read: Tensor | None
    miss_count: int


def _groups(binding: Binding, device: torch.device) -> list[_Group]:
    columns = list(accumulate(binding.dims, initial=0))
    kinds = list(zip(binding.dims, binding.poolings, strict=True))
    if not binding.is_pooled:
        # Rows are not pooled: one output for all features, side by side in no columns.
        columns = [0] * len(kinds)
    found = []
    for dim, pooling in dict.fromkeys(kinds):
        features = [at for at, kind in enumerate(kinds) if kind == (dim, pooling)]
        of_group = [columns[at] for at in features]
        found.append(
            _Group(
                features,
                torch.tensor(of_group, device=device),
                torch.zeros(len(features), dtype=torch.int64, device=device),
                dim,
                pooling == "mean",
                all(number % 4 == 0 for number in (dim, binding.output_dim, *of_group)),
            )
        )
    return found


def _bags_of(binding: Binding, bags: Bags, group: _Group) -> tuple[Tensor, Tensor | None]:
    """Returns offsets and weights of the features of a group."""
    if len(group.features) == binding.feature_count:
        return bags.offsets, bags.weights
    lengths = torch.diff(bags.offsets).view(binding.feature_count, -1)[group.features]
    offsets = torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0))
    if bags.weights is None:
        return offsets, None
    bounds = bounds_of(bags.offsets, binding.feature_count)
    parts = [bags.weights[bounds[at] : bounds[at + 1]] for at in group.features]
    return offsets, torch.cat(parts)


def _chosen(tables: Sequence[dict[str, Any]], hot: HotRows) -> dict[int, Tensor]:
    """Returns the rows of each table that go to the device, ascending."""
    names = {str(table["name"]): at for at, table in enumerate(tables)}
    for name, counts in hot.counts.items():
        if name not in names:
            raise InvalidError(f"no table {name!r}; the snapshot has {sorted(names)}")
        wanted = (int(tables[names[name]]["row_count"]),)
        if tuple(counts.shape) != wanted:
            raise InvalidError(
                f"counts of table {name!r} have the shape {tuple(counts.shape)}; give one for "
                f"each of its rows, {list(wanted)}"
            )
    if hot.misses_max < 1:
        raise InvalidError(f"misses_max must be at least 1, not {hot.misses_max}")
    dims = {int(table["dim"]) for table in tables if not is_own(table)}
    left = parse_bytes(hot.budget, "budget") - 4 * hot.misses_max * sum(dims)
    gains, sizes = [], []
    for name, counts in hot.counts.items():
        row_bytes = 4 * int(tables[names[name]]["dim"])
        gains.append(counts.double().cpu() / row_bytes)
        sizes.append(torch.full_like(gains[-1], row_bytes))
    gain, size = torch.cat(gains), torch.cat(sizes)
    order = gain.argsort(descending=True, stable=True)
    fits = (size[order].cumsum(0) <= left) & (gain[order] > 0)
    if not bool(fits.any()):
        raise InvalidError(
            f"a budget of {hot.budget} holds no used row beside {hot.misses_max} missing ones; "
            "raise budget, or lower misses_max"
        )
    is_kept = torch.zeros(len(gain), dtype=torch.bool, device="cpu")
    is_kept[order[fits]] = True
    parts = torch.split(is_kept, [len(counts) for counts in hot.counts.values()])
    return {
        names[name]: part.nonzero().view(-1) for name, part in zip(hot.counts, parts, strict=True)
    }
