"""Trains a small language model whose n-gram memory is many times larger than its budget.

    python examples/ngram_memory_lm.py --check
    python examples/ngram_memory_lm.py --data $(find /usr/lib/python3 -name '*.py') --figure lm.svg

The rows of a position depend on its last tokens alone, so they are read ahead. The model is
trained with the memory on disk and without it. ``--check`` trains it with the memory in plain
torch, too, and compares every bit. Text is generated, or the words of the files of ``--data``; its
last tenth is held out.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from comparison import Run, TorchRows, arguments, check, draw, opened, report, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tierbed as tb

WORD = re.compile(r"\w+|[^\w\s]")
HIDDEN = 64
ATTENTION_HEADS = 4
HELD_OUT = 0.1
SAMPLES = 16
OF_ROWS = tb.Adagrad(lr=0.05)


def phrases(vocabulary: int, count: int, seed: int) -> Tensor:
    """Generates ``count`` tokens: phrases of 3 to 6 words, some far more usual than others."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.randint(0, vocabulary, (2 * vocabulary, 6), generator=generator)
    picks = len(known) * torch.rand(count // 3 + 1, generator=generator) ** 3
    return torch.cat([known[at, : 3 + at % 4] for at in picks.long().tolist()])[:count]


def words_of(files: list[Path], vocabulary: int, count: int) -> Tensor:
    """Reads at most ``count`` words; the rarest and those first seen when held out are word 0."""
    texts = (file.read_text(errors="replace") for file in files)
    text = list(islice((word for each in texts for word in WORD.findall(each)), count))
    usual = Counter(text[: int(len(text) * (1 - HELD_OUT))]).most_common(vocabulary - 1)
    number = {word: at for at, (word, _) in enumerate(usual, start=1)}
    return torch.tensor([number.get(word, 0) for word in text])


class Batch(NamedTuple):
    """Windows of text, and the rows of their n-grams."""

    tokens: Tensor  # [B, T + 1]
    sparse: tb.KeyedJaggedTensor
    is_held_out: bool


class Windows(Dataset[Batch]):
    """The text from front to back: batches to train on, then those held out."""

    def __init__(self, tokens: Tensor, length: int, ngrams: tb.nn.NgramHash) -> None:
        per_batch = SAMPLES * length
        self.count = (len(tokens) - 1) // per_batch
        self.train_count = int(self.count * (1 - HELD_OUT))
        inputs = tokens[: self.count * per_batch].view(self.count, SAMPLES, length)
        targets = tokens[1 : self.count * per_batch + 1].view(self.count, SAMPLES, length)
        self.tokens = torch.cat([inputs, targets[..., -1:]], dim=2)
        self.ngrams = ngrams
        if self.train_count in (0, self.count):
            raise SystemExit(f"{len(tokens)} tokens are too few for batches of {per_batch}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Batch:
        tokens = self.tokens[at]
        return Batch(tokens, self.ngrams(tokens[:, :-1]), at >= self.train_count)


class Block(nn.Module):
    """A layer of a causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.mix = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        wide = 4 * HIDDEN
        self.deep = nn.Sequential(nn.Linear(HIDDEN, wide), nn.GELU(), nn.Linear(wide, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[B, T, H]`` to the same."""
        parts = self.mix(self.norms[0](hidden)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (ATTENTION_HEADS, -1)).transpose(1, 2) for part in parts]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.deep(self.norms[1](hidden))


class Model(nn.Module):
    """Two layers, with the memory between."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, HIDDEN)
        self.positions = nn.Parameter(torch.zeros(length, HIDDEN))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, vocabulary))
        self.memory: tb.nn.NgramMemory | None = None

    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross entropy of the next token."""
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        hidden = self.blocks[0](self.words(inputs) + self.positions)
        if self.memory is not None:
            hidden = self.memory(hidden, batch.sparse)
        logits = self.head(self.blocks[1](hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(run: Run, model: Model, batches: Iterable[Batch], epochs: int) -> None:
    """Trains and, behind each epoch, finds the perplexity of what was held out."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        held_out = []
        with timed(run):
            for batch in batches:
                if batch.is_held_out:
                    with torch.no_grad():
                        held_out.append(model.loss(batch).item())
                    continue
                optimizer.zero_grad()
                model.loss(batch).backward()  # steps the rows of the memory
                optimizer.step()
        run.quality.append(math.exp(sum(held_out) / len(held_out)))


def build(options: argparse.Namespace, store: tb.Store | None) -> Model:
    """Makes a model, with the same dense weights each time."""
    torch.manual_seed(7)
    model = Model(options.vocabulary, options.length)
    if store is not None:
        model.memory = tb.nn.NgramMemory(
            HIDDEN,
            tb.nn.NgramHash(rows=options.rows),
            embedding_dim=16,
            store=store,
            optimizer=OF_ROWS,
        )
    return model


def main() -> None:
    """Reads the options, trains and compares."""
    parser = arguments(__doc__, budget="16MiB", epochs=3)
    parser.add_argument("--tokens", type=int, default=400_000, help="most tokens of text")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--rows", type=int, default=1 << 18, help="of each order and head")
    options = parser.parse_args()
    if options.data:
        tokens = words_of(options.data, options.vocabulary, options.tokens)
    else:
        tokens = phrases(options.vocabulary, options.tokens, seed=3)
    windows = Windows(tokens, options.length, tb.nn.NgramHash(rows=options.rows))
    loader = DataLoader(windows, batch_size=None)

    runs = [Run("memory on disk"), Run("no memory")]
    with opened(options.store, options.budget) as store:
        model = build(options, store)
        ahead = tb.lookahead(loader, model.memory)
        train(runs[0], model, ahead, options.epochs)
        runs[0].rows_bytes = store.stats()["budget"]["peak_bytes"]
        train(runs[1], build(options, None), loader, options.epochs)
        if options.check:
            runs.append(Run("memory in plain torch"))
            with tb.Store.open(backend="memory", dram_budget="64GiB") as twin:
                model = build(options, twin)
                model.memory.embeddings = TorchRows(model.memory.embeddings, OF_ROWS)
            train(runs[2], model, loader, options.epochs)
            runs[2].rows_bytes = model.memory.embeddings.bytes()
        for run in runs:
            run.tokens = options.epochs * windows.tokens[..., :-1].numel()
            print(f"{run.name}: {run.tokens / run.seconds:.0f} tokens/s")
        report(runs, "perplexity", options.json)
        if options.check:
            check(model.memory.embeddings.differences(store), [runs[0], runs[2]])
    if options.figure:
        draw(options.figure, runs, "perplexity")


if __name__ == "__main__":
    main()
