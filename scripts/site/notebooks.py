"""Pages made of the notebooks: their texts as they are, their code in blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def place_of(notebook: Path) -> str:
    """Returns where the site has a notebook."""
    return f"tutorials/{notebook.stem.replace('_', '-')}.md"


def pages() -> dict[str, str]:
    """Returns a page per notebook, by its path in the site."""
    return {place_of(path): _page(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def _page(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title, *parts = [_cell(cell) for cell in cells]
    origin = f"This page is the notebook `examples/notebooks/{path.name}`, without its outputs."
    return "\n\n".join([title, origin, *parts]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
