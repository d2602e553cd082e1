"""Orders of batches that are known before the epoch begins.

Files are read front to back, and a seeded shuffle is the same each time it is drawn: then all
batches of an epoch are known, and :func:`tierbed.lookahead` makes a plan of them. A
:class:`BatchOrder` is what such a loader promises; :func:`known_order` finds it, or says why
there is none. A loader of one's own promises it with a method ``known_order()``.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from tierbed.data.dataset import Dataset, WorkerPart
from tierbed.data.loader_draws import (
    generators_of,
    has_drawn_its_seed,
    kept,
    sampler_of,
    undisturbed,
)

__all__ = ["BatchOrder", "fingerprint", "known_order"]

PROBED_BATCHES = 2
Key = Callable[[Any], Any]


@dataclass(frozen=True)
class BatchOrder:
    """The batches of an epoch, known in advance.

    Args:
        fingerprint: Equal for equal batches in equal order, and only then.
        batches: Yields all batches of the epoch, from its first one, without moving the loader.
        start: Batches of the epoch that the loader passes over when it is iterated next.
        batch_count: Batches of the epoch, for the progress bar; None when unknown.
        is_stepped: Whether batch ``n`` of the epoch trains; None: all do. One that is only looked
            up, such as of a validation, gives no rows to new ids of an open vocabulary.
    """

    fingerprint: str
    batches: Callable[[], Iterable[Any]]
    start: int = 0
    batch_count: int | None = None
    is_stepped: Callable[[int], bool] | None = None


def fingerprint(parts: Any) -> str:
    """Returns a short text that is equal for equal JSON values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def known_order(loader: Iterable[Any], key: Key) -> BatchOrder | str:
    """Returns the order of a loader's batches, or why it is not known.

    Known are the datasets of :mod:`tierbed.data`, a ``torch.utils.data.DataLoader`` over a
    map-style dataset without a shuffle or with a seeded one, and every loader with a method
    ``known_order()``. A dataset that draws at random without its own seed is noticed.

    Args:
        loader: What will be iterated.
        key: Takes a batch, returns its KeyedJaggedTensor.
    """
    promise = getattr(loader, "known_order", None)
    if callable(promise):
        promised: BatchOrder | str = promise()
        return promised
    if isinstance(loader, Dataset):
        return _of_dataset(loader)
    if isinstance(loader, DataLoader):
        return _of_dataloader(loader, key)
    return f"a {type(loader).__name__} does not tell its order"


def _of_dataset(
    dataset: Dataset, collate: Callable[[Any], Any] = lambda batch: batch
) -> BatchOrder | str:
    done = int(dataset.state_dict()["done"])
    if done % dataset.batch_size:
        return "the dataset stands in the middle of a batch"
    parts = dataset.order_identity()
    if isinstance(parts, str):
        return parts
    # A part of its own, so that planning moves and counts nothing.
    whole = dataset.part(dataset.first, dataset.stop)
    known = dataset.sample_count
    return BatchOrder(
        fingerprint(parts),
        lambda: (collate(batch) for _, batch in whole.walk(0, WorkerPart(0, 1))),
        done // dataset.batch_size,
        None if known is None else -(-known // dataset.batch_size),
    )


# ---------------------------------------------------------------- DataLoader


def _of_dataloader(loader: DataLoader[Any], key: Key) -> BatchOrder | str:
    promised = getattr(loader.dataset, "order_fingerprint", None)
    is_plain = loader.batch_size is None and getattr(loader, "in_order", True)
    if isinstance(loader.dataset, Dataset) and is_plain:
        # Workers take turns, so that these are the batches of the dataset.
        return _of_dataset(loader.dataset, loader.collate_fn)
    if isinstance(loader.dataset, IterableDataset):
        if promised is None:
            return "an IterableDataset does not tell its order; give it an order_fingerprint"
        return BatchOrder(fingerprint(["stream", promised]), lambda: undisturbed(loader))
    if not getattr(loader, "in_order", True):
        return "the DataLoader hands batches on out of order"
    sampler = sampler_of(loader)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        return "the shuffle has no seed; give the DataLoader a generator"
    if not _is_standard(loader) and not _repeats(loader):
        return "the sampler draws another order each time"
    with kept(loader):
        probe = _probe(loader, key, 1)
    with kept(loader):
        if _probe(loader, key, 2) != probe:
            return "the dataset draws ids at random, without a seed of its own"
    parts = {
        "dataset": type(loader.dataset).__qualname__,
        "samples": len(loader.dataset),  # type: ignore[arg-type]
        "promise": promised,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__qualname__,
        "generators": [_digest(made.get_state()) for made in generators_of(loader)],
        "probe": probe,
    }
    if has_drawn_its_seed(loader):
        parts["workers"] = "kept"
    return BatchOrder(fingerprint(parts), lambda: undisturbed(loader), 0, len(loader))


def _is_standard(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is torch's own, of a kind that repeats by construction."""
    return type(sampler_of(loader)) in (SequentialSampler, RandomSampler)


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    return iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _repeats(loader: DataLoader[Any]) -> bool:
    """Whether the sampler draws the same order whatever the global generators do."""
    digests = []
    for seed in (1, 2):
        with kept(loader):
            _seed_all(seed)
            digest = hashlib.blake2b(digest_size=16)
            for drawn in _indices(loader):
                digest.update(repr(drawn).encode())
            digests.append(digest.digest())
    return digests[0] == digests[1]


def _probe(loader: DataLoader[Any], key: Key, seed: int) -> list[str]:
    """Returns digests of the first batches, read with the global generators at ``seed``."""
    drawn = list(islice(_indices(loader), PROBED_BATCHES))
    _seed_all(seed)
    dataset: Any = loader.dataset
    digests = []
    for at in drawn:
        if loader.batch_sampler is None:
            items = dataset[at]
        elif hasattr(dataset, "__getitems__"):
            items = dataset.__getitems__(at)
        else:
            items = [dataset[index] for index in at]
        bags = key(loader.collate_fn(items))
        digests.append(_digest(bags.values()) + _digest(bags.offsets()))
    return digests


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
