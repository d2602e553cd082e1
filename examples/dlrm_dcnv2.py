"""Trains MLPerf's recommender, DLRM-DCNv2, with its multi-hot features and scaled tables.

    python examples/dlrm_dcnv2.py --check
    python examples/dlrm_dcnv2.py --data day_0.gz --scale 1 --figure auc.svg

``--scale 1`` are MLPerf's tables, of 204 million rows. ``--data`` is a folder of days as MLPerf has
them, or files of Criteo's layout, of which bags are made likewise: a value stands with others that
it alone determines. The last tenth is held out.

Source: Wang et al., WWW 2021 (DCNv2); MLPerf Training, recommendation_v2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from comparison import Run, arguments, auc, compare, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb

ROWS = tb.data.MLPERF_ROWS
HOTNESS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
NAMES = [f"cat_{at}" for at in range(len(ROWS))]
DENSE = 13
HELD_OUT = 0.1
OF_ROWS = tb.Adagrad(lr=0.02)


class Batch(NamedTuple):
    """What MLPerf's loader yields."""

    dense: Tensor  # [B, 13]
    sparse: tb.KeyedJaggedTensor
    labels: Tensor  # [B]
    is_held_out: bool


def to_bags(values: list[Tensor], sizes: list[int]) -> tb.KeyedJaggedTensor:
    """Makes the bags of one value per feature and sample: it, and others that it determines."""
    ids, lengths = [], []
    for at, (of_feature, size, hotness) in enumerate(zip(values, sizes, HOTNESS, strict=True)):
        others = torch.arange(hotness) * (0x9E3779B1 + 2 * at)
        # Those of value x begin with x itself.
        mixed = of_feature[:, None] + others * (of_feature[:, None] % 65_521 + 1)
        ids.append((mixed % size).view(-1))
        lengths.append(torch.full_like(of_feature, hotness))
    return tb.KeyedJaggedTensor(NAMES, torch.cat(ids), lengths=torch.cat(lengths))


class Generated(Dataset[Batch]):
    """Batches whose labels depend on some features and numbers; then those held out."""

    def __init__(self, sizes: list[int], batch: int, count: int) -> None:
        self.sizes, self.batch, self.count = sizes, batch, count
        generator = torch.Generator().manual_seed(3)
        counts = [min(size, 1 << 20) for size in sizes[::4]]
        self.effects = [0.7 * torch.randn(count, generator=generator) for count in counts]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Batch:
        generator = torch.Generator().manual_seed(at)
        # Some values are far more usual than others.
        values = [
            (size * torch.rand(self.batch, generator=generator) ** 4).long() for size in self.sizes
        ]
        dense = torch.randn(self.batch, DENSE, generator=generator)
        logits = dense[:, 0] - 1
        for of_feature, effects in zip(values[::4], self.effects, strict=True):
            logits = logits + effects[of_feature % len(effects)]
        labels = (torch.rand(self.batch, generator=generator) < torch.sigmoid(logits)).float()
        bags = to_bags(values, self.sizes)
        return Batch(dense, bags, labels, is_held_out=at >= self.count * (1 - HELD_OUT))


class Criteo:
    """Batches of a log in its order; then those held out."""

    def __init__(self, files: list[Path], sizes: list[int], batch: int, folder: Path) -> None:
        if files[0].is_dir():
            self.data: tb.data.Dataset = tb.data.CriteoMultiHotData(files[0], batch, rows=sizes)
        else:
            tb.data.build_vocabulary(files, folder / "vocabulary")
            self.data = tb.data.CriteoData(files, folder / "vocabulary", batch)
        self.parts = self.data.split_last(HELD_OUT)
        self.sizes = sizes

    def known_order(self) -> tb.data.BatchOrder:
        """Tells the look-ahead that the order is always the same."""
        source = tb.data.order.fingerprint([self.data.identity(), self.sizes])
        return tb.data.BatchOrder(source, lambda: iter(self))

    def __iter__(self) -> Iterator[Batch]:
        for part, is_held_out in zip(self.parts, (False, True), strict=True):
            for read in part.batches(part.first, part.stop, part.batch_size):
                bags = read.sparse
                if isinstance(self.data, tb.data.CriteoData):
                    bags = to_bags(list(bags.values().chunk(len(NAMES))), self.sizes)
                yield Batch(read.dense, bags, read.label, is_held_out)


def layers(sizes: list[int], is_output: bool = False) -> nn.Sequential:
    """Returns linear layers with ReLU behind each but an output."""
    each = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*(each[:-1] if is_output else each))


class Cross(nn.Module):
    """A cross layer of low rank: ``x0 * (W V x + b) + x``."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: Tensor, inputs: Tensor) -> Tensor:
        """Maps ``[B, W]`` to the same."""
        return first * self.up(self.down(inputs)) + inputs


class DlrmDcn(nn.Module):
    """DLRM whose interaction is a cross network."""

    def __init__(self, sizes: list[int], options: argparse.Namespace, store: tb.Store) -> None:
        super().__init__()
        dim, wide = options.dim, options.width
        tables = [
            tb.EmbeddingBagConfig(size, dim, name, init=tb.Normal(std=0.05))
            for name, size in zip(NAMES, sizes, strict=True)
        ]
        self.embeddings: nn.Module = tb.EmbeddingBagCollection(
            tables, store=store, optimizer=OF_ROWS
        )
        self.bottom = layers([DENSE, wide // 2, wide // 4, dim])
        width = dim * (len(sizes) + 1)
        self.crosses = nn.ModuleList(Cross(width, wide // 2) for _ in range(3))
        self.top = layers([width, wide, wide, wide // 2, wide // 4, 1], is_output=True)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits ``[B]``."""
        pooled = self.embeddings(batch.sparse).values()
        first = hidden = torch.cat([self.bottom(batch.dense), pooled], dim=1)
        for cross in self.crosses:
            hidden = cross(first, hidden)
        return self.top(hidden)[:, 0]


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="48MiB", epochs=1)
    parser.add_argument("--scale", type=float, default=1e-3, help="of MLPerf's tables")
    parser.add_argument("--batch", type=int, default=128, help="samples")
    parser.add_argument("--batches", type=int, default=400, help="of generated data")
    parser.add_argument("--dim", type=int, default=32, help="elements of a row; MLPerf: 128")
    parser.add_argument("--width", type=int, default=128, help="of dense layers; MLPerf: 1024")
    options = parser.parse_args()
    sizes = [max(min(rows, 100), int(rows * options.scale)) for rows in ROWS]

    def build(store: tb.Store) -> DlrmDcn:
        torch.manual_seed(7)
        return DlrmDcn(sizes, options, store)

    def train(run: Run, model: DlrmDcn, batches: Iterable[Batch], _: Any) -> None:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
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

    with TemporaryDirectory() as folder:
        made = Generated(sizes, options.batch, options.batches)
        loader: Iterable[Batch] = DataLoader(made, batch_size=None)
        if options.data:
            loader = Criteo(options.data, sizes, options.batch, Path(folder))
        compare(options, build, train, loader, quality="AUC", optimizer=OF_ROWS)


if __name__ == "__main__":
    main()
