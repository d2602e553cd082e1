"""Factorizes a matrix of ratings: a user's rating is a product of two rows and two biases.

    python examples/matrix_factorization.py --check
    python examples/matrix_factorization.py --data ratings.csv --figure rmse.svg

``--data`` are ratings as MovieLens publishes them, read by pyarrow: lines of user, item, rating
and, if known, time, with commas, tabs, blanks or ``::`` between. They are sorted by time, and the
last tenth is held out.

Source: Koren, Bell and Volinsky, Computer 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison import Run, arguments, compare, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb

BATCH = 1024
HELD_OUT = 0.1
OF_ROWS = tb.Adam(lr=5e-3)


class Ratings(NamedTuple):
    """Ratings by time, the earliest first."""

    users: Tensor  # [N] i64
    items: Tensor  # [N] i64
    stars: Tensor  # [N] f32


def read(files: list[Path]) -> Ratings:
    """Reads ratings by time; numbers users and items by value."""
    table = tb.data.read_ratings(files)
    user, item, stars = (torch.tensor(table[name].to_numpy()) for name in table.column_names[:3])
    return Ratings(*(ids.unique(return_inverse=True)[1] for ids in (user, item)), stars)


def generate(users: int, items: int, count: int, seed: int) -> Ratings:
    """Generates ratings from 1 to 5 by a product of four factors, biases and noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    of_users, of_items = normal(users, 4) / 2, normal(items, 4)
    # Some users and items have many more ratings than others.
    user = (users * torch.rand(count, generator=generator) ** 2).long()
    item = (items * torch.rand(count, generator=generator) ** 2).long()
    biases = 0.3 * normal(users)[user] + 0.5 * normal(items)[item]
    stars = 3.5 + (of_users[user] * of_items[item]).sum(dim=1) + biases + 0.3 * normal(count)
    return Ratings(user, item, stars.clamp(1, 5))


class Batch(NamedTuple):
    """Pairs of a user and an item, and ratings."""

    sparse: tb.KeyedJaggedTensor
    stars: Tensor  # [B]
    is_held_out: bool


class ByTime(Dataset[Batch]):
    """Batches to train on, the earliest first; then those held out, which cost no scan."""

    def __init__(self, ratings: Ratings) -> None:
        self.ratings = ratings
        self.train_count = int(len(ratings.stars) * (1 - HELD_OUT)) // BATCH
        if self.train_count == 0:
            raise SystemExit(f"{len(ratings.stars)} ratings are too few for batches of {BATCH}")
        self.mean = ratings.stars[: self.train_count * BATCH].mean()

    def __len__(self) -> int:
        return (len(self.ratings.stars) + BATCH - 1) // BATCH

    def __getitem__(self, at: int) -> Batch:
        users, items, stars = (part[at * BATCH : (at + 1) * BATCH] for part in self.ratings)
        lengths = torch.ones(2 * len(users), dtype=torch.int64)
        sparse = tb.KeyedJaggedTensor(["user", "item"], torch.cat([users, items]), lengths=lengths)
        return Batch(sparse, stars, at >= self.train_count)


class Factors(nn.Module):
    """A row of factors per user and item; the last element is the bias."""

    def __init__(self, ratings: Ratings, mean: Tensor, dim: int, store: tb.Store) -> None:
        super().__init__()
        sizes = {"user": int(ratings.users.max()) + 1, "item": int(ratings.items.max()) + 1}
        init = tb.Normal(std=0.05)
        self.embeddings: nn.Module = tb.EmbeddingCollection(
            [tb.EmbeddingConfig(size, dim + 1, name, init=init) for name, size in sizes.items()],
            store=store,
            optimizer=OF_ROWS,
        )
        self.mean = nn.Parameter(mean.clone())

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns ratings ``[B]`` and the mean square of the rows."""
        rows = self.embeddings(batch.sparse)
        user, item = rows["user"].values(), rows["item"].values()
        products = (user[:, :-1] * item[:, :-1]).sum(dim=1)
        square = (user.square() + item.square()).sum(dim=1).mean()
        return self.mean + products + user[:, -1] + item[:, -1], square


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="8MiB", epochs=5)
    parser.add_argument("--users", type=int, default=100_000, help="of generated data")
    parser.add_argument("--items", type=int, default=50_000, help="of generated data")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of generated data")
    parser.add_argument("--dim", type=int, default=31, help="factors")
    parser.add_argument("--decay", type=float, default=0.02, help="penalty of large rows")
    options = parser.parse_args()
    if options.data:
        ratings = read(options.data)
    else:
        ratings = generate(options.users, options.items, options.ratings, seed=3)
    by_time = ByTime(ratings)
    loader = DataLoader(by_time, batch_size=None)

    def build(store: tb.Store) -> Factors:
        return Factors(ratings, by_time.mean, options.dim, store)

    def train(run: Run, model: Factors, batches: Iterable[Batch], _: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(options.epochs):
            errors = []
            with timed(run):
                for batch in batches:
                    if batch.is_held_out:
                        with torch.no_grad():
                            errors.append(model(batch)[0] - batch.stars)
                        continue
                    optimizer.zero_grad()
                    stars, square = model(batch)
                    loss = (stars - batch.stars).square().mean() + options.decay * square
                    loss.backward()  # steps the rows
                    optimizer.step()
            run.quality.append(math.sqrt(torch.cat(errors).double().square().mean()))

    held_out = ratings.stars[by_time.train_count * BATCH :]
    always_mean = (held_out - by_time.mean).double().square().mean().sqrt()
    print(f"always the mean: RMSE {always_mean:.4f}")
    compare(options, build, train, loader, quality="RMSE", optimizer=OF_ROWS)


if __name__ == "__main__":
    main()
