"""Optimizers that update the rows, and their numbers.

The optimizer runs inside the backward pass, at the row's home: gradients of duplicate rows are
summed once, only touched rows change ("exact" and "lazy" in the words of FBGEMM). The kind is
fixed with the table, because its state lies next to the row; the numbers may change at any step.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tierbed.errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    from tierbed._native_options import Hyper

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "Optimizer",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "as_optimizer",
]


@dataclass(frozen=True)
class Optimizer:
    """Base of the fused optimizers; use one of the subclasses.

    Args:
        lr: Learning rate.
        weight_decay: L2 penalty added to the gradient of touched rows.
    """

    kind: ClassVar[str] = ""

    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                wanted = "two numbers of at least 0 and below 1"
                is_pair = isinstance(value, (tuple, list)) and len(value) == 2
                is_good = is_pair and all(_is_number(beta) and beta < 1 for beta in value)
                object.__setattr__(self, "betas", tuple(value) if is_good else value)
            else:
                wanted = "a finite number of at least 0"
                is_good = _is_number(value)
            if not is_good:
                raise InvalidError(
                    f"{type(self).__name__}: {field.name} must be {wanted}, found {value!r}",
                    {"optimizer": self.kind, field.name: str(value)},
                )

    @property
    def state_init(self) -> float:
        """Initial value of every accumulator."""
        return float(getattr(self, "initial_accumulator_value", 0.0))

    def state_words(self, dim: int) -> int:
        """Returns the float32 words of state beside a row of ``dim`` weights.

        Args:
            dim: Weights of a row.
        """
        return state_words(self.kind, dim)

    def hyper(self) -> Hyper:
        """Returns the numbers as ``NativeStore.set_optimizer`` takes them."""
        beta1, beta2 = getattr(self, "betas", (0.9, 0.999))
        return {
            "lr": float(self.lr),
            "eps": float(getattr(self, "eps", 1e-8)),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(self.weight_decay),
        }

    def with_lr(self, lr: float) -> Optimizer:
        """Returns the same optimizer with learning rate ``lr``.

        Args:
            lr: Learning rate.
        """
        return dataclasses.replace(self, lr=lr)


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number of at least 0, and no text or tensor."""
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An integer no float can hold is not finite here; `math.isfinite` would raise for it.
    return is_plain and 0 <= value <= sys.float_info.max


@dataclass(frozen=True)
class SGD(Optimizer):
    """Plain gradient descent; no state.

    Examples:
        >>> tb.SGD(lr=0.1).state_words(dim=16)
        0
    """

    kind = "sgd"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad with one accumulator per weight, as ``torch.optim.Adagrad``.

    Args:
        eps: Added to the denominator.
        initial_accumulator_value: Initial value of every accumulator.

    Examples:
        >>> tb.Adagrad(lr=0.1).state_words(dim=16)
        16
    """

    kind = "adagrad"

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row (the mean of the squared gradients of the row).

    The usual choice for large tables: 4 bytes of state per row.

    Args:
        eps: Added to the denominator.
        initial_accumulator_value: Initial value of every accumulator.

    Examples:
        >>> tb.RowWiseAdagrad(lr=0.02).state_words(dim=16)
        1
    """

    kind = "row_wise_adagrad"

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0


@dataclass(frozen=True)
class Adam(Optimizer):
    """Lazy Adam: only touched rows move, as ``torch.optim.SparseAdam``.

    Args:
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.

    Examples:
        >>> tb.Adam(lr=0.001).state_words(dim=16)
        32
    """

    kind = "adam"

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class PartialRowWiseAdam(Optimizer):
    """Lazy Adam with one second moment per row.

    Args:
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.

    Examples:
        >>> tb.PartialRowWiseAdam(lr=0.001).state_words(dim=16)
        17
    """

    kind = "partial_row_wise_adam"

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


#: The optimizers by kind.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    one.kind: one for one in (SGD, Adagrad, RowWiseAdagrad, Adam, PartialRowWiseAdam)
}


def state_words(kind: str, dim: int) -> int:
    """Returns the float32 words of state of optimizer ``kind`` beside ``dim`` weights."""
    words = {
        "sgd": 0,
        "adagrad": dim,
        "row_wise_adagrad": 1,
        "adam": 2 * dim,
        "partial_row_wise_adam": dim + 1,
    }
    return words[kind]


_OF_TORCH: dict[type, type[Optimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.SparseAdam: Adam,
}


def as_optimizer(
    optimizer: Optimizer | type[Any], optimizer_kwargs: Mapping[str, Any] | None = None
) -> Optimizer:
    """Accepts ``tb.RowWiseAdagrad(lr=...)`` or ``torch.optim.Adagrad`` with its keyword arguments.

    Raises:
        InvalidError: Not an optimizer, or an argument it does not have.
        UnsupportedError: A torch optimizer, or an argument of it, without a fused counterpart.
    """
    kwargs = dict(optimizer_kwargs or {})
    if isinstance(optimizer, Optimizer):
        return dataclasses.replace(optimizer, **kwargs) if kwargs else optimizer
    if not isinstance(optimizer, type):
        raise InvalidError(
            f"optimizer must be one of tierbed's or a torch.optim class, not {optimizer!r}"
        )
    fused = optimizer if issubclass(optimizer, Optimizer) else _OF_TORCH.get(optimizer)
    if fused is None or fused is Optimizer:
        raise UnsupportedError(
            f"no fused counterpart of {optimizer.__name__}; use SGD, Adagrad, RowWiseAdagrad, "
            "Adam (lazy, as torch.optim.SparseAdam) or PartialRowWiseAdam",
            {"optimizer": optimizer.__name__},
        )
    known = {field.name for field in dataclasses.fields(fused)}
    if fused is SGD and optimizer is torch.optim.SGD:
        kwargs.setdefault("lr", 1e-3)
    for name, value in list(kwargs.items()):
        if name not in known:
            if value:
                raise UnsupportedError(
                    f"the fused {fused.__name__} has no {name}; it knows {sorted(known)}",
                    {"optimizer": fused.kind, name: str(value)},
                )
            del kwargs[name]
    return fused(**kwargs)
