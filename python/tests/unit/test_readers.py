"""As many lookups read at once as there are callers, up to a bound."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.placement import import_tables

ROWS = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readers") / "snapshot"
    import_tables({"a": torch.arange(ROWS * 16.0).view(ROWS, 16)}, path)
    return path


def ask(snapshot: tb.Snapshot, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(100):
        rows = torch.randint(ROWS, (26,), generator=generator)
        bags = tb.KeyedJaggedTensor(["a"], rows, lengths=torch.ones_like(rows))
        found = snapshot.lookup(bags)["a"]
        assert torch.equal(found[:, 0], rows * 16.0)


def test_callers_in_threads_get_right_rows_from_more_readers_than_processors(folder: Path) -> None:
    with tb.Snapshot.open(folder, cache=tb.CacheOptions(bytes_max=0), readers=8) as snapshot:
        alone = snapshot.stats()["snapshot"]["reader_count"]
        threads = [threading.Thread(target=ask, args=(snapshot, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = snapshot.stats()["snapshot"]
    assert alone <= stats["reader_count"] <= 8
    assert stats["reader_error"] is None
    assert stats["lookup_count"] == 800


def test_a_bound_below_one_is_refused(folder: Path) -> None:
    with pytest.raises(tb.InvalidError, match="readers must be at least 1"):
        tb.Snapshot.open(folder, readers=0)
    with tb.Snapshot.open(folder, readers=1) as snapshot:
        ask(snapshot, 1)
        assert snapshot.stats()["snapshot"]["reader_count"] == 1
