"""Trains GraphSAGE on a graph whose node features lie in a store.

    python examples/graph_sage.py --check
    python examples/graph_sage.py --data edges.txt features.npy labels.npy --figure accuracy.svg

The loader samples neighbours of neighbours, so the rows of coming batches are read ahead. Nodes are
numbered as they came. The last tenth is held out: nodes that training has never seen, not even as
neighbours, are classified by what came before. ``--tune`` trains the features, too.

Source: Hamilton, Ying and Leskovec, NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from comparison import Run, arguments, compare, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb

BATCH = 256
FANOUT = (8, 5)
HELD_OUT = 0.1
CHUNK_ROWS = 65_536
OF_ROWS = tb.Adagrad(lr=0.01)


class Graph(NamedTuple):
    """Nodes with features and classes, and edges."""

    edges: Tensor  # [E, 2] i64
    features: np.ndarray  # [N, D] f32, perhaps mapped from a file
    labels: Tensor  # [N] i64


def read(files: list[Path]) -> Graph:
    """Reads lines of two nodes, and matrices of features and classes."""
    edges, features, labels = files
    pairs = np.loadtxt(edges, dtype=np.int64, ndmin=2)
    return Graph(
        torch.from_numpy(pairs), np.load(features, mmap_mode="r"), torch.from_numpy(np.load(labels))
    )


def generate(nodes: int, dim: int, seed: int, classes: int = 10) -> Graph:
    """Generates nodes that link to earlier ones, mostly of their class; features are vague."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (nodes,), generator=generator)
    of_class = torch.randn(classes, dim, generator=generator)
    features = of_class[labels] + 3 * torch.randn(nodes, dim, generator=generator)
    # Nodes by class, in order: an earlier one of a class is one before a node's place there.
    order = labels.argsort(stable=True)
    first = torch.searchsorted(labels[order], torch.arange(classes))
    place = torch.empty(nodes, dtype=torch.int64)
    place[order] = torch.arange(nodes) - first[labels[order]]
    edges = []
    for _ in range(5):
        chance = torch.rand(nodes, generator=generator)
        same = order[first[labels] + (chance * place).long()]
        any_node = (chance * torch.arange(nodes)).long()
        is_same = torch.rand(nodes, generator=generator) < 0.8
        edges.append(torch.stack([torch.arange(nodes), torch.where(is_same, same, any_node)], 1))
    return Graph(torch.cat(edges), features.numpy(), labels)


class Batch(NamedTuple):
    """Nodes with the neighbours sampled for them, and their classes."""

    sparse: tb.KeyedJaggedTensor  # per node: itself, its neighbours, theirs
    labels: Tensor  # [B]
    is_held_out: bool


class Sampled(Dataset[Batch]):
    """Batches of nodes to train on, in a random order that is the same in every epoch; then others.

    Nodes that are trained on have only each other as neighbours.
    """

    def __init__(self, graph: Graph) -> None:
        count = len(graph.labels)
        self.labels = graph.labels
        self.train_count = int(count * (1 - HELD_OUT))
        late, early = graph.edges.max(dim=1).values, graph.edges.min(dim=1).values
        both = late < self.train_count
        sources = torch.cat([late, early[both]])
        order = sources.argsort(stable=True)
        self.neighbours = torch.cat([early, late[both]])[order]
        self.first = torch.searchsorted(sources[order], torch.arange(count + 1))
        generator = torch.Generator().manual_seed(1)
        trained = torch.randperm(self.train_count, generator=generator)
        held_out = torch.arange(self.train_count, count)
        self.batches = [*trained.split(BATCH), *held_out.split(BATCH)]

    def __len__(self) -> int:
        return len(self.batches)

    def sample(self, nodes: Tensor, fanout: int, generator: torch.Generator) -> Tensor:
        """Draws ``[N, fanout]`` neighbours of ``nodes`` ``[N]``; a node without has itself."""
        degrees = self.first[nodes + 1] - self.first[nodes]
        at = (torch.rand(len(nodes), fanout, generator=generator) * degrees[:, None]).long()
        drawn = self.neighbours[
            (self.first[nodes][:, None] + at).clamp_max(len(self.neighbours) - 1)
        ]
        return torch.where(degrees[:, None] > 0, drawn, nodes[:, None])

    def __getitem__(self, at: int) -> Batch:
        nodes = self.batches[at]
        # A seed of its own makes the draws of a batch those that were planned.
        generator = torch.Generator().manual_seed(at)
        near = self.sample(nodes, FANOUT[0], generator)
        far = self.sample(near.view(-1), FANOUT[1], generator).view(len(nodes), -1)
        ids = torch.cat([nodes[:, None], near, far], dim=1)
        lengths = torch.full((len(nodes),), ids.shape[1])
        sparse = tb.KeyedJaggedTensor(["node"], ids.view(-1), lengths=lengths)
        return Batch(sparse, self.labels[nodes], int(nodes[0]) >= self.train_count)


class Sage(nn.Module):
    """Two layers: a node's vector and the mean of its neighbours', each through a matrix."""

    def __init__(self, graph: Graph, hidden: int, is_tuned: bool, store: tb.Store) -> None:
        super().__init__()
        count, dim = graph.features.shape
        self.is_tuned = is_tuned
        table = tb.EmbeddingConfig(count, dim, "node")
        self.embeddings: nn.Module = tb.EmbeddingCollection([table], store=store, optimizer=OF_ROWS)
        for first in range(0, count, CHUNK_ROWS):
            chunk = np.ascontiguousarray(graph.features[first : first + CHUNK_ROWS], np.float32)
            store.write_rows("node", first, torch.from_numpy(chunk))
        classes = int(graph.labels.max()) + 1
        self.first, self.second = nn.Linear(2 * dim, hidden), nn.Linear(2 * hidden, classes)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits ``[B, classes]``."""
        with torch.set_grad_enabled(self.is_tuned and torch.is_grad_enabled()):
            rows = self.embeddings(batch.sparse)["node"].values()
        sizes = [1, FANOUT[0], FANOUT[0] * FANOUT[1]]
        node, near, far = rows.view(len(batch.labels), sum(sizes), -1).split(sizes, dim=1)
        of_near = far.unflatten(1, FANOUT).mean(dim=2)
        inputs = torch.cat(
            [
                torch.cat([node, near.mean(dim=1, keepdim=True)], dim=2),
                torch.cat([near, of_near], dim=2),
            ],
            dim=1,
        )
        hidden = torch.relu(self.first(inputs))
        return self.second(torch.cat([hidden[:, 0], hidden[:, 1:].mean(dim=1)], dim=1))


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="16MiB", epochs=3)
    parser.add_argument("--nodes", type=int, default=200_000, help="of generated data")
    parser.add_argument("--dim", type=int, default=64, help="features of generated data")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tune", action="store_true", help="train the features, too")
    options = parser.parse_args()
    graph = read(options.data) if options.data else generate(options.nodes, options.dim, seed=3)
    loader = DataLoader(Sampled(graph), batch_size=None)

    def build(store: tb.Store) -> Sage:
        torch.manual_seed(7)
        return Sage(graph, options.hidden, options.tune, store)

    def train(run: Run, model: Sage, batches: Iterable[Batch], _: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(options.epochs):
            are_right = []
            with timed(run):
                for batch in batches:
                    if batch.is_held_out:
                        with torch.no_grad():
                            are_right.append(model(batch).argmax(dim=1) == batch.labels)
                        continue
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(batch), batch.labels).backward()
                    optimizer.step()
            run.quality.append(torch.cat(are_right).double().mean().item())

    compare(options, build, train, loader, quality="accuracy", optimizer=OF_ROWS)


if __name__ == "__main__":
    main()
