"""Findings: what was looked at, how it is, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "State"]

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        name: What was looked at.
        state: A ``problem`` stops Tierbed from working, a ``warning`` makes it slow or risky.
        found: What there is.
        advice: What to change; empty where nothing is.
        values: The same as numbers and words, for machines.
    """

    name: str
    state: State
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        about = {"name": self.name, "state": self.state, "found": self.found}
        return {**about, "advice": self.advice or None, **self.values}
