"""Does the look-ahead yield every batch, in order, and announce it once?"""

from collections.abc import Iterator

import pytest

import tierbed as tb


class Buffer:
    """A collection whose buffer holds ``room`` batches that were announced and not yet used."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[int] = []
        self.groups: list[list[int]] = []
        self.ended = 0

    def prefetch(self, batches: list[int]) -> int:
        fit = batches[: max(0, self.room - len(self.held))]
        self.held += fit
        self.groups.append(fit)
        return len(fit)

    def use(self, batch: int) -> bool:
        if batch in self.held:
            self.held.remove(batch)
            return True
        return False

    def end_lookahead(self) -> None:
        self.held.clear()
        self.ended += 1


def itself(batch: int) -> int:
    return batch


@pytest.mark.parametrize("window", [1, 2, 5, 16, 1000])
@pytest.mark.parametrize("count", [0, 1, 4, 33])
def test_all_batches_come_in_order_and_prefetched(window: int, count: int) -> None:
    buffer = Buffer(room=10**6)
    seen = []
    for batch in tb.lookahead(range(count), buffer, window=window, key=itself):
        assert buffer.use(batch), "a batch came before its rows"
        seen.append(batch)
    assert seen == list(range(count))
    assert buffer.ended == 1


def test_rows_are_fetched_in_groups() -> None:
    buffer = Buffer(room=10**6)
    for batch in tb.lookahead(range(100), buffer, window=20, key=itself):
        buffer.use(batch)
    sizes = [len(group) for group in buffer.groups if group]
    assert sizes[0] == 20
    assert len(sizes) <= 11, "one sweep per half window"


def test_the_window_shortens_to_what_fits() -> None:
    buffer = Buffer(room=3)
    hits = 0
    seen = []
    for batch in tb.lookahead(range(50), buffer, window=16, key=itself):
        hits += buffer.use(batch)
        seen.append(batch)
    assert seen == list(range(50))
    assert hits >= 45


def test_nothing_fits_and_all_still_comes() -> None:
    buffer = Buffer(room=0)
    assert list(tb.lookahead(range(9), buffer, window=4, key=itself)) == list(range(9))


def test_window_zero_reads_nothing_ahead() -> None:
    buffer = Buffer(room=10)
    read = []

    def loader() -> Iterator[int]:
        for batch in range(5):
            read.append(batch)
            yield batch

    for batch in tb.lookahead(loader(), buffer, window=0, key=itself):
        assert read[-1] == batch
    assert buffer.groups == []


def test_leaving_early_or_failing_ends_the_lookahead() -> None:
    buffer = Buffer(room=100)
    for _ in tb.lookahead(range(50), buffer, window=8, key=itself):
        break
    stream = tb.lookahead(range(50), buffer, window=8, key=itself)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]

    def failing() -> Iterator[int]:
        yield 0
        raise RuntimeError("the disk of the loader")

    with pytest.raises(RuntimeError, match="loader"):
        list(tb.lookahead(failing(), buffer, window=8, key=itself))
    assert buffer.ended == 3


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(tb.InvalidError, match="window"):
        tb.lookahead([], Buffer(1), window=-1)
