"""Reference pages made from the code: Python modules, the command line, statistics."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "tierbed"
# What users do not import: the command line has a page of its own.
NOT_IMPORTED = {"__main__", "cli", "ops"}


def python_pages() -> dict[str, str]:
    """Returns a page per public module or package, by its path in the site."""
    pages = {"reference/python/tierbed.md": _page("tierbed", [])}
    for entry in sorted(PACKAGE.iterdir()):
        name = entry.stem
        is_public = not name.startswith("_") and name not in NOT_IMPORTED
        if is_public and entry.suffix == ".py":
            pages[f"reference/python/{name}.md"] = _page(f"tierbed.{name}", [])
        elif is_public and (entry / "__init__.py").is_file():
            pages[f"reference/python/{name}.md"] = _page(f"tierbed.{name}", _modules(entry))
    return pages


def _modules(package: Path) -> list[str]:
    found = []
    for entry in sorted(package.iterdir()):
        if entry.stem.startswith("_"):
            continue
        name = f"tierbed.{package.relative_to(PACKAGE).as_posix().replace('/', '.')}.{entry.stem}"
        if entry.suffix == ".py":
            found.append(name)
        elif (entry / "__init__.py").is_file():
            found += [name, *_modules(entry)]
    return found


def _page(module: str, submodules: list[str]) -> str:
    options = "    options:\n      heading_level: 2\n      show_root_heading: false\n"
    parts = [f"# {module}\n", f"::: {module}\n{options}"]
    parts += [
        f"## {name}\n\n::: {name}\n{options.replace('level: 2', 'level: 3')}" for name in submodules
    ]
    return "\n".join(parts)


def cli_page() -> str:
    """Returns the help of every command, as the command line itself prints it."""
    import typer.main
    from typer.testing import CliRunner

    from tierbed import cli

    # Commands are imported when the command line starts.
    if not cli.app.registered_commands:
        cli._register()
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    parts = ["# Command line\n\nExit codes: 0 done, 1 the work failed, 2 the call was wrong,"]
    parts.append("130 interrupted, 143 terminated.\n")
    for words in _commands(typer.main.get_command(cli.app), ()):
        shown = runner.invoke(cli.app, [*words, "--help"], prog_name="tierbed")
        if shown.exit_code != 0:
            raise RuntimeError(f"tierbed {' '.join(words)} --help: {shown.output}")
        parts.append(f"## tierbed {' '.join(words)}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(parts)


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if not children:
        yield words
        return
    for child in sorted(children):
        yield from _commands(children[child], (*words, child))


def errors_page() -> str:
    """Returns a table of all errors: name, what else they are, and what to do."""
    from tierbed import errors

    parts = ["# Errors\n\nEvery error has a message with values and a remedy, and a `context`.\n"]
    parts.append("| class | also a | do this |\n|---|---|---|")
    for name in errors.__all__:
        kind = getattr(errors, name)
        if not isinstance(kind, type):
            continue
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        parts.append(f"| `{name}` | {bases} | {(kind.__doc__ or '').splitlines()[0]} |")
    return "\n".join(parts) + "\n"


def statistics_page() -> str:
    """Returns every key of `stats()`, found in stores and snapshots that are made for it."""
    import torch

    import tierbed as tb

    sections: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for backend in ("file", "cold", "lsm"):
            store = tb.Store.open(folder / backend, backend=backend, dram_budget="32MiB")
            table = tb.EmbeddingBagConfig(1000, 8, "item")
            rows = tb.EmbeddingBagCollection([table], store=store)
            ids = tb.KeyedJaggedTensor(
                ["item"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64)
            )
            rows(ids).values().sum().backward()
            store.checkpoint("one")
            sections[f'`Store.stats()`, backend "{backend}"'] = store.stats()
            if backend == "file":
                store.publish(folder / "snapshot")
            store.close()
        with tb.Snapshot.open(folder / "snapshot", dram_budget="8MiB") as snapshot:
            snapshot.lookup(ids)
            sections["`Snapshot.stats()`"] = snapshot.stats()
    parts = [
        "# Statistics\n",
        "The keys that `stats()` returns, found in stores made for this page.",
    ]
    parts.append("Units are in the names: `_bytes`, `_us`, `_rows`, `_count`.\n")
    for title, value in sections.items():
        parts.append(f"## {title}\n\n| key | type |\n|---|---|")
        parts += [f"| `{key}` | {kind} |" for key, kind in _keys(value, "")]
        parts.append("")
    return "\n".join(parts)


def _keys(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _keys(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield from _keys(value[0], f"{prefix}[]")
    else:
        yield prefix, "null" if value is None else type(value).__name__
