"""When a publisher writes a whole version, and what its deltas are made against."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierbed as tb
from tierbed.train.publishing import Against, Full, Link, LocalFolder, Rules, choose

EVERY = Rules(delta_every_s=60.0, full_every_s=3600.0)


def chain(*sizes: int, here: int = 99, noted: tuple[int, ...] | None = None) -> list[Link]:
    """A whole version of the first size, and deltas; the first ``here`` of them lie here."""
    return [
        Link(
            identity=f"id{at}",
            file_bytes=size,
            folder=Path(f"id{at}") if at < here else None,
            is_noted=noted is None or at in noted,
        )
        for at, size in enumerate(sizes)
    ]


def test_the_first_version_is_whole() -> None:
    assert isinstance(choose(EVERY, [], 0.0), Full)


@pytest.mark.parametrize("deltas", range(8))
def test_a_delta_is_made_against_the_newest_version(deltas: int) -> None:
    assert choose(EVERY, chain(1000, *[10] * deltas), 5.0) == Against(at=deltas)


def test_a_ninth_delta_takes_the_place_of_eight() -> None:
    assert choose(EVERY, chain(1000, *[10] * 8), 5.0) == Against(at=0)


def test_deltas_of_a_quarter_of_the_bytes_become_one() -> None:
    assert choose(EVERY, chain(1000, 124, 125), 5.0) == Against(at=2)
    assert choose(EVERY, chain(1000, 125, 125), 5.0) == Against(at=0)
    # And where that one is as large, the next version is whole.
    assert choose(EVERY, chain(1000, 249), 5.0) == Against(at=1)
    assert choose(EVERY, chain(1000, 250), 5.0) == Full(
        reason="the delta has become too large for its snapshot"
    )


def test_a_whole_version_is_due_now_and_then() -> None:
    assert isinstance(choose(EVERY, chain(1000, 10), 3600.0), Full)
    never = Rules(delta_every_s=60.0, full_every_s=None)
    assert choose(never, chain(1000, 10), 1e9) == Against(at=1)
    only = Rules(delta_every_s=None, full_every_s=60.0)
    assert isinstance(choose(only, chain(1000), 1.0), Full)


def test_only_what_is_known_and_here_is_built_on() -> None:
    assert choose(EVERY, chain(1000, 10, 10, noted=(0, 1)), 5.0) == Against(at=1)
    assert choose(EVERY, chain(1000, 10, 10, here=2), 5.0) == Against(at=1)
    assert choose(EVERY, chain(1000, 10, 10, noted=(0,), here=2), 5.0) == Against(at=0)
    assert isinstance(choose(EVERY, chain(1000, 10, noted=()), 5.0), Full)
    assert isinstance(choose(EVERY, chain(1000, 10, here=0), 5.0), Full)


def test_a_local_folder_has_one_publisher(tmp_path: Path) -> None:
    local = LocalFolder(tmp_path / "local")
    with pytest.raises(tb.ClosedError, match="give local another folder"):
        LocalFolder(tmp_path / "local")
    LocalFolder(tmp_path / "other").close()
    local.writing.mkdir()
    local.close()
    again = LocalFolder(tmp_path / "local")
    assert not again.writing.exists(), "what a killed publisher was writing is gone"
    again.close()
