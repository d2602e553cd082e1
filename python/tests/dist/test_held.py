"""Initial rows of what ranks hold: those of a store, by however many threads they are made."""

from __future__ import annotations

import threading

import pytest
import torch

import tierbed as tb
from tierbed.dist.held import Held, initial_rows

CONFIG = tb.EmbeddingBagConfig(1000, 6, "a")


@pytest.mark.parametrize("threads", [1, 3])
def test_initial_rows_are_those_of_a_store(threads: int) -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB", seed=7) as store:
        store.add_table(CONFIG, tb.SGD())
        wanted = store.read_rows("a", 0, 1000)
    held = Held(config=CONFIG, name="a", rows=range(40, 970), columns=range(2, 5))
    found = list(initial_rows(held, 7, threads=threads, chunk_rows=64))
    assert [first for first, _ in found] == list(range(40, 970, 64))
    assert torch.equal(torch.cat([rows for _, rows in found]), wanted[40:970, 2:5])


def test_whoever_stops_early_leaves_no_thread_behind() -> None:
    held = Held(config=CONFIG, name="a", rows=range(1000), columns=range(6))
    before = threading.active_count()
    rows = initial_rows(held, 7, threads=2, chunk_rows=10)
    assert next(rows)[0] == 0
    assert threading.active_count() == before + 2
    rows.close()
    assert threading.active_count() == before
