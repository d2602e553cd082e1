"""What errors advise, read from the sources: Rust's `remedy` and the advice of Python's errors.

In Python the advice is what stands behind the first semicolon of an error's message, unless it
only tells what was found.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
LIST = Path(__file__).parent / "followed.txt"

_TEXT = r'"((?:[^"\\]|\\.|\\\n)*)"'
_RUST = (
    re.compile(r'"remedy",\s*(?:format_args!\(\s*)?' + _TEXT),
    # What a child may do with a value that its parent opened.
    re.compile(r'Owned::new\([\w:()]+,\s*(?:"[^"]*"|what),\s*' + _TEXT),
    re.compile(r"let remedy =\s*" + _TEXT),
    re.compile(r"remedy: (send several smaller requests)"),
)
#: The module of tests that ends a file; what else only tests have has no remedies.
_TESTS = re.compile(r"#\[cfg\(test\)\]\n(?:#\[.*\]\n)*mod \w+ \{")
_FOUND = (
    "found ", "it has ", "it knows ", "the store has ", "the snapshot has ", "there are ",
    "the smallest has ", "table {} has ", "every feature needs ", "keys must differ",
    "a CodedStore keeps", "only a table of open", "one of {}", "is the server running",
)  # fmt: skip


def in_rust() -> dict[str, set[str]]:
    """Returns each remedy of the engine with the files that name it."""
    found: dict[str, set[str]] = {}
    for part in ("crates", "tools"):
        for file in sorted((REPOSITORY / part).rglob("src/**/*.rs")):
            text = _TESTS.split(file.read_text())[0]
            if file.name == "tests.rs" or "tests" in file.parts or "conformance" in file.name:
                continue
            for pattern in _RUST:
                for match in pattern.finditer(text):
                    remedy = re.sub(r"\\\n\s*", "", match.group(1)).replace('\\"', '"')
                    found.setdefault(remedy, set()).add(str(file.relative_to(REPOSITORY)))
    return found


def _text_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) or "{}" for part in node.values)
    return None


def in_python() -> dict[str, set[str]]:
    """Returns each advice of the package's own errors with the files that give it."""
    found: dict[str, set[str]] = {}
    for file in sorted((REPOSITORY / "python" / "tierbed").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            text = _text_of(node.args[0]) if name.endswith("Error") else None
            advice = text.split("; ", 1)[1] if text and "; " in text else ""
            if advice and not advice.startswith(_FOUND):
                found.setdefault(advice, set()).add(str(file.relative_to(REPOSITORY)))
    return found


def listed() -> dict[str, list[str]]:
    """Returns what the list has: for each remedy the lines below it, of tests or of a reason."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in LIST.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("    "):
            lines.append(line.strip())
            continue
        assert line not in found, f"listed twice: {line}"
        lines = found[line] = []
    return found
