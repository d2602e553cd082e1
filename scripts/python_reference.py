"""Writes the Python reference: one HTML page per public module, from the docstrings.

Use: ``python scripts/python_reference.py FOLDER``. Needs nothing but the package itself.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import ModuleType

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
h2 { border-top: 1px solid #8884; padding-top: 1rem }
code, pre { font: 14px/1.45 ui-monospace, monospace }
pre.signature { background: #8881; padding: .6rem; overflow-x: auto }
pre.doc { white-space: pre-wrap }
section.member { margin-left: 2rem }
@media (prefers-color-scheme: dark) { body { background: #181a1b; color: #ddd } a { color: #8bf } }
"""


def main(arguments: list[str]) -> int:
    """Writes all pages and an index into the folder given."""
    if len(arguments) != 1:
        print("use: python_reference.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for module in public_modules("tierbed"):
        page = f"{module.__name__}.html"
        (folder / page).write_text(module_page(module), encoding="utf-8")
        question = escape((inspect.getdoc(module) or "").split("\n")[0])
        rows.append(f'<p><a href="{page}"><code>{module.__name__}</code></a>: {question}</p>')
    index = html("Tierbed: Python reference", "\n".join(rows))
    (folder / "index.html").write_text(index, encoding="utf-8")
    print(f"wrote {len(rows)} pages to {folder}/index.html")
    return 0


def public_modules(name: str) -> Iterator[ModuleType]:
    """Yields the package and its public modules, outermost first."""
    package = importlib.import_module(name)
    yield package
    for found in pkgutil.walk_packages(package.__path__, prefix=f"{name}."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield importlib.import_module(found.name)


def module_page(module: ModuleType) -> str:
    """Renders one module: its doc, then every public name."""
    parts = [f'<pre class="doc">{escape(inspect.getdoc(module) or "")}</pre>']
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value):
            parts.append(entry(name, value, heading="h2"))
            parts.extend(members(name, value))
        elif callable(value):
            parts.append(entry(name, value, heading="h2"))
        elif inspect.ismodule(value):
            link = f'<a href="{value.__name__}.html"><code>{escape(value.__name__)}</code></a>'
            parts.append(f"<p>Module {link}</p>")
    parts.append('<p><a href="index.html">All modules</a></p>')
    return html(module.__name__, "\n".join(parts))


def public_names(module: ModuleType) -> list[str]:
    """Returns ``__all__``, or the public names defined in the module itself."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    own = (
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    return sorted(own)


def members(owner: str, cls: type) -> Iterator[str]:
    """Renders the public methods and properties a class defines itself."""
    if issubclass(cls, enum.Enum):
        values = ", ".join(f"{member.name} = {member.value!r}" for member in cls)
        yield f'<section class="member"><p>Values: <code>{escape(values)}</code></p></section>'
        return
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(inner, property) or callable(inner):
            body = entry(f"{owner}.{name}", inner, heading="h3")
            yield f'<section class="member">{body}</section>'


def entry(name: str, value: object, heading: str) -> str:
    """Renders one name: signature and docstring."""
    doc = escape(inspect.getdoc(value) or "")
    return (
        f'<{heading} id="{escape(name)}"><code>{escape(name)}</code></{heading}>\n'
        f'<pre class="signature">{escape(signature(name, value))}</pre>\n'
        f'<pre class="doc">{doc}</pre>'
    )


def signature(name: str, value: object) -> str:
    """Returns the call as written, one parameter per line when it is long."""
    if isinstance(value, property):
        return f"{name}  (property)"
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    line = f"{name}{found}"
    if len(line) <= 88:
        return line
    parameters = "".join(f"    {parameter},\n" for parameter in found.parameters.values())
    returns = found.return_annotation
    arrow = "" if returns is inspect.Signature.empty else f" -> {returns}"
    return f"{name}(\n{parameters}){arrow}"


def html(title: str, body: str) -> str:
    """Wraps a body into a page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
