"""Parts of a report, each as HTML and as text: figures, tables with bars, lines over time.

Every text goes through :func:`html.escape`: names of tables are those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol, TypeAlias

from tierbed._util.bytes import format_bytes

__all__ = ["Bar", "Column", "Figure", "Lines", "Note", "Part", "Table", "count_text", "share_text"]

_HEIGHT = 90


class Part(Protocol):
    """A section of a report."""

    def to_html(self) -> str:
        """Returns a ``<section>``."""

    def to_text(self) -> str:
        """Returns lines of plain text."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number, large.

    Attributes:
        name: What it is.
        value: The number with its unit.
        note: What it is of.
    """

    name: str
    value: str
    note: str = ""

    def to_html(self) -> str:
        """Returns a ``<section>``."""
        return (
            f'<section class="figure"><h2>{escape(self.name)}</h2>'
            f'<div class="value">{escape(self.value)}</div>'
            f'<div class="note">{escape(self.note)}</div></section>'
        )

    def to_text(self) -> str:
        """Returns a line."""
        return f"{self.name}: {self.value}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A cell that is a share: a bar, and its text.

    Attributes:
        ratio: From 0 to 1.
        text: Beside the bar.
    """

    ratio: float
    text: str

    def to_html(self) -> str:
        """Returns a ``<div>``."""
        width = 100 * min(1.0, max(0.0, self.ratio))
        return (
            f'<div class="bar"><div class="track"><div class="fill" style="width: {width:.2f}%">'
            f"</div></div><span>{escape(self.text)}</span></div>"
        )


Cell: TypeAlias = "str | Bar"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its head.
        is_number: Whether its cells are numbers, which stand at the right.
        is_wide: Whether a narrow screen does without.
    """

    name: str
    is_number: bool = False
    is_wide: bool = False

    def kind(self) -> str:
        """Returns the attribute of its cells."""
        kinds = ["number"] * self.is_number + ["wide"] * self.is_wide
        return f' class="{" ".join(kinds)}"' if kinds else ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows and columns.

    Attributes:
        title: Above it.
        columns: Its columns.
        rows: Cells of each row.
        note: Below it.
        width: ``full``, ``half`` or ``third`` of the page.
        current: The row that is in force, which stands out.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    width: str = "half"
    current: int | None = None

    def to_html(self) -> str:
        """Returns a ``<section>``."""
        heads = "".join(f"<th{one.kind()}>{escape(one.name)}</th>" for one in self.columns)
        body = "".join(self._row(at, row) for at, row in enumerate(self.rows))
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<section class="{self.width}"><h2>{escape(self.title)}</h2><div class="wider">'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{note}"
            "</section>"
        )

    def _row(self, at: int, row: Sequence[Cell]) -> str:
        cells = (
            f"<td{column.kind()}>{escape(cell) if isinstance(cell, str) else cell.to_html()}</td>"
            for column, cell in zip(self.columns, row, strict=True)
        )
        kind = ' class="now"' if at == self.current else ""
        return f"<tr{kind}>{''.join(cells)}</tr>"

    def to_text(self) -> str:
        """Returns the title, and a line per row."""
        texts = [
            [cell if isinstance(cell, str) else cell.text for cell in row] for row in self.rows
        ]
        lines = [[column.name for column in self.columns], *texts]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.columns))]
        shown = [
            "  ".join(
                cell.rjust(width) if column.is_number or "%" in cell else cell.ljust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *(f"  {line}" for line in shown), *_noted(self.note)])


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A line over time, or over budgets, from 0 to its highest point.

    Attributes:
        title: Above it.
        points: ``(x, y)``, by x.
        highest: The text of the highest y.
        scale: Texts below, from the first x to the last.
        note: Below it.
        width: As of :class:`Table`.
        top: A y that has room, also where no point is so high.
        now: The x that is in force, marked.
    """

    title: str
    points: Sequence[tuple[float, float]]
    highest: str
    scale: Sequence[str]
    note: str = ""
    width: str = "third"
    top: float = 0.0
    now: float | None = None

    def to_html(self) -> str:
        """Returns a ``<section>``."""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        below = "".join(f"<span>{escape(text)}</span>" for text in self.scale)
        return (
            f'<section class="{self.width}"><h2>{escape(self.title)}</h2>'
            f'<div class="note">{escape(self.highest)}</div>{self._svg()}'
            f'<div class="scale note">{below}</div>{note}</section>'
        )

    def _svg(self) -> str:
        first, last = self.points[0][0], self.points[-1][0]
        across = max(last - first, 1e-9)
        top = max(self.top, *(y for _, y in self.points), 1e-9)

        def at(x: float, y: float) -> str:
            return f"{1000 * (x - first) / across:.1f},{_HEIGHT * (1 - y / top):.1f}"

        line = " ".join(at(x, y) for x, y in self.points)
        area = f"0,{_HEIGHT} {line} 1000,{_HEIGHT}"
        mark = ""
        if self.now is not None:
            x = at(self.now, 0).partition(",")[0]
            mark = f'<line class="now" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}"/>'
        label = escape(f"{self.title}: {self.highest}", quote=True)
        return (
            f'<svg viewBox="0 0 1000 {_HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}"><line x1="0" x2="1000" y1="{_HEIGHT}" y2="{_HEIGHT}"/>'
            f'{mark}<polygon points="{area}"/><polyline points="{line}"/></svg>'
        )

    def to_text(self) -> str:
        """Returns the title and the highest point."""
        return "\n".join([f"{self.title}: {self.highest}", *_noted(self.note)])


@dataclass(frozen=True, kw_only=True)
class Note:
    """A text in place of what is not known.

    Attributes:
        title: Above it.
        text: What is missing, and how to get it.
        code: A call that gets it.
        width: As of :class:`Table`.
    """

    title: str
    text: str
    code: str = ""
    width: str = "half"

    def to_html(self) -> str:
        """Returns a ``<section>``."""
        code = f"<p><code>{escape(self.code)}</code></p>" if self.code else ""
        return (
            f'<section class="{self.width}"><h2>{escape(self.title)}</h2>'
            f'<p class="note">{escape(self.text)}</p>{code}</section>'
        )

    def to_text(self) -> str:
        """Returns title, text and call."""
        code = f"\n    {self.code}" if self.code else ""
        return f"{self.title}\n  {self.text}{code}"


def _noted(note: str) -> list[str]:
    return [f"  {note}"] if note else []


def share_text(ratio: float) -> str:
    """Writes a share for people: ``"12.3 %"``."""
    return f"{100 * ratio:.1f} %"


def count_text(count: float) -> str:
    """Writes a count, or a rate, for people: ``"12,345"``, ``"1.2 M"``."""
    for least, unit in ((1e9, "G"), (1e6, "M")):
        if abs(count) >= 10 * least:
            return f"{count / least:,.1f} {unit}"
    return f"{count:,.0f}" if abs(count) >= 100 or count == int(count) else f"{count:.3g}"


def bytes_text(size_bytes: float) -> str:
    """Writes a size for people, as everywhere in Tierbed."""
    return format_bytes(size_bytes)
