"""Collections of tables for models, over a store or a snapshot.

The modules look like those of ``torch.nn`` and TorchRec. Their rows are no parameters: they lie
in the store, the optimizer runs there during backward, and ``state_dict()`` does not hold them.
Each backward through a lookup is one optimizer step on its rows. Outside training mode, or
without gradients, a lookup only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tierbed._util.tensors import as_int64
from tierbed.config.optim import Optimizer, RowWiseAdagrad, as_optimizer
from tierbed.config.tables import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    feature_labels,
)
from tierbed.config.words import GivenRows, OnNonfinite
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, UnpooledRows, as_kjt
from tierbed.nn.copies import PICKLED, deep_copied, reduced, restore
from tierbed.nn.leaf import as_leaf, is_traced
from tierbed.nn.pretrained import check_pretrained, copy_pretrained
from tierbed.nn.states import LoadReport, take_rows, tell_not_loaded
from tierbed.ops import operators as ops
from tierbed.ops.binding import Binding
from tierbed.ops.links import as_device, default_device, device_after
from tierbed.ops.steps import StepGuard
from tierbed.train.coded_store import CodedStore
from tierbed.train.session import Announcing, Reading, StepSession
from tierbed.train.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "RowSource"]


class RowSource(Protocol):
    """A :class:`tierbed.Store`, a :class:`tierbed.Snapshot` or a :class:`tierbed.CodedStore`."""

    @property
    def native(self) -> Any:
        """The engine's object."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows may be updated."""

    @property
    def takes_gradients(self) -> bool:
        """Whether a backward reaches the rows, to step them or to refuse."""

    def tables(self) -> list[dict[str, Any]]:
        """Every table's schema, by id."""

    def table_id(self, name: str) -> int:
        """The id of table ``name``."""

    def vocabularies(self) -> dict[str, dict[str, Any]]:
        """The tables of open vocabulary, by name."""


class Collection(nn.Module):
    """What pooled and unpooled collections have in common."""

    # TorchRec's name of what holds the tables, in a state dictionary.
    state_prefix: ClassVar[str] = "embedding_bags"
    _config_kind: ClassVar[type[BaseEmbeddingConfig]] = EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        store: RowSource,
        optimizer: Optimizer | type[Any] | None,
        optimizer_kwargs: Mapping[str, Any] | None,
        poolings: Mapping[str, str],
        on_nonfinite: OnNonfinite = "error",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(tables, store)
        names = [config.name for config in tables]
        if len(set(names)) != len(names):
            raise InvalidError(f"table names must differ: {names}")
        self._configs = list(tables)
        self._poolings = dict(poolings)
        self._on_nonfinite: OnNonfinite = on_nonfinite
        self._device = default_device() if device is None else as_device(device)
        if optimizer is None and not optimizer_kwargs:
            fused = None
        else:
            fused = as_optimizer(optimizer or RowWiseAdagrad(), optimizer_kwargs)
        self._features = [feature for config in tables for feature in config.feature_names]
        self._names = feature_labels(tables)
        self._dims = [config.embedding_dim for config in tables for _ in config.feature_names]
        self._attach(store, {config.name: table_id(store, config, fused) for config in tables})
        if isinstance(store, Store):
            store.note_collection(self)

    def _attach(self, store: RowSource, ids: Mapping[str, int]) -> None:
        """Binds the module to ``store``, where its tables have ``ids`` by name."""
        # Plain attributes: neither parameters nor buffers, so state_dict() lacks them.
        self._store = store
        of_features = [config.name for config in self._configs for _ in config.feature_names]
        self._binding = Binding(
            store.native,
            [ids[name] for name in of_features],
            [self._poolings[name] for name in of_features],
            self._dims,
            StepGuard(
                {at: name for name, at in ids.items()},
                store.watch if isinstance(store, Store) else None,
                self._on_nonfinite,
            ),
            getattr(store, "_observer", None),
        )
        self._binding.is_open = any(config.num_embeddings is None for config in self._configs)
        self._hook = ops.new_hook().requires_grad_(store.takes_gradients)
        self._binding.hook = self._hook
        if self._device is None:
            self._device = getattr(store, "device", None)
        self._binding.set_device(self._device)
        self._binding.windows = getattr(store, "windows", None)
        self._binding.device_rows = getattr(store, "device_rows", None)
        self._still_hook = torch.zeros(1, device="cpu")

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Mapping[str, Tensor],
        freeze: bool = True,
        *,
        store: Store,
        rows: GivenRows = "copy",
        **options: Any,
    ) -> Self:
        """Makes a collection of rows that exist, each table with one feature of its name.

        Rows are copied into the store, some at a time.

        Args:
            embeddings: By name of a table, its rows ``[N, D]``.
            freeze: Whether they stay as they are, as of ``torch.nn.Embedding.from_pretrained``.
            store: The store.
            rows: ``"copy"`` copies into new tables; ``"keep"`` keeps the rows of tables that the
                store has already, as after a restart.
            options: The other arguments of the class.

        Raises:
            InvalidError: Tensors of another shape, or a table that the store has already.
        """
        new = check_pretrained(store, embeddings, rows)
        tables = [
            cls._config_kind(num_embeddings=len(given), embedding_dim=given.shape[1], name=name)
            for name, given in embeddings.items()
        ]
        make: Any = cls  # the subclasses have arguments of their own
        made: Self = make(tables, store=store, **options)
        copy_pretrained(store, embeddings, new)
        return made.requires_grad_(not freeze)

    @property
    def store(self) -> RowSource:
        """Where the rows live."""
        return self._store

    @property
    def device(self) -> torch.device:
        """Where outputs are, if the collection was given a device or moved to one."""
        return torch.device("cpu") if self._device is None else self._device

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Rows stay where they are; outputs move.
        self._device = device_after(fn, self._device)
        self._binding.set_device(self._device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def feature_names(self) -> list[str]:
        """Returns the input features, in the order of the output."""
        return list(self._features)

    def table_names(self) -> list[str]:
        """Returns the names of the tables."""
        return [config.name for config in self._configs]

    # ------------------------------------------------------------ in a training loop

    def requires_grad_(
        self, requires_grad: bool = True, tables: Sequence[str] | None = None
    ) -> Self:
        """Freezes the rows, or lets them train again.

        Rows are no parameters: ``requires_grad_`` of a module around this one does not reach them.
        A copy of a collection is frozen until this lets its rows train.

        Args:
            requires_grad: Whether a backward steps the rows.
            tables: Names of tables; by default all.

        Raises:
            InvalidError: A table that this collection does not have.
        """
        ids = {name: table for table, name in self._binding.guard.tables.items()}
        unknown = [name for name in tables or () if name not in ids]
        if unknown:
            raise InvalidError(f"the collection has no tables {unknown}; it has {sorted(ids)}")
        named = {ids[name] for name in (ids if tables is None else tables)}
        frozen = self._binding.frozen
        self._binding.frozen = frozen - named if requires_grad else frozen | named
        trains = len(self._binding.frozen) < len(ids)
        self._hook.requires_grad_(trains and self._store.takes_gradients)
        if trains and isinstance(self._store, Store):
            self._store.note_collection(self)
        return super().requires_grad_(trains)

    def set_grad_scaler(self, scaler: Any) -> None:
        """Tells which ``torch.amp.GradScaler`` scales the loss; None: none does.

        Rows are then stepped by the gradient divided by its scale, and steps whose gradient is
        not finite are left out and counted (:attr:`skipped_steps`).

        Args:
            scaler: That of the model, or None.
        """
        self._binding.guard.set_scaler(scaler)

    @property
    def skipped_steps(self) -> int:
        """Steps of the rows left out because their gradient was not finite."""
        return self._binding.skipped_steps

    # ------------------------------------------------------------ states and copies

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        names = {name: f"{prefix}{self.state_prefix}.{name}.weight" for name in self.table_names()}
        take_rows(self, names, state_dict, LoadReport(*rest[-3:]))
        tell_not_loaded(prefix, names, state_dict)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        pickled = state.pop(PICKLED)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        restore(self, pickled)

    def bags(self, features: Any) -> KeyedJaggedTensor:
        """Picks and orders the features of a batch that this collection reads.

        Args:
            features: The bags of a batch, in any order of features.

        Raises:
            InvalidError: A feature is missing.
        """
        bags = as_kjt(features, takes_variable=True)
        return bags if bags.keys() == self._features else bags.select(self._features)

    def _step_session(self) -> Announcing:
        """Returns what :func:`tierbed.lookahead` controls the look-ahead by."""
        if isinstance(self._store, Store):
            return StepSession(self._store, self, self._binding)
        return Reading()

    def iter_full_state(self, chunk_rows: int = 65536) -> Iterator[tuple[str, int, Tensor]]:
        """Streams all rows as (state name, first row, ``[chunk_rows, D]``), in bounded memory.

        Of a table of open vocabulary the rows that ids have, in the order of the rows; then their
        ids ``[N]`` i64, and the row ``[1, D]`` that all other ids share, under names that end in
        ``ids`` and ``shared`` instead of ``weight``.

        Args:
            chunk_rows: Most rows at a time.

        Raises:
            UnsupportedError: The rows are those of a snapshot.
        """
        reader = getattr(self._store, "read_rows", None)
        if reader is None:
            raise UnsupportedError("rows of a snapshot are not streamed; use the training store")
        for config in self._configs:
            name = f"{self.state_prefix}.{config.name}"
            if config.num_embeddings is None:
                yield from self._open_rows(name, config.name, chunk_rows)
                continue
            for first in range(0, config.num_embeddings, chunk_rows):
                count = min(chunk_rows, config.num_embeddings - first)
                yield f"{name}.weight", first, reader(config.name, first, count)

    def _open_rows(
        self, name: str, table: str, chunk_rows: int
    ) -> Iterator[tuple[str, int, Tensor]]:
        store: Any = self._store
        ids, rows = store.ids(table)
        for first in range(0, max(1, len(rows)), chunk_rows):
            weights = store.gather_rows(table, rows[first : first + chunk_rows].contiguous())
            yield f"{name}.weight", first, weights
        yield f"{name}.ids", 0, ids
        yield f"{name}.shared", 0, store.read_rows(table, 0, 1)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns ``state_dict()`` and all rows, whole, under TorchRec's names.

        For tables that fit in memory; :meth:`iter_full_state` is for the others.
        """
        full: dict[str, Tensor] = dict(self.state_dict())
        chunks: dict[str, list[Tensor]] = {}
        for name, _, rows in self.iter_full_state():
            chunks.setdefault(name, []).append(rows)
        full.update({name: torch.cat(parts) for name, parts in chunks.items()})
        return full

    def _lookup(self, bags: KeyedJaggedTensor, weights: Tensor | None) -> Tensor:
        ids, offsets = as_int64(bags.values()), as_int64(bags.offsets())
        hook = self._hook if self.training else self._still_hook
        is_training = self.training and self._store.is_trainable and torch.is_grad_enabled()
        is_training = is_training and self._hook.requires_grad
        if self._binding.is_open:
            ids = ops.translate(ids, offsets, self._binding.handle, is_training)
        return ops.lookup(self._binding, ids, offsets, weights, hook, is_training)

    def extra_repr(self) -> str:
        """Lists the tables and their features."""
        return "\n".join(
            f"({c.name}): {c.num_embeddings or 'open'} x {c.embedding_dim} "
            f"<- {list(c.feature_names)}"
            for c in self._configs
        )


def _check_arguments(tables: Sequence[BaseEmbeddingConfig], store: RowSource) -> None:
    if not tables:
        raise InvalidError("a collection needs at least one table")
    if not hasattr(store, "takes_gradients"):
        raise InvalidError(
            "store must be a tierbed.Store, Snapshot or CodedStore, not "
            f"{type(store).__name__}; tierbed.Store.open(path) opens one"
        )


def _check_configs(
    tables: Sequence[BaseEmbeddingConfig], kind: type[BaseEmbeddingConfig], owner: str
) -> None:
    for config in tables:
        if not isinstance(config, kind):
            found = f"{type(config).__module__}.{type(config).__name__}"
            raise InvalidError(
                f"tables of an {owner} must be tierbed.{kind.__name__}, not {found}; "
                "tierbed.torchrec.from_configs takes those of TorchRec, or make one with the same "
                "name, num_embeddings, embedding_dim and feature_names"
            )


def table_id(store: RowSource, config: BaseEmbeddingConfig, optimizer: Optimizer | None) -> int:
    """Returns the id of a table, which a store that trains gets if it lacks it."""
    if isinstance(store, CodedStore):
        return store.add_table(config)
    if isinstance(store, Store):
        return store.add_table(config, optimizer)
    table = store.table_id(config.name)
    found = next(known for known in store.tables() if known["name"] == config.name)
    row_count = config.num_embeddings
    if config.name in store.vocabularies():
        found = {**found, "row_count": None}
    if (found["row_count"], found["dim"]) != (row_count, config.embedding_dim):
        raise InvalidError(
            f"table {config.name!r} of the snapshot is {found['row_count']} x {found['dim']}, "
            f"not {config.num_embeddings} x {config.embedding_dim}",
            {"table": config.name},
        )
    return table


class EmbeddingBagCollection(Collection):
    """Pooled rows of many features at once, TorchRec's interface.

    Args:
        tables: The tables; several features may read one table.
        store: Where the rows live: a :class:`tierbed.Store`, or to only look up a
            :class:`tierbed.Snapshot` or a :class:`tierbed.CodedStore`.
        optimizer: Fused optimizer of the rows, or ``torch.optim.{SGD,Adagrad,SparseAdam}``. By
            default that of the collections that use the tables already, or ``RowWiseAdagrad()``.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        is_weighted: Whether ids carry weights (``KeyedJaggedTensor.weights_or_none()``), which
            then receive their gradient.
        on_nonfinite: What a gradient with nan or inf does: ``"error"``, or ``"skip"``, which
            leaves the step out and counts it (:attr:`skipped_steps`).
        device: Where outputs go, such as ``"cuda"``; ids may stay on the CPU. ``to(device)`` of
            the model says so, too. By default torch's default device, if that is another than the
            CPU, or else where the ids are.

    Examples:
        Two tables, a batch of two samples, and a step of the rows:

        >>> tables = [
        ...     tb.EmbeddingBagConfig(name="user", num_embeddings=1000, embedding_dim=16),
        ...     tb.EmbeddingBagConfig(
        ...         name="item", num_embeddings=5000, embedding_dim=8, feature_names=["clicked"]
        ...     ),
        ... ]
        >>> store = tb.Store.open(backend="memory", dram_budget="16MiB")
        >>> optimizer = tb.RowWiseAdagrad(lr=0.02)
        >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=optimizer)
        >>> batch = tb.KeyedJaggedTensor(
        ...     ["user", "clicked"],
        ...     torch.tensor([3, 5, 10, 11, 12]),
        ...     lengths=torch.tensor([1, 1, 2, 1]),
        ... )
        >>> pooled = emb(batch)
        >>> pooled.keys(), pooled["clicked"].shape
        (['user', 'clicked'], torch.Size([2, 8]))
        >>> before = store.gather_rows("user", torch.tensor([3]))
        >>> pooled.values().sum().backward()  # steps the rows where they lie
        >>> bool((store.gather_rows("user", torch.tensor([3])) < before).all())
        True
        >>> store.close()
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        store: RowSource,
        optimizer: Optimizer | type[Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        on_nonfinite: OnNonfinite = "error",
        device: torch.device | str | None = None,
    ) -> None:
        _check_configs(tables, EmbeddingBagConfig, "EmbeddingBagCollection")
        poolings = {config.name: config.pooling.value for config in tables}
        super().__init__(tables, store, optimizer, optimizer_kwargs, poolings, on_nonfinite, device)
        self._is_weighted = is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the tables as they were given."""
        return [config for config in self._configs if isinstance(config, EmbeddingBagConfig)]

    def is_weighted(self) -> bool:
        """Returns whether ids carry weights."""
        return self._is_weighted

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> KeyedTensor:
            """Looks up a batch."""

    def forward(self, features: Any) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: A :class:`tierbed.KeyedJaggedTensor` or TorchRec's: the features of the
                tables in any order; others are ignored.

        Returns:
            ``[B, D]`` per feature, side by side.

        Raises:
            InvalidError: A weighted collection and a batch without weights.
        """
        if is_traced(features):
            traced: KeyedTensor = as_leaf(self, features)
            return traced
        bags = self.bags(features)
        weights = bags.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise InvalidError("is_weighted=True, but the batch has no weights")
        if bags.variable is None:
            return KeyedTensor(self._names, self._dims, self._lookup(bags, weights))
        bags.variable.check(self._features)
        pooled = self._lookup(bags, weights)
        of_samples = bags.variable.of_samples(pooled, self._features, self._dims)
        return KeyedTensor(self._names, self._dims, of_samples)


class EmbeddingCollection(Collection):
    """Rows of sequences, not pooled; all tables of one ``embedding_dim``.

    Args:
        tables: The tables.
        store: As for :class:`EmbeddingBagCollection`.
        optimizer: As for :class:`EmbeddingBagCollection`.
        optimizer_kwargs: As for :class:`EmbeddingBagCollection`.
        on_nonfinite: As for :class:`EmbeddingBagCollection`.
        device: As for :class:`EmbeddingBagCollection`.

    Raises:
        InvalidError: Tables of several dims.

    Examples:
        >>> table = tb.EmbeddingConfig(name="history", num_embeddings=1000, embedding_dim=16)
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     emb = tb.EmbeddingCollection([table], store=store)
        ...     batch = tb.KeyedJaggedTensor(
        ...         ["history"], torch.tensor([3, 5, 9]), lengths=torch.tensor([2, 1])
        ...     )
        ...     emb(batch)["history"].values().shape
        torch.Size([3, 16])
    """

    state_prefix = "embeddings"
    _config_kind = EmbeddingConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        store: RowSource,
        optimizer: Optimizer | type[Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        on_nonfinite: OnNonfinite = "error",
        device: torch.device | str | None = None,
    ) -> None:
        _check_configs(tables, BaseEmbeddingConfig, "EmbeddingCollection")
        dims = {config.embedding_dim for config in tables}
        if len(dims) > 1:
            raise InvalidError(f"the tables of an EmbeddingCollection need one dim: {dims}")
        poolings = {config.name: "none" for config in tables}
        super().__init__(tables, store, optimizer, optimizer_kwargs, poolings, on_nonfinite, device)

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """Returns the tables as they were given."""
        return list(self._configs)

    def embedding_dim(self) -> int:
        """Returns the elements of a row, equal in all tables."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the names of the output's features, a list per table."""
        names = iter(self._names)
        return [[next(names) for _ in config.feature_names] for config in self._configs]

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> dict[str, JaggedTensor]:
            """Looks up a batch."""

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Looks up a batch.

        Args:
            features: As for :class:`EmbeddingBagCollection`.

        Returns:
            Per feature a :class:`JaggedTensor` with values ``[E_f, D]`` and the input's lengths.
        """
        if is_traced(features):
            traced: dict[str, JaggedTensor] = as_leaf(self, features)
            return traced
        return self._sequences(self.bags(features))

    def _sequences(self, bags: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        rows = self._lookup(bags, None)
        variable = bags.variable
        if not torch.compiler.is_compiling() and UnpooledRows.fits(rows, bags) and not variable:
            return UnpooledRows(rows, bags).to_dict(self._names)
        stride = bags.stride()
        lengths = bags.lengths().view(len(self._names), stride)
        parts = torch.split(rows, lengths.sum(dim=1).tolist())
        of_features = list(lengths.unbind())
        if variable is not None:
            counts = [variable.bag_counts[key] for key in self._features]
            of_features = [row[:count] for row, count in zip(of_features, counts, strict=True)]
        return {
            name: JaggedTensor(part, lengths=of_feature.to(part.device))
            for name, part, of_feature in zip(self._names, parts, of_features, strict=True)
        }
