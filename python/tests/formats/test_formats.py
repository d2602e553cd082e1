"""Does this version open what earlier versions wrote, to the last bit?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import format_set
import pytest
from conftest import REPOSITORY

import tierbed as tb

SETS = REPOSITORY / "testdata" / "formats"


def manifests() -> dict[str, dict[str, Any]]:
    return {
        folder.name: json.loads((folder / format_set.MANIFEST).read_text())
        for folder in sorted(SETS.iterdir())
    }


def fixtures() -> list[Any]:
    return [
        pytest.param(made, name, id=f"{made}-{name}")
        for made, told in manifests().items()
        for name in told["fixtures"]
    ]


@pytest.mark.parametrize(("made", "name"), fixtures())
def test_what_an_earlier_version_wrote_is_opened_to_the_last_bit(
    made: str, name: str, tmp_path: Path
) -> None:
    entry = manifests()[made]["fixtures"][name]
    format_set.unpack(SETS / made / f"{name}{format_set.SUFFIX}", tmp_path)
    try:
        format_set.check_fixture(entry, tmp_path)
    except tb.UnsupportedError as error:
        # A library that is not on every machine; all else must open.
        if "librocksdb" not in str(error):
            raise
        pytest.skip(str(error))


def test_no_fixture_lies_about_that_no_test_opens() -> None:
    told = manifests()
    assert told, "no sets of fixtures"
    for made, manifest in told.items():
        found = sorted(path.name for path in (SETS / made).iterdir())
        wanted = [
            format_set.MANIFEST,
            *(f"{name}{format_set.SUFFIX}" for name in manifest["fixtures"]),
        ]
        assert found == sorted(wanted), made


def test_every_set_is_small() -> None:
    for folder in SETS.iterdir():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 2 << 20, folder.name


def test_another_row_in_a_fixture_is_noticed(tmp_path: Path) -> None:
    """The check itself can fail: one row written over, one answer told otherwise."""
    folder = next(iter(sorted(SETS.iterdir())))
    told = json.loads((folder / format_set.MANIFEST).read_text())["fixtures"]
    entry = told["file"]
    format_set.unpack(folder / f"file{format_set.SUFFIX}", tmp_path)
    with format_set.stores.open_store(entry["recipe"], tmp_path / "store") as store:
        rows = store.read_rows("a", 3, 1)
        store.write_rows("a", 3, rows + 1)
        store.checkpoint("changed")
    with pytest.raises(AssertionError):
        format_set.check_fixture(entry, tmp_path)
    entry = told["snapshot"]
    entry["facts"]["answers"]["a"] = "0" * 64
    format_set.unpack(folder / f"snapshot{format_set.SUFFIX}", tmp_path)
    with pytest.raises(AssertionError):
        format_set.check_fixture(entry, tmp_path)
