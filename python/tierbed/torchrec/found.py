"""Modules of TorchRec in a model: which they are, and whether a store can take their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tierbed.config.optim import Optimizer
from tierbed.config.tables import Constant, Init
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.torchrec.configs import drawn_by, table_of
from tierbed.torchrec.optimizers import applied_to, fused_of, state_rows, steps_of
from tierbed.train.store import Store

__all__ = ["Found", "FoundTable", "find"]


@dataclass(frozen=True)
class FoundTable:
    """A table of a module.

    Args:
        name: Its name.
        weight: Its rows ``[N, D]``.
        applied: The optimizer applied in backward whose state goes along, if any.
    """

    name: str
    weight: Tensor
    applied: torch.optim.Optimizer | None

    def copy(self, store: Store, chunk_rows: int) -> None:
        """Copies rows and state into the table of that name; nothing from the device meta."""
        if self.weight.is_meta:
            return
        for first in range(0, self.weight.shape[0], chunk_rows):
            end = first + chunk_rows
            applied = self.applied
            part = None if applied is None else state_rows(applied, self.weight, first, end)
            rows = self.weight[first:end].detach().cpu().contiguous()
            store.write_rows(self.name, first, rows, part)
        if self.applied is not None:
            store.set_steps_done(self.name, steps_of(self.applied, self.weight))


@dataclass(frozen=True)
class Found:
    """A collection of TorchRec in a model.

    Args:
        path: Its name in the model; empty for the model itself.
        module: It.
        is_pooled: Whether its rows are pooled.
        configs: Its tables in TorchRec's words.
        tables: Their rows.
        optimizer: That of what takes its place; None for the default.
        init: Initial weights by table, where there are rows or a caller gave them.
    """

    path: str
    module: Any
    is_pooled: bool
    configs: list[Any]
    tables: list[FoundTable]
    optimizer: Optimizer | None
    init: Mapping[str, Init]

    @property
    def trains(self) -> bool:
        """Whether its rows train."""
        return all(table.weight.requires_grad for table in self.tables)


def find(model: nn.Module, optimizer: Optimizer | None, init: Mapping[str, Init]) -> list[Found]:
    """Finds every collection of TorchRec in ``model``, and checks that a store can be each.

    Raises:
        InvalidError: There is none, or two have a table of one name.
        UnsupportedError: One that a store cannot be exactly.
    """
    # TorchRec is there: whoever calls has imported it.
    from torchrec.distributed.types import ShardedModule
    from torchrec.modules import embedding_modules as theirs

    interfaces = (
        theirs.EmbeddingBagCollectionInterface,
        theirs.EmbeddingCollectionInterface,
        ShardedModule,
    )
    exact = {theirs.EmbeddingBagCollection: True, theirs.EmbeddingCollection: False}
    found: list[Found] = []
    for path, module in model.named_modules():
        if not isinstance(module, interfaces) or type(module).__module__.startswith("tierbed."):
            continue
        if type(module) not in exact:
            raise UnsupportedError(
                f"{path or 'the model'} is a {type(module).__module__}.{type(module).__name__}, "
                "which may do more than its tables say; replace torchrec.EmbeddingBagCollection "
                "and EmbeddingCollection, before they are sharded, fused or quantized",
                {"module": path},
            )
        found.append(_found(path, module, exact[type(module)], optimizer, init))
    if not found:
        raise InvalidError(
            "the model has no torchrec.EmbeddingBagCollection and no EmbeddingCollection to "
            "replace; give the module that holds them"
        )
    names = [table.name for one in found for table in one.tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidError(
            f"several modules have tables {twice}, which a store tells apart by name; give the "
            "tables of the model different names",
            {"tables": ",".join(twice)},
        )
    _check_shared(model, found)
    return found


def _found(
    path: str,
    module: Any,
    is_pooled: bool,
    optimizer: Optimizer | None,
    init: Mapping[str, Init],
) -> Found:
    configs = list(module.embedding_bag_configs() if is_pooled else module.embedding_configs())
    lookups = module.embedding_bags if is_pooled else module.embeddings
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in hooks):
        raise UnsupportedError(
            f"module {path!r} has hooks, which would be lost; register them after it is replaced",
            {"module": path},
        )
    fused = {}
    tables = []
    starts = dict(init)
    for config in configs:
        lookup = lookups[config.name]
        if not lookup.weight.is_meta and drawn_by(config) is None:
            # Every row is written: nothing of the initial ones is seen.
            starts.setdefault(config.name, Constant(0.0))
        table_of(config, starts)
        _check_lookup(config, lookup, is_pooled)
        applied = applied_to(lookup.weight)
        if optimizer is None:
            fused[config.name] = None if applied is None else fused_of(applied)
        elif applied is not None and not _is_kind(applied, optimizer):
            applied = None
        tables.append(FoundTable(config.name, lookup.weight, applied))
    if len(set(fused.values())) > 1:
        raise UnsupportedError(
            f"the tables of {path or 'the model'} have different optimizers in backward: {fused}; "
            "give one for all of them with optimizer=",
            {"module": path},
        )
    frozen = {table.weight.requires_grad for table in tables}
    if len(frozen) > 1:
        raise UnsupportedError(
            f"some tables of {path or 'the model'} are frozen and some train; a store freezes a "
            "collection, so make two of them",
            {"module": path},
        )
    chosen = optimizer if optimizer is not None else next(iter(fused.values()), None)
    return Found(path, module, is_pooled, configs, tables, chosen, starts)


def _is_kind(applied: torch.optim.Optimizer, optimizer: Optimizer) -> bool:
    try:
        return fused_of(applied).kind == optimizer.kind
    except UnsupportedError:
        return False


def _check_lookup(config: Any, lookup: Any, is_pooled: bool) -> None:
    """Refuses a table whose module does other than its config says."""
    kind = nn.EmbeddingBag if is_pooled else nn.Embedding
    odd = None
    if type(lookup) is not kind:
        odd = f"is a {type(lookup).__name__}"
    elif tuple(lookup.weight.shape) != (config.num_embeddings, config.embedding_dim):
        odd = f"has weights {tuple(lookup.weight.shape)}"
    elif lookup.max_norm is not None or lookup.scale_grad_by_freq:
        odd = "has max_norm or scale_grad_by_freq"
    elif lookup.padding_idx is not None:
        odd = "has a padding_idx"
    elif lookup.weight.dtype is not torch.float32:
        raise UnsupportedError(
            f"table {config.name!r}: rows train in float32, not {lookup.weight.dtype}; give "
            "model.float()",
            {"table": config.name},
        )
    elif lookup.weight._backward_hooks:
        odd = "has hooks on its gradient"
    if odd is not None:
        raise UnsupportedError(
            f"table {config.name!r} {odd}, which its config does not say; replace tables as "
            "TorchRec makes them",
            {"table": config.name},
        )


def _check_shared(model: nn.Module, found: list[Found]) -> None:
    """Refuses modules and weights that are used in two places: each would step the rows."""
    places: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(weight), []).append(name)
    for one in found:
        for table in one.tables:
            names = places[id(table.weight)]
            if len(names) > 1:
                raise UnsupportedError(
                    f"table {table.name!r} is shared by {names}, and rows are stepped once per "
                    "lookup, not once for all; use the table in one module, with several features",
                    {"table": table.name},
                )
