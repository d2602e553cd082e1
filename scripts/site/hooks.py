"""What the site adds to the pages of `docs`: root documents, references and results.

Called by mkdocs (`hooks:` of mkdocs.yml). Links between documents are those of the repository;
here they are turned into those of the site, and links to sources into plain text.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

import charts
import notebooks
import reference
import results
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[2]
# Documents of the root folder, and where the site has them.
ROOT_DOCUMENTS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "STYLE.md": "project/style.md",
    "CHANGELOG.md": "project/changelog.md",
    "changes/README.md": "project/contributing.md",
}
# Sources that the site has as a page.
SOURCES = {"python/tierbed/errors.py": "reference/errors.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
# Roles of reStructuredText in docstrings: the name in code says enough.
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):(?=<)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Lists the generated pages in the navigation."""
    python = [{_title(path): path} for path in reference.python_pages()]
    suites = [{suite.title: f"results/{suite.suite}.md"} for suite in _suites()]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"][0] = {"Python": python}
        elif "Results" in section:
            section["Results"] = ["results/index.md", *suites]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, charts and the documents of the root folder."""
    for name, path in ROOT_DOCUMENTS.items():
        if path != "index.md" and not name.startswith("changes/"):
            text = (REPOSITORY / name).read_text(encoding="utf-8")
            files.append(File.generated(config, path, content=text))
    pages = reference.python_pages()
    pages |= notebooks.pages()
    pages["reference/cli.md"] = reference.cli_page()
    pages["reference/errors.md"] = reference.errors_page()
    pages["reference/statistics.md"] = reference.statistics_page()
    for suite in _suites():
        pages[f"results/{suite.suite}.md"] = results.page(suite)
        for run_at, run in enumerate(suite.runs):
            for table_at, table in enumerate(run.tables):
                if table.chart:
                    name = results.chart_name(suite, run_at, table_at)
                    picture = charts.draw(table)
                    files.append(File.generated(config, f"results/charts/{name}", content=picture))
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links of the repository into links of the site, outside of code."""
    path = page.file.src_uri
    if path == "results/index.md":
        markdown = markdown.replace("<!-- claims -->", results.index(_suites()))
    origins = {there: here for here, there in ROOT_DOCUMENTS.items() if there != "index.md"}
    origin = origins.get(path, f"docs/{path}")
    if path == "project/contributing.md":
        origin = "CONTRIBUTING.md"
    pieces = FENCE.split(markdown)
    return "".join(
        piece if piece.startswith("```") else LINK.sub(lambda m: _link(m, origin, path), piece)
        for piece in pieces
    )


def on_page_content(html: str, **_: Any) -> str:
    """Leaves out the roles of docstrings."""
    return ROLE.sub("", html)


def _link(found: re.Match[str], origin: str, path: str) -> str:
    mark, text, target, anchor = found.group(1), found.group(2), found.group(3), found.group(4)
    if not target or "://" in target or target.startswith("mailto:"):
        return found.group(0)
    aim = os.path.normpath(os.path.join(os.path.dirname(origin), target))
    if aim in ROOT_DOCUMENTS:
        there = ROOT_DOCUMENTS[aim]
    elif aim in SOURCES:
        there = SOURCES[aim]
    elif aim.startswith("examples/notebooks/") and aim.endswith(".ipynb"):
        there = notebooks.place_of(Path(aim))
    elif aim.startswith("docs/results/data/"):
        there = f"results/{Path(aim).stem}.md"
    elif aim.startswith("docs/") and Path(aim).suffix:
        there = aim.removeprefix("docs/")
    else:
        return text
    return f"{mark}[{text}]({os.path.relpath(there, os.path.dirname(path) or '.')}{anchor or ''})"


def _suites() -> list[results.Suite]:
    return results.load(REPOSITORY / "docs" / "results" / "data")


def _title(path: str) -> str:
    name = Path(path).stem
    return "tierbed" if name == "tierbed" else f"tierbed.{name}"
