"""What tests of reports and of `tierbed top` share: a run to look at, and a reader of HTML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import torch

import tierbed as tb

ROWS = {"item": 4000, "user": 2000}
VOID = {"meta", "link", "br", "line", "polygon", "polyline"}


def batches(count: int, samples: int = 32, seed: int = 0) -> list[tb.KeyedJaggedTensor]:
    """Returns batches of one id per feature and sample; small ids are the popular ones."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        drawn = [torch.rand(samples, generator=generator) ** 3 for _ in ROWS]
        ids = [(one * rows).long() for one, rows in zip(drawn, ROWS.values(), strict=True)]
        lengths = torch.ones(samples * len(ROWS), dtype=torch.int64)
        made.append(tb.KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths))
    return made


@contextmanager
def store_in(
    folder: Path, dram_budget: str = "224KiB"
) -> Iterator[tuple[tb.Store, torch.nn.Module]]:
    """Opens a store that holds a part of its rows in memory, and a collection on it."""
    tables = [
        tb.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16)
        for name, rows in ROWS.items()
    ]
    with tb.Store.open(folder, dram_budget=dram_budget, order="window") as store:
        yield store, tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))


def train(emb: torch.nn.Module, data: list[tb.KeyedJaggedTensor]) -> None:
    for batch in data:
        emb(batch).values().sum().backward()


class Reader(HTMLParser):
    """Reads a page: its text, what it refers to, and whether its elements are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        given = [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.links += given
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())
