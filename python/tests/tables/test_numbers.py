"""Ids are compared and sorted in files where they are many, with the answer of a plain sort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tierbed.tables import numbers
from tierbed.tables.numbers import Numbers, RowOrder, first_repeated

BIG = 2**63 - 1
#: Prints how much resident memory grows at its peak while a table with ids comes in and goes out.
MEASURED = """
import sys
import numpy as np
import torch
import tierbed as tb
from tierbed.tables import numbers

numbers.PART_NUMBERS = 50_000
folder, count = sys.argv[1], int(sys.argv[2])

def memory(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

def grown(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before

def moved(name, count):
    place = f"{folder}/{name}"
    np.save(f"{place}.npy", np.zeros((count, 1), "f4"))
    np.save(f"{place}.ids.npy", np.arange(count)[::-1] * 7919)
    beside = {"a": f"{place}.ids.npy"}
    with tb.Store.open(place, dram_budget="16MiB") as store:
        store.add_table(tb.EmbeddingBagConfig(None, 1, "a"), tb.SGD(lr=0.1))
        read = lambda: tb.tables.import_tables(store, f"{place}.npy", {"a": "weight"}, ids=beside)
        return grown(read), grown(lambda: tb.tables.export_tables(store, f"{place}-out.npy"))

moved("warm", 1000)
print(*moved("measured", count))
"""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "PART_NUMBERS", 8)
    monkeypatch.setattr(numbers, "PARTS_MAX", 5)


def test_numbers_come_back_from_their_file() -> None:
    found = Numbers()
    for chunk in ([3, -1], [], [BIG, -BIG - 1, 7]):
        found.append(torch.tensor(chunk, dtype=torch.int32 if not chunk else torch.int64))
    assert found.rows().shape == (5,)
    assert found.read(1, 3).tolist() == [-1, BIG, -BIG - 1]
    assert torch.cat(list(found.rows().chunks(2))).tolist() == [3, -1, BIG, -BIG - 1, 7]
    with pytest.raises(EOFError, match="beyond 5"):
        found.read(3, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-50, 50) | st.integers(-BIG - 1, BIG), max_size=60))
def test_what_is_there_twice_is_found(ids: list[int]) -> None:
    chunks = torch.tensor(ids, dtype=torch.int64).split(7)
    found = first_repeated(chunks, len(ids))
    twice = {one for one in ids if ids.count(one) > 1}
    assert found in twice if twice else found is None


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 99), max_size=60), st.randoms(use_true_random=False))
def test_ids_follow_the_order_of_their_rows(rows: set[int], luck: object) -> None:
    order = RowOrder(100)
    mixed = list(rows)
    luck.shuffle(mixed)  # type: ignore[attr-defined]
    for chunk in torch.tensor(mixed, dtype=torch.int64).split(7):
        order.add(chunk, 1000 - chunk)
    found, ids = (one.read(0, one.count) for one in order.finish())
    assert found.tolist() == sorted(rows)
    assert ids.tolist() == [1000 - row for row in sorted(rows)]


def test_memory_does_not_grow_with_ids(tmp_path: Path) -> None:
    grown = []
    for count in (200_000, 800_000):
        place = tmp_path / str(count)
        place.mkdir()
        found = subprocess.run(
            [sys.executable, "-c", MEASURED, str(place), str(count)],
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert found.returncode == 0, found.stderr[-3000:]
        grown.append([int(part) for part in found.stdout.split()])
    # Ids and their rows alone would be 16 bytes for each of the 600,000 more.
    for fewer, more in zip(*grown, strict=True):
        assert more - fewer < 6 << 20, grown
