"""The notebooks run as their reader would run them: beside no checkout, from top to bottom."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parents[3]
NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]

# What the last cells print or show, where the notebook keeps its promises.
PROMISES = {
    "keep_a_model_fresh": [
        "the server answers with the store's rows: True",
        "the first version answers again: True",
        "delta 5",
    ],
    "train_and_publish": ["order: forward", "snapshot, int8"],
    "tune_memory": ["twice the memory finds", "Another budget"],
}


def test_the_site_has_a_page_of_each() -> None:
    sys.path.insert(0, str(REPOSITORY / "scripts" / "site"))
    import notebooks

    pages = notebooks.pages()
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    for path in NOTEBOOKS:
        page = pages[notebooks.place_of(path)]
        assert notebooks.place_of(path) in navigation
        for cell in nbformat.read(path, as_version=4).cells:
            assert cell.source in page


def test_there_are_three() -> None:
    assert set(NAMES) == set(PROMISES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        assert not cell.get("outputs"), "clear the outputs before you commit"
        assert cell.get("execution_count") is None
        if cell.cell_type == "code":
            ast.parse(cell.source)
    assert book.cells[0].source.startswith("# "), "the first cell is its title"
    assert book.cells[-2].cell_type == "code", "a picture or a table comes last, and what it says"
    text = path.read_text()
    assert text.endswith("\n")
    assert text.encode().isascii(), "bytes that every editor keeps"


# In a process of its own: what runs a notebook leaves an event loop behind.
RUN = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=120).execute(cwd=sys.argv[2])
nbformat.write(book, sys.argv[2] + "/done.ipynb")
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path)],
        cwd=tmp_path,
        # Threads of torch that wait for each other take longer than one.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    book = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    said = "".join(
        output.get("text", "") + output.get("data", {}).get("text/html", "")
        for cell in book.cells
        for output in cell.get("outputs", ())
    )
    for promise in PROMISES[path.stem]:
        assert promise in said
    assert "Traceback" not in said
