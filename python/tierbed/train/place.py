"""Place of a look-ahead within its epoch, with the generators that its order was drawn from.

A shuffle is drawn when an epoch begins, or follows from its number. So generators and number are
kept as they were then: put back, the loader draws the same order again, and the batches that are
done are passed over. Behind them the global generators are put to where they stood when the place
was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from tierbed._util import state
from tierbed.data.order import generators_of

__all__ = ["Place", "generators_now", "set_generators", "set_global_generators"]

Generators = dict[str, Any]


@dataclass
class Place:
    """Where an epoch stands.

    Args:
        batch: Batches handed on.
        begin: The generators when the epoch began; None where that is now.
        now: The generators when the place was saved.
    """

    batch: int
    begin: Generators | None = None
    now: Generators | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values and tensors."""
        return {"batch": self.batch, "begin": self.begin}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Place:
        """Reads what was saved."""
        return cls(int(saved["batch"]), saved["begin"], saved["now"])


def generators_now(loader: Iterable[Any]) -> Generators:
    """Returns the state of the global generators, and of what ``loader`` draws its order from."""
    own = [one.get_state() for one in _own(loader)]
    return {"own": own, "all": state.rng_state(), "epoch": getattr(_data(loader), "epoch", None)}


def set_generators(loader: Iterable[Any], saved: Generators | None) -> None:
    """Puts the generators back to what :func:`generators_now` returned."""
    if saved is None:
        return
    for one, before in zip(_own(loader), saved["own"], strict=True):
        one.set_state(before)
    state.set_rng_state(saved["all"])
    if saved.get("epoch") is not None:
        _data(loader).set_epoch(saved["epoch"])


def set_global_generators(saved: Generators | None) -> None:
    """Puts the global generators back, and leaves those of the loader where it has drawn them."""
    if saved is not None:
        state.set_rng_state(saved["all"])


def _data(loader: Any) -> Any:
    return loader.dataset if isinstance(loader, DataLoader) else loader


def _own(loader: Iterable[Any]) -> list[Any]:
    return generators_of(loader) if isinstance(loader, DataLoader) else []
