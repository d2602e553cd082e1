"""Memory of a device for the rows of windows.

In forward order the rows of a window lie side by side, and an id is the number of an entry. So they
move to a device as they are, are trained in place, and come back when the window ends. Two windows
fit at a time: rows that both use are copied on the device, while the others of the ending window
come back and those of the beginning one go up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierbed.config.optim import state_words
from tierbed.errors import InvalidError, PoisonedError, UnsupportedError
from tierbed.ops.links import Link, as_device, link_of
from tierbed.ops.streams import HostStreams
from tierbed.ops.windows.layout import (
    CHUNK_WORDS,
    LINE_WORDS,
    GivenTable,
    Kind,
    Memory,
    Window,
    host_floats,
    host_pairs,
)

if TYPE_CHECKING:
    from tierbed._native_options import TableSchema

__all__ = ["WindowsOnDevice", "windows_on"]

# Chunks that have memory: two on their way in each direction.
STAGED = 4
# Most kinds of rows of a store.
KINDS_MAX = 256
# Budget of a CPU that stands in for a device.
CPU_BYTES = 1 << 30


class Staging:
    """Memory of the device that records go through, two pieces in turn.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._parts = [
            torch.empty(CHUNK_WORDS, dtype=torch.float32, device=device) for _ in range(2)
        ]
        self._free_after: list[Any] = [None, None]

    def next(self, like: Tensor) -> tuple[Tensor, Any]:
        """Returns memory of the shape of ``like``, and the event after which it is free."""
        self._parts.reverse()
        self._free_after.reverse()
        return self._parts[0][: like.numel()].view(like.shape), self._free_after[0]

    def note(self, event: Any) -> None:
        """Notes after which event that memory is free again."""
        self._free_after[0] = event


class WindowsOnDevice:
    """The rows of the current window, on a device. The engine calls it, one call at a time.

    Args:
        link: Copies between the host and the device.
        budget_bytes: Most bytes of the device's memory.
    """

    def __init__(self, link: Link, budget_bytes: int) -> None:
        self.link = link
        self.budget_bytes = budget_bytes
        self.begun_count = 0
        """Windows that came to the device."""
        self.launches: dict[Any, Any] = {}
        """What collections launch over the rows of the current window."""
        self._kinds: dict[int, Kind] = {}
        self._memory: list[Tensor] = []
        self._registered: list[int] = []
        self._window: Window | None = None
        self._counts: Tensor | None = None
        self._failure: str | None = None
        self._last: Any = None

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.link.device

    def note_tables(self, tables: list[TableSchema]) -> None:
        """Tells the tables of the store, in the order of their ids."""
        for at, table in enumerate(tables):
            words = state_words(table["optimizer"], table["dim"])
            self._kinds[at] = Kind(table["dim"], words)

    @property
    def window(self) -> Window:
        """The current window.

        Raises:
            PoisonedError: A step failed half-way, so that its rows are not known.
        """
        if self._failure is not None:
            raise PoisonedError(
                f"a step on the device failed ({self._failure}); open the store again, at its last "
                "checkpoint"
            )
        assert self._window is not None, "no window came to the device"
        return self._window

    @property
    def counts(self) -> Tensor:
        """``[3]`` i64 on the device: rows stepped, steps left out, and steps refused."""
        if self._counts is None:
            self._counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        return self._counts

    def left_out(self) -> int:
        """Returns how many steps were left out because their gradient was not finite."""
        return 0 if self._counts is None else int(self._counts[1])

    def fail(self, failure: BaseException) -> None:
        """Notes that a step that the engine has counted was not made."""
        self._failure = repr(failure)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Lets work of the current stream follow what any stream did with the rows before."""
        if self._last is not None:
            self.link.follow(self._last)
        try:
            yield
        finally:
            self._last = self.link.mark()

    # ------------------------------------------------------------ called by the engine

    def open(self, windows: list[Memory]) -> None:
        """Takes memory for two windows, and lets the device copy those of the host.

        Raises:
            InvalidError: They do not fit the budget.
        """
        assert not self._memory, "the windows of two engines are on one device"
        words = max(words for _, words in windows)
        # The parts of each kind begin at lines of their own.
        words += 3 * LINE_WORDS * KINDS_MAX
        least = 4 * (2 * words + STAGED * CHUNK_WORDS)
        if least > self.budget_bytes:
            raise InvalidError(
                f"two windows take {least} bytes of the device, more than hbm_budget "
                f"({self.budget_bytes}); raise it, or look ahead by a smaller window",
                {"least_bytes": str(least)},
            )
        memory = [torch.empty(words, dtype=torch.float32, device=self.device) for _ in windows]
        self._going_up, self._coming_down = Staging(self.device), Staging(self.device)
        # Last: what did not fit leaves nothing behind.
        self._memory = memory
        self._registered = [
            address for address, words in windows if self.link.register(address, 4 * words)
        ]

    def upload(self, words: Memory, tables: list[GivenTable]) -> None:
        """Takes the rows of a window, in place of those that are here."""
        self._window = None
        with self.in_order():
            self._begin(words, tables)

    def download(self, words: Memory) -> int:
        """Gives the rows back; returns how many were stepped since the last time."""
        with self.in_order():
            self._give_back(self.window, words)
            return self._finish()

    def advance(
        self, ended: Memory, begun: Memory, tables: list[GivenTable], carried: Memory
    ) -> int:
        """Goes on to the next window; returns as :meth:`download`.

        Args:
            ended: Gets the rows of the window that ends.
            begun: Has those of the window that begins, but for the carried ones.
            tables: Of the window that begins.
            carried: Address of pairs of entries, and how many.
        """
        before = self.window
        with self.in_order():
            self._give_back(before, ended)
            after = self._begin(begun, tables)
            self._carry(before, after, carried)
            return self._finish()

    def close(self) -> None:
        """Forgets the memory of the host, which is about to be freed."""
        with self.in_order():
            self.link.to_host(self.counts).wait()
        for address in self._registered:
            self.link.unregister(address)
        self._registered, self._memory, self._window = [], [], None
        self.launches.clear()
        del self._going_up, self._coming_down

    # ------------------------------------------------------------

    def _begin(self, words: Memory, tables: list[GivenTable]) -> Window:
        self._memory.reverse()
        window = Window(self._memory[0], tables, self._kinds)
        host = host_floats(words)
        for rows, first, records in window.chunks(host):
            staged, free_after = self._going_up.next(records)
            self.link.copy_up(records, staged, free_after)
            rows.put(first, staged)
            self._going_up.note(self.link.mark())
        self._window = window
        self.launches.clear()
        self.begun_count += 1
        return window

    def _give_back(self, window: Window, words: Memory) -> None:
        host = host_floats(words)
        for rows, first, records in window.chunks(host):
            staged, free_after = self._coming_down.next(records)
            if free_after is not None:
                self.link.follow(free_after)
            rows.give(first, staged)
            self._coming_down.note(self.link.copy_down(staged, records))

    def _finish(self) -> int:
        """Waits for rows on their way to the host.

        Raises:
            InvalidError: A step was refused.
        """
        counts = self.link.to_host(self.counts)
        self.link.finish_copies()
        stepped, _, refused = counts.wait().tolist()
        if refused:
            raise InvalidError(
                "a gradient since the last change of window was not finite, and rows were not "
                "stepped from there on; open the store again at its last checkpoint, and look for "
                'the cause, or make the collection with on_nonfinite="skip"'
            )
        self.counts[0] -= stepped
        return int(stepped)

    def _carry(self, before: Window, after: Window, carried: Memory) -> None:
        """Copies rows that both windows use; pairs come table after table."""
        count = carried[1]
        if count == 0:
            return
        pairs = host_pairs(carried)
        at = 0
        for table, (first, size, _, words) in enumerate(before.tables):
            end = at + int(torch.searchsorted(pairs[at:, 0].contiguous(), first + size))
            kind = self._kinds[table] if end > at else None
            step = max(1, CHUNK_WORDS // words)
            for start in range(at, end, step):
                assert kind is not None, "rows of no kind are carried"
                part = pairs[start : min(start + step, end)].to(torch.int64)
                part[:, 0] += before.first_rows[table] - first
                part[:, 1] += after.first_rows[table] - after.tables[table][0]
                places = self.link.to_device(part.t().contiguous())
                after.rows[kind].take(places[1], before.rows[kind], places[0])
            at = end
        assert at == count, "carried rows are not in the order of tables"


def windows_on(device: torch.device | str, budget_bytes: int | None) -> WindowsOnDevice:
    """Returns memory for windows on ``device``; by default half of what is free there.

    Raises:
        InvalidError: A device that is not there, or a CPU without Triton's interpreter.
        UnsupportedError: Triton is not installed.
    """
    try:
        # Triton is optional.
        from tierbed.dist.kernels.launch import check_device
        from tierbed.dist.kernels.step_rows import step_rows_kernel
    except ImportError as error:
        raise UnsupportedError(
            f"rows on a device need Triton, and it cannot be imported ({error}); install "
            "triton, or give device to the collection and not to the store"
        ) from error
    device = as_device(device)
    check_device(device, step_rows_kernel)
    link = link_of(device) or Link(HostStreams())
    if budget_bytes is None:
        is_cuda = device.type == "cuda"
        budget_bytes = torch.cuda.mem_get_info(device)[0] // 2 if is_cuda else CPU_BYTES
    return WindowsOnDevice(link, budget_bytes)
