"""Copies and pickles of collections, whose rows are in neither.

A deep copy shares the store of its original and only reads. It is what an average of weights, a
target network or a best model so far is made of, and rows may be larger than memory. Were it to
train, every row would be stepped twice.

A pickle names the folder of the store, because a store has one owner: who loads the pickle opens
the store first, with the budget of that process. Then the module is as if made anew over it.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tierbed.config.optim import Optimizer
from tierbed.errors import ClosedError, UnsupportedError
from tierbed.train import opened
from tierbed.train.store import Store

if TYPE_CHECKING:
    from tierbed.nn.embedding import Collection, RowSource

__all__ = ["PICKLED", "deep_copied", "reduced", "restore"]

C = TypeVar("C", bound="Collection")

# Where the state of a pickle has what binds it to its store.
PICKLED = "tierbed.pickled"
_OF_STORE = frozenset({"_store", "_binding", "_hook", "_still_hook"})


@dataclass(frozen=True)
class PickledStore:
    """A store of a pickle.

    Args:
        path: Its folder.
        optimizers: Those of the tables, with their numbers in force, by name.
        steps: Steps that they had done, by name.
    """

    path: str
    optimizers: dict[str, Optimizer]
    steps: dict[str, int]


@dataclass(frozen=True)
class Pickled:
    """What binds a module to its rows.

    Args:
        source: Where the rows are: what names a store, or a snapshot.
        frozen: Tables that do not train.
    """

    source: Any
    frozen: list[str]


def _rest(collection: Collection) -> dict[str, Any]:
    """Returns what a collection has beside its store."""
    return {name: value for name, value in vars(collection).items() if name not in _OF_STORE}


def _blank(kind: type[C]) -> C:
    return kind.__new__(kind)


def deep_copied(collection: C, memo: dict[int, Any]) -> C:
    """Returns a copy that reads the rows of ``collection``, and steps none until it is told to."""
    copied = _blank(type(collection))
    memo[id(collection)] = copied
    vars(copied).update(copy.deepcopy(_rest(collection), memo))
    store, tables = collection.store, collection._binding.guard.tables
    copied._attach(store, {name: table for table, name in tables.items()})
    if isinstance(store, Store):
        copied._binding.frozen = frozenset(tables)
        copied._hook.requires_grad_(False)
        store.watch.tell_copied()
    return copied


def reduced(collection: Collection) -> tuple[Any, ...]:
    """Returns what pickles a collection.

    Raises:
        UnsupportedError: Its rows are in the memory of this process only.
    """
    binding = collection._binding
    frozen = sorted(binding.guard.tables[table] for table in binding.frozen)
    pickled = Pickled(_source_of(collection), frozen)
    return _blank, (type(collection),), {**_rest(collection), PICKLED: pickled}


def _source_of(collection: Collection) -> Any:
    store = collection.store
    if not isinstance(store, Store):
        return store
    if store.path is None:
        raise UnsupportedError(
            f"{type(collection).__name__} over a store without a folder cannot be pickled: its "
            "rows are in this process only; open the store with a path, or save "
            "full_state_dict()"
        )
    names = collection.table_names()
    return PickledStore(
        os.path.realpath(store.path),
        {name: store.optimizer(name) for name in names},
        {name: store.steps_done(name) for name in names},
    )


def restore(collection: Collection, pickled: Pickled) -> None:
    """Binds a collection of a pickle to its rows.

    Raises:
        ClosedError: Its store is not open in this process.
    """
    # Only here, as collections need this module.
    from tierbed.nn.embedding import table_id

    source = pickled.source
    store: RowSource
    optimizers: dict[str, Optimizer] = {}
    if isinstance(source, PickledStore):
        store = _open_store(source)
        in_use = {name for one in store.collections() for name in one.table_names()}
        optimizers = {name: at for name, at in source.optimizers.items() if name not in in_use}
    else:
        store = source
    ids = {
        config.name: table_id(store, config, optimizers.get(config.name))
        for config in collection._configs
    }
    collection._attach(store, ids)
    collection._binding.frozen = frozenset(ids[name] for name in pickled.frozen)
    trains = len(pickled.frozen) < len(ids)
    collection._hook.requires_grad_(trains and store.takes_gradients)
    if isinstance(store, Store):
        store.note_collection(collection)
    if isinstance(source, PickledStore) and isinstance(store, Store):
        _compare_steps(source, store)


def _open_store(source: PickledStore) -> Store:
    store = opened.find(source.path)
    if store is None:
        raise ClosedError(
            f"the rows of this module lie in the store at {source.path}, which is not open in this "
            f"process; call tierbed.Store.open({source.path!r}) before the module is loaded",
            {"path": source.path},
        )
    return store


def _compare_steps(source: PickledStore, store: Store) -> None:
    found = {name: store.steps_done(name) for name in source.steps}
    if found != source.steps:
        warnings.warn(
            f"the rows of the store at {source.path} are those of the steps {found}, and the "
            f"module was pickled at the steps {source.steps}: call store.checkpoint where the "
            "module is pickled, or keep its state_dict() in extra of the checkpoint",
            stacklevel=2,
        )
