"""Reports as a page, in a notebook, and as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from tierbed.report.parts import Part
from tierbed.report.style import STYLE

__all__ = ["Report"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a store or a snapshot does: shows itself in notebooks, and saves a page.

    Attributes:
        title: What it is of.
        about: What holds for all of it.
        parts: Its sections.
        numbers: What the sections show, for programs.

    Examples:
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     report = store.report()
        >>> report.save("report.html")
        >>> report.numbers["memory"]["limit_bytes"]
        16777216
    """

    title: str
    about: str
    parts: Sequence[Part] = field(repr=False)
    numbers: Mapping[str, Any] = field(repr=False)

    def to_html(self) -> str:
        """Returns a whole page that needs nothing else: no script, no file, no network."""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f'<title>{escape(self.title)}</title>\n<link rel="icon" href="data:,">\n'
            f'<style>\n{STYLE}</style>\n</head>\n<body class="tierbed">\n{self._body()}\n'
            "</body>\n</html>\n"
        )

    def _repr_html_(self) -> str:
        return f'<style>{STYLE}</style><div class="tierbed">{self._body()}</div>'

    def _body(self) -> str:
        sections = "\n".join(part.to_html() for part in self.parts)
        return (
            f'<h1>{escape(self.title)}</h1>\n<p class="note">{escape(self.about)}</p>\n'
            f"<main>\n{sections}\n</main>"
        )

    def to_text(self) -> str:
        """Returns the same as plain text."""
        parts = "\n\n".join(part.to_text() for part in self.parts)
        return f"{self.title}\n{self.about}\n\n{parts}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page, replacing the file at once.

        Args:
            path: The file, such as ``report.html``.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(self.to_html(), encoding="utf-8")
        temporary.replace(target)

    def __str__(self) -> str:
        return self.to_text()
