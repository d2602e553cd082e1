"""The statistics have the fields that their types name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb
from tierbed.train import StoreStats


def unknown(found: dict[str, Any], kind: Any, at: str = "stats") -> list[str]:
    """Returns fields that ``kind`` does not name, or of another type."""
    hints = get_type_hints(kind)
    wrong = [f"{at}.{name}" for name in found if name not in hints]
    for name, hint in hints.items():
        if name not in found:
            continue
        if isinstance(found[name], dict) and hasattr(hint, "__total__"):
            wrong += unknown(found[name], hint, f"{at}.{name}")
        elif isinstance(hint, type) and not hasattr(hint, "__total__"):
            wrong += [] if isinstance(found[name], hint) else [f"{at}.{name} is {found[name]!r}"]
    return wrong


def bags(ids: list[int]) -> tb.KeyedJaggedTensor:
    ones = torch.ones(2 * len(ids), dtype=torch.int64)
    return tb.KeyedJaggedTensor(["a", "b"], torch.tensor([*ids, *ids]), lengths=ones)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "memory"},
        {"backend": "file"},
        {"backend": "cold"},
        {"backend": "lsm"},
        {"order": "forward"},
        {"shards": 2},
    ],
)
def test_statistics_have_the_fields_of_their_types(options: dict[str, Any], tmp_path: Path) -> None:
    path = None if options.get("backend") == "memory" else tmp_path / "store"
    with tb.Store.open(path, dram_budget="32MiB", **options) as store:
        assert unknown(dict(store.stats()), StoreStats) == []
        tables = [tb.EmbeddingBagConfig(10, 4, name) for name in "ab"]
        emb = tb.EmbeddingBagCollection(tables, store=store)
        loader: Any = DataLoader(range(4), 2, collate_fn=bags)
        for batch in tb.lookahead(loader, emb):
            emb(batch).values().sum().backward()
        store.checkpoint("a")
        assert unknown(dict(store.stats()), StoreStats) == []
        assert store.stats()["steps"] == 2
        assert store.order()["kind"] in ("forward", "window")
