"""Joins the notes of `changes/` into the changelog, and writes the notes of a release.

Use: ``python scripts/release/changelog.py join VERSION DATE``, or ``notes VERSION``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HEADINGS = {
    "feature": "New",
    "change": "Changed",
    "fix": "Mended",
    "speed": "Faster",
    "format": "Formats on disk",
}
ENTRY = re.compile(r"^\[(\w+)\] ", re.MULTILINE)
WIDTH = 100


class ReleaseError(Exception):
    """A release that cannot be made as it stands; its text says what to do."""


def entries(folder: Path) -> dict[str, list[str]]:
    """Returns the entries of all notes of a folder, by tag, each as one line."""
    found: dict[str, list[str]] = {tag: [] for tag in HEADINGS}
    for note in sorted(folder.glob("*.md")):
        if note.name == "README.md":
            continue
        before, *parts = ENTRY.split(note.read_text())
        if before.strip() or not parts:
            raise ReleaseError(f"{note.name} does not begin with a tag such as [feature]")
        for tag, text in zip(parts[::2], parts[1::2], strict=True):
            if tag not in found:
                raise ReleaseError(f"{note.name} has the tag [{tag}], not one of {list(found)}")
            found[tag].append(" ".join(text.split()).replace("](../", "]("))
    return found


def grouped(found: dict[str, list[str]]) -> str:
    """Returns entries as the changelog has them: a bold heading and a list for each tag."""
    parts = []
    for tag, heading in HEADINGS.items():
        if found[tag]:
            items = [
                textwrap.fill(
                    text,
                    WIDTH,
                    initial_indent="- ",
                    subsequent_indent="  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                for text in found[tag]
            ]
            parts.append(f"**{heading}**\n\n" + "\n".join(items) + "\n")
    return "\n".join(parts)


def section(changelog: str, version: str) -> re.Match[str] | None:
    """Returns the section of a version: its heading's note in brackets, and its text."""
    heading = rf"^## {re.escape(version)} \((?P<when>[^)]*)\)\n"
    return re.search(heading + r"(?P<text>.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)


def join(repository: Path, version: str, date: str) -> None:
    """Moves all notes into the changelog's section of a version, which it makes or dates."""
    path, folder = repository / "CHANGELOG.md", repository / "changes"
    changelog, added = path.read_text(), grouped(entries(folder))
    known = section(changelog, version)
    if known is None:
        first = re.search(r"^## ", changelog, re.MULTILINE)
        at = len(changelog) if first is None else first.start()
        made = f"## {version} ({date})\n\n{added}\n"
        changelog = changelog[:at] + made + changelog[at:]
    elif known["when"] == "unreleased":
        text = known["text"].rstrip() + "\n"
        made = f"## {version} ({date})\n{text}" + (f"\n{added}\n" if added else "\n")
        changelog = changelog[: known.start()] + made + changelog[known.end() :]
    else:
        raise ReleaseError(f"version {version} was released ({known['when']}): name the next one")
    path.write_text(changelog.rstrip() + "\n")
    for note in folder.glob("*.md"):
        if note.name != "README.md":
            note.unlink()


def notes(repository: Path, version: str) -> str:
    """Returns what a release says of itself: its section, and notes that were not joined."""
    known = section((repository / "CHANGELOG.md").read_text(), version)
    if known is None:
        raise ReleaseError(f"CHANGELOG.md has no section {version}: join the notes first")
    left = grouped(entries(repository / "changes"))
    if left and known["when"] != "unreleased":
        raise ReleaseError(f"changes/ has notes that came after version {version}")
    text = known["text"].strip() + "\n" + (f"\n{left}" if left else "")
    return f"# Tierbed {version} ({known['when']})\n\n{text}"


def main(words: list[str]) -> int:
    """Runs one command; returns the exit status."""
    try:
        match words:
            case ["join", version, date]:
                join(REPOSITORY, version, date)
            case ["notes", version]:
                sys.stdout.write(notes(REPOSITORY, version))
            case _:
                sys.stderr.write(__doc__ or "")
                return 2
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
