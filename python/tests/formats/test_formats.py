"""Files of earlier versions open, hold the rows they held, and train on to the same bits.

Every folder of ``testdata/formats`` was written by one earlier version and is never written again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import serving, stores
from .archive import FORMATS, read_facts, unpack

CASES = {case.name: case for case in (*stores.CASES, *serving.CASES)}
VERSIONS = sorted(folder.name for folder in FORMATS.iterdir() if folder.is_dir())
FIXTURES = sorted(
    (version, path.name.removesuffix(".tar.gz"))
    for version in VERSIONS
    for path in (FORMATS / version).glob("*.tar.gz")
)


def test_every_file_of_testdata_is_a_fixture_with_a_reader() -> None:
    assert VERSIONS
    for version in VERSIONS:
        names = {name for of, name in FIXTURES if of == version}
        assert names <= CASES.keys()
        wanted = {f"{name}{end}" for name in names for end in (".tar.gz", ".json")}
        assert {path.name for path in (FORMATS / version).iterdir()} == wanted


@pytest.mark.parametrize(("version", "name"), FIXTURES)
def test_what_an_earlier_version_wrote_is_read(version: str, name: str, tmp_path: Path) -> None:
    unpack(FORMATS / version / f"{name}.tar.gz", tmp_path)
    CASES[name].check(tmp_path, read_facts(FORMATS / version / f"{name}.json"))
