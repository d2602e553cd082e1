"""What a ``DataLoader`` draws its order from, and when: generators, samplers, seeds of workers.

Behind the last batch of an epoch samplers draw once more. An iterator draws a seed for its workers
in front of its first epoch, also where it keeps them for the next ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tierbed._util import state

__all__ = [
    "as_drawn",
    "begun",
    "generators_of",
    "has_drawn_its_seed",
    "has_epochs",
    "kept",
    "pass_epoch",
    "sampler_of",
    "samplers_of",
    "undisturbed",
]


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Returns what draws single samples, or the loader's own batch sampler."""
    inner = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return inner.sampler if type(inner) is BatchSampler else inner


def undisturbed(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the batches of the loader's next epoch; afterwards all generators are as they were.

    They come from a copy of the loader, with workers of its own: an iterator that keeps its workers
    draws their seed once, in front of its first epoch. Were it begun here, the shuffle of the
    epoch that is trained on would be drawn from another place of the generator.
    """
    twin = copy.copy(loader)
    vars(twin).update(persistent_workers=False, _iterator=None)
    if has_drawn_its_seed(loader):
        # Every new iterator draws a seed; not from where the coming epoch's shuffle is drawn.
        vars(twin).update(generator=torch.Generator())
    with kept(loader):
        yield from twin


def has_drawn_its_seed(loader: DataLoader[Any]) -> bool:
    """Whether the loader goes on with workers that it has, so that an epoch draws no seed."""
    return loader.persistent_workers and getattr(loader, "_iterator", None) is not None


def as_drawn(loader: Any, has_drawn: bool) -> Any:
    """Returns a loader whose next epoch is drawn as if it had drawn the seed of its workers.

    Args:
        loader: Any loader. Of a ``DataLoader`` that keeps its workers a copy is returned: it draws
            their seed once, in front of its first epoch.
        has_drawn: Whether it has drawn that seed, or will.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers:
        return loader
    twin = copy.copy(loader)
    vars(twin).update(_iterator=(loader._iterator or _DRAWN) if has_drawn else None)
    return twin


# In the place of an iterator whose workers were seeded.
_DRAWN: Any = object()


def begun(loader: Any, has_drawn: bool) -> Iterator[Any]:
    """Begins an epoch of a loader.

    Args:
        loader: Any loader.
        has_drawn: See :func:`as_drawn`. Behind a restart the seed was drawn by an epoch before.
    """
    keeps_workers = isinstance(loader, DataLoader) and loader.persistent_workers
    if not keeps_workers or not has_drawn or has_drawn_its_seed(loader):
        return iter(loader)
    own = loader.generator
    vars(loader).update(generator=torch.Generator())
    try:
        return iter(loader)
    finally:
        vars(loader).update(generator=own)


class _Nothing:
    """Samples that take no time."""

    def __getitem__(self, index: Any) -> None:
        return None


def pass_epoch(loader: Any) -> None:
    """Draws what an epoch of a loader draws from its own generators, without reading any data.

    Only a ``DataLoader`` over a map-style dataset draws.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    twin = copy.copy(loader)
    vars(twin).update(
        dataset=_Nothing(),
        collate_fn=len,
        num_workers=0,
        timeout=0,
        pin_memory=False,
        persistent_workers=False,
        _iterator=None,
    )
    if has_drawn_its_seed(loader) or loader.generator is None:
        vars(twin).update(generator=torch.Generator())
    for _ in twin:
        pass


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Returns the samplers of a loader that are told their epoch, each once."""
    holders = {id(one): one for one in (loader.batch_sampler, loader.sampler, sampler_of(loader))}
    return [one for one in holders.values() if has_epochs(one)]


def has_epochs(source: Any) -> bool:
    """Whether a dataset or sampler is told the number of its epoch, and has it."""
    is_told = callable(getattr(source, "set_epoch", None))
    return is_told and isinstance(getattr(source, "epoch", None), int)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Returns the generators that a loader and its samplers have, each once."""
    holders = (loader, loader.batch_sampler, loader.sampler, sampler_of(loader))
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


@contextmanager
def kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Puts the loader's and the global generators back at the end."""
    own = [(generator, generator.get_state()) for generator in generators_of(loader)]
    everywhere = state.rng_state()
    try:
        yield
    finally:
        state.set_rng_state(everywhere)
        for generator, before in own:
            generator.set_state(before)
