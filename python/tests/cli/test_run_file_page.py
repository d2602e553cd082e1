"""The reference of the run file is what the options say."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "reference" / "run-file.md"
sys.path.insert(0, str(REPOSITORY / "scripts" / "site"))

import run_file  # noqa: E402


def test_the_page_is_made_of_the_options() -> None:
    if "TIERBED_WRITE_REFERENCE" in os.environ:
        PAGE.write_text(run_file.page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == run_file.page(), "write it by `cargo x config`"


def test_a_server_has_two_keys_more_than_that_without_python() -> None:
    section = run_file.page().partition("## [serve]")[2]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == [
        "threads",
        "predict",
    ]


def test_the_server_without_python_knows_the_sections_of_others() -> None:
    source = (REPOSITORY / "crates" / "tierbed-server" / "src" / "file.rs").read_text()
    sections = set(re.findall(r"^## \[(\w+)\]", run_file.page(), re.MULTILINE))

    def words(name: str) -> set[str]:
        found = re.search(rf"const {name}: .* = \[(.*)\];", source)
        assert found is not None
        return set(re.findall(r'"(\w+)"', found[1]))

    assert words("OTHER_SECTIONS") == sections - {"serve"}
    assert words("OF_TORCH") == {"predict", "threads"}
