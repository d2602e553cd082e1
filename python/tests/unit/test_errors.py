"""Does every kind of error arrive as its own class?"""

import pickle

import pytest

from tierbed import errors

BUILT_IN = {
    "invalid": ValueError,
    "corruption": errors.TierbedError,
    "io": OSError,
    "no_space": OSError,
    "poisoned": errors.TierbedError,
    "closed": errors.TierbedError,
    "unsupported": NotImplementedError,
}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_kind_has_a_class_with_message_and_context(kind: str) -> None:
    error = errors.from_native(kind, "page checksum mismatch (page_id: 7)", {"page_id": "7"})
    assert isinstance(error, BUILT_IN[kind])
    assert isinstance(error, errors.TierbedError)
    assert (error.kind, str(error)) == (kind, "page checksum mismatch (page_id: 7)")
    assert error.context == {"page_id": "7"}


def test_a_full_disk_is_an_os_error_with_its_number() -> None:
    error = errors.from_native("no_space", "write failed", {}, 28)
    assert isinstance(error, errors.NoSpaceError)
    assert isinstance(error, errors.IoError)
    assert error.errno == 28
    assert str(error) == "write failed"


def test_errors_cross_processes() -> None:
    error = errors.from_native("no_space", "write failed", {"path": "x"}, 28)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.context, again.errno) == ("write failed", {"path": "x"}, 28)


def test_an_unknown_kind_is_still_ours() -> None:
    assert isinstance(errors.from_native("new_kind", "?", {}), errors.TierbedError)
