"""Minutes since 1970: the time that evictions by age go by."""

from __future__ import annotations

import time

from tierbed.errors import InvalidError

__all__ = ["checked_minutes", "minutes_now"]


def checked_minutes(now_mins: int | None) -> int:
    """Returns minutes since 1970, by default those of now.

    Raises:
        InvalidError: No number of minutes from 0 to 2^32 - 1.
    """
    now = minutes_now() if now_mins is None else now_mins
    if not 0 <= now < 1 << 32:
        raise InvalidError("now_mins must be from 0 to 2^32 - 1", {"now_mins": str(now)})
    return now


def minutes_now() -> int:
    """Returns minutes since 1970."""
    return int(time.time() // 60)
