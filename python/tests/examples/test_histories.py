"""Histories of the sequence examples are the same from lines of items and from ratings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from example_kit import EXAMPLES


@pytest.fixture
def histories(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("histories")


def test_ratings_and_lines_of_items_are_the_same_histories(tmp_path: Path, histories: Any) -> None:
    pytest.importorskip("pyarrow")
    of_users = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    lines = tmp_path / "items.txt"
    lines.write_text("".join(" ".join(map(str, items)) + "\n" for items in of_users))
    events = [
        (10 * at + user, user, item)
        for user, items in enumerate(of_users)
        for at, item in enumerate(items)
    ]
    ratings = tmp_path / "ratings.csv"
    told = [f"{user},{item},4.0,{time}" for time, user, item in sorted(events, reverse=True)]
    ratings.write_text("\n".join(["userId,movieId,rating,timestamp", *told]) + "\n")
    found, expected = histories.read([ratings]), histories.read([lines])
    assert found.items == expected.items == [[3, 1, 4], [9, 2, 6, 5]]
    assert found.item_count == expected.item_count == 10
