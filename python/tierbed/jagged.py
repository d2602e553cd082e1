"""Jagged tensors: ids of batches, and the vectors of their lookups.

The layout is TorchRec's: ``values`` holds the ids of all bags, feature by feature and within a
feature sample by sample; bag ``f * B + b`` is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.
TorchRec itself is not needed; its own ``KeyedJaggedTensor`` is accepted wherever ours is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack

from tierbed._native import fill_offsets
from tierbed._util.variable_batch import VariableBatch
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "UnpooledRows", "as_kjt"]


# From so many bags on, the passes of torch's kernels cost more than the border.
_MANY_BAGS = 4096


def offsets_of(lengths: Tensor) -> Tensor:
    """Returns the offsets ``[N+1]`` i64 of bags of ``lengths`` ``[N]``."""
    if lengths.numel() >= _MANY_BAGS and _is_plain(lengths):
        offsets = torch.empty(lengths.numel() + 1, dtype=torch.int64)
        fill_offsets(lengths, lengths.dtype == torch.int32, offsets)
        return offsets
    ends = torch.cumsum(lengths, dim=0, dtype=torch.int64)
    return torch.nn.functional.pad(ends, (1, 0))


def _is_plain(lengths: Tensor) -> bool:
    """Whether the memory of ``lengths`` may be read past torch."""
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or not lengths.is_cpu:
        return False
    is_known = lengths.dtype in (torch.int32, torch.int64) and lengths.is_contiguous()
    if not is_known or _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        return False
    return _get_tracing_state() is None


# Most bounds that are taken apart as numbers of Python.
_BOUNDS_MAX = 512
_COUNTS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def _check(values: Tensor, lengths: Tensor | None, offsets: Tensor | None, what: str) -> None:
    """Refuses what cannot be the ids and bags of a batch."""
    if lengths is None and offsets is None:
        raise InvalidError(f"a {what} needs lengths or offsets")
    if not isinstance(values, Tensor):
        raise _not_a_tensor(values, "values", what)
    if lengths is not None and lengths is not values:
        _check_counts(lengths, "lengths", what)
    if offsets is not None and offsets is not values:
        _check_counts(offsets, "offsets", what)


def _check_counts(tensor: Tensor, name: str, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise _not_a_tensor(tensor, name, what)
    if tensor.dtype not in _COUNTS:
        raise InvalidError(
            f"{name} of a {what} must be integers, not {tensor.dtype}", {"argument": name}
        )


def _not_a_tensor(found: object, name: str, what: str) -> InvalidError:
    return InvalidError(
        f"{name} of a {what} must be a torch.Tensor, not {type(found).__name__}; "
        "torch.as_tensor makes one",
        {"argument": name},
    )


class _Bags:
    """What bags of one feature and of several have in common; lengths or offsets are given."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """Returns the ids of all bags ``[E]``, or rows ``[E, D]``."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Returns the weights ``[E]``, if any."""
        return self._weights

    def lengths(self) -> Tensor:
        """Returns the length of each bag, ``[B]``, of ``F`` features ``[F*B]``."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Tensor:
        """Returns the bounds of the bags, ``[B+1]``, of ``F`` features ``[F*B+1]``."""
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths())
        return self._offsets


class JaggedTensor(_Bags):
    """The bags of one feature.

    Args:
        values: ``[E]`` ids, or ``[E, D]`` rows.
        lengths: ``[B]`` length of each bag; or give ``offsets`` ``[B+1]``.
        weights: ``[E]`` weight of each id.
        offsets: ``[B+1]`` bounds of the bags, from 0 to ``E``.

    Examples:
        >>> rows = tb.JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 1]))
        >>> rows.offsets()
        tensor([0, 2, 2, 3])
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Tensor | None = None,
        weights: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        _check(values, lengths, offsets, "JaggedTensor")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    def to_dense(self) -> list[Tensor]:
        """Returns one tensor per bag."""
        bounds, values = self.offsets().tolist(), self.values()
        return [values[a:b] for a, b in pairwise(bounds)]

    def __repr__(self) -> str:
        return f"JaggedTensor(values={tuple(self.values().shape)}, bags={self.lengths().numel()})"


class _FeatureRows(JaggedTensor):
    """The rows of one feature of an :class:`UnpooledRows`."""

    _weights = None
    _lengths = None
    _offsets = None

    def __init__(self, rows: UnpooledRows, at: int) -> None:
        # Nothing of the base is set: a request of one sample has one of these per feature.
        self._rows = rows
        self._at = at

    def values(self) -> Tensor:
        """Returns the rows ``[E, D]``."""
        return self._rows.values(self._at)

    def lengths(self) -> Tensor:
        """Returns the length of each bag, ``[B]``."""
        if self._lengths is None:
            self._lengths = self._rows.lengths(self._at)
        return self._lengths


class UnpooledRows:
    """The rows of a small batch of bags, which are taken apart by feature when they are asked for.

    Where a request has one sample, making the tensors of all its features takes longer than
    reading their rows. Bounds are taken at once, so that a caller may use its tensors again.

    Args:
        rows: ``[E, D]``, without gradient.
        bags: The batch that was looked up; it :meth:`fits`.
    """

    def __init__(self, rows: Tensor, bags: KeyedJaggedTensor) -> None:
        offsets = bags.offsets()
        self._values = rows
        self._stride = bags.stride()
        self._bounds: list[int] = offsets.tolist()
        self._dtype = offsets.dtype
        self._lengths = bags._lengths
        self._parts: Sequence[Tensor] | None = None if len(bags.keys()) > 1 else (rows,)

    @staticmethod
    def fits(rows: Tensor, bags: KeyedJaggedTensor) -> bool:
        """Tells whether numbers of Python are cheaper than tensors, and nothing is trained.

        Args:
            rows: Rows ``[E, D]``.
            bags: The bags they are of.
        """
        if rows.requires_grad or not bags.stride():
            return False
        offsets = bags.offsets()
        return offsets.numel() <= _BOUNDS_MAX and offsets.is_cpu

    def to_dict(self, names: Sequence[str]) -> dict[str, JaggedTensor]:
        """Returns one :class:`JaggedTensor` per feature, called ``names``.

        Args:
            names: A name per feature.
        """
        return {name: _FeatureRows(self, at) for at, name in enumerate(names)}

    def values(self, at: int) -> Tensor:
        """Returns the rows ``[E, D]`` of the feature at position ``at``.

        Args:
            at: Position of the feature.
        """
        if self._parts is None:
            sizes = [b - a for a, b in pairwise(self._bounds[:: self._stride])]
            self._parts = torch.split(self._values, sizes)
        return self._parts[at]

    def lengths(self, at: int) -> Tensor:
        """Returns the length of each bag ``[B]`` of the feature at position ``at``.

        Args:
            at: Position of the feature.
        """
        first, end = at * self._stride, (at + 1) * self._stride
        if self._lengths is not None:
            return self._lengths[first:end]
        bounds = self._bounds[first : end + 1]
        return torch.tensor([b - a for a, b in pairwise(bounds)], dtype=self._dtype)


class KeyedJaggedTensor(_Bags):
    """The bags of several features of a batch of ``B`` samples.

    Args:
        keys: Feature names, ``F`` of them.
        values: ``[E]`` ids, feature by feature.
        weights: ``[E]`` weight of each id.
        lengths: ``[F*B]`` length of each bag; or give ``offsets``.
        offsets: ``[F*B+1]`` bounds of the bags, from 0 to ``E``.
        stride: ``B``; by default the number of bags divided by ``F``.

    Raises:
        InvalidError: Tensors that do not describe ``F*B`` bags.

    Examples:
        >>> batch = tb.KeyedJaggedTensor(
        ...     ["user", "item"],  # two features of two samples
        ...     torch.tensor([3, 5, 10, 11, 12]),
        ...     lengths=torch.tensor([1, 1, 2, 1]),
        ... )
        >>> batch["item"].values()
        tensor([10, 11, 12])
    """

    # Of a batch whose features have bags of their own numbers: see VariableBatch.
    _variable: VariableBatch | None = None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        self._keys = list(keys)
        _check(values, lengths, offsets, "KeyedJaggedTensor")
        if lengths is not None:
            bags = lengths.numel()
        else:
            assert offsets is not None
            bags = offsets.numel() - 1
        if stride is None:
            stride = bags // len(self._keys) if self._keys else 0
        if stride * len(self._keys) != bags:
            raise InvalidError(
                f"{len(self._keys)} features of {stride} samples have "
                f"{stride * len(self._keys)} bags, but lengths or offsets describe {bags}; "
                "every feature needs the same number of samples",
                {"features": str(len(self._keys)), "bags": str(bags)},
            )
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Builds one from lengths ``[F*B]``.

        Args:
            keys: Feature names, ``F``.
            values: Ids ``[E]`` of all bags, feature by feature.
            lengths: Length of each bag, ``[F*B]``.
            weights: Weights ``[E]``, if any.
        """
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths)

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Builds one from offsets ``[F*B+1]``.

        Args:
            keys: Feature names, ``F``.
            values: Ids ``[E]`` of all bags, feature by feature.
            offsets: Bounds of the bags, ``[F*B+1]``.
            weights: Weights ``[E]``, if any.
        """
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets)

    @staticmethod
    def from_jt_dict(features: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Joins one :class:`JaggedTensor` per feature; all of the same number of bags.

        Args:
            features: By name; all with weights or none.

        Raises:
            InvalidError: Other numbers of bags, or weights of some features only.
        """
        parts = list(features.values())
        bags = {key: part.lengths().numel() for key, part in features.items()}
        if len(set(bags.values())) > 1:
            raise InvalidError(
                f"every feature needs the same number of bags, one per sample; found {bags}",
                {key: str(count) for key, count in bags.items()},
            )
        weights = [part.weights_or_none() for part in parts]
        kept = [weight for weight in weights if weight is not None]
        if kept and len(kept) != len(parts):
            raise InvalidError("either all features have weights or none")
        return KeyedJaggedTensor(
            list(features),
            torch.cat([part.values() for part in parts]),
            torch.cat(kept) if kept else None,
            lengths=torch.cat([part.lengths() for part in parts]),
        )

    def keys(self) -> list[str]:
        """Returns the feature names."""
        return self._keys

    def stride(self) -> int:
        """Returns the number of samples ``B``."""
        return self._stride

    @property
    def variable(self) -> VariableBatch | None:
        """Where features have bags of their own numbers: which; None for one bag per sample."""
        return self._variable

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """Returns the features at positions ``indices``, in that order; repeats are allowed.

        Args:
            indices: Positions of features.
        """
        order = [int(at) for at in indices]
        if order == list(range(len(self._keys))):
            return self
        stride = self._stride
        lengths = self.lengths().view(len(self._keys), stride)
        keys = [self._keys[at] for at in order]
        picked = lengths[torch.tensor(order, device=lengths.device)].reshape(-1)
        if sorted(order) == list(range(len(self._keys))):
            positions = _permuted_positions(
                self.offsets(), offsets_of(picked), order, stride, self._values.numel()
            )
        else:
            ends = self.offsets()[::stride].tolist() if stride else [0] * (len(self._keys) + 1)
            spans = [torch.arange(ends[at], ends[at + 1]) for at in order]
            positions = torch.cat(spans).to(self._values.device)
        weights = None if self._weights is None else self._weights[positions]
        permuted = KeyedJaggedTensor(
            keys, self._values[positions], weights, lengths=picked, stride=stride
        )
        permuted._variable = self._variable
        return permuted

    def select(self, keys: Sequence[str]) -> KeyedJaggedTensor:
        """Returns the features called ``keys``, in that order.

        Args:
            keys: Feature names.

        Raises:
            InvalidError: A feature is missing, or there twice.
        """
        at_of = {key: at for at, key in enumerate(self._keys)}
        if len(at_of) != len(self._keys):
            twice = [key for key in dict.fromkeys(keys) if self._keys.count(key) > 1]
            if twice:
                raise InvalidError(
                    f"the batch has the features {twice} more than once; keys must differ",
                    {"twice": ",".join(twice)},
                )
        missing = [key for key in keys if key not in at_of]
        if missing:
            raise InvalidError(
                f"the batch lacks the features {missing}; it has {self._keys}",
                {"missing": ",".join(missing)},
            )
        return self.permute([at_of[key] for key in keys])

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Returns one :class:`JaggedTensor` per feature."""
        return {key: self[key] for key in self._keys}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Returns a copy on ``device`` (itself when already there).

        Args:
            device: Where the copy is.
            non_blocking: As of ``torch.Tensor.to``.
        """

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        moved = KeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            move(self._weights),
            move(self._lengths),
            move(self._offsets),
            self._stride,
        )
        moved._variable = self._variable
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """Returns itself: the store reads ids from ordinary memory."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(key)
        first = self._keys.index(key) * self._stride
        count = self._stride if self._variable is None else self._variable.bag_counts[key]
        bounds = self.offsets()[first : first + count + 1]
        start, end = (int(bounds[0]), int(bounds[-1])) if self._stride else (0, 0)
        weights = None if self._weights is None else self._weights[start:end]
        return JaggedTensor(self._values[start:end], weights=weights, offsets=bounds - start)

    def __repr__(self) -> str:
        return (
            f"KeyedJaggedTensor(keys={self._keys}, stride={self._stride}, "
            f"values={tuple(self._values.shape)})"
        )


def _permuted_positions(
    old: Tensor, new: Tensor, order: list[int], stride: int, index_count: int
) -> Tensor:
    """Where does element ``j`` after a permutation of all features come from?

    Arithmetic on known shapes only, so that it compiles without a graph break. ``old`` and
    ``new`` are the offsets ``[F*B+1]`` before and after; returns ``[E]`` i64.
    """
    device = old.device
    starts = old[torch.tensor(order, device=device) * stride]
    bounds = new[torch.arange(len(order) + 1, device=device) * stride]
    at = torch.arange(index_count, device=device)
    feature = torch.searchsorted(bounds[1:].contiguous(), at, right=True)
    return at + (starts - bounds[:-1])[feature]


class KeyedTensor:
    """One vector per feature and sample, side by side.

    Args:
        keys: Feature names, ``F`` of them.
        length_per_key: Columns of each feature.
        values: ``[B, sum(length_per_key)]``.
        key_dim: Dimension along which the features lie; 1.

    Examples:
        >>> pooled = tb.KeyedTensor(["user", "item"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> pooled["item"]
        tensor([[3.]])
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1
    ) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim

    def keys(self) -> list[str]:
        """Returns the feature names."""
        return self._keys

    def values(self) -> Tensor:
        """Returns all columns, ``[B, sum(length_per_key)]``."""
        return self._values

    def key_dim(self) -> int:
        """Returns the dimension along which the features lie."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Returns the columns of each feature."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Returns the first column of each feature, and the end of the last."""
        bounds = [0]
        for length in self._length_per_key:
            bounds.append(bounds[-1] + length)
        return bounds

    def to_dict(self) -> dict[str, Tensor]:
        """Returns the columns ``[B, D]`` of every feature."""
        parts = torch.split(self._values, self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        at = self._keys.index(key) if key in self._keys else -1
        if at < 0:
            raise KeyError(key)
        return self._values.narrow(
            self._key_dim, self.offset_per_key()[at], self._length_per_key[at]
        )

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, values={tuple(self._values.shape)})"


def as_kjt(features: Any, *, takes_variable: bool = False) -> KeyedJaggedTensor:
    """Accepts our :class:`KeyedJaggedTensor`, or any object with TorchRec's methods.

    Args:
        features: The bags of a batch.
        takes_variable: Whether features may have other numbers of bags; the caller then gives
            samples their vectors.

    Raises:
        InvalidError: Another kind of object, or samples of bags that are not there.
        UnsupportedError: Batches of another size per feature (TorchRec's ``inverse_indices``).
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    needed = ("keys", "values", "offsets", "weights_or_none", "stride")
    if not all(callable(getattr(features, name, None)) for name in needed):
        raise InvalidError(
            "expected a KeyedJaggedTensor (keys, values, offsets, weights_or_none, stride), "
            f"not {type(features).__name__}"
        )
    variable = VariableBatch.of(features)
    if variable is not None and not takes_variable:
        raise UnsupportedError(
            "a KeyedJaggedTensor with inverse_indices (variable batch per feature) is not looked "
            "up; expand it to one bag per sample and feature first",
            {"keys": ",".join(features.keys())},
        )
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    if variable is None:
        offsets, stride = features.offsets(), features.stride()
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride)
    lengths = variable.lengths(features.lengths())
    filled = KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=variable.stride)
    filled._variable = variable
    return filled
