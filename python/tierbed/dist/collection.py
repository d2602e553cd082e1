"""Collections whose tables are divided over ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tierbed._native import FeaturePlan, NativeExchangePlan
from tierbed._util.minutes import checked_minutes
from tierbed.config.optim import Optimizer, PartialRowWiseAdam, RowWiseAdagrad, as_optimizer
from tierbed.config.tables import DataType, EmbeddingBagConfig, feature_labels
from tierbed.config.words import ExchangeKind
from tierbed.dist.autograd import Lookup, LookupParts, batch_of
from tierbed.dist.checkpoint import RankTables, load_rows, save_rows
from tierbed.dist.checkpoint_async import async_save_rows
from tierbed.dist.device.plan import DevicePlan
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.exchange import PRECISIONS, Exchange, ExchangeOptions, OneSided, Serving
from tierbed.dist.held import Held, held_tables, initial_rows
from tierbed.dist.nodes import Nodes
from tierbed.dist.open_index import open_tables_of
from tierbed.dist.open_tables import OpenTables
from tierbed.dist.over_nodes import OverNodes
from tierbed.dist.ranks import ProcessRank, Rank
from tierbed.dist.session import RankSession, RankTraining
from tierbed.dist.sharding import ColumnWise, ShardingPlan
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.jagged import KeyedJaggedTensor, KeyedTensor, as_kjt
from tierbed.ops.links import as_device, default_device, device_after
from tierbed.results import EvictedIds
from tierbed.train.coded_store import CodedStore
from tierbed.train.session import Announcing, Reading
from tierbed.train.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ShardedEmbeddingBagCollection"]


class ShardedEmbeddingBagCollection(nn.Module):
    """:class:`tierbed.EmbeddingBagCollection` for tables that are divided over ranks.

    Every rank makes one with equal arguments (but for ``store`` and ``ranks``), and from then on
    all ranks call it together: forward, backward, and at the end :meth:`close`. Each gives its own
    samples, as many as it likes, and gets the vectors of those. Samples count as if those of
    rank 0 came first. Numbers are those of one process, to the last bit.

    Args:
        tables: The tables. Of those with an open vocabulary one rank keeps the index: the one that
            holds the table, or ranks in turn.
        store: This rank's store, a folder of its own or memory; or a :class:`tierbed.CodedStore`
            to only look up rows that are kept in fewer bytes; or a
            :class:`tierbed.dist.DeviceStore` for rows in the memory of GPUs.
        plan: Who holds what; by default :meth:`ShardingPlan.balanced`.
        ranks: Who this rank is; by default this process of ``torch.distributed``.
        exchange: How vectors and gradients travel: :class:`ExchangeOptions`, or only their kind.
        optimizer: As for :class:`tierbed.EmbeddingBagCollection`; a CodedStore has none.
        optimizer_kwargs: As for :class:`tierbed.EmbeddingBagCollection`.
        is_weighted: As for :class:`tierbed.EmbeddingBagCollection`.
        device: As for :class:`tierbed.EmbeddingBagCollection`; rows of a DeviceStore stay on its
            device.

    Raises:
        InvalidError: Options that are unknown, no tables, or a plan of another number of ranks.
        UnsupportedError: An open vocabulary in a DeviceStore, a CodedStore or a store of shards,
            or divided by columns.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        store: Store | CodedStore | DeviceStore,
        plan: ShardingPlan | None = None,
        ranks: Rank | None = None,
        exchange: ExchangeOptions | ExchangeKind = "auto",
        optimizer: Optimizer | type[Any] = RowWiseAdagrad(),  # noqa: B008  (frozen)
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        how = exchange if isinstance(exchange, ExchangeOptions) else ExchangeOptions(kind=exchange)
        if not tables:
            raise InvalidError("a collection needs at least one table")
        self._ranks = ProcessRank() if ranks is None else ranks
        self._configs = list(tables)
        self._store = store
        self._plan = plan or ShardingPlan.balanced(tables, self._ranks.count)
        if self._plan.rank_count != self._ranks.count:
            raise InvalidError(
                f"the plan is for {self._plan.rank_count} ranks, but there are {self._ranks.count}"
            )
        self._is_weighted = is_weighted
        self._device = default_device() if device is None else as_device(device)
        pairs = [(feature, config) for config in tables for feature in config.feature_names]
        self._features = [feature for feature, _ in pairs]
        self._names = feature_labels(tables)
        self._dims = [config.embedding_dim for _, config in pairs]
        self._optimizer = as_optimizer(optimizer, optimizer_kwargs)
        self._nodes = self._find_nodes(store, how)
        self._check_open(store)
        # What this rank holds of a batch, where a store may follow a plan of it.
        self._joined: FeaturePlan | None = None
        self._exchange: Exchange
        if isinstance(store, DeviceStore):
            self._exchange = self._join_devices(store, how)
        else:
            self._exchange = self._join_hosts(store, how)
        self._hook = torch.zeros(1, requires_grad=True, device="cpu")
        self._still_hook = torch.zeros(1, device="cpu")

    @property
    def store(self) -> Store | CodedStore | DeviceStore:
        """Where this rank's rows live."""
        return self._store

    @property
    def plan(self) -> ShardingPlan:
        """Who holds what."""
        return self._plan

    @property
    def exchange(self) -> str:
        """How vectors travel.

        ``"one_sided"`` where all ranks share memory, ``"collective"`` where none do, and
        ``"hierarchical"`` between nodes of several ranks that do.
        """
        if self._nodes.count == 1:
            return "one_sided"
        return "collective" if self._nodes.ranks_each == 1 else "hierarchical"

    @property
    def nodes(self) -> Nodes:
        """Which ranks share memory."""
        return self._nodes

    def sent_bytes(self) -> dict[str, int]:
        """Returns the bytes that this rank sent to other nodes since it joined.

        By kind of message: ``ids``, ``vectors``, ``gradients``, ``weights`` (their gradients), and
        ``numbers`` that say how long others are. None of these where all ranks share memory.
        ``indexes`` are ids of open vocabularies and their rows, between all ranks.
        """
        return self._exchange.sent_bytes()

    def table_names(self) -> list[str]:
        """Returns what the store of this rank calls what it holds of the tables."""
        return [held.name for held in held_tables(self._configs, self._plan, self._ranks.rank)]

    def feature_names(self) -> list[str]:
        """Returns the input features, in the order of the output."""
        return list(self._features)

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> KeyedTensor:
            """Looks up a batch."""

    def forward(self, features: Any) -> KeyedTensor:
        """Looks up a batch, together with all ranks.

        Args:
            features: This rank's samples, a :class:`tierbed.KeyedJaggedTensor` or TorchRec's.

        Returns:
            ``[B, D]`` per feature, side by side, for this rank's samples.

        Raises:
            InvalidError: A bad batch; nothing was sent, and it may be mended.
            TierbedError: Another rank failed or is silent; the message names it.
        """
        bags, weights = self._checked(features)
        hook, is_training = self._grad_mode()
        rows = Lookup.apply(  # type: ignore[no-untyped-call]
            hook, weights, bags, self._exchange, is_training
        )
        return KeyedTensor(self._names, self._dims, self._placed(rows))

    def _placed(self, rows: Tensor) -> Tensor:
        return rows if self._device is None else rows.to(self._device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Rows stay where they are; outputs move.
        self._device = device_after(fn, self._device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward_parts(self, features: Any, parts: int) -> Iterator[KeyedTensor]:
        """Looks up a batch, together with all ranks, and yields it part by part.

        The samples of each rank are divided into ``parts`` ranges. A part is yielded as soon as
        its rows are there, while another thread still reads those of later parts; until the last
        part is read the store is busy. Together the parts have the numbers of :meth:`forward`, and
        one backward through all of them steps the rows once. All ranks give the same ``parts``.

        Args:
            features: As for :meth:`forward`.
            parts: How many, at most 1024; some may be empty.

        Returns:
            ``[b, D]`` per feature, side by side, for one range of samples after the other.

        Raises:
            InvalidError: As :meth:`forward`.
            TierbedError: As :meth:`forward`, here or while iterating.
            UnsupportedError: ``copies_outputs=True``.
        """
        bags, weights = self._checked(features)
        hook, is_training = self._grad_mode()
        begun: list[Serving] = []
        rows = LookupParts.apply(  # type: ignore[no-untyped-call]
            hook, weights, bags, self._exchange, (is_training, parts, begun)
        )
        return self._arriving(rows, begun[0])

    def _grad_mode(self) -> tuple[Tensor, bool]:
        """Returns the hook of a lookup, and whether its backward steps rows.

        A backward to rows that do not train is refused, unless ``eval()`` said that nobody wants
        to train them.
        """
        is_trainable = self._store.is_trainable
        hook = self._hook if self.training or is_trainable else self._still_hook
        return hook, self.training and is_trainable and torch.is_grad_enabled()

    def _arriving(self, rows: Sequence[Tensor], serving: Serving) -> Iterator[KeyedTensor]:
        for part, of_part in enumerate(rows):
            serving.wait(part)
            yield KeyedTensor(self._names, self._dims, self._placed(of_part))
        serving.join()

    def _checked(self, features: Any) -> tuple[KeyedJaggedTensor, Tensor | None]:
        """Returns the bags in the order of the tables, and weights where there must be some."""
        bags = as_kjt(features)
        bags = bags if bags.keys() == self._features else bags.select(self._features)
        if not isinstance(self._store, DeviceStore):
            bags = bags.to("cpu")
        weights = bags.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise InvalidError("is_weighted=True, but the batch has no weights")
        return bags, weights

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint that any number of ranks can load; all ranks call this together.

        Rows and optimizer state of these tables, whole or not at all. A rank's own
        ``store.checkpoint`` is quicker, and for as many ranks only.

        Args:
            path: A new folder that all ranks see, or an address without a checkpoint:
                ``s3://bucket/run/epoch-1``. What an interrupted save left there is not sent again.
            extra: What belongs to the run beside the tables; that of rank 0 is kept.

        Raises:
            InvalidError: The folder exists, or a checkpoint is at the address.
            IoError: The store of the address refuses, or cannot be reached.
            TierbedError: Another rank failed; the message names it.
            UnsupportedError: The store of the address does not compare before it writes.
        """
        save_rows(path, self._held(), extra)

    def async_save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 3600.0,
    ) -> Future[None]:
        """Begins :meth:`save` and returns; training goes on. All ranks call this together.

        Each rank keeps a checkpoint of its store on its disk, which takes as long as
        ``store.checkpoint``. A thread then writes that one, as of this step, and drops it. Ranks
        tell each other at ``path`` how far they are, so that no collective call is made meanwhile.
        A folder gets no other name when it is whole: its manifest is written last.

        Args:
            path: As of :meth:`save`.
            extra: As of :meth:`save`; it is copied at once.
            timeout_s: How long a rank that is done waits for the others.

        Returns:
            As ``torch.distributed.checkpoint.async_save``, a future: its ``result()`` returns when
            the checkpoint is there, and raises what :meth:`save` raises.

        Raises:
            InvalidError: A checkpoint is there.
            TierbedError: Another rank failed; the message names it.
            UnsupportedError: A store without a folder, or of several shards, keeps no checkpoint.
        """
        return async_save_rows(path, self._held(), extra, timeout_s)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Reads the rows that this rank holds, into a store that trained none yet.

        All ranks call this together, and each reads the files that have what it holds. Learning
        rates are those of this collection.

        Args:
            path: Where the checkpoint was saved: a folder or an address.

        Returns:
            The ``extra`` that was saved.

        Raises:
            InvalidError: Other tables, another optimizer or seed, or rows that were trained.
            CorruptionError: A file is missing, or not as it was written.
        """
        return load_rows(path, self._held())

    def _held(self) -> RankTables:
        return RankTables(
            ranks=self._ranks,
            store=self._store,
            tables=self._configs,
            plan=self._plan,
            optimizer=self._optimizer,
        )

    def evict(self, *, now_mins: int | None = None) -> dict[str, EvictedIds]:
        """Takes the rows of ids that the policy of their table judges; as ``Store.evict``.

        All ranks call this together, between steps. A row that is freed starts again from its
        initial value where it is held.

        Args:
            now_mins: Minutes since 1970; by default the time of the rank that keeps the index.

        Returns:
            What was taken, by table.

        Raises:
            InvalidError: ``now_mins`` is no number of minutes from 0 to 2^32 - 1.
            TierbedError: Another rank failed; the message names it.
        """
        now = checked_minutes(now_mins)
        if not isinstance(self._exchange, OneSided):
            return {}
        return {
            name: EvictedIds(id_count=ids, waiting_count=waiting)
            for name, (ids, waiting) in self._exchange.evict(now).items()
        }

    def close(self) -> None:
        """Leaves together with all other ranks; the store stays open."""
        self._exchange.close()

    def __enter__(self) -> ShardedEmbeddingBagCollection:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error the others learn it when this rank's exchange goes.
        if kind is None:
            self.close()

    def extra_repr(self) -> str:
        """Lists the tables and who holds them."""
        return "\n".join(
            f"({c.name}): {c.num_embeddings} x {c.embedding_dim} {self._plan.tables[c.name]}"
            for c in self._configs
        )

    def _hold(self, store: Store | CodedStore, held: Held) -> int:
        """Adds what this rank holds of a table to its store.

        Row ids stay those of the whole table, so that initial rows are the same; rows of other
        ranks are never touched and take no room.
        """
        config = held.config
        if held.name == config.name:
            return self._add(store, config, held.rows)
        self._check_columns(config)
        is_new = held.name not in [table["name"] for table in store.tables()]
        part = dataclasses.replace(config, name=held.name, embedding_dim=len(held.columns))
        table = self._add(store, part, held.rows)
        for first, rows in initial_rows(held, store.seed) if is_new else ():
            store.write_rows(held.name, first, rows)
        return table

    def _add(self, store: Store | CodedStore, config: EmbeddingBagConfig, rows: range) -> int:
        """Adds a table; a store of codes takes room for ``rows`` alone."""
        if isinstance(store, CodedStore):
            return store.add_table(config, rows)
        return store.add_table(config, self._optimizer)

    def _check_open(self, store: Store | CodedStore | DeviceStore) -> None:
        """Refuses open vocabularies where rows are not found by an index."""
        for config in self._configs:
            if config.num_embeddings is None and not isinstance(store, Store):
                raise UnsupportedError(
                    f"table {config.name!r} has an open vocabulary, which a "
                    f"{type(store).__name__} has not; keep it in a tierbed.Store, or give "
                    "num_embeddings",
                    {"table": config.name},
                )

    def _check_columns(self, config: EmbeddingBagConfig) -> None:
        """Refuses to divide by columns what belongs to whole rows."""
        whole, optimizer = None, self._optimizer
        if isinstance(self._store, CodedStore):
            if config.data_type is DataType.INT8:
                whole = "int8 keeps a scale of whole rows; divide it by rows, or use fp16 or bf16"
        elif isinstance(optimizer, (RowWiseAdagrad, PartialRowWiseAdam)):
            whole = (
                f"{type(optimizer).__name__} keeps state of whole rows; divide it by rows, or use "
                "SGD, Adagrad or Adam"
            )
        if whole is not None:
            raise UnsupportedError(
                f"table {config.name!r} is divided by columns, but {whole}", {"table": config.name}
            )

    def _find_nodes(self, store: Store | CodedStore | DeviceStore, how: ExchangeOptions) -> Nodes:
        """Returns which ranks share memory; of devices all do, or none."""
        if not isinstance(store, DeviceStore):
            return self._ranks.find_nodes(how.kind)
        if {how.output_dtype, how.row_dtype} != {torch.float32}:
            raise UnsupportedError(
                "rows of a DeviceStore travel as float32; give no other output_dtype or row_dtype"
            )
        return self._ranks.find_device_nodes(how.kind, store.device)

    def _join_devices(self, store: DeviceStore, how: ExchangeOptions) -> Exchange:
        # They need Triton, which is optional; a DeviceStore was made, so that it is there.
        from tierbed.dist.device.collective import CollectiveExchange
        from tierbed.dist.device.exchange import DeviceExchange

        for config in self._configs:
            if isinstance(self._plan.tables.get(config.name), ColumnWise):
                self._check_columns(config)
        groups = DevicePlan(self._configs, self._plan)
        if how.kind == "collective" or self._nodes.count > 1:
            nodes = self._nodes
            messages = self._ranks.device_messages(nodes, store.device, how.timeout_s)
            return CollectiveExchange(
                store, groups, nodes, messages, self._optimizer, how, is_weighted=self._is_weighted
            )
        heap = self._ranks.share_device_heap(store.device)
        return DeviceExchange(
            store, groups, heap, self._optimizer, how, is_weighted=self._is_weighted
        )

    def _join_hosts(self, store: Store | CodedStore, how: ExchangeOptions) -> Exchange:
        rank = self._ranks.rank
        travel = (PRECISIONS[how.output_dtype], PRECISIONS[how.row_dtype])
        described = self._plan.described(self._configs, *travel)
        plan = NativeExchangePlan(described, how.samples_max, how.indices_max, self._nodes.count)
        held = {one.config.name: one for one in held_tables(self._configs, self._plan, rank)}
        ids = {name: self._hold(store, one) for name, one in held.items()}
        groups, joined = [], []
        for members in plan.groups(rank):
            tables = [ids[self._configs[table].name] for table, _ in members]
            groups.append(store.native.plan(tables, [pooling for _, pooling in members]))
            joined.extend(tables)
        if isinstance(store, Store):
            store.note_collection(self)
            if joined:
                self._joined = store.native.plan(joined, ["sum"] * len(joined))
        heap = self._ranks.share_heap(plan.region_bytes, self._nodes)
        exchange: OneSided
        if self._nodes.count == 1:
            exchange = OneSided(store.native, plan, heap, rank, groups, how)
        else:
            wire = self._ranks.wire(self._nodes, how.timeout_s)
            exchange = OverNodes(store.native, plan, heap, self._nodes, wire, groups, how)
        if isinstance(store, Store):
            self._open_tables(store, exchange, ids, how.timeout_s)
        return exchange

    def _open_tables(
        self, store: Store, exchange: OneSided, ids: Mapping[str, int], timeout_s: float
    ) -> None:
        """Lets the exchange find rows of ids of open vocabularies, where there are some."""
        rank, count = self._ranks.rank, self._ranks.count
        tables = open_tables_of(self._configs, self._plan, rank, store.native, ids)
        if tables:
            if count > 1:
                store.note_shared_ids(table.config.name for table in tables)
            each = Nodes(rank=rank, count=count, ranks_each=1, hosts=self._nodes.hosts)
            wire = self._ranks.wire(each, timeout_s)
            found = OpenTables(store.native, tables, each, wire, exchange.fail)
            exchange.open_with(found, len(self._features))

    def _step_session(self) -> Announcing:
        """Returns the control of the look-ahead over all ranks."""
        return self._session_for(lambda features: features)

    def _session_for(self, prepare: Callable[[Any], Any]) -> Announcing:
        if not isinstance(self._store, Store) or not isinstance(self._exchange, OneSided):
            # Rows that do not train, or that are in the memory of GPUs: all are there.
            return Reading()
        training = RankTraining(
            store=self._store,
            ranks=self._ranks,
            exchange=self._exchange,
            joined=self._joined,
            trains=lambda: self._grad_mode()[1],
            identity=self._plan.described(self._configs, "f32", "f32"),
            feature_names=self._features,
        )
        return RankSession(training, lambda features: batch_of(*self._checked(prepare(features))))
