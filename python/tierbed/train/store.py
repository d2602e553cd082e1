"""Training store: the tables of a run on disk or in memory, and its checkpoints.

A :class:`Store` is one folder (or plain memory) with the rows of all tables, their optimizer
state, and the last checkpoint. One process owns it. What was not checkpointed is lost when the
process ends; what was checkpointed is never lost.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import torch

from tierbed import _native
from tierbed._native import NativeStore
from tierbed._util import state
from tierbed._util.bytes import parse_bytes, parse_limit
from tierbed.backends.bridge import Bridge
from tierbed.backends.protocol import RowStoreProtocol
from tierbed.config.io import IoOptions
from tierbed.config.optim import Optimizer, RowWiseAdagrad
from tierbed.config.tables import BaseEmbeddingConfig, DataType
from tierbed.config.words import Backend, Durability, OnMismatch, Order, check_word
from tierbed.errors import ClosedError, CorruptionError, InvalidError, UnsupportedError
from tierbed.ops.steps import StepWatch
from tierbed.ops.windows.device import WindowsOnDevice, windows_on
from tierbed.placement.files import (
    HeadRows,
    PlacementFiles,
    TableCodecs,
    placement_files,
    table_codecs,
    table_heads,
)
from tierbed.report.observer import Observer
from tierbed.results import KeptCheckpoint, SnapshotReport
from tierbed.train import opened
from tierbed.train.background import Request, base_paths, compiled_parts, publish_async
from tierbed.train.shards import Shards, published_shards
from tierbed.train.stats import OrderState
from tierbed.train.store_reports import StoreReports

if TYPE_CHECKING:
    from typing_extensions import Self

    from tierbed._native_options import StoreOptions

__all__ = ["Store"]

_OF_THE_ENGINE = frozenset(
    {
        "add_table",
        "asks_for_plan",
        "is_trainable",
        "may_follow_plan",
        "may_leave_plan",
        "native",
        "note_collection",
        "note_scans",
        "note_shared_ids",
        "note_unknown_order",
        "optimizers",
        "plan_obstacle",
        "takes_gradients",
        "watch",
        "windows",
    }
)
EXTRA = "extra.pt"
RNG = "rng.pt"
Progress = Callable[[int, int], None]


class Store(StoreReports):
    """The tables of a training run. Made by :meth:`open`; also a context manager.

    Args:
        native: The engine's store.
        path: Its folder, or None.
        seed: Seed of the initial rows.
        order: The order that was asked for.

    Raises:
        InvalidError: A path; :meth:`open` takes that.

    Examples:
        >>> store = tb.Store.open("run/store", dram_budget="16MiB")
        >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=16)]
        >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        >>> store.read_rows("item", first_row=0, row_count=2).shape
        torch.Size([2, 16])
        >>> report = store.checkpoint("epoch-1", extra={"epoch": 1})
        >>> store.close()
    """

    def __init__(
        self,
        native: NativeStore,
        path: str | None = None,
        seed: int = 0,
        order: str = "window",
    ) -> None:
        if not isinstance(native, NativeStore):
            raise InvalidError(
                f"a Store is made by a call; tierbed.Store.open({native!r}) opens it"
            )
        self._order = order
        self._native = native
        self._path = path
        self._seed = seed
        self._optimizers: dict[int, Optimizer] = {}
        self._given: dict[int, Optimizer] = {}
        self._watch = StepWatch()
        self._collections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._shared_ids: set[str] = set()
        self._told_order = False
        self._is_open = True
        self._told_scans = False
        self._may_leave_plan = True
        self._observer = Observer(native, path)
        self._windows: WindowsOnDevice | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        dram_budget: int | str = "4GiB",
        backend: Backend | None = None,
        durability: Durability = "checkpoint",
        order: Order = "auto",
        on_mismatch: OnMismatch | None = None,
        io: IoOptions | None = None,
        disk_quota: int | str | None = None,
        checkpoint: str | None = None,
        vocabulary_dram: int | str | None = None,
        shards: int | None = None,
        read_only: bool = False,
        device: torch.device | str | None = None,
        hbm_budget: int | str | None = None,
        storage_thread: bool | None = None,
        seed: int = 0,
    ) -> Self:
        """Opens the store at ``path``, or makes it; continues from its last checkpoint.

        Args:
            path: The folder. Only ``backend="memory"`` does without.
            dram_budget: Bytes of memory for everything the store keeps, as a number or as
                ``"16MiB"``; buffers, caches and indexes all count.
            backend: How rows are kept when they are read by number: ``"file"`` (what None
                means for a new store); ``"cold"``, home arrays and delta runs for streams;
                ``"memory"`` for tables that fit (the reference); ``"lsm"``, RecDB's
                log-structured merge tree, or ``"lsm_plain"``, the same without RecDB's parts;
                what others do, to compare: ``"hashdb"``, ``"mmap"``, ``"rocksdb"``,
                ``"rocksdb_universal"``. All give the same numbers. A store with a backend
                trains by window.
            durability: ``"checkpoint"`` for checkpoints now and then; ``"step"`` for one after
                every step: rows also go to a log, and a checkpoint with up to 256 KiB of
                state is one entry and one sync of it. Backends ``"lsm"`` and ``"lsm_plain"``.
            order: ``"auto"`` trains along a plan when :func:`tierbed.lookahead` is given a
                loader whose order is known, and by a window of batches otherwise.
                ``"forward"`` insists on a plan, ``"window"`` never makes one.
            on_mismatch: What a batch does that is not the planned one: ``"error"``, or
                ``"fallback"``: all rows move, once, to where they are read by number, and
                training goes on with the same numbers; or ``"fallback_cold"``, the same with
                the ``cold`` backend. By default ``"error"`` with ``order="forward"`` or
                several shards, else ``"fallback"``.
            io: How its files are read and written.
            disk_quota: Most bytes on disk; None for no limit but the disk's.
            checkpoint: Name of a kept checkpoint to go back to. What came after it and was not
                kept itself is gone. Its files are checked first: if one is missing or damaged,
                the last checkpoint stays.
            vocabulary_dram: Bytes of ``dram_budget`` for index pages of open vocabularies, where
                there are any; by default a sixteenth.
            shards: Parts that work at the same time, each on a thread of its own, with whole
                tables each; the numbers are the same. A store keeps the number it began with,
                which is what None means, or one for a new store. Several shards stay in forward
                order, have no open vocabulary and keep no checkpoints.
            read_only: Looks at the last checkpoint, or at the kept one that ``checkpoint`` names,
                and writes nothing: on a disk that cannot be written, or beside the process that
                trains. When that process commits, what is read of its last checkpoint may be a
                CorruptionError; :meth:`verify` begins again by itself. A kept one stays.
                Changes are an UnsupportedError. RocksDB's backends are not opened so, and
                ``"mmap"`` not while another process has it.
            device: In forward order rows of the current window are trained in the memory of this
                CUDA device, with the same numbers; in other orders they stay on the host. Outputs
                of collections go there. With one shard, and with SGD, Adagrad or RowWiseAdagrad.
                ``"cpu"`` runs the kernels in Triton's interpreter, for tests.
            hbm_budget: Bytes of the device's memory: two windows, and 128 MiB for copies. By
                default half of what is free there.
            storage_thread: In forward order, rows move between memory and disk on a thread of their
                own while the caller trains, with the same numbers; each shard has one. None has
                it where the process may use two processors for each shard and ``dram_budget`` is
                at least 16 MiB for each, 256 KiB of which the thread takes. Unsupported with a
                device; a store that is only read has none.
            seed: From it come the initial rows of every table.

        Raises:
            InvalidError: A bad argument, a budget that is too small (the message names the
                least), or a folder of another format.
            UnsupportedError: A device without Triton, for several shards, or with a storage
                thread.
            ClosedError: Another process owns the store, or this one has it open already.
            CorruptionError: The last checkpoint does not verify.
        """
        check_word("backend", backend or "file", Backend)
        check_word("durability", durability, Durability)
        check_word("order", order, Order)
        check_word("on_mismatch", on_mismatch or "error", OnMismatch)
        if shards is not None and shards < 1:
            raise InvalidError(f"shards must be at least 1, not {shards}", {"shards": str(shards)})
        if path is None and backend != "memory":
            raise InvalidError("a store on disk needs a path; give one, or backend='memory'")
        io = io or IoOptions()
        options: StoreOptions = {
            "dram_budget_bytes": parse_bytes(dram_budget, "dram_budget"),
            "backend": backend,
            "durability": durability,
            "order": order,
            "on_mismatch": on_mismatch,
            "shards": shards,
            "io_engine": io.engine,
            "queue_depth": io.queue_depth,
            "disk_quota_bytes": parse_limit(disk_quota, "disk_quota"),
            "storage_thread": storage_thread,
            "vocabulary_bytes": parse_limit(vocabulary_dram, "vocabulary_dram"),
            "read_only": read_only,
            "kept": checkpoint if read_only else None,
        }
        folder = None if path is None else os.fspath(path)
        if read_only and folder is None:
            raise InvalidError("read_only looks at a checkpoint of a folder; give its path")
        if checkpoint is not None and folder is None:
            raise InvalidError("a store without a path has no checkpoint to go back to")
        has_choice = folder is not None and backend is None
        windows = None
        if device is not None:
            windows = windows_on(device, parse_limit(hbm_budget, "hbm_budget"))
        elif hbm_budget is not None:
            raise InvalidError("hbm_budget is memory of a device; give device, or leave it out")
        try:
            if checkpoint is not None and folder is not None and not read_only:
                _native.restore_checkpoint(folder, checkpoint)
            native = NativeStore(folder, options, windows)
        except ClosedError as error:
            raise opened.explained(error, str(folder)) from None
        store = cls(native, folder, seed, order if has_choice else "window")
        store._windows = windows
        insists = on_mismatch is None and (order == "forward" or (shards or 1) > 1)
        store._may_leave_plan = on_mismatch != "error" and not insists
        if read_only:
            store._observer = None
        opened.note(store, only_reads=read_only)
        return store

    @classmethod
    def over(
        cls,
        rows: RowStoreProtocol,
        *,
        dram_budget: int | str = "4GiB",
        seed: int = 0,
    ) -> Self:
        """Opens the engine over a store of yours; it continues from that store's last commit.

        Args:
            rows: Any object with the calls of :class:`tierbed.backends.RowStoreProtocol`; closed
                together with this store. Its own memory is not in the budget.
            dram_budget: Bytes of memory for the row buffer and the engine.
            seed: From it come the initial rows of every table.

        Raises:
            InvalidError: ``rows`` is no row store, or the budget is too small.
            CorruptionError: What it holds was not written by a commit.
        """
        budget_bytes = parse_bytes(dram_budget, "dram_budget")
        return cls(NativeStore.over(Bridge(rows), budget_bytes), None, seed)

    @property
    def native(self) -> NativeStore:
        """The engine's store, for collections."""
        return self._native

    @property
    def seed(self) -> int:
        """Seed of the initial rows."""
        return self._seed

    @property
    def windows(self) -> WindowsOnDevice | None:
        """Windows on a device, for collections; None where rows stay on the host."""
        return self._windows

    @property
    def device(self) -> torch.device | None:
        """Where outputs of collections go by default; None: where their ids are."""
        return None if self._windows is None else self._windows.device

    @property
    def is_open(self) -> bool:
        """Whether :meth:`close` was not called yet."""
        return self._is_open

    @property
    def is_trainable(self) -> bool:
        """True: rows may be updated (a snapshot's may not)."""
        return True

    @property
    def watch(self) -> StepWatch:
        """What sees the steps of all tables together, for collections."""
        return self._watch

    @property
    def takes_gradients(self) -> bool:
        """True: a backward through a lookup steps the rows."""
        return True

    # ------------------------------------------------------------ tables

    def add_table(self, config: BaseEmbeddingConfig, optimizer: Optimizer | None = None) -> int:
        """Adds a table, or finds the same one again, and returns its id.

        Args:
            config: The table.
            optimizer: That of its rows; by default that of the collections that use the table
                already, or ``RowWiseAdagrad()``.

        Raises:
            InvalidError: A table of that name with another shape, optimizer or seed exists, or a
                collection uses it with other numbers of the optimizer.
            UnsupportedError: Rows that are not to be kept in float32.
        """
        if config.data_type is not DataType.FP32:
            raise UnsupportedError(
                f"table {config.name!r}: rows train in float32, not {config.data_type.value}; keep "
                "trained rows in fewer bytes in a tierbed.CodedStore",
                {"table": config.name},
            )
        in_use = self._in_use(config.name)
        if optimizer is None:
            optimizer = RowWiseAdagrad() if in_use is None else in_use
        schema = config.schema(optimizer, self._seed)
        if config.num_embeddings is None:
            table = self._native.add_open_table(schema, config.policy())
        else:
            table = self._native.add_table(schema)
        if in_use is None:
            self._given[table] = optimizer
            self._set_optimizer(table, optimizer)
        elif in_use != optimizer:
            raise InvalidError(
                f"a collection uses table {config.name!r} with {in_use}, not with {optimizer}; "
                "leave optimizer out to use that, or change the learning rate of the table with "
                "store.set_learning_rate(lr, tables)",
                {"table": config.name},
            )
        return table

    def _in_use(self, name: str) -> Optimizer | None:
        """Returns the optimizer that was given with a table which a collection uses."""
        if not any(name in collection.table_names() for collection in self._collections):
            return None
        return self._given.get(self.table_id(name))

    # ------------------------------------------------------------ order

    def order(self) -> OrderState:
        """Returns what is known of the order that training follows.

        Returns:
            ``kind`` (``"forward"`` or ``"window"``), ``reason`` (why it is not the forward
            order), ``fallback_count`` and ``rows_moved``; in forward order also ``epoch`` and
            ``batch`` (where training stands), ``plan``, ``unplanned_scan_count`` and
            ``unplanned_search_count`` (how often rows beside the plan were read by a pass over
            everything, and by finding them).
        """
        return self.stats()["order"]

    def note_unknown_order(self, reason: str) -> None:
        """Keeps why no plan was made, and tells it once.

        Args:
            reason: Why the order is not known.

        Raises:
            InvalidError: The store insists on a plan.
        """
        if self._order == "forward":
            raise InvalidError(f"the forward order cannot be followed: {reason}")
        self._native.note_reason(reason)
        if not self._told_order and self._path is not None:
            logging.getLogger("tierbed").warning(
                "training by window, not in forward order: %s", reason
            )
            self._told_order = True

    def note_collection(self, collection: Any) -> None:
        """Remembers a collection that trains on this store, while it lives.

        Args:
            collection: A collection on this store.
        """
        self._collections.add(collection)

    def collections(self) -> list[Any]:
        """Returns the collections that live and train on this store."""
        return list(self._collections)

    @property
    def may_follow_plan(self) -> bool:
        """Whether one collection may follow a plan: it is asked for, and there is no other."""
        return self.asks_for_plan and len(self._collections) == 1

    @property
    def asks_for_plan(self) -> bool:
        """Whether a plan is to be followed where there can be one."""
        return self._order != "window"

    @property
    def may_leave_plan(self) -> bool:
        """Whether batches that are not the planned ones train on, by window."""
        return self._may_leave_plan

    @property
    def plan_obstacle(self) -> str | None:
        """Why no plan can be followed although one is asked for; None when one can."""
        count = len(self._collections)
        if not self.asks_for_plan or count == 1:
            return None
        return (
            f"{count} collections train on the store, and one is looked ahead; look them ahead "
            "together with lookahead(loader, [one, other]), or drop the others"
        )

    def note_scans(self, *, is_coming: bool = False) -> None:
        """Tells once that lookups beside the plan read everything, when they do.

        Args:
            is_coming: Whether a scan of unplanned rows is announced.
        """
        if self._told_scans or not self.asks_for_plan or self._native.position() is None:
            return
        count = int(self.order().get("unplanned_scan_count", 0))
        if count == 0 and not is_coming:
            return
        logging.getLogger("tierbed").warning(
            "in forward order, lookups of many rows that were not planned read the whole store, "
            "once per group of batches with lookahead, once per batch without; have the loader "
            "yield validation batches too (and its known_order()), or open the store with "
            'order="window"'
        )
        self._told_scans = True

    # ------------------------------------------------------------ life of a run

    def checkpoint(
        self,
        name: str,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: bool = False,
        capture_rng: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> int:
        """Makes everything durable, all or nothing, and returns the checkpoint's number.

        Args:
            name: A name for people.
            extra: What belongs to the run beside the tables (``model.state_dict()``, the data
                position, ...): nested dictionaries and lists of tensors and plain values.
            keep: Whether it outlives the next checkpoint, until :meth:`drop_checkpoint`; the name
                is then of letters, digits, ``_`` and ``-``. Files that are never rewritten are
                shared with the store, others are copied.
            capture_rng: Also keep the state of torch's, Python's and numpy's generators.
            attachments: Further named bytes.

        Raises:
            InvalidError: A reserved name of an attachment, a name that cannot be kept, or an extra
                that is no dictionary.
        """
        parts = dict(attachments or {})
        reserved = {EXTRA, RNG} & parts.keys()
        if reserved:
            raise InvalidError(f"attachment names {sorted(reserved)} are reserved")
        if extra is not None:
            if not isinstance(extra, Mapping):
                raise InvalidError(
                    f"extra of a checkpoint is a dictionary, not {type(extra).__name__}; give it "
                    'a name in one, such as extra={"epoch": 3}'
                )
            parts[EXTRA] = state.pack(extra)
        if capture_rng:
            parts[RNG] = state.pack(state.rng_state())
        return self._native.checkpoint(name, sorted(parts.items()), keep)

    def checkpoints(self) -> list[KeptCheckpoint]:
        """Returns the kept checkpoints, oldest first."""
        kept = [] if self._path is None else _native.kept_checkpoints(self._path)
        return [
            KeptCheckpoint(number=number, name=name, file_bytes=size) for number, name, size in kept
        ]

    def drop_checkpoint(self, name: str) -> None:
        """Forgets a kept checkpoint and gives its disk space back.

        Args:
            name: Name of the checkpoint.

        Raises:
            InvalidError: No checkpoint of that name is kept.
        """
        if self._path is None:
            raise InvalidError("a store without a path keeps no checkpoints")
        self._native.drop_checkpoint(name)

    def last_checkpoint(self) -> tuple[int, str] | None:
        """Returns number and name of the checkpoint the store was opened at or made last."""
        return self._native.last_checkpoint()

    def load_extra(self) -> dict[str, Any] | None:
        """Returns the ``extra`` of the last checkpoint; reads no code, only data."""
        packed = self._native.attachment(EXTRA)
        return None if packed is None else state.unpack(packed)

    def restore_rng(self) -> bool:
        """Puts the random generators back to the last checkpoint; False when it has none."""
        packed = self._native.attachment(RNG)
        if packed is None:
            return False
        state.set_rng_state(state.unpack(packed))
        return True

    def attachment(self, name: str) -> bytes | None:
        """Returns the bytes attached to the last checkpoint as ``name``.

        Args:
            name: Name of the attachment.
        """
        return self._native.attachment(name)

    def attachment_names(self) -> list[str]:
        """Returns the names of the bytes attached to the last checkpoint.

        ``extra.pt`` and ``rng.pt`` are among them where ``extra`` and random state were given.
        """
        return sorted(self._native.attachment_names())

    def checkpoint_rows(self, name: str, *, keep: bool = False) -> int:
        """Checkpoints changed rows; all else stays as in the last checkpoint.

        ``extra``, the state of random generators and attachments are carried over, so that a run
        resumes at the same bits with other rows, or with tables more.

        Args:
            name: A name for people.
            keep: As of :meth:`checkpoint`.

        Returns:
            The checkpoint's number.

        Raises:
            CorruptionError: An attachment of the last checkpoint is gone.
        """
        parts = []
        for part in self.attachment_names():
            packed = self._native.attachment(part)
            if packed is None:
                raise CorruptionError(f"attachment {part!r} is gone", {"attachment": part})
            parts.append((part, packed))
        return self._native.checkpoint(name, parts, keep)

    def publish(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        base: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        changes: Literal["auto", "tracked", "compared"] = "auto",
        placement: PlacementFiles | None = None,
        codec: TableCodecs | None = None,
        head_rows: HeadRows | None = None,
        shards: Shards | None = None,
        attachments: Mapping[str, bytes] | None = None,
        compiled: bool = False,
        progress: Progress | None = None,
    ) -> SnapshotReport:
        """Writes the newest version of every written row into a serving snapshot.

        Args:
            path: A new folder.
            model: Its dense parameters go along, and its ``config()`` where it has one, so that
                ``tierbed serve`` can predict.
            base: A snapshot of this store: write a delta, only rows that changed since, for
                :meth:`Snapshot.apply`. Or a list of a snapshot and deltas upon it, oldest first:
                write a delta to come upon the last of these, for a server that has them all.
            changes: How a delta finds these rows. By those noted since the base was published
                (``tracked``, refused where they are not known), by comparing all rows with it
                (``compared``), or by the first where it can be (``auto``). Upon the base both give
                the same rows; only a compared delta leaves out rows written with what they had.
                ``stats()["changes"]`` counts both.
            placement: Which rows share pages, from ``tierbed place``: the file of a store with one
                table, or a file per table or tuple of tables of one dim, whose rows are numbered
                through in that order. Other tables lie most used rows first.
            codec: How rows are kept on pages: f32, f16, bf16, int8, int4 or gauss4, each row with
                a scale of its own; for all tables, or by table. By default f32. A delta keeps
                rows as its base does.
            head_rows: How many rows of a table, or ``"5%"`` of those stored, lie most used first
                and have entries in the index; for all tables that share no pages, or by table.
                The others lie by id, so that a bit of the index is enough for each. By default all
                rows have entries. A delta has none.
            shards: Divide rows into shards: the folder gets a snapshot for each and
                ``shards.json``, which is written last. A delta has none.
            attachments: Further named bytes.
            compiled: Also compile ``model``, as :func:`tierbed.serve.compile_dense` does, which
                takes some seconds; its result among ``attachments`` does for several versions.
            progress: Called with (rows done, rows in all).
        """
        request = self._request(
            path,
            model,
            base,
            changes,
            placement,
            codec,
            head_rows,
            attachments,
            compiled=compiled,
            shards=shards,
        )
        written = self._native.publish(
            request.path,
            request.attachments,
            progress,
            request.base,
            request.changes,
            request.placements,
            request.codecs,
            request.heads,
            request.shards,
        )
        return SnapshotReport(**written)

    def publish_async(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        base: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        placement: PlacementFiles | None = None,
        codec: TableCodecs | None = None,
        head_rows: HeadRows | None = None,
        shards: Shards | None = None,
        attachments: Mapping[str, bytes] | None = None,
        compiled: bool = False,
        progress: Progress | None = None,
    ) -> Future[SnapshotReport]:
        """As :meth:`publish`, while training goes on: what is written is the step of this call.

        Training waits until changed rows in memory are copied. Then a thread copies the others,
        some at a time, and a step that changes a row which was not copied yet copies the old one
        first. It takes an eighth of the memory budget; the first one writes memory to the store,
        to make room. A delta needs the changed rows to be known (``changes="tracked"`` of
        :meth:`publish`).

        Args:
            path: A new folder.
            model: As of :meth:`publish`.
            base: As of :meth:`publish`.
            placement: As of :meth:`publish`.
            codec: As of :meth:`publish`.
            head_rows: As of :meth:`publish`.
            shards: As of :meth:`publish`.
            attachments: As of :meth:`publish`.
            compiled: As of :meth:`publish`.
            progress: Called with (rows done, rows in all) by that thread.

        Returns:
            What :meth:`publish` returns, once all is written; :meth:`close` ends it with a
            :class:`ClosedError`.

        Raises:
            UnsupportedError: The store follows a plan, has several shards, or nothing was written
                to it yet.
            InvalidError: Another one is under way, or changes since ``base`` are not known.

        Examples:
            >>> store = tb.Store.open("run/store", dram_budget="16MiB")
            >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=99, embedding_dim=16)]
            >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
            >>> store.write_rows("item", 0, torch.ones(99, 16))
            >>> publish = store.publish_async("run/snapshot")
            >>> store.write_rows("item", 0, torch.zeros(99, 16))  # training goes on
            >>> publish.result().row_count
            99
            >>> store.close()
        """
        request = self._request(
            path,
            model,
            base,
            "tracked",
            placement,
            codec,
            head_rows,
            attachments,
            compiled=compiled,
            shards=shards,
        )
        return publish_async(self._native, request, progress)

    def _request(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None,
        base: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        changes: str,
        placement: PlacementFiles | None,
        codec: TableCodecs | None,
        head_rows: HeadRows | None,
        attachments: Mapping[str, bytes] | None,
        *,
        compiled: bool,
        shards: Shards | None,
    ) -> Request:
        parts = dict(attachments or {})
        if compiled:
            parts.update(compiled_parts(model, self))
        if model is not None:
            parts.update(state.model_attachments(model))
        tables = self.tables()
        names = [table["name"] for table in tables]
        placed = placement_files(placement, tables, self.table_id)
        return Request(
            path=os.fspath(path),
            attachments=sorted(parts.items()),
            base=base_paths(base),
            changes=changes,
            placements=placed,
            codecs=table_codecs(codec, names, self.table_id),
            heads=table_heads(head_rows, names, self.table_id, placed),
            shards=published_shards(shards, tables, self.table_id),
        )

    def verify(self) -> int:
        """Checks every checksum, kept checkpoints too, and returns the number of pages checked.

        Raises:
            CorruptionError: Naming the page, or file and name of a kept checkpoint.
        """
        return self._native.verify()

    def close(self) -> None:
        """Gives back memory and the folder; what was not checkpointed is lost.

        A forked child, where the store is its parent's, closes nothing.
        """
        try:
            if self._is_open and self._observer is not None:
                self._observer.close()
        finally:
            self._native.close()
            self._is_open = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A model may have its store as an attribute; its copy reads the same rows.
        self._watch.tell_copied()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a Store cannot be copied or pickled, it has one owner; open it where it is used, and "
            "leave it out of what goes to other processes"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except Exception as closing:
            if error is None:
                raise
            # The error of the block is the first one, and why closing failed.
            logging.getLogger("tierbed").warning("closing the store failed, too: %s", closing)

    def __dir__(self) -> list[str]:
        # What collections and the look-ahead ask is not offered to people.
        return [name for name in super().__dir__() if name not in _OF_THE_ENGINE]

    def __repr__(self) -> str:
        return f"Store(path={self._path!r}, seed={self._seed})"
