"""Neighbours from Python: who they are, their file, and what a snapshot answers with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.placement import import_tables
from tierbed.serve.cache import cache_parts

SIZES = {"a": 900, "b": 300, "wide": 40}
DIMS = {"a": 8, "b": 8, "wide": 16}


@pytest.fixture(scope="module")
def tables() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(n, DIMS[name], generator=generator) for name, n in SIZES.items()}


@pytest.fixture
def folder(tables: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "snapshot"
    import_tables(tables, path)
    return path


def counts() -> dict[str, torch.Tensor]:
    return {name: 1000.0 / (1 + torch.arange(n)) for name, n in SIZES.items()}


def ask(snapshot: tb.Snapshot, name: str, rows: torch.Tensor) -> torch.Tensor:
    bags = tb.KeyedJaggedTensor([name], rows, lengths=torch.ones_like(rows))
    return snapshot.lookup(bags)[name]


def test_the_most_used_of_near_rows_stands_for_a_row() -> None:
    rows = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.1, 0.0], [10.0, 0.1], [0.05, 0.0]])
    used = torch.tensor([5.0, 9.0, 1.0, 0.0, 7.0])
    found = tb.find_neighbours({"t": rows}, {"t": used}, candidates=4, nearest=1)
    # Row 3 is no candidate; nobody stands for itself.
    assert found.of["t"].tolist() == [[0, 4], [0, 2], [0, 4], [0, 1], [0, 0]]
    found = tb.find_neighbours({"t": rows}, {"t": used}, candidates=None, nearest=1)
    assert found.of["t"].tolist() == [[0, 4], [0, 3], [0, 4], [0, 1], [0, 0]]
    found = tb.find_neighbours({"t": rows}, {"t": used}, candidates=None, nearest=2)
    # Of rows 3 and 2, which are nearest to row 1, row 2 is used more often.
    assert found.of["t"].tolist() == [[0, 4], [0, 2], [0, 4], [0, 1], [0, 0]]
    alone = tb.find_neighbours({"t": rows[:1]}, {"t": used[:1]})
    assert alone.of["t"].tolist() == [[-1, -1]]


def test_neighbours_are_those_of_plain_search(tables: dict[str, torch.Tensor]) -> None:
    used = {
        name: torch.rand(n, generator=torch.Generator().manual_seed(n)) for name, n in SIZES.items()
    }
    for across in (True, False):
        found = tb.find_neighbours(tables, used, nearest=10, candidates=None, across=across)
        assert found.tables == ("a", "b", "wide")
        for name, row in (("a", 3), ("a", 899), ("b", 0), ("wide", 7)):
            others = [
                (float((tables[name][row] - tables[other][at]).norm()), other, at)
                for other in (SIZES if across else [name])
                if DIMS[other] == DIMS[name]
                for at in range(SIZES[other])
                if (other, at) != (name, row)
            ]
            nearest = sorted(others)[:10]
            _, other, at = max(nearest, key=lambda near: float(used[near[1]][near[2]]))
            assert found.of[name][row].tolist() == [found.tables.index(other), at]


@pytest.mark.parametrize("beside", [True, False])
def test_rows_that_left_are_answered_by_their_neighbours(
    folder: Path, tables: dict[str, torch.Tensor], tmp_path: Path, beside: bool
) -> None:
    found = tb.find_neighbours(tables, counts(), candidates=64)
    found = tb.Neighbours(tables=found.tables, of={"a": found.of["a"]})
    with tb.Snapshot.open(folder) as snapshot:
        written = found.write(snapshot, None if beside else tmp_path / "near")
    assert written == (f"{folder}.neighbours" if beside else str(tmp_path / "near"))
    cache = ["f32:ev_lfu:96", tb.NeighbourTier(share=4, inline=True)]
    path = None if beside else written
    generator = torch.Generator().manual_seed(3)
    seen = []
    for _ in range(2):
        generator.manual_seed(3)
        approximate = 0
        with tb.Snapshot.open(
            folder,
            cache=tb.CacheOptions(tiers=cache, bytes_max=32_000, neighbours=path),
            misses="surrogate",
        ) as snapshot:
            for _ in range(600):
                popular = torch.randint(64, (6,), generator=generator)
                rows = torch.cat([popular, torch.randint(900, (4,), generator=generator)]).unique()
                answers = ask(snapshot, "a", rows)
                for row, answer in zip(rows.tolist(), answers, strict=True):
                    if not torch.equal(answer, tables["a"][row]):
                        place, near = found.of["a"][row].tolist()
                        assert torch.equal(answer, tables[found.tables[place]][near])
                        approximate += 1
            # A table that the file leaves out is never approximated.
            for _ in range(3):
                every = torch.arange(SIZES["b"])
                assert torch.equal(ask(snapshot, "b", every), tables["b"])
            stats = snapshot.stats()["snapshot"]
        told = stats["neighbours"]
        assert told["rows_answered"] == stats["lookups"]["rows_surrogate"] == approximate > 100
        assert told["rows_dropped"] == told["rows_failed"] == 0
        assert 0 < told["used_bytes"] <= told["capacity_bytes"] == 1280
        assert stats["cache_used_bytes"] <= 32_000
        seen.append(stats["lookups"])
    assert seen[0] == seen[1]


def test_files_that_do_not_fit_are_refused(
    folder: Path, tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def opened(**given: object) -> None:
        misses = str(given.pop("misses", "surrogate"))
        cache = tb.CacheOptions(**{"tiers": "lru,neighbours:second_chance:4", **given})
        tb.Snapshot.open(folder, cache=cache, misses=misses).close()

    with pytest.raises(tb.InvalidError, match="no such file"):
        opened()
    found = tb.find_neighbours(tables, counts())
    with tb.Snapshot.open(folder) as snapshot:
        path = Path(found.write(snapshot))
        wrong = torch.zeros(SIZES["a"], 2, dtype=torch.int64)
        for near in (wrong[:-1], wrong[:, 0], wrong + 3, wrong + torch.tensor([2, 0])):
            with pytest.raises(tb.InvalidError):
                tb.Neighbours(tables=found.tables, of={"a": near}).write(snapshot, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))
    opened()
    opened(neighbours=path)
    for given in (
        {"misses": "read"},
        {"misses": "default"},
        {"tiers": "lru,neighbours:fifo:4"},
        {"tiers": "lru,neighbours,neighbours"},
        {"tiers": "neighbours"},
        {"tiers": "lru", "neighbours": path},
    ):
        with pytest.raises(tb.InvalidError):
            opened(**given)
    content = path.read_bytes()
    path.write_bytes(content[:-4096])
    with pytest.raises(tb.CorruptionError, match="wrong length"):
        opened()
    path.write_bytes(content[:100] + b"x" + content[101:])
    with pytest.raises((tb.CorruptionError, tb.InvalidError)):
        opened()
    other = tmp_path / "other"
    import_tables({"a": tables["a"]}, other)
    path.write_bytes(content)
    near = tb.CacheOptions(tiers="lru,neighbours", neighbours=path)
    with pytest.raises(tb.InvalidError, match="of other tables"):
        tb.Snapshot.open(other, cache=near, misses="surrogate").close()
    with pytest.warns(RuntimeWarning, match="neighbours have too few bytes"):
        opened(bytes_max=64_000, tiers="lru,neighbours:second_chance:0.001")


def test_neighbours_by_name() -> None:
    tier = tb.NeighbourTier()
    assert cache_parts(tier) == [tier]
    assert cache_parts("lru, neighbours:second_chance:4") == ["lru", "neighbours:second_chance:4"]
