"""Batches of others that are taken as our own."""

from __future__ import annotations

from typing import Any

from tierbed._util.variable_batch import VariableBatch
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.jagged.keyed import KeyedJaggedTensor

__all__ = ["as_kjt", "is_kjt"]

_NEEDED = ("keys", "values", "offsets", "weights_or_none", "stride")


def is_kjt(features: Any) -> bool:
    """Tells whether an object has the methods of a KeyedJaggedTensor.

    Args:
        features: Any object.
    """
    return all(callable(getattr(features, name, None)) for name in _NEEDED)


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
    if not is_kjt(features):
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
