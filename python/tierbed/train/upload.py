"""A version on its way to its location, by a thread: training goes on meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

from tierbed import _native
from tierbed.errors import TierbedError
from tierbed.serve.versions import now_s
from tierbed.train.channel import Cut, Head, Target, newest
from tierbed.train.publishing import LocalFolder

__all__ = ["Upload"]


class Upload(threading.Thread):
    """Pushes a version, looks where the channel is then, and removes what is needed no more.

    Not a daemon: a program that ends waits for what is on its way.

    Args:
        cut: What is pushed.
        target: Where to.
        local: The folder of what deltas are made against.
        expected: Where the channel is before; as of ``_native.push_version``.
        prunes: Whether old versions are removed from the location too.
    """

    def __init__(
        self,
        cut: Cut,
        target: Target,
        local: LocalFolder,
        *,
        expected: str | dict[str, Any],
        prunes: bool,
    ) -> None:
        super().__init__(name="tierbed-publisher", daemon=False)
        self.cut = cut
        self._target, self._local = target, local
        self._expected, self._prunes = expected, prunes
        #: Why the push failed; it may have moved the channel all the same.
        self.error: BaseException | None = None
        #: Why versions that are needed no more are still there.
        self.tidy_error: BaseException | None = None
        #: Where the channel is now, if ``is_seen``.
        self.head: Head = None
        self.is_seen = False
        self.seconds = 0.0

    def run(self) -> None:
        """Does all that."""
        begun_s = time.monotonic()
        place, channel = self._target.versions.location, self._target.channel
        folder = str(self.cut.folder)
        try:
            given = _native.push_version(place, folder, channel, self._expected, now_s(), None)
            self.head, self.is_seen = given["head"], True
        except BaseException as error:
            self.error = error
            self._look(error)
        self.seconds = time.monotonic() - begun_s
        if newest(self.head) == self.cut.identity:
            try:
                self._tidy()
            except BaseException as error:
                self.tidy_error = error

    def _look(self, failed: BaseException) -> None:
        """Looks where the channel is: a store that answers late may have moved it."""
        try:
            self.head = self._target.head()
            self.is_seen = True
        except TierbedError as error:
            # Why the push failed says more; the channel is looked at again before the next one.
            failed.__context__ = error

    def _tidy(self) -> None:
        assert self.head is not None, "a channel that was moved is somewhere"
        self._local.leave_only([link["identity"] for link in self.head["chain"]])
        if self._prunes and self._target.keep_s is not None:
            self._target.versions.prune(self._target.keep_s)
