"""What the table of memory says is what parts take: measured at a size, and at four times of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import growth_kit
import pytest

from tierbed.errors import InvalidError
from tierbed.sizing.growth import GROWTH, Growth, growth_of, table_lines

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "memory.md"

#: By part, what has it, and what it grows with: what measures it, and the smaller size. Parts
#: inside a budget are as the account says; growing takes milliseconds.
ACCOUNTED = {
    ("page maps", "file", "page"): ("page_maps", 60_000),
    ("row buffer", "window", "row"): ("row_buffer", 20_000),
    ("range maps", "cold", "range"): ("range_maps", 200_000),
    ("filters", "lsm", "row"): ("filters", 20_000),
    ("block indexes", "lsm", "block"): ("block_indexes", 20_000),
    ("memory store", "memory", "row"): ("memory_store", 20_000),
    ("plan windows", "forward", "window"): ("plan_windows", 800),
    ("chunk lists", "forward", "chunk"): ("chunk_lists", 40_000),
    ("vocabulary directory", "vocabulary", "id"): ("vocabulary_directory", 40_000),
    ("forward_index", "snapshot", "bits"): ("forward_index", 40_000),
    ("forward_index", "head_rows", "row"): ("index_of_tails", 40_000),
    ("placement_index", "snapshot", "row"): ("placement_of_rows", 20_000),
    ("placement_index", "snapshot", "replica"): ("placement_of_replicas", 2_000),
    ("deltas", "delta", "row"): ("delta", 20_000),
}
#: Others are as resident memory says, each in a process of its own.
RESIDENT = {
    ("next uses", "plan", "row"): ("plan_arrays", 4_000_000),
    ("tokens", "Vocabulary", "token"): ("tokens", 200_000),
    ("query log", "QueryLog", "id"): ("log_ids", 2_000_000),
    ("query log", "QueryLog", "query"): ("log_queries", 500_000),
    ("bisection", "place", "id"): ("bisected_ids", 1_000_000),
    ("bisection", "place", "row"): ("bisected_rows", 200_000),
    ("growth of pages", "place", "id"): ("grown_ids", 50_000),
    ("placement", "Placement", "row"): ("placement", 200_000),
}


def part(name: tuple[str, str, str]) -> Growth:
    """The part whose name, owner and unit begin or are as told."""
    found = [
        one
        for _, group in GROWTH
        for one in group
        if one.part == name[0] and name[1] in one.where and name[2] in one.per.replace(",", " ")
    ]
    # `id of a query` has `query` in it, and a snapshot with a head is a snapshot.
    exact = [one for one in found if one.per.startswith(name[2]) or len(found) == 1]
    return (exact or found)[0]


def each(smaller: growth_kit.Counted, larger: growth_kit.Counted) -> float:
    return (larger[1] - smaller[1]) / (larger[0] - smaller[0])


@pytest.mark.parametrize("name", ACCOUNTED, ids=" ".join)
def test_accounts_grow_as_the_table_says(name: tuple[str, str, str]) -> None:
    measure, size = ACCOUNTED[name]
    count_bytes = getattr(growth_kit, measure)
    found, told = each(count_bytes(size), count_bytes(4 * size)), part(name)
    assert told.least * 0.999 <= found <= told.most * 1.001, told


@pytest.fixture(scope="module")
def resident() -> dict[str, float]:
    """Bytes of each thing, by what measures it: in a process where nothing else grows."""
    wanted = [f"{measure}={size}" for measure, size in RESIDENT.values()]
    done = subprocess.run(
        [sys.executable, growth_kit.__file__, *wanted],
        capture_output=True,
        text=True,
        timeout=280,
        # Large arrays come from the kernel and go back to it, so that none is counted later.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    found = [each((line[0], line[1]), (line[2], line[3])) for line in lines]
    return dict(zip([measure for measure, _ in RESIDENT.values()], found, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RESIDENT, ids=" ".join)
def test_resident_memory_grows_as_the_table_says(
    name: tuple[str, str, str], resident: dict[str, float]
) -> None:
    found, told = resident[RESIDENT[name][0]], part(name)
    assert told.least * 0.95 <= found <= told.most * 1.05, told


def test_every_part_of_the_table_is_measured() -> None:
    parts = [one for _, group in GROWTH for one in group]
    assert [part(name) for name in (*ACCOUNTED, *RESIDENT)] == parts
    assert all(0 <= one.least <= one.most for one in parts)


@pytest.mark.parametrize("group", ["training", "serving", "outside"])
def test_the_page_shows_the_table(group: str) -> None:
    lines = "\n".join(table_lines(group))
    assert lines in PAGE.read_text(), f"docs/reference/memory.md lacks:\n{lines}"


def test_parts_are_found_by_their_names() -> None:
    assert growth_of("page maps").bytes_of(10) == 20
    assert growth_of("placement_index", per="replica").most == 4
    with pytest.raises(InvalidError, match="2 parts"):
        growth_of("placement_index")
    with pytest.raises(InvalidError, match="0 parts"):
        growth_of("page map")
