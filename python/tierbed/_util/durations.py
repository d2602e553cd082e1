"""Durations as people write them: ``"72h"``."""

from __future__ import annotations

import math
import re

from tierbed.errors import InvalidError

__all__ = ["parse_seconds"]

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(duration: float | str, name: str = "duration") -> float:
    """Reads a duration: a number of seconds, or text such as ``"60s"``, ``"24h"``, ``"7d"``.

    Units are ``ms``, ``s``, ``m`` or ``min``, ``h`` and ``d``.

    Raises:
        InvalidError: Not a duration, naming ``name``.
    """
    if isinstance(duration, (int, float)) and not isinstance(duration, bool):
        if math.isfinite(duration) and duration >= 0:
            return float(duration)
        raise InvalidError(
            f"{name} must be a number of seconds that is not negative: {duration}",
            {name: str(duration)},
        )
    match = _DURATION.fullmatch(duration) if isinstance(duration, str) else None
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InvalidError(
            f"{name} is not a duration: {duration!r}; write for example 60s, 24h or 7d",
            {name: str(duration)},
        )
    return float(match[1]) * unit
