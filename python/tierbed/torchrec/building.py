"""Collections over a store in models of TorchRec: in place of its modules, or from its configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tierbed.config.optim import Optimizer
from tierbed.config.tables import Init
from tierbed.config.words import GivenRows, OnNonfinite, check_word
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.nn.embedding import Collection, RowSource
from tierbed.torchrec.configs import init_of_schema, is_pooled
from tierbed.torchrec.found import Found, find
from tierbed.train.store import Store

__all__ = ["from_configs", "modules", "replace"]


def modules() -> Any:
    """Returns the module of our collections with TorchRec's interfaces.

    Raises:
        UnsupportedError: TorchRec is not installed.
    """
    try:
        from tierbed.torchrec import modules
    except ImportError as error:
        raise UnsupportedError(
            f"TorchRec cannot be imported ({error}); install it with: "
            "pip install torchrec fbgemm-gpu-cpu"
        ) from error
    return modules


def from_configs(
    tables: Sequence[Any],
    store: RowSource,
    *,
    optimizer: Optimizer | type[Any] | None = None,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    is_weighted: bool = False,
    need_indices: bool = False,
    init: Mapping[str, Init] | None = None,
    on_nonfinite: OnNonfinite = "error",
) -> Collection:
    """Makes a collection over ``store`` from TorchRec's configs, for its models.

    Args:
        tables: ``torchrec.EmbeddingBagConfig`` of every table for pooled rows, or
            ``torchrec.EmbeddingConfig`` for sequences.
        store: A :class:`tierbed.Store`, or to only look up a :class:`tierbed.Snapshot` or a
            :class:`tierbed.CodedStore`.
        optimizer: As for :class:`tierbed.EmbeddingBagCollection`.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        is_weighted: Whether ids of pooled rows carry weights.
        need_indices: Whether ids of sequences come back as weights of the output.
        init: Initial weights by table. By default those of ``init_fn``, where it is a function of
            ``torch.nn.init`` that draws uniform, normal or equal numbers. They are of the same
            distribution; the numbers are drawn from the seed of the store.
        on_nonfinite: As for :class:`tierbed.EmbeddingBagCollection`.

    Returns:
        A module that takes TorchRec's batches and returns its ``KeyedTensor``, or its
        ``JaggedTensor`` per feature.

    Raises:
        InvalidError: Other configs than TorchRec's, or bags and sequences mixed.
        UnsupportedError: TorchRec is not installed, or a field asks for what a store does not do.
    """
    made = modules()
    pooled = {is_pooled(config) for config in tables}
    if len(pooled) != 1:
        raise InvalidError(
            "tables must be EmbeddingBagConfig all, or EmbeddingConfig all; make a collection of "
            "each"
        )
    options: dict[str, Any] = {
        "store": store,
        "optimizer": optimizer,
        "optimizer_kwargs": optimizer_kwargs,
        "init": init,
        "on_nonfinite": on_nonfinite,
    }
    collection: Collection
    if pooled == {True}:
        collection = made.EmbeddingBagCollection(tables, is_weighted=is_weighted, **options)
    else:
        collection = made.EmbeddingCollection(tables, need_indices=need_indices, **options)
    return collection


def replace(
    model: nn.Module,
    store: Store,
    *,
    optimizer: Optimizer | None = None,
    rows: GivenRows = "copy",
    init: Mapping[str, Init] | None = None,
    on_nonfinite: OnNonfinite = "error",
    chunk_rows: int = 65536,
) -> nn.Module:
    """Puts collections over ``store`` in place of TorchRec's in ``model``.

    Every ``EmbeddingBagCollection`` and ``EmbeddingCollection`` keeps its names, features,
    poolings and weights of ids. Rows are copied ``chunk_rows`` at a time, with the state of the
    optimizer applied in backward. What cannot be done exactly is refused before anything changes;
    where copying fails, the model stays as it was. Make the optimizer of the dense part afterwards.

    Tables on the device ``meta`` have nothing to copy: the store draws their initial rows.

    Args:
        model: The model, or one of the modules itself.
        store: The training store.
        optimizer: That of all rows. By default the one that ``_apply_optimizer_in_backward`` gave
            the tables, or ``RowWiseAdagrad()``. With one of another kind its state starts anew.
        rows: ``"copy"`` copies all rows into new tables; ``"keep"`` keeps those of tables that the
            store has already, as after a restart, and copies the others.
        init: Initial weights of tables on ``meta``, instead of what their ``init_fn`` says.
        on_nonfinite: As for :class:`tierbed.EmbeddingBagCollection`.
        chunk_rows: Rows copied at a time.

    Returns:
        ``model``, or what takes its place where it is one of the modules itself.

    Raises:
        InvalidError: Nothing to replace, a table that the store has already, or two of one name.
        UnsupportedError: A data type, an optimizer, a module or a way to share it that a store
            cannot do exactly.
    """
    check_word("rows", rows, GivenRows)
    if not isinstance(store, Store):
        raise InvalidError(
            f"store must be a tierbed.Store, not {type(store).__name__}; to only look up, make a "
            "collection with tierbed.torchrec.from_configs"
        )
    made = modules()
    known = {str(table["name"]): init_of_schema(table) for table in store.tables()}
    found = find(model, optimizer, {**known, **(init or {})})
    if rows == "copy":
        there = [table.name for one in found for table in one.tables if table.name in known]
        if there:
            raise InvalidError(
                f"the store has the tables {there} already; rows='keep' trains on with its rows",
                {"tables": ",".join(there)},
            )
    collections = [_collection(made, one, store, on_nonfinite) for one in found]
    for one in found:
        for table in one.tables:
            if table.name not in known:
                table.copy(store, chunk_rows)
    for one, collection in zip(found, collections, strict=True):
        if one.path == "":
            return collection
        parent, _, name = one.path.rpartition(".")
        model.get_submodule(parent)._modules[name] = collection
    return model


def _collection(made: Any, found: Found, store: Store, on_nonfinite: OnNonfinite) -> Collection:
    """Makes what takes the place of a module."""
    options: dict[str, Any] = {
        "store": store,
        "optimizer": found.optimizer,
        "init": found.init,
        "on_nonfinite": on_nonfinite,
    }
    collection: Collection
    if found.is_pooled:
        weighted = found.module.is_weighted()
        collection = made.EmbeddingBagCollection(found.configs, is_weighted=weighted, **options)
    else:
        needed = found.module.need_indices()
        collection = made.EmbeddingCollection(found.configs, need_indices=needed, **options)
    collection.train(found.module.training)
    collection.requires_grad_(found.trains)
    return collection
