"""What users had, in order: read from files, or generated."""

from __future__ import annotations

import argparse
import gzip
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tierbed as tb

CLUSTERS = 40
FOLLOWERS = 3


@dataclass(frozen=True)
class Histories:
    """Items of users, the earliest first; the last of each is held out."""

    items: list[list[int]]
    item_count: int

    def train(self) -> list[list[int]]:
        """Returns all items but the last of each user."""
        return [of_user[:-1] for of_user in self.items]

    def held_out(self) -> list[int]:
        """Returns the last item of each user."""
        return [of_user[-1] for of_user in self.items]

    def log_q(self) -> Tensor:
        """Returns how likely a random step of the training part has each item, as a logarithm."""
        seen = torch.tensor([item for of_user in self.train() for item in of_user])
        counts = torch.bincount(seen, minlength=self.item_count).clamp_min(1)
        return (counts / len(seen)).log()


def read(files: list[Path], least: int = 3) -> Histories:
    """Reads item numbers, a line per user, or ratings of MovieLens; leaves out short histories."""
    items = []
    if files[0].name.startswith(("ratings.", "u.data")):
        log, files = tb.data.read_ratings(files), []
        items = tb.data.sequences(log, by="user", order="time", items=["item"])["item"].to_pylist()
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt") as lines:
            items += [[int(item) for item in line.split()] for line in lines]
    items = [of_user for of_user in items if len(of_user) >= least]
    return Histories(items, 1 + max(map(max, items)))


def generate(users: int, items: int, seed: int) -> Histories:
    """Generates users of two tastes each, who often take what follows on their last item."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=generator)

    size = items // CLUSTERS
    tastes = draw(CLUSTERS, users, 2)
    lengths = 4 + draw(13, users)
    # Of every item a few others of its cluster.
    clusters = torch.arange(items) // size
    followers = (clusters[:, None] * size + draw(size, items, FOLLOWERS)).clamp_max(items - 1)
    everyone = torch.arange(users)
    steps = []
    for _ in range(int(lengths.max())):
        # Some items of a cluster are far more usual than others.
        usual = (size * torch.rand(users, generator=generator) ** 3).long()
        picked = tastes[everyone, draw(2, users)] * size + usual
        if steps:
            follows = torch.rand(users, generator=generator) < 0.6
            picked = torch.where(follows, followers[steps[-1], draw(FOLLOWERS, users)], picked)
        steps.append(picked)
    taken = torch.stack(steps, dim=1).tolist()
    cut = zip(taken, lengths.tolist(), strict=True)
    return Histories([of_user[:length] for of_user, length in cut], items)


def of(options: argparse.Namespace) -> Histories:
    """Reads the files of ``--data``, or generates ``--users`` and ``--items``."""
    if options.data:
        return read(options.data)
    return generate(options.users, options.items, seed=3)
