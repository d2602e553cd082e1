"""Trains two towers for retrieval: users and items whose products say what a user takes.

    python examples/two_tower.py --check
    python examples/two_tower.py --data histories.txt.gz --vectors items.npy --figure recall.svg

The negatives are the items of the batch and some drawn from all, corrected by how likely each is.
A line of ``--data`` has the item numbers of a user, the earliest first. The last item of each user
is held out; recall is measured over all items but those that the user had. ``--vectors`` writes
the items' vectors as a matrix for an index of approximate search, such as faiss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import histories
import numpy as np
import torch
from comparison import Run, arguments, compare, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb
from tierbed.nn import row_chunks, sampled_logits, top_k

BATCH = 512
K = 20
CHUNK_ROWS = 8192
TESTED = 2000
OF_ROWS = tb.Adagrad(lr=0.05)


class Batch(NamedTuple):
    """Pairs of a user and an item, and drawn items."""

    sparse: tb.KeyedJaggedTensor  # user [B], item [B], drawn: all in the first bag


class Pairs(Dataset[Batch]):
    """Batches of training pairs in a random order, which is the same in every epoch."""

    def __init__(self, of: histories.Histories, drawn: int) -> None:
        train = of.train()
        users = [user for user, items in enumerate(train) for _ in items]
        items = [item for items in train for item in items]
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(1))
        self.users = torch.tensor(users)[order]
        self.items = torch.tensor(items)[order]
        self.item_count = of.item_count
        self.drawn = drawn

    def __len__(self) -> int:
        return (len(self.users) + BATCH - 1) // BATCH

    def __getitem__(self, at: int) -> Batch:
        some = slice(at * BATCH, (at + 1) * BATCH)
        users, items = self.users[some], self.items[some]
        # A seed of its own makes the draws of a batch those that were planned.
        generator = torch.Generator().manual_seed(at)
        drawn = torch.randint(0, self.item_count, (self.drawn,), generator=generator)
        lengths = torch.ones(3, len(users), dtype=torch.int64)
        lengths[2] = 0
        lengths[2, 0] = self.drawn
        return Batch(
            tb.KeyedJaggedTensor(
                ["user", "item", "drawn"],
                torch.cat([users, items, drawn]),
                lengths=lengths.view(-1),
            )
        )


class Towers(nn.Module):
    """A network for users and one for items, over one lookup of both tables."""

    def __init__(self, users: int, items: int, dim: int, store: tb.Store) -> None:
        super().__init__()
        of = {"embedding_dim": dim, "init": tb.Normal(std=0.1)}
        tables = [
            tb.EmbeddingConfig(users, name="user", **of),
            tb.EmbeddingConfig(items, name="item", feature_names=["item", "drawn"], **of),
        ]
        self.embeddings: nn.Module = tb.EmbeddingCollection(tables, store=store, optimizer=OF_ROWS)
        self.of_user, self.of_item = (
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
            for _ in range(2)
        )

    def user(self, rows: Tensor) -> Tensor:
        """Maps rows of users ``[B, D]`` to unit vectors."""
        return nn.functional.normalize(rows + self.of_user(rows), dim=1)

    def item(self, rows: Tensor) -> Tensor:
        """Maps rows of items ``[N, D]`` to unit vectors."""
        return nn.functional.normalize(rows + self.of_item(rows), dim=1)

    def loss(self, batch: Batch, log_q: Tensor) -> Tensor:
        """Returns the sampled softmax of the batch."""
        rows = self.embeddings(batch.sparse)
        items, drawn = (self.item(rows[name].values()) for name in ("item", "drawn"))
        ids, drawn_ids = (batch.sparse[name].values() for name in ("item", "drawn"))
        uniform = torch.full((len(drawn),), -float(np.log(len(log_q))))
        logits = sampled_logits(
            self.user(rows["user"].values()),
            items,
            torch.cat([items, drawn]),
            positive_ids=ids,
            negative_ids=torch.cat([ids, drawn_ids]),
            positive_log_q=log_q[ids],
            negative_log_q=torch.cat([log_q[ids], uniform]),
            temperature=0.1,
        )
        return nn.functional.cross_entropy(logits, torch.zeros(len(ids), dtype=torch.int64))


def recall(model: Towers, source: Any, of: histories.Histories, users: Tensor) -> float:
    """Returns how often the held-out item is among the best K of all that the user had not."""
    train = [of.items[user][:-1] for user in users.tolist()]
    seen = tb.JaggedTensor(
        torch.tensor([item for items in train for item in items]),
        lengths=torch.tensor([len(items) for items in train]),
    )
    with torch.no_grad():
        queries = model.user(source.gather_rows("user", users))
        found = top_k(
            queries, source, "item", K, encode=model.item, excluded=seen, chunk_rows=CHUNK_ROWS
        )
    held_out = torch.tensor(of.held_out())[users, None]
    return (found.ids == held_out).any(dim=1).double().mean().item()


def write_vectors(path: str, model: Towers, store: tb.Store, shape: tuple[int, int]) -> None:
    """Writes the vectors of all items, in memory for one chunk."""
    vectors = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    with torch.no_grad():
        for chunk in row_chunks(store, "item"):
            vectors[chunk.ids.numpy()] = model.item(chunk.rows).numpy()
    vectors.flush()


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="16MiB", epochs=3)
    parser.add_argument("--users", type=int, default=60_000, help="of generated data")
    parser.add_argument("--items", type=int, default=40_000, help="of generated data")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--drawn", type=int, default=256, help="negatives drawn per batch")
    parser.add_argument("--vectors", help="write the items' vectors into this npy file")
    options = parser.parse_args()
    of = histories.of(options)
    log_q, pairs = of.log_q(), Pairs(of, options.drawn)
    loader = DataLoader(pairs, batch_size=None)
    tested = torch.arange(0, len(of.items), max(1, len(of.items) // TESTED))

    def build(store: tb.Store) -> Towers:
        torch.manual_seed(7)
        return Towers(len(of.items), of.item_count, options.dim, store)

    def train(run: Run, model: Towers, batches: Iterable[Batch], source: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(options.epochs):
            with timed(run):
                for batch in batches:
                    optimizer.zero_grad()
                    model.loss(batch, log_q).backward()  # steps the rows
                    optimizer.step()
            run.quality.append(recall(model, source, of, tested))

    def finish(model: Towers, store: tb.Store) -> None:
        if options.vectors:
            write_vectors(options.vectors, model, store, (of.item_count, options.dim))

    compare(options, build, train, loader, quality=f"recall@{K}", optimizer=OF_ROWS, finish=finish)


if __name__ == "__main__":
    main()
