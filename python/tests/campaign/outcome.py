"""What came of one try, and what do all tries come to?"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: What must not happen; anything else is an outcome.
BAD = ("lost", "silent", "panic", "signal", "hang", "wrong")
#: Good outcomes, in the order of the table's columns.
GOOD = ("right", "refused", "rollback", "unacked", "documented", "skipped")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One try.

    Attributes:
        label: What was tried on what: ``"kill in checkpoint"``, ``"flip in CURRENT"``.
        came: One of :data:`GOOD` or :data:`BAD`.
        text: What was seen, for people.
        setting: The configuration.
    """

    label: str
    came: str
    text: str = ""
    setting: str = ""


@dataclass(kw_only=True)
class Case:
    """All outcomes of one numbered case of a kind."""

    kind: str
    number: int
    seed: int
    outcomes: list[Outcome]

    def command(self) -> str:
        return f"make campaign KIND={self.kind} SEED={self.seed} CASE={self.number}"


class Tally:
    """Counts of a whole campaign."""

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.bad: list[dict[str, Any]] = []
        self.notes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.cases: collections.Counter[str] = collections.Counter()

    def add(self, case: Case) -> None:
        self.cases[case.kind] += 1
        for one in case.outcomes:
            if one.came not in GOOD + BAD:
                raise ValueError(f"no outcome is called {one.came!r}")
            self.counts[case.kind, one.label, one.came] += 1
            if one.came == "skipped":
                self.notes[case.kind, one.text] += 1
            if one.came in BAD:
                self.bad.append({**asdict(one), "kind": case.kind, "command": case.command()})

    def table(self) -> str:
        lines = [f"{'what was tried':44}{'tries':>9}  outcomes"]
        labels = sorted({(kind, label) for kind, label, _ in self.counts})
        for kind in sorted(self.cases):
            lines.append(f"{kind} ({self.cases[kind]} cases)")
            for of, label in labels:
                if of == kind:
                    lines.append(self._line(kind, label))
        return "\n".join(lines)

    def _line(self, kind: str, label: str) -> str:
        found = {came: self.counts[kind, label, came] for came in (*BAD, *GOOD)}
        tries = sum(count for came, count in found.items() if came != "skipped")
        told = ", ".join(
            f"{count:,} {came.upper() if came in BAD else came}"
            for came, count in found.items()
            if count
        )
        return f"  {label[:41]:42}{tries:>9,}  {told}"

    def verdict(self) -> str:
        worst = collections.Counter(one["came"] for one in self.bad)
        return ", ".join(f"{worst[name]} {name}" for name in BAD)

    def failures(self) -> Iterable[str]:
        """One paragraph for each different thing that must not happen, with its command."""
        seen: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
        for one in self.bad:
            key = (one["kind"], one["label"], one["came"], one["setting"])
            seen.setdefault(key, []).append(one)
        for (kind, label, came, setting), found in sorted(seen.items()):
            first = found[0]
            yield (
                f"{came.upper()} x{len(found)} {kind}: {label} [{setting}]\n"
                f"    {first['text'][:300]}\n    {first['command']}"
            )

    def write(self, path: Path, **more: Any) -> None:
        rows = [
            {"kind": kind, "label": label, "came": came, "count": count}
            for (kind, label, came), count in sorted(self.counts.items())
        ]
        notes = [{"kind": k, "text": t, "count": c} for (k, t), c in sorted(self.notes.items())]
        told = {**more, "cases": dict(self.cases), "counts": rows, "bad": self.bad, "notes": notes}
        path.write_text(json.dumps(told, indent=1) + "\n")
