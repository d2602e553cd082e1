"""The interfaces as they were published, for machines without the libraries.

Names, arguments and return types are those of recsys-examples v26.06.01 (``dynamicemb.types``) and
of DGL 2.5 (``dgl.graphbolt.feature_store``); nothing else is.
"""

from __future__ import annotations

import abc
import enum
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class CopyMode(enum.Enum):
    EMBEDDING = "embedding"
    VALUE = "value"


class Storage(abc.ABC):
    @abc.abstractmethod
    def find(
        self,
        unique_keys: Tensor,
        table_ids: Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: Tensor | None = None,
    ) -> tuple[Any, ...]: ...

    @abc.abstractmethod
    def insert(
        self,
        keys: Tensor,
        table_ids: Tensor,
        values: Tensor,
        scores: Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None: ...

    @abc.abstractmethod
    def dump(
        self,
        table_id: int,
        meta_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        timestamp: int,
    ) -> None: ...

    @abc.abstractmethod
    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        include_optim: bool,
        timestamp: int,
    ) -> None: ...

    @abc.abstractmethod
    def embedding_dtype(self) -> torch.dtype: ...

    @abc.abstractmethod
    def embedding_dim(self, table_id: int) -> int: ...

    @abc.abstractmethod
    def value_dim(self, table_id: int) -> int: ...

    @abc.abstractmethod
    def max_embedding_dim(self) -> int: ...

    @abc.abstractmethod
    def max_value_dim(self) -> int: ...

    @abc.abstractmethod
    def embedding_dims(self, on_device: bool = False) -> Tensor: ...

    @abc.abstractmethod
    def all_dims_vec4(self) -> bool: ...

    @abc.abstractmethod
    def init_optimizer_state(self) -> float: ...

    @abc.abstractmethod
    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[Any, ...]]: ...


class Feature(abc.ABC):
    @abc.abstractmethod
    def read(self, ids: Tensor = None): ...

    @abc.abstractmethod
    def read_async(self, ids: Tensor): ...

    @abc.abstractmethod
    def read_async_num_stages(self, ids_device: torch.device): ...

    @abc.abstractmethod
    def size(self): ...

    @abc.abstractmethod
    def count(self): ...

    @abc.abstractmethod
    def update(self, value: Tensor, ids: Tensor = None): ...

    @abc.abstractmethod
    def metadata(self): ...


class FeatureStore(abc.ABC):
    @abc.abstractmethod
    def __getitem__(self, feature_key): ...

    @abc.abstractmethod
    def __setitem__(self, feature_key, feature): ...

    @abc.abstractmethod
    def __contains__(self, feature_key): ...

    @abc.abstractmethod
    def read(self, domain, type_name, feature_name, ids=None): ...

    @abc.abstractmethod
    def size(self, domain, type_name, feature_name): ...

    @abc.abstractmethod
    def count(self, domain, type_name, feature_name): ...

    @abc.abstractmethod
    def metadata(self, domain, type_name, feature_name): ...

    @abc.abstractmethod
    def update(self, domain, type_name, feature_name, value, ids=None): ...

    @abc.abstractmethod
    def keys(self): ...


def check_implements(kind: type, published: type) -> None:
    """Asserts that ``kind`` has each method, and takes what the published one takes.

    By position and by name, with the same things left out; what it takes beyond that it does
    without.
    """
    for name, theirs in _methods(published).items():
        ours = getattr(kind, name, None)
        assert ours is not None, f"{kind.__name__} has no {name}"
        asked = list(inspect.signature(theirs).parameters.values())
        taken = list(inspect.signature(ours).parameters.values())
        assert [at.name for at in taken[: len(asked)]] == [at.name for at in asked], name
        for ours_at, theirs_at in zip(taken, asked, strict=False):
            assert ours_at.kind == theirs_at.kind, f"{name}: {ours_at}"
            has_default = ours_at.default is not inspect.Parameter.empty
            assert has_default or theirs_at.default is inspect.Parameter.empty, f"{name}: {ours_at}"
        for extra in taken[len(asked) :]:
            assert extra.default is not inspect.Parameter.empty, f"{name}: {extra}"


def _methods(published: type) -> dict[str, Any]:
    """Returns the abstract methods of a class of this file, or all own ones of a real one."""
    named = getattr(published, "__abstractmethods__", None) or [
        name
        for name, member in vars(published).items()
        if inspect.isfunction(member) and name != "__init__"
    ]
    return {name: getattr(published, name) for name in named}
