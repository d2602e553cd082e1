"""Trains a deep interest network: will a user take a candidate, given what the user had?

    python examples/din.py --check
    python examples/din.py --data histories.txt.gz --figure auc.svg

Attention weighs the items of the history by the candidate. A line of ``--data`` has the item
numbers of a user, the earliest first. Each step is a positive candidate with the steps before as
its history, and a drawn item a negative one. The last item of each user is held out, with a drawn
one beside it, and AUC is measured over these.

Source: Zhou et al., KDD 2018 (DIN). Differs: softplus in place of Dice, and no categories of
items.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import histories
import torch
from comparison import Run, arguments, auc, compare, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb

BATCH = 256
LENGTH = 20
OF_ROWS = tb.Adagrad(lr=0.05)


class Batch(NamedTuple):
    """Users, their histories and candidates, and whether the candidate was taken."""

    sparse: tb.KeyedJaggedTensor
    labels: Tensor  # [B]
    is_held_out: bool


class Candidates(Dataset[Batch]):
    """Batches to train on, in a random order that is the same in every epoch; then those held out.

    Held-out batches are in the plan of the epoch, so they cost no scan.
    """

    def __init__(self, of: histories.Histories) -> None:
        self.items, self.item_count = of.items, of.item_count
        train = [
            (user, step) for user, items in enumerate(of.items) for step in range(1, len(items) - 1)
        ]
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
        train = [train[at] for at in order.tolist()]
        held_out = [(user, len(items) - 1) for user, items in enumerate(of.items)]
        parts = [(train, False), (held_out, True)]
        self.batches = [
            (steps[first : first + BATCH], is_held_out)
            for steps, is_held_out in parts
            for first in range(0, len(steps), BATCH)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, at: int) -> Batch:
        steps, is_held_out = self.batches[at]
        # A seed of its own makes the draws of a batch those that were planned.
        generator = torch.Generator().manual_seed(at)
        drawn = torch.randint(0, self.item_count, (len(steps),), generator=generator).tolist()
        taken = [self.items[user][step] for user, step in steps]
        before = [self.items[user][max(0, step - LENGTH) : step] for user, step in steps]
        # Every step twice: with the item that was taken, and with the drawn one.
        users = [user for user, _ in steps] * 2
        history = [item for of_step in before for item in of_step] * 2
        lengths = [len(of_step) for of_step in before] * 2
        ones = [1] * len(users)
        sparse = tb.KeyedJaggedTensor(
            ["user", "history", "candidate"],
            torch.tensor(users + history + taken + drawn),
            lengths=torch.tensor(ones + lengths + ones),
        )
        labels = torch.cat([torch.ones(len(steps)), torch.zeros(len(steps))])
        return Batch(sparse, labels, is_held_out)


class Din(nn.Module):
    """Pools the history by how it fits the candidate, and scores both with the user."""

    def __init__(self, users: int, items: int, dim: int, store: tb.Store) -> None:
        super().__init__()
        init = tb.Normal(std=0.1)
        tables = [
            tb.EmbeddingConfig(users, dim, "user", init=init),
            tb.EmbeddingConfig(
                items, dim, "item", feature_names=["history", "candidate"], init=init
            ),
        ]
        self.embeddings: nn.Module = tb.EmbeddingCollection(tables, store=store, optimizer=OF_ROWS)
        self.attention = nn.Sequential(nn.Linear(4 * dim, 36), nn.Softplus(), nn.Linear(36, 1))
        self.top = nn.Sequential(
            nn.Linear(4 * dim, 80),
            nn.Softplus(),
            nn.Linear(80, 40),
            nn.Softplus(),
            nn.Linear(40, 1),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits ``[B]``."""
        rows = self.embeddings(batch.sparse)
        user, candidate = rows["user"].values(), rows["candidate"].values()
        history, lengths = rows["history"].values(), rows["history"].lengths()
        sample = torch.repeat_interleave(lengths)  # of each item of a history
        beside = candidate[sample]
        pairs = torch.cat([history, beside, history - beside, history * beside], dim=1)
        # As in the paper, weights are not normalized: their sum tells how strong an interest is.
        weighted = self.attention(pairs) * history
        interest = torch.zeros_like(candidate).index_add(0, sample, weighted)
        return self.top(torch.cat([user, interest, candidate, interest * candidate], dim=1))[:, 0]


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="8MiB", epochs=2)
    parser.add_argument("--users", type=int, default=20_000, help="of generated data")
    parser.add_argument("--items", type=int, default=50_000, help="of generated data")
    parser.add_argument("--dim", type=int, default=32)
    options = parser.parse_args()
    of = histories.of(options)
    loader = DataLoader(Candidates(of), batch_size=None)

    def build(store: tb.Store) -> Din:
        torch.manual_seed(7)
        return Din(len(of.items), of.item_count, options.dim, store)

    def train(run: Run, model: Din, batches: Iterable[Batch], _: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(options.epochs):
            scores, labels = [], []
            with timed(run):
                for batch in batches:
                    if batch.is_held_out:
                        with torch.no_grad():
                            scores.append(model(batch))
                        labels.append(batch.labels)
                        continue
                    optimizer.zero_grad()
                    loss = nn.functional.binary_cross_entropy_with_logits(
                        model(batch), batch.labels
                    )
                    loss.backward()  # steps the rows
                    optimizer.step()
            run.quality.append(auc(torch.cat(scores), torch.cat(labels)))

    compare(options, build, train, loader, quality="AUC", optimizer=OF_ROWS)


if __name__ == "__main__":
    main()
