"""The bags of several features of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tierbed._util.variable_batch import VariableBatch
from tierbed.errors import InvalidError
from tierbed.jagged.bags import Bags, check_bags, offsets_of
from tierbed.jagged.single import JaggedTensor

__all__ = ["KeyedJaggedTensor"]


class KeyedJaggedTensor(Bags):
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
    # Ids of each feature, once they were asked for.
    _length_per_key: list[int] | None = None

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
        check_bags(values, lengths, offsets, "KeyedJaggedTensor")
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

    @staticmethod
    def concat(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Joins the features of several batches of the same samples.

        Args:
            batches: Of one stride; all with weights or none.

        Raises:
            InvalidError: No batch, other numbers of samples, or weights of some only.
        """
        strides = sorted({batch.stride() for batch in batches})
        weights = [batch.weights_or_none() for batch in batches]
        kept = [weight for weight in weights if weight is not None]
        if len(strides) != 1 or (kept and len(kept) != len(batches)):
            raise InvalidError(
                "batches are joined that have the same number of samples, and all weights or none; "
                f"found {strides} samples and {len(kept)} of {len(batches)} with weights"
            )
        return KeyedJaggedTensor(
            [key for batch in batches for key in batch.keys()],
            torch.cat([batch.values() for batch in batches]),
            torch.cat(kept) if kept else None,
            lengths=torch.cat([batch.lengths() for batch in batches]),
            stride=strides[0],
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int64,
    ) -> KeyedJaggedTensor:
        """Returns one without features.

        Args:
            is_weighted: Whether it has weights.
            device: Where it is.
            values_dtype: Of the ids.
            weights_dtype: Of the weights.
            lengths_dtype: Of the lengths.
        """
        none = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor(
            [], none.values(), none.weights_or_none(), none.lengths(), stride=0
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

    def stride_per_key(self) -> list[int]:
        """Returns the number of samples of each feature."""
        return [self._stride] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Returns an empty list: every feature has a bag per sample."""
        return []

    def variable_stride_per_key(self) -> bool:
        """Returns False: every feature has a bag per sample."""
        return False

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Returns None: every feature has a bag per sample."""
        return None

    def length_per_key(self) -> list[int]:
        """Returns the number of ids of each feature, ``F``."""
        if self._length_per_key is None:
            sums = self.lengths().view(len(self._keys), -1).sum(dim=1) if self._keys else None
            self._length_per_key = [] if sums is None else sums.tolist()
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Returns :meth:`length_per_key`, if it was computed."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Returns the bounds of the features among the ids, ``F+1``."""
        return [0, *accumulate(self.length_per_key())]

    def offset_per_key_or_none(self) -> list[int] | None:
        """Returns :meth:`offset_per_key`, if the lengths of the features were computed."""
        return None if self._length_per_key is None else self.offset_per_key()

    def lengths_offset_per_key(self) -> list[int]:
        """Returns the bounds of the features among the bags, ``F+1``."""
        return [at * self._stride for at in range(len(self._keys) + 1)]

    def index_per_key(self) -> dict[str, int]:
        """Returns the position of each feature."""
        return {key: at for at, key in enumerate(self._keys)}

    def sync(self) -> KeyedJaggedTensor:
        """Computes :meth:`length_per_key`, and returns itself."""
        if not torch.compiler.is_compiling():
            self.length_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forgets :meth:`length_per_key`, and returns itself."""
        self._length_per_key = None
        return self

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Splits the features into batches of the same samples.

        Args:
            segments: Features of each.

        Raises:
            InvalidError: Other numbers than the features there are.
        """
        if sum(segments) != len(self._keys) or min(segments, default=0) < 0:
            raise InvalidError(
                f"segments {list(segments)} must be of all {len(self._keys)} features; "
                "select(keys) takes some"
            )
        bounds, parts, first = self.offset_per_key(), [], 0
        for count in segments:
            end = first + count
            ids = slice(bounds[first], bounds[end])
            bags = slice(first * self._stride, end * self._stride)
            parts.append(
                KeyedJaggedTensor(
                    self._keys[first:end],
                    self._values[ids],
                    None if self._weights is None else self._weights[ids],
                    lengths=self.lengths()[bags],
                    stride=self._stride,
                )
            )
            first = end
        return parts

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
