"""Rows behind the interface of ``torch.optim.Optimizer``.

Without it each backward through a lookup is a step of its rows. With it backwards collect the
gradients, :meth:`RowOptimizer.step` makes one step of what was collected, and what a training loop
does around an optimizer reaches the rows: accumulation, clipping, a ``GradScaler``, schedulers of
learning rates, closures.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tierbed.errors import InvalidError, UnsupportedError
from tierbed.nn.embedding import Collection
from tierbed.ops.collected import CollectedGradients, CollectedTable
from tierbed.ops.steps import scales_twice
from tierbed.train.store import Store

__all__ = ["RowOptimizer"]

# What a group of parameters may change; other fields of an optimizer are fixed with the table.
_NUMBERS = ("lr", "weight_decay", "betas", "eps")


class RowOptimizer(torch.optim.Optimizer):
    """Steps rows when ``step`` is called, by what backwards collected until then.

    The rows keep their fused optimizers and the optimizer state beside them in the store. Each
    table is a group of parameters with the numbers of its optimizer; those of the group are in
    force at each step. Its parameter is a stand-in, whose ``grad`` is the summed gradient of the
    rows ``[R, D]``: clip it with ``torch.nn.utils``, as those of other parameters.

    Memory holds one gradient and one id per distinct row of a step. One lookup and one step have
    the bits of training without this optimizer; several lookups have those of one lookup of all
    their ids.

    Args:
        rows: A store, for all its collections; or a module, or several, for the collections in it.
        dense: The optimizer of the other parameters: its groups stand before those of the tables,
            and it steps with them. For frameworks that take one optimizer.

    Raises:
        InvalidError: No collection that trains, or one with a scaler of its own.
        UnsupportedError: Tables that are divided over ranks.

    Examples:
        >>> store = tb.Store.open(backend="memory", dram_budget="16MiB")
        >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=16)]
        >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adam(lr=0.01))
        >>> top = torch.nn.Linear(16, 1)
        >>> dense = torch.optim.Adam(top.parameters(), lr=0.01)
        >>> optimizer = tb.RowOptimizer(emb, dense)
        >>> for ids in ([1, 2], [2, 3]):
        ...     lengths = torch.ones(2, dtype=torch.int64)
        ...     batch = tb.KeyedJaggedTensor(["item"], torch.tensor(ids), lengths=lengths)
        ...     top(emb(batch).values()).mean().backward()
        >>> [len(group["params"][0].grad) for group in optimizer.param_groups if "table" in group]
        [3]
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> store.steps_done("item")
        1
        >>> store.close()
    """

    def __init__(
        self,
        rows: Store | nn.Module | Iterable[nn.Module],
        dense: torch.optim.Optimizer | None = None,
    ) -> None:
        self.dense: torch.optim.Optimizer | None = None
        self._stores: list[tuple[Store, CollectedGradients]] = []
        groups = []
        for store, collections in _by_store(rows).items():
            tables = _tables_of(store, collections)
            groups += [_group(store, table) for table in tables.values()]
            self._stores.append((store, CollectedGradients(store.native, tables)))
        self._owners = [(store, at) for store, one in self._stores for at in one.tables]
        super().__init__(groups, {} if dense is None else dict(dense.defaults))
        self.dense = dense
        self._is_made = True
        for store, collected in self._stores:
            _attach(store, collected, self)

    @property
    def steps_rows_only(self) -> bool:
        """Whether no dense optimizer steps along."""
        return self.dense is None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the dense optimizer, then one per table."""
        if self.dense is None:
            return self._row_groups
        return [*self.dense.param_groups, *self._row_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._row_groups = groups

    @property
    def state(self) -> Any:
        """The state of the dense optimizer; that of rows lies in the store."""
        return self._own_state if self.dense is None else self.dense.state

    @state.setter
    def state(self, state: Any) -> None:
        self._own_state = state

    def parameters(self) -> list[nn.Parameter]:
        """Returns the stand-ins of the tables, whose gradients may be clipped with those of others.

        They are the same objects at every step, of as many rows as the step has.
        """
        return [group["params"][0] for group in self._row_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of the rows that have a gradient, and of the dense optimizer.

        Args:
            closure: Called first, with gradients: it evaluates the model and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            InvalidError: A gradient with nan or inf, or an order that must be followed and of
                which several batches were collected; no row of that store is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for (store, table), group in zip(self._owners, self._row_groups, strict=True):
            _put_in_force(store, table, group)
        with torch.no_grad():
            for store, collected in self._stores:
                if store.watch.collector() is not collected:
                    raise InvalidError(
                        "another RowOptimizer steps the rows of this store; step that one"
                    )
                collected.step()
        if self.dense is not None:
            self.dense.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the collected gradients; those of the dense parameters as torch does.

        Args:
            set_to_none: For the dense parameters; rows keep no gradient of zeros.
        """
        if self.dense is not None:
            self.dense.zero_grad(set_to_none)
        for _, collected in self._stores:
            collected.clear()

    def close(self) -> None:
        """Lets backwards step the rows again."""
        for store, collected in self._stores:
            collected.clear()
            if store.watch.collector() is collected:
                store.watch.collector = lambda: None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the numbers of the groups, learning rates among them, and the dense state.

        The state of the rows lies with them in the store, and in its checkpoints.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            InvalidError: Other tables, or other groups of the dense optimizer.
        """
        groups = state_dict["param_groups"]
        count = len(self.param_groups) - len(self._row_groups)
        found = [group.get("table") for group in groups[count:]]
        wanted = [group["table"] for group in self._row_groups]
        if found != wanted:
            raise InvalidError(
                f"the state is of the tables {found}, this optimizer steps {wanted} behind {count} "
                "dense groups; make it of the same collections and the same dense optimizer"
            )
        if self.dense is not None:
            dense = {"state": state_dict["state"], "param_groups": groups[:count]}
            self.dense.load_state_dict(dense)
        for own, saved in zip(self._row_groups, groups[count:], strict=True):
            own.update({name: value for name, value in saved.items() if name != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: tables are those of the collections; only for torch's own constructor.

        Args:
            param_group: A group of parameters.

        Raises:
            UnsupportedError: Always, once it is made.
        """
        if getattr(self, "_is_made", False):
            raise UnsupportedError(
                "a RowOptimizer takes no further groups; add them to the dense optimizer, and make "
                "the RowOptimizer anew"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a RowOptimizer cannot be copied or pickled, its rows lie in a store; save its "
            "state_dict()"
        )


def _by_store(rows: Any) -> dict[Store, list[Collection]]:
    """Returns the collections that train, by store, in the order of the modules."""
    if isinstance(rows, Store):
        found = [one for one in rows.collections() if isinstance(one, Collection)]
    else:
        roots = [rows] if isinstance(rows, nn.Module) else list(rows)
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        divided = [m for m in modules if type(m).__name__.startswith("ShardedEmbedding")]
        if divided:
            raise UnsupportedError(
                f"a RowOptimizer does not step a {type(divided[0]).__name__}, whose ranks step "
                "their rows within backward; leave it out, and use larger batches instead of "
                "accumulation"
            )
        found = [module for module in modules if isinstance(module, Collection)]
    by_store: dict[Store, list[Collection]] = {}
    for collection in found:
        if isinstance(collection.store, Store):
            by_store.setdefault(collection.store, []).append(collection)
    if not by_store:
        raise InvalidError(
            "there is no collection over a store that trains; make the collections first, and "
            "give the store or a module that has them"
        )
    return by_store


def _tables_of(store: Store, collections: list[Collection]) -> dict[int, CollectedTable]:
    tables: dict[int, CollectedTable] = {}
    for collection in collections:
        if collection._binding.guard.has_scaler:
            raise scales_twice()
        for name in collection.table_names():
            schema = store.table(name)
            tables.setdefault(store.table_id(name), CollectedTable(name, schema["dim"]))
    return dict(sorted(tables.items()))


def _group(store: Store, table: CollectedTable) -> dict[str, Any]:
    numbers = dataclasses.asdict(store.optimizer(table.name))
    own = {name: numbers[name] for name in _NUMBERS if name in numbers}
    return {"params": [table.parameter], "table": table.name, **own}


def _put_in_force(store: Store, table: int, group: Mapping[str, Any]) -> None:
    """Gives a table the numbers of its group, where they changed."""
    found = store.optimizers[table]
    numbers = {key: group[key] for key in _NUMBERS if key in group and hasattr(found, key)}
    for key, value in numbers.items():
        if isinstance(value, torch.Tensor):
            numbers[key] = value.item()
    wanted = dataclasses.replace(found, **numbers)
    if wanted != found:
        store.set_optimizer(group["table"], wanted)


def _attach(store: Store, collected: CollectedGradients, owner: RowOptimizer) -> None:
    """Lets the gradients of ``store`` go to ``collected`` while ``owner`` lives."""
    lives = weakref.ref(owner)
    store.watch.collector = lambda: None if lives() is None else collected
