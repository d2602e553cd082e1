"""Measured tiles of kernels: what ``triton_cases.py`` runs of them in the interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.dist.kernels import pool_to_ranks, step_rows, tiles, tune, uses

CPU = torch.device("cpu")
LOAD = tune.Load(features=2, rows=9, batch=6, longest=3)


def interpret_all() -> None:
    with cache_folder() as folder:
        check_that_tiles_are_kept(folder)
    with cache_folder() as folder:
        damaged_tiles_are_told(folder)
    with cache_folder() as folder:
        check_folders(folder)
    with pytest.raises(tb.InvalidError, match="measured on CUDA devices"):
        tune.tune([64], "cpu")
    for dim in (1, 3, 16, 64, 200, 1024):
        for kernel in tiles.FIELDS:
            assert list(tune.candidates(kernel, dim)), (kernel, dim)


@contextlib.contextmanager
def cache_folder() -> Iterator[Path]:
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


@contextlib.contextmanager
def launched() -> Iterator[list[dict[str, Any]]]:
    """Gives the constants of what lookups and steps launch."""
    told: list[dict[str, Any]] = []
    kept = pool_to_ranks.launch

    def note(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        told.append({"kernel": kernel.__name__, **constants})
        kept(kernel, programs, *arguments, **constants)

    pool_to_ranks.launch = step_rows.launch = note
    try:
        yield told
    finally:
        pool_to_ranks.launch = step_rows.launch = kept


def pool_and_step(dim: int) -> list[dict[str, Any]]:
    """Looks up and steps with the tiles that are known, and returns what was launched."""
    with launched() as told:
        out = torch.full((1, dim), float("nan"))
        one = torch.tensor([0, 1])
        for is_single in (False, True):
            pool_to_ranks.pool_to_ranks(
                torch.full((1, dim), 2.0),
                one[:1],
                (one[:1], one, None),
                torch.tensor([out.data_ptr()]),
                one,
                one[:1],
                dim,
                is_single=is_single,
            )
            assert bool((out == 2).all())
        sorted_uses = uses.sort_uses(one[:1], one[:1], None, None, row_total=1, grad_total=dim)
        state, counts = torch.zeros(1, 0), torch.zeros(1, dtype=torch.int32)
        numbers = step_rows.StepNumbers(kind="sgd", lr=1.0, eps=0.0, weight_decay=0.0)
        step_rows.step_rows(out, state, counts, sorted_uses, torch.ones(1, dim), numbers)
        assert bool((out == 1).all())
    return told


def check_that_tiles_are_kept(folder: Path) -> None:
    """The tile of the least time is taken for its width, and for no other one or other GPU."""
    before = pool_and_step(32), pool_and_step(8)
    best = {}
    for kernel in tiles.FIELDS:
        last = list(tune.candidates(kernel, 32))[-1]
        times = iter(range(100, 0, -1))

        def measure(run: Callable[[], None], times: Iterator[int] = times) -> float:
            ms = next(times)
            if ms == 100:
                run()
            return ms

        found = tune.tune_kernel(kernel, 32, CPU, LOAD, measure)
        assert (found.gpu, found.width, found.tile) == ("interpreter", 32, last)
        path = tiles.keep_tiles([found])
        best[kernel] = last
    assert path == folder / "tierbed" / "kernel-tiles.json"
    assert len(json.loads(path.read_text())["tiles"]) == len(tiles.FIELDS)
    other = tiles.MeasuredTile(
        gpu="another", kernel="pool_to_ranks", width=8, tile=best["pool_to_ranks"]
    )
    tiles.keep_tiles([other])
    assert pool_and_step(8) == before[1]
    told = pool_and_step(28)
    order = ["pool_to_ranks", "pool_to_ranks_single", "step_rows_many", "step_rows"]
    names = {"bags": "bags_per_program", "rows": "rows_per_program", "warps": "num_warps"}
    assert len(told) == len(before[0]) == len(order)
    for kernel, constants in zip(order, told, strict=True):
        wanted = {names.get(name, name): number for name, number in best[kernel].items()}
        assert wanted.items() <= constants.items(), kernel
    # Rows in fewer bytes have tiles of their own.
    with launched() as told:
        half, one = torch.ones(1, 32, dtype=torch.float16), torch.tensor([0, 1])
        out = torch.empty(1, 32)
        addresses = torch.tensor([out.data_ptr()])
        bags = (one[:1], one, None)
        pool_to_ranks.pool_to_ranks(half, one[:1], bags, addresses, one, one[:1], 32)
    chosen = pool_to_ranks.pool_tile(32, item_bytes=2)
    assert told[0]["bags_per_program"] == chosen.bags


def damaged_tiles_are_told(folder: Path) -> None:
    """A file that is not what was written is an error until it is deleted."""
    tile = {"bags": 2, "rows_at_once": 4, "warps": 1}
    right = {"gpu": "interpreter", "kernel": "pool_to_ranks", "width": 32, "tile": tile}
    path = tiles.keep_tiles([tiles.MeasuredTile(**right)])
    whole = path.read_text()
    for text in [
        whole[:-20],
        "\ufffe",
        "[]",
        '{"version": 2, "tiles": []}',
        '{"version": 1}',
        *(
            json.dumps({"version": 1, "tiles": [right | wrong]})
            for wrong in (
                {"kernel": "another"},
                {"width": 33},
                {"tile": {"bags": 2}},
                {"tile": tile | {"bags": 3}},
                {"tile": tile | {"warps": 1.0}},
                {"tile": tile | {"warps": 4096}},
                {"tile": 7},
                {"gpu": 7},
                {"more": 7},
            )
        ),
    ]:
        path.write_bytes(text.encode("utf-16" if text == "\ufffe" else "utf-8"))
        tiles._known.cache_clear()
        with pytest.raises(tb.CorruptionError, match="delete that file") as caught:
            pool_and_step(32)
        assert caught.value.context["path"] == str(path)
        with pytest.raises(tb.CorruptionError, match="delete that file"):
            tiles.keep_tiles([])
        path.unlink()
        pool_and_step(32)
        tiles.keep_tiles([tiles.MeasuredTile(**right)])
    path.unlink()
    path.mkdir()
    tiles._known.cache_clear()
    with pytest.raises(tb.IoError, match="cannot read"):
        pool_and_step(32)


def check_folders(folder: Path) -> None:
    """Tiles lie in the cache folder of the user, as the standard of such folders says."""
    os.environ["XDG_CACHE_HOME"] = "not/absolute"
    assert tiles.tiles_file() == Path.home() / ".cache" / "tierbed" / "kernel-tiles.json"
    home = Path.home

    def without_home() -> Path:
        raise RuntimeError("no home")

    Path.home = without_home  # type: ignore[method-assign,assignment]
    try:
        assert tiles.tiles_file() is None
        formula = pool_to_ranks.pool_tile(32)
        assert tiles.Tiles.of(CPU).pick("pool_to_ranks", 32, formula) is formula
        with pytest.raises(tb.IoError, match="set XDG_CACHE_HOME"):
            tiles.keep_tiles([])
        os.environ["XDG_CACHE_HOME"] = str(folder)
        assert tiles.keep_tiles([]).is_file()
    finally:
        Path.home = home  # type: ignore[method-assign]
