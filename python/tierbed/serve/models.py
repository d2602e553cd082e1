"""Models that a server asks: a dense part on top of the pooled rows of a snapshot.

The server reads requests and looks rows up by itself, for all requests that wait at once. Then it
calls the model's ``head`` with the numbers and the rows of all samples.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from tierbed._util.state import DENSE, MODEL
from tierbed.config.words import Pooling
from tierbed.errors import InvalidError
from tierbed.nn import CtrModel, EmbeddingBagCollection, build_model
from tierbed.nn.embedding import RowSource
from tierbed.serve.snapshot import Snapshot

__all__ = ["ModelFeature", "Scorer", "ServedModel", "load_model"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelFeature:
    """A feature with ids that a model takes.

    Args:
        name: Its name in what is said of the model.
        table: The table of the snapshot that its ids are of.
        pooling: How the rows of a bag become one.
    """

    name: str
    table: str
    pooling: Pooling = "sum"


@dataclass(frozen=True)
class ServedModel:
    """A module of one's own and what it takes, for :class:`Server`.

    The module has a method ``head(dense, rows)``. ``dense`` is ``[B, dense_count]`` f32, ``rows``
    ``[B, sum of dims]`` f32: the pooled rows of all features side by side, as
    ``EmbeddingBagCollection(batch).values()`` has them. It returns logits ``[B]``, which are
    answered as ``probability`` and ``logit``, or a dict of outputs by name, each ``[B]`` or
    ``[B, K]``, all f32. Samples of several requests come together, so none may depend on others.
    It is called from several threads at once, without gradients, in evaluation mode.

    Args:
        module: The module.
        features: Its features in the order of the rows. By default those of the only
            ``EmbeddingBagCollection`` in the module.
        dense_count: Numerical features. By default the module's ``dense_count``.

    Examples:
        >>> from tierbed.serve import ModelFeature, ServedModel, Server, load_model
        >>> class Liked(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.out = torch.nn.Linear(2 + 8, 1)
        ...     def head(self, dense, rows):
        ...         return self.out(torch.cat([dense, rows], dim=1)).squeeze(1)
        >>> with tb.Store.open("store", dram_budget="16MiB") as store:
        ...     table = tb.EmbeddingBagConfig(name="item", num_embeddings=100, embedding_dim=8)
        ...     emb = tb.EmbeddingBagCollection([table], store=store)
        ...     _ = store.publish("snapshot", Liked())
        >>> with tb.Snapshot.open("snapshot") as snapshot:
        ...     liked = load_model(snapshot, into=Liked())
        ...     model = ServedModel(liked, [ModelFeature(name="item", table="item")], dense_count=2)
        ...     with Server(snapshot, "127.0.0.1:0", model=model) as server:
        ...         server.predicts
        True
    """

    module: nn.Module
    features: Sequence[ModelFeature] | None = None
    dense_count: int | None = None


@overload
def load_model(snapshot: Snapshot) -> CtrModel | None: ...
@overload
def load_model(snapshot: Snapshot, into: Module) -> Module: ...
def load_model(snapshot: Snapshot, into: nn.Module | None = None) -> nn.Module | None:
    """Returns the model that a snapshot was published with, ready to predict.

    Args:
        snapshot: An open snapshot.
        into: A module of one's own, which gets the published dense parameters. By default the
            click model that was published is built, if it was one.

    Returns:
        The model, or None when the snapshot has no click model.

    Raises:
        InvalidError: The snapshot has no dense parameters for ``into``, or others.
    """
    config, dense = snapshot.attachment(MODEL), snapshot.attachment(DENSE)
    if into is None:
        return None if config is None or dense is None else _built(config, dense, snapshot)
    if dense is None:
        raise InvalidError(
            "the snapshot was published without a model; publish(path, model) adds its parameters"
        )
    return _loaded(into, dense)


def _built(config: bytes, dense: bytes, snapshot: RowSource) -> CtrModel:
    return _loaded(build_model(json.loads(config), snapshot), dense)


def _loaded(module: Module, dense: bytes) -> Module:
    # `import tierbed` loads this file, and few programs serve.
    from safetensors.torch import load

    try:
        module.load_state_dict(load(dense))
    except RuntimeError as error:
        message = f"the published parameters are not those of the module: {error}"
        raise InvalidError(message) from error
    return module.eval()


class Scorer:
    """What the engine's server calls: a model bound to the tables of a snapshot.

    Args:
        model: The model.
        snapshot: What it is served from, or a store that it will be published from.

    Raises:
        InvalidError: The module has no head, does not say what it takes, or answers in another
            form.
    """

    def __init__(self, model: ServedModel, snapshot: RowSource) -> None:
        module = model.module.eval()
        if not callable(getattr(module, "head", None)):
            raise InvalidError(
                f"{type(module).__name__} has no method head(dense, rows), which a server calls"
            )
        features = _features_of(module) if model.features is None else list(model.features)
        dense_count = model.dense_count
        if dense_count is None:
            dense_count = getattr(module, "dense_count", None)
        if not isinstance(dense_count, int) or dense_count < 0:
            raise InvalidError(
                f"{type(module).__name__} does not say how many numbers it takes; give "
                "ServedModel(..., dense_count=...)"
            )
        dims = {table["name"]: int(table["dim"]) for table in snapshot.tables()}
        unknown = sorted({feature.table for feature in features} - dims.keys())
        if unknown:
            raise InvalidError(
                f"no tables {unknown} for the model; the snapshot has {sorted(dims)}"
            )
        self._model, self._snapshot = model, snapshot
        self.answering = Answering(module)
        self.widths = dense_count, sum(dims[feature.table] for feature in features)
        self.inputs = {
            "dense_count": dense_count,
            "features": [asdict(feature) for feature in features],
        }
        self._names: list[str] = []
        self.outputs = self._outputs()

    def score(self, dense: Any, rows: Any) -> list[Tensor]:
        """Scores a batch.

        Args:
            dense: Capsule of ``[B, dense_count]`` f32.
            rows: Capsule of ``[B, sum of dims]`` f32.

        Returns:
            The outputs, in the order of ``outputs``.
        """
        with torch.inference_mode():
            answer = self.answering(from_dlpack(dense), from_dlpack(rows))
        return [answer[name].contiguous() for name in self._names]

    def successor(self, config: bytes | None, dense: bytes) -> Scorer:
        """Returns that of a model published with a delta.

        Args:
            config: Its ``config()``, where it has one.
            dense: Its dense parameters.
        """
        module = self._model.module
        told = getattr(module, "config", None)
        if config is not None and callable(told) and json.loads(config) != _plain(told()):
            if not isinstance(module, CtrModel):
                raise InvalidError("the published model has another config than the one served")
            model = ServedModel(_built(config, dense, self._snapshot))
            return Scorer(model, self._snapshot)
        # Tables are shared, all else is a copy: requests go on with this one.
        shared = {id(part): part for part in module.modules() if _has_tables(part)}
        copied = _loaded(copy.deepcopy(module, shared), dense)
        model = ServedModel(copied, self._model.features, self._model.dense_count)
        return Scorer(model, self._snapshot)

    def _outputs(self) -> list[dict[str, Any]]:
        """Asks for one sample and for two, so that no request waits for code to be loaded."""
        found = []
        for count in (1, 2):
            given = [torch.zeros(count, width) for width in self.widths]
            with torch.inference_mode():
                answer = self.answering(*given)
            self._names = list(answer)
            shapes = {name: _shape(name, output) for name, output in answer.items()}
            wrong = {name: shape for name, shape in shapes.items() if shape[:1] != (count,)}
            if wrong or any(len(shape) > 2 for shape in shapes.values()):
                raise InvalidError(
                    f"outputs of a served model are [B] or [B, K], but for {count} samples head "
                    f"returned {shapes}"
                )
            found.append({name: shape[1:] for name, shape in shapes.items()})
        if found[0] != found[1]:
            raise InvalidError(f"outputs of a served model change with its samples: {found}")
        return [
            {"name": name, "width": rest[0] if rest else None} for name, rest in found[0].items()
        ]


def _shape(name: str, output: Any) -> tuple[int, ...]:
    if not isinstance(output, Tensor) or output.dtype != torch.float32:
        kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise InvalidError(f"outputs of a served model are float32 tensors, but {name!r} is {kind}")
    return tuple(output.shape)


class Answering(nn.Module):
    """The part of a model that a server calls: numbers and rows in, outputs by name out.

    Args:
        module: That of a :class:`ServedModel`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, dense: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Returns the outputs of a batch.

        Args:
            dense: ``[B, dense_count]`` f32.
            rows: ``[B, sum of dims]`` f32.
        """
        module: Any = self.module
        if isinstance(module, CtrModel):
            if module.dense_count == 0:
                dense = rows.new_ones(rows.shape[0], 1)
            rows = rows.view(-1, len(module.table_sizes), module.embedding_dim)
        answer = module.head(dense, rows)
        if isinstance(answer, dict):
            return answer
        return {"probability": torch.sigmoid(answer), "logit": answer}


def _plain(config: Any) -> Any:
    return json.loads(json.dumps(config))


def _has_tables(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingBagCollection)


def _features_of(module: nn.Module) -> list[ModelFeature]:
    collections = [part for part in module.modules() if isinstance(part, EmbeddingBagCollection)]
    if len(collections) != 1 or collections[0].is_weighted():
        raise InvalidError(
            f"{type(module).__name__} has {len(collections)} EmbeddingBagCollections, and a server "
            "reads its features of one without weights; give ServedModel(..., features=...)"
        )
    return [
        ModelFeature(name=feature, table=config.name, pooling=cast(Pooling, config.pooling.value))
        for config in collections[0].embedding_bag_configs()
        for feature in config.feature_names
    ]
