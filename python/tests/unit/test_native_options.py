"""Options of native calls: dicts and dataclasses are read, all else is refused with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tierbed as tb
from tierbed._native import CriteoReader, NativePlacement, NativeQueryLogBuilder, NativeStore

STORE: dict[str, Any] = {"dram_budget_bytes": 8 << 20, "backend": "memory"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"dram": 1}, "unknown field"),
        ({"backend": "tape"}, "unknown variant"),
        ({"queue_depth": "many"}, "invalid type"),
        ({"queue_depth": -1}, "invalid value"),
        ({"dram_budget_bytes": 1 << 64}, "64 bits"),
        ({"dram_budget_bytes": float("nan")}, "finite"),
        ({"dram_budget_bytes": None}, "invalid type"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(tb.InvalidError, match=told):
        NativeStore(None, {**STORE, **wrong})


def test_what_is_no_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="an option cannot be of type"):
        NativeStore(None, {**STORE, "backend": object()})
    with pytest.raises(TypeError):
        NativeStore(None, {1: 2})


def test_dataclasses_and_paths_are_options(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Read:
        format: str
        bad_lines: str = "fail"

    log = tmp_path / "log"
    log.write_text("")
    assert CriteoReader([str(log)], Read("criteo")).dense_count == 13
    with pytest.raises(tb.InvalidError, match="unknown variant"):
        CriteoReader([str(log)], Read("tape"))


def test_results_keep_their_numbers() -> None:
    store = NativeStore(None, STORE)
    table = tb.EmbeddingBagConfig(10, 4, "t", init=tb.Uniform(-0.1, 0.3), seed=(1 << 63) - 1)
    schema = table.schema(tb.Adagrad(initial_accumulator_value=0.1), store_seed=1)
    assert store.add_table(schema) == 0
    assert store.schema()["tables"] == [schema]
    builder = NativeQueryLogBuilder(4)
    options = {"method": "by_frequency", "rows_per_page": 2, "seed": 1, "threads": 1}
    [placed] = NativePlacement.build(
        builder.finish(), None, {**options, "iterations": 1}, [0.0], None, None, None
    )
    assert placed.info()["pages_by_rows"] == [0, 0, 2]
