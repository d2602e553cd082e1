"""Trains SASRec, or layers like those of HSTU, with one item table for input and output.

    python examples/sasrec.py --check
    python examples/sasrec.py --block hstu --data histories.txt.gz --figure ndcg.svg

What a user had, what followed on it and drawn negatives are three features of one table, so a step
looks the table up once. A line of ``--data`` has the item numbers of a user, the earliest first.
The last item of each user is held out, and NDCG@10 is measured over all items.

Source: Kang and McAuley, ICDM 2018 (SASRec); Zhai et al., ICML 2024 (HSTU). Differs: a sampled
softmax with negatives that a batch shares; of HSTU the layer, with a bias per distance.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

import histories
import torch
from comparison import Run, arguments, compare, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb
from tierbed.nn import sampled_logits, top_k

BATCH = 64
LENGTH = 20
ATTENTION_HEADS = 2
K = 10
TESTED = 2000
CHUNK_ROWS = 8192


class Batch(NamedTuple):
    """Histories, what followed on each item, and drawn items: all in the first bag."""

    sparse: tb.KeyedJaggedTensor


class Sequences(Dataset[Batch]):
    """Batches of users in a random order, which is the same in every epoch."""

    def __init__(self, of: histories.Histories, drawn: int) -> None:
        self.users = [items[-LENGTH - 1 :] for items in of.train()]
        generator = torch.Generator().manual_seed(1)
        self.order = torch.randperm(len(self.users), generator=generator).tolist()
        self.item_count = of.item_count
        self.drawn = drawn

    def __len__(self) -> int:
        return (len(self.users) + BATCH - 1) // BATCH

    def __getitem__(self, at: int) -> Batch:
        users = [self.users[user] for user in self.order[at * BATCH : (at + 1) * BATCH]]
        items = [item for of_user in users for item in of_user[:-1]]
        items += [item for of_user in users for item in of_user[1:]]
        # A seed of its own makes the draws of a batch those that were planned.
        generator = torch.Generator().manual_seed(at)
        drawn = torch.randint(0, self.item_count, (self.drawn,), generator=generator)
        lengths = [len(of_user) - 1 for of_user in users]
        of_drawn = [self.drawn] + [0] * (len(users) - 1)
        return Batch(
            tb.KeyedJaggedTensor(
                ["history", "next", "drawn"],
                torch.cat([torch.tensor(items, dtype=torch.int64), drawn]),
                lengths=torch.tensor(lengths + lengths + of_drawn),
            )
        )


class SasrecBlock(nn.Module):
    """A layer of a causal transformer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.mix, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.deep = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to the same."""
        parts = self.mix(self.norms[0](hidden)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (ATTENTION_HEADS, -1)).transpose(1, 2) for part in parts]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.deep(self.norms[1](hidden))


class HstuBlock(nn.Module):
    """A layer of HSTU: attention without softmax, gated by the items themselves."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.of_distance = nn.Parameter(torch.zeros(ATTENTION_HEADS, LENGTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[B, T, D]`` to the same."""
        mixed = nn.functional.silu(self.mix(self.norm_in(hidden)))
        gate, *parts = mixed.chunk(4, dim=-1)
        query, key, value = (
            part.unflatten(-1, (ATTENTION_HEADS, -1)).transpose(1, 2) for part in parts
        )
        steps = torch.arange(hidden.shape[1])
        distance = steps[:, None] - steps
        bias = self.of_distance[:, distance.clamp_min(0)]
        weights = nn.functional.silu(query @ key.transpose(2, 3) + bias) * (distance >= 0)
        seen = (weights / LENGTH) @ value
        return hidden + self.out(self.norm_out(seen.transpose(1, 2).flatten(2)) * gate)


class Model(nn.Module):
    """Two layers over the rows of a history."""

    def __init__(self, items: int, options: argparse.Namespace, store: tb.Store) -> None:
        super().__init__()
        dim, block = options.dim, {"sasrec": SasrecBlock, "hstu": HstuBlock}[options.block]
        features = ["history", "next", "drawn"]
        init = tb.Normal(std=dim**-0.5)
        table = tb.EmbeddingConfig(items, dim, "item", feature_names=features, init=init)
        of_rows = tb.Adam(lr=options.lr)
        self.embeddings: nn.Module = tb.EmbeddingCollection([table], store=store, optimizer=of_rows)
        self.positions = nn.Parameter(torch.zeros(LENGTH, dim))
        self.blocks = nn.Sequential(block(dim), block(dim), nn.LayerNorm(dim))

    def encode(self, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Maps rows ``[E, D]`` of histories to states ``[B, T, D]``; tells which are theirs."""
        is_item = torch.arange(int(lengths.max())) < lengths[:, None]
        padded = rows.new_zeros(*is_item.shape, rows.shape[1]).masked_scatter(
            is_item[..., None], rows
        )
        return self.blocks(padded + self.positions[: is_item.shape[1]]), is_item

    def loss(self, batch: Batch) -> Tensor:
        """Returns the sampled softmax over all steps of the batch."""
        rows = self.embeddings(batch.sparse)
        states, is_item = self.encode(rows["history"].values(), rows["history"].lengths())
        logits = sampled_logits(
            states[is_item],
            rows["next"].values(),
            rows["drawn"].values(),
            positive_ids=batch.sparse["next"].values(),
            negative_ids=batch.sparse["drawn"].values(),
        )
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


@torch.no_grad()
def ndcg(model: Model, source: Any, of: histories.Histories) -> float:
    """Returns NDCG@10 of the held-out items of some users."""
    some = slice(None, None, max(1, len(of.items) // TESTED))
    train = [items[-LENGTH:] for items in of.train()[some]]
    ids = torch.tensor([item for items in train for item in items])
    lengths = torch.tensor([len(items) for items in train])
    states, _ = model.encode(source.gather_rows("item", ids), lengths)
    queries = states[torch.arange(len(train)), lengths - 1]
    found = top_k(queries, source, "item", K, chunk_rows=CHUNK_ROWS).ids
    is_hit = (found == torch.tensor(of.held_out()[some])[:, None]).double()
    return (is_hit / torch.log2(torch.arange(K) + 2.0)).sum(dim=1).mean().item()


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="8MiB", epochs=5)
    parser.add_argument("--users", type=int, default=40_000, help="of generated data")
    parser.add_argument("--items", type=int, default=20_000, help="of generated data")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--drawn", type=int, default=256, help="negatives drawn per batch")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate; real logs: 1e-3")
    parser.add_argument("--block", choices=["sasrec", "hstu"], default="sasrec")
    options = parser.parse_args()
    of = histories.of(options)
    loader = DataLoader(Sequences(of, options.drawn), batch_size=None)

    def build(store: tb.Store) -> Model:
        torch.manual_seed(7)
        return Model(of.item_count, options, store)

    def train(run: Run, model: Model, batches: Iterable[Batch], source: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
        for _ in range(options.epochs):
            with timed(run):
                for batch in batches:
                    optimizer.zero_grad()
                    model.loss(batch).backward()  # steps the rows
                    optimizer.step()
            run.quality.append(ndcg(model, source, of))

    compare(options, build, train, loader, quality=f"NDCG@{K}", optimizer=tb.Adam(lr=options.lr))


if __name__ == "__main__":
    main()
