"""Every remedy of the code is followed by a test, or the list says why none can."""

from __future__ import annotations

import re

from .sources import REPOSITORY, in_python, in_rust, listed

#: What removes something must be followed: that nothing is lost is seen, not believed.
_REMOVES = ("delete", "remove", "drop ", "dropping", "overwrite", "wipe", "clear", "empty the")
#: Remedies that no test follows; the number may only fall.
LEFT_MAX = 58


def test_every_remedy_is_listed_and_every_entry_is_a_remedy() -> None:
    found = {**in_rust(), **in_python()}
    assert len(found) > 200
    missing = {remedy: files for remedy, files in found.items() if remedy not in listed()}
    assert not missing, "followed by no test of followed.txt"
    assert not listed().keys() - found.keys(), "no error has these remedies any more"


def test_the_tests_of_the_list_exist() -> None:
    for remedy, lines in listed().items():
        assert lines, f"nothing follows {remedy!r}"
        for line in lines:
            if line.startswith("left: "):
                continue
            file, name = line.split("::")
            text = (REPOSITORY / file).read_text()
            assert re.search(rf"\b(def|fn) {name}\(", text), f"{name} is not in {file}"


def test_few_remedies_are_left() -> None:
    left = [remedy for remedy, lines in listed().items() if lines[0].startswith("left: ")]
    assert len(left) <= LEFT_MAX, len(left)
    assert not [remedy for remedy in left if any(word in remedy for word in _REMOVES)]
