"""Published snapshots: immutable folders that models are served from.

A :class:`Snapshot` is an immutable folder of checksummed pages, read through a row cache of a
fixed budget. Collections take it in place of a store; they then only look up.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierbed._native import NativeResident, NativeSnapshot, apply_delta
from tierbed._util.bytes import parse_bytes, parse_limit
from tierbed.config.io import IoOptions
from tierbed.config.tables import is_own
from tierbed.config.words import MissMode, Pooling, SnapshotBackend, check_word
from tierbed.errors import ClosedError, InvalidError, UnsupportedError
from tierbed.jagged import KeyedTensor, as_kjt
from tierbed.ops import operators as ops
from tierbed.ops.binding import Binding
from tierbed.ops.links import as_device
from tierbed.report.observer import Observer
from tierbed.results import SnapshotReport
from tierbed.serve.cache import CacheOptions, TierPlan, cache_parts
from tierbed.serve.hot_rows import DeviceRows, HotRows

if TYPE_CHECKING:
    from typing_extensions import Self

    from tierbed._native_options import RecordOptions, SnapshotOptions
    from tierbed.report import Report
    from tierbed.serve.cache import CachePart

__all__ = ["Snapshot"]


def _absolute(path: str | os.PathLike[str]) -> str:
    # The working directory may be another one when it is opened again.
    return os.path.abspath(os.fspath(path))


def _resident(
    folder: str, resident: TierPlan | str | os.PathLike[str], dram_budget: int | str
) -> list[NativeResident]:
    """Returns what ``resident`` keeps of the tables of the snapshot in ``folder``."""
    plan = resident if isinstance(resident, TierPlan) else TierPlan.load(resident)
    with Snapshot.open(folder, dram_budget=dram_budget, cache=[]) as snapshot:
        made_of = plan.about.get("snapshot", snapshot.identity)
        if made_of != snapshot.identity:
            raise InvalidError(
                "the plan of tiers was made of another snapshot",
                {"expected": snapshot.identity, "found": str(made_of)},
            )
        return plan.native(snapshot.table_id)


def _opened_elsewhere(
    kind: type[Snapshot], path: str, identity: str, given: dict[str, Any]
) -> Snapshot:
    """Opens in this process what another one sent: the same rows, or an error."""
    snapshot = kind.open(path, **given)
    found = snapshot.identity
    if found != identity:
        snapshot.close()
        raise ClosedError(
            f"folder holds another snapshot than the one that was sent (path: {path}, "
            f"expected: {identity}, found: {found}, remedy: publish into a new folder)",
            {"path": path, "expected": identity, "found": found},
        )
    return snapshot


def _refreshed(refresh: bool | Sequence[str]) -> list[str] | None:
    """Returns the tables named; an empty list is all of them."""
    if isinstance(refresh, bool):
        return [] if refresh else None
    if isinstance(refresh, str) or not refresh:
        raise InvalidError(f"refresh names tables, or is True or False, not {refresh!r}")
    return list(refresh)


def snapshot_options(
    *,
    dram_budget: int | str,
    backend: SnapshotBackend,
    tiers: CacheOptions,
    misses: MissMode,
    readers: int | None,
    io: IoOptions,
) -> SnapshotOptions:
    """Returns the arguments of :meth:`Snapshot.open` as the engine takes them.

    Raises:
        InvalidError: Options that do not fit each other.
    """
    if readers is not None and readers < 1:
        raise InvalidError(f"readers must be at least 1, not {readers}")
    if tiers.floor is not None and tiers.budget is None:
        raise InvalidError("floor is a part of a shared budget; give that too")
    return {
        "dram_budget_bytes": parse_bytes(dram_budget, "dram_budget"),
        "backend": backend,
        "io_engine": io.engine,
        "queue_depth": io.queue_depth,
        "reader_count": readers,
        "cache_bytes_max": parse_limit(tiers.bytes_max, "bytes_max"),
        "tiers": cache_parts(tiers.tiers),
        "neighbours": None if tiers.neighbours is None else os.fspath(tiers.neighbours),
        "misses": misses,
        "refresh": _refreshed(tiers.refresh),
        "tier_floor_bytes": parse_limit(tiers.floor, "floor"),
    }


_OF_THE_ENGINE = frozenset({"is_trainable", "native", "takes_gradients"})


class Snapshot:
    """A published snapshot. Made by :meth:`open`; also a context manager.

    Args:
        native: The engine's snapshot.
        path: Its folder.

    Raises:
        InvalidError: A path; :meth:`open` takes that.

    Examples:
        >>> rows = torch.arange(8000.0).view(1000, 8)
        >>> _ = tb.placement.import_tables({"item": rows}, "snapshot")
        >>> batch = tb.KeyedJaggedTensor(["item"], torch.tensor([3, 5]), lengths=torch.tensor([2]))
        >>> with tb.Snapshot.open("snapshot", dram_budget="16MiB") as snapshot:
        ...     torch.equal(snapshot.lookup(batch).values(), rows[3:4] + rows[5:6])
        True
    """

    def __init__(self, native: NativeSnapshot, path: str = "") -> None:
        if not isinstance(native, NativeSnapshot):
            raise InvalidError(
                f"a Snapshot is made by a call; tierbed.Snapshot.open({native!r}) opens it"
            )
        self._native = native
        self._path = path
        self._absolute_path = path
        self._tables: list[dict[str, Any]] = native.schema()["tables"]
        self._table_ids = {table["name"]: at for at, table in enumerate(self._tables)}
        states = json.loads(native.attachment("_vocabularies.json") or '{"vocabularies": []}')
        self._vocabularies = {state["table"]: state for state in states["vocabularies"]}
        self._bindings: dict[tuple[tuple[int, ...], str], Binding] = {}
        self._given: dict[str, Any] | None = None
        self._observer = Observer(native)
        self._device: torch.device | None = None
        self._device_rows: DeviceRows | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        dram_budget: int | str = "256MiB",
        backend: SnapshotBackend = "direct",
        cache: CacheOptions | CachePart | Sequence[CachePart] = "lru",
        resident: TierPlan | str | os.PathLike[str] | None = None,
        misses: MissMode = "read",
        readers: int | None = None,
        io: IoOptions | None = None,
        device: torch.device | str | None = None,
        hot: HotRows | None = None,
    ) -> Self:
        """Opens the snapshot at ``path`` for reading.

        A forked child opens it anew when it first reads, and a snapshot that is sent to another
        process (pickled) is opened there: each with the same options and a budget of its own.

        Args:
            path: The folder that ``publish`` wrote.
            dram_budget: Bytes of memory for the row cache and everything else.
            backend: ``"direct"`` reads pages past the system's cache, ``"mmap"`` through it,
                ``"memory"`` loads everything first.
            cache: The tiers of its cache, or all :class:`CacheOptions`. A tier that cannot hold
                any row within its bytes is told by a ``RuntimeWarning``.
            resident: Rows that stay in memory, from :func:`plan_tiers` or its file.
            misses: ``"read"``, or ``"surrogate"`` to answer misses by what ``resident`` keeps for
                them, or by a neighbour, or ``"default"`` to let no request read at all. Counted in
                :meth:`stats`.
            readers: Most lookups at once; by default 8. Those
                beyond the processors are for small lookups, are made when lookups meet, and are
                fewer in small budgets. ``stats()["snapshot"]["reader_count"]`` tells how many there
                are.
            io: How its files are read.
            device: Where outputs go, such as ``"cuda"``; by default where ids are.
            hot: Rows that are kept on ``device``, with the bits of the others. They were never on a
                GPU so far.

        Raises:
            InvalidError: Not a snapshot, a budget that is too small, or options that do not fit
                each other.
            UnsupportedError: Hot rows without Triton.
            CorruptionError: Pages or manifest do not verify.
        """
        tiers = cache if isinstance(cache, CacheOptions) else CacheOptions(tiers=cache)
        io = io or IoOptions()
        options = snapshot_options(
            dram_budget=dram_budget,
            backend=backend,
            tiers=tiers,
            misses=misses,
            readers=readers,
            io=io,
        )
        folder = os.fspath(path)
        near = tiers.neighbours
        given = {
            "dram_budget": dram_budget,
            "backend": backend,
            "cache": replace(tiers, neighbours=None if near is None else _absolute(near)),
            "resident": resident
            if resident is None or isinstance(resident, TierPlan)
            else _absolute(resident),
            "misses": misses,
            "readers": readers,
            "io": io,
            "device": device,
            "hot": hot,
        }
        if hot is not None and device is None:
            raise InvalidError('hot rows need a device; name it, as device="cuda"')
        kept = [] if resident is None else _resident(folder, resident, dram_budget)
        shared = None if tiers.budget is None else tiers.budget.native
        snapshot = cls(NativeSnapshot(folder, options, kept, shared), folder)
        # Another process shares no budget with this one.
        snapshot._given = given if tiers.budget is None else None
        snapshot._absolute_path = _absolute(folder)
        if options["cache_bytes_max"] != 0:
            snapshot._tell_of_empty_tiers()
        if device is not None:
            snapshot._use_device(as_device(device), hot)
        return snapshot

    def _use_device(self, device: torch.device, hot: HotRows | None) -> None:
        self._device = device
        if hot is None:
            return
        try:
            self._device_rows = DeviceRows(self._native, self._tables, device, hot)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def apply(
        base: str | os.PathLike[str],
        delta: str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        dram_budget: int | str = "256MiB",
    ) -> SnapshotReport:
        """Writes the snapshot that a delta makes of the snapshot it was published against.

        Equal inputs give equal snapshots, to the byte, so the next delta fits wherever this one
        was applied.

        Args:
            base: The snapshot.
            delta: What ``Store.publish(..., base=...)`` wrote.
            out: A new folder.
            dram_budget: Bytes of memory for all of it.

        Raises:
            InvalidError: The delta was made against another snapshot.
        """
        budget_bytes = parse_bytes(dram_budget, "dram_budget")
        written = apply_delta(os.fspath(base), os.fspath(delta), os.fspath(out), budget_bytes)
        return SnapshotReport(**written)

    def _tell_of_empty_tiers(self) -> None:
        """Warns of tiers whose bytes are too few for any row: they would silently do nothing."""
        for tier in self.stats()["snapshot"]["tiers"]:
            if tier["row_count_max"] == 0:
                warnings.warn(
                    f"the cache tier {tier['codec']}:{tier['policy']} has too few bytes to hold a "
                    "row, so every miss is read; raise dram_budget or bytes_max of CacheOptions, "
                    "which may be 0 to do without",
                    RuntimeWarning,
                    stacklevel=3,
                )
        neighbours = self.stats()["snapshot"]["neighbours"]
        if neighbours is not None and neighbours["key_count_max"] == 0:
            warnings.warn(
                "neighbours have too few bytes to know any, so none answers; raise dram_budget, "
                "cache_bytes or their share, or open without them",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def native(self) -> NativeSnapshot:
        """The engine's snapshot, for collections and servers."""
        return self._native

    @property
    def device(self) -> torch.device | None:
        """Where outputs go; None: where ids are."""
        return self._device

    @property
    def device_rows(self) -> DeviceRows | None:
        """The rows that are kept on the device."""
        return self._device_rows

    @property
    def path(self) -> str:
        """The folder."""
        return self._path

    @property
    def identity(self) -> str:
        """What tells this snapshot from every other."""
        return self._native.identity()

    @property
    def is_trainable(self) -> bool:
        """False: rows of a snapshot never change."""
        return False

    @property
    def takes_gradients(self) -> bool:
        """False: a backward ends at the vectors of a snapshot."""
        return False

    def tables(self) -> list[dict[str, Any]]:
        """Returns every table's ``name``, ``row_count``, ``dim``, ...."""
        return [table for table in self._tables if not is_own(table)]

    def vocabularies(self) -> dict[str, dict[str, Any]]:
        """Returns, per table of open vocabulary, what its index held when it was published."""
        return self._vocabularies

    def translate(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ``ids``, of any shape, i64; unknown ones have the shared row, 0.

        Args:
            table: Name of the table.
            ids: Ids of any shape.
        """
        flat = ids.detach().to(torch.int64).cpu().reshape(-1)
        binding = self._binding([self.table_id(table)], "sum")
        rows: torch.Tensor = ops.translate(
            flat, torch.tensor([0, flat.numel()], device="cpu"), binding.handle, False
        )
        return rows.view(ids.shape)

    def table_id(self, name: str) -> int:
        """Returns the id of table ``name``.

        Args:
            name: Name of the table.

        Raises:
            InvalidError: No such table.
        """
        found = self._table_ids.get(name)
        if found is None:
            known = [table["name"] for table in self.tables()]
            raise InvalidError(f"no table {name!r}; the snapshot has {known}", {"table": name})
        return found

    def lookup(
        self, features: Any, pooling: Pooling = "sum", tables: Sequence[str] | None = None
    ) -> KeyedTensor:
        """Pools the rows of bags.

        Args:
            features: A :class:`KeyedJaggedTensor` of ``F`` features and ``B`` samples.
            pooling: ``"sum"`` or ``"mean"``.
            tables: The table each feature reads; by default the one called like the feature.

        Returns:
            ``[B, D]`` per feature.

        Raises:
            InvalidError: Another pooling, a table that is not there, or not one per feature.
        """
        bags = as_kjt(features)
        ids = [self.table_id(name) for name in (tables or bags.keys())]
        if len(ids) != len(bags.keys()):
            raise InvalidError(f"{len(bags.keys())} features need as many tables, not {len(ids)}")
        check_word("pooling", pooling, Pooling)
        binding = self._binding(ids, pooling)
        indices = bags.values()
        if self._vocabularies:
            indices = ops.translate(indices.to(torch.int64), bags.offsets(), binding.handle, False)
        values = ops.lookup(binding, indices, bags.offsets(), bags.weights_or_none())
        return KeyedTensor(bags.keys(), binding.dims, values)

    def _binding(self, tables: list[int], pooling: str) -> Binding:
        key = (tuple(tables), pooling)
        binding = self._bindings.get(key)
        if binding is None:
            dims = [int(self._tables[table]["dim"]) for table in tables]
            binding = Binding(
                self._native, tables, [pooling] * len(tables), dims, observer=self._observer
            )
            binding.set_device(self._device)
            binding.device_rows = self._device_rows
            self._bindings[key] = binding
        return binding

    def attachment(self, name: str) -> bytes | None:
        """Returns the bytes published as ``name``.

        Args:
            name: Name of the attachment.
        """
        return self._native.attachment(name)

    def attachment_names(self) -> list[str]:
        """Returns the names of all attachments."""
        return self._native.attachment_names()

    def verify(self) -> int:
        """Checks every checksum and returns the number of pages checked."""
        return self._native.verify()

    def stats(self) -> dict[str, Any]:
        """Returns counters of lookups, the cache, the budget and the disk.

        With hot rows also ``device``: their number and bytes, ids that were there or not, and
        lookups that the host made instead.
        """
        stats: dict[str, Any] = self._native.stats()
        if self._device_rows is not None:
            stats["device"] = self._device_rows.stats()
        return stats

    def record(
        self,
        folder: str | os.PathLike[str],
        *,
        tables: Sequence[str | Sequence[str]] | None = None,
        sample: float = 1.0,
        seed: int = 0,
        file_bytes: int | str = "1MiB",
        bytes_max: int | str = "1GiB",
    ) -> list[Path]:
        """Records what is looked up from now on, as query logs to place by.

        Each sample of a lookup is a query. Files appear whole; when they take more than
        ``bytes_max`` the oldest are removed. A lookup never waits for the disk: what it cannot
        take is dropped and counted, see ``recorded`` of ``snapshot`` in :meth:`stats`. What is in
        memory is written when the snapshot is closed.

        Args:
            folder: Gets a folder for each group of tables, named like them with ``+`` between.
            tables: The tables, or tuples of tables whose rows are to share pages; by default
                every table by itself.
            sample: Share of the samples to record, each drawn by itself.
            seed: Equal seeds draw equal samples.
            file_bytes: Size of a file.
            bytes_max: Size of all files of a group.

        Returns:
            The folder of each group: what ``tierbed place --log`` reads.

        Raises:
            InvalidError: The snapshot records already, or tables that cannot share pages.
            UnsupportedError: Rows are on a device, whose lookups the engine does not see.
        """
        if self._device_rows is not None:
            raise UnsupportedError(
                "lookups of rows on a device are not recorded; open the snapshot without hot rows"
            )
        if tables is None:
            tables = [str(table["name"]) for table in self.tables()]
        groups = [(group,) if isinstance(group, str) else tuple(group) for group in tables]
        paths = [Path(folder) / "+".join(group) for group in groups]
        options: RecordOptions = {
            "groups": [
                {"tables": [self.table_id(name) for name in group], "folder": str(path)}
                for group, path in zip(groups, paths, strict=True)
            ],
            "sample": sample,
            "seed": seed,
            "file_bytes": parse_bytes(file_bytes, "file_bytes"),
            "bytes_max": parse_bytes(bytes_max, "bytes_max"),
        }
        self._native.record(options)
        return paths

    def report(self, queries: str | os.PathLike[str] | None = None) -> Report:
        """Returns what the snapshot does, to be shown in a notebook or saved as a page.

        Memory by part against the budget, what rows were answered from, reads over time, the
        tables, and what half and double the budget would bring.

        Args:
            queries: The folder that was given to :meth:`record`, or to ``tierbed serve --record``:
                its queries are replayed through caches of other sizes.

        Raises:
            InvalidError: The folder holds no logs of the tables of this snapshot.

        Examples:
            >>> _ = tb.placement.import_tables({"item": torch.zeros(1000, 8)}, "snapshot")
            >>> with tb.Snapshot.open("snapshot", dram_budget="16MiB") as snapshot:
            ...     snapshot.report().save("report.html")
        """
        # Few programs make reports.
        from tierbed.report.of_snapshot import report_of_snapshot

        return report_of_snapshot(self, self._observer, queries)

    def close(self) -> None:
        """Gives back memory and files."""
        self._bindings.clear()
        self._device_rows = None
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is None:
            raise TypeError(
                "a snapshot with a shared budget cannot be pickled: processes share no budget; "
                "open it in the other process"
            )
        if self.stats()["snapshot"]["generation"]["number"]:
            raise TypeError(
                "a snapshot with deltas cannot be pickled: the other process would read what it "
                "was before them; open what Snapshot.apply makes of them there"
            )
        return _opened_elsewhere, (type(self), self._absolute_path, self.identity, self._given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise TypeError("a snapshot cannot be copied; share it, or open it again")

    def __dir__(self) -> list[str]:
        # What collections ask is not offered to people.
        return [name for name in super().__dir__() if name not in _OF_THE_ENGINE]

    def __repr__(self) -> str:
        return f"Snapshot(path={self._path!r}, tables={len(self._tables)})"
