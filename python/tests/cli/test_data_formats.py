"""Runs on files of every format that `tierbed train` reads, and scores of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierbed.cli import main

ROWS = 400


def tierbed(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def columns() -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    generator = np.random.default_rng(1)
    users = generator.integers(0, 40, ROWS)
    return pyarrow.table(
        {
            "click": (users % 3 == 0).astype(np.int8),
            "user": users,
            "site": [f"s{user % 7}" for user in users],
            "tags": [[f"t{user % 5}"] * (user % 4) for user in users],
            "price": [None if at == 5 else float(at % 9) for at in range(ROWS)],
        }
    )


OF_COLUMNS = ("--label", "click", "--dense", "price", "--categorical", "user,site,tags")


def parquet(folder: Path) -> tuple[Any, ...]:
    table = columns()
    files = pytest.importorskip("pyarrow.parquet")
    files.write_table(table, folder / "log.parquet", row_group_size=90)
    return ("--format", "parquet", "--data", folder / "log.parquet", *OF_COLUMNS)


def hashed(folder: Path) -> tuple[Any, ...]:
    return (*parquet(folder), "--hash-rows", 500)


def arrow(folder: Path) -> tuple[Any, ...]:
    table = columns()
    pytest.importorskip("pyarrow.feather").write_feather(table, folder / "log.arrow")
    return ("--format", "arrow", "--data", folder / "log.arrow", *OF_COLUMNS)


def movielens(folder: Path) -> tuple[Any, ...]:
    pytest.importorskip("pyarrow")
    lines = [f"{at % 40}\t{at * 7 % 60}\t{1 + at % 40 % 5}\t{at}" for at in range(ROWS)]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    return ("--format", "movielens", "--data", folder / "u.data", "--like", 3)


def multi_hot(folder: Path) -> tuple[Any, ...]:
    generator = np.random.default_rng(1)
    ids = {"0": generator.integers(0, 30, (ROWS, 3)), "1": generator.integers(0, 9, (ROWS, 1))}
    np.savez(folder / "day_0_sparse_multi_hot.npz", **ids)
    np.save(folder / "day_0_dense.npy", generator.random((ROWS, 13), dtype=np.float32))
    np.save(folder / "day_0_labels.npy", (ids["1"] % 2).astype(np.int32))
    return ("--format", "criteo_multi_hot", "--data", folder, "--table-rows", "30,9")


@pytest.mark.parametrize("made", [parquet, hashed, arrow, movielens, multi_hot])
def test_a_run_on_files_of_a_format(made: Any, tmp_path: Path) -> None:
    given = made(tmp_path)
    store = ("--store", tmp_path / "run", "--dram-budget", "4MiB")
    more = ("--dim", 4, "--batch-size", 16, "--lr", 0.2, "--seed", 1)
    assert tierbed("train", *given, *store, *more, "--json", tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["train_samples"] == 320
    assert result["auc"] > 0.8, "the label follows from the ids"
    assert (tmp_path / "run" / "vocabulary").exists() == (made not in (hashed, multi_hot))
    data = given[given.index("--data") + 1]
    scored = ("eval", *store, "--data", data, "--json", tmp_path / "eval.json")
    assert tierbed(*scored) == 0
    assert json.loads((tmp_path / "eval.json").read_text())["auc"] > 0.8


def test_labels_of_a_run_are_clicks(tmp_path: Path, capsys: Any) -> None:
    given = parquet(tmp_path)
    wrong = [("user" if one == "click" else one) for one in given]
    assert tierbed("train", *wrong, "--store", tmp_path / "run") != 0
    assert "other values than 0 and 1; name another column" in capsys.readouterr().err
    assert tierbed("train", *given, "--store", tmp_path / "again", "--dim", 4) == 0


def test_what_a_format_needs_is_named(tmp_path: Path, capsys: Any) -> None:
    given = parquet(tmp_path)
    bare = given[: given.index("--categorical")]
    assert tierbed("train", *bare, "--store", tmp_path / "run") != 0
    assert "with --categorical" in capsys.readouterr().err
    days = multi_hot(tmp_path)
    twice = (*days, "--data", tmp_path)
    assert tierbed("train", *twice, "--store", tmp_path / "run") != 0
    assert "takes one folder; name it with --data" in capsys.readouterr().err
