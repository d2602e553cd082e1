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
from tierbed.data.dataset import Dataset
from tierbed.data.loader_draws import generators_of, has_epochs, samplers_of

__all__ = [
    "Generators",
    "Place",
    "generators_now",
    "is_begun",
    "set_epochs",
    "set_generators",
    "set_global_generators",
    "set_own_generators",
]

Generators = dict[str, Any]


@dataclass
class Place:
    """Where an epoch stands.

    Args:
        batch: Batches handed on.
        begin: The generators when the epoch began; None where that is now.
        now: The generators when the place was saved.
        epochs: Which of several epochs of a plan it is, from :meth:`Epochs.state_dict`.
    """

    batch: int
    begin: Generators | None = None
    now: Generators | None = None
    epochs: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values and tensors."""
        saved = {"batch": self.batch, "begin": self.begin, "now": self.now}
        return saved if self.epochs is None else {**saved, "epochs": self.epochs}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Place:
        """Reads what was saved."""
        return cls(int(saved["batch"]), saved["begin"], saved["now"], saved.get("epochs"))


def generators_now(loader: Iterable[Any]) -> Generators:
    """Returns the state of the global generators, and of what ``loader`` draws its order from."""
    data = _data(loader)
    return {
        "own": [one.get_state() for one in _own(loader)],
        "all": state.rng_state(),
        "epoch": data.epoch if has_epochs(data) else None,
        "sampler_epochs": [one.epoch for one in _samplers(loader)],
    }


def set_generators(loader: Iterable[Any], saved: Generators | None) -> None:
    """Puts the generators back to what :func:`generators_now` returned."""
    if saved is None:
        return
    set_own_generators(loader, saved)
    state.set_rng_state(saved["all"])
    set_epochs(loader, saved, 0)


def set_own_generators(loader: Iterable[Any], saved: Generators | None) -> None:
    """Puts the generators of the loader back, and leaves the global ones."""
    if saved is not None:
        for one, before in zip(_own(loader), saved["own"], strict=True):
            one.set_state(before)


def is_begun(loader: Iterable[Any]) -> bool:
    """Whether the loader stands in an epoch that it goes on with, as our own datasets do."""
    data = _data(loader)
    return isinstance(data, Dataset) and int(data.state_dict()["done"]) > 0


def set_epochs(loader: Iterable[Any], saved: Generators, passed: int) -> None:
    """Tells dataset and samplers the number of an epoch.

    Args:
        loader: Whose they are.
        saved: Has their numbers, from :func:`generators_now`.
        passed: Epochs behind these numbers.
    """
    if saved.get("epoch") is not None:
        _data(loader).set_epoch(saved["epoch"] + passed)
    # States that were saved before samplers were asked have none.
    if "sampler_epochs" in saved:
        for one, epoch in zip(_samplers(loader), saved["sampler_epochs"], strict=True):
            one.set_epoch(epoch + passed)


def set_global_generators(saved: Generators | None) -> None:
    """Puts the global generators back, and leaves those of the loader where it has drawn them."""
    if saved is not None:
        state.set_rng_state(saved["all"])


def _data(loader: Any) -> Any:
    return loader.dataset if isinstance(loader, DataLoader) else loader


def _own(loader: Iterable[Any]) -> list[Any]:
    return generators_of(loader) if isinstance(loader, DataLoader) else []


def _samplers(loader: Iterable[Any]) -> list[Any]:
    """Returns the samplers that are told their epoch, such as a ``DistributedSampler``."""
    return samplers_of(loader) if isinstance(loader, DataLoader) else []
