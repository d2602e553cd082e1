"""Every Python block of the documents runs as it stands, one document per fresh folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
DOCUMENTS = REPOSITORY / "docs"
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# What the README leaves to the reader: a model and a loader.
README_NAMES = """
from typing import NamedTuple
import torch
import tierbed as tb

class Batch(NamedTuple):
    dense: torch.Tensor
    sparse: tb.KeyedJaggedTensor
    label: torch.Tensor

class Scored(NamedTuple):
    logit: torch.Tensor
    def loss(self, label):
        return torch.nn.functional.binary_cross_entropy_with_logits(self.logit, label)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64 + 2, 1)
    def forward(self, dense, pooled):
        return Scored(self.layer(torch.cat([dense, pooled.values()], dim=1)).squeeze(1))

def batch(at):
    generator = torch.Generator().manual_seed(at)
    items = torch.randint(0, 50_000_000, (32,), generator=generator)
    sparse = tb.KeyedJaggedTensor(["item"], items, lengths=torch.ones(32, dtype=torch.int64))
    return Batch(torch.rand(32, 2, generator=generator), sparse, (items % 2).float())

model = Model()
loader = [batch(at) for at in range(4)]
"""


def blocks(document: Path) -> str:
    found = BLOCK.findall(document.read_text())
    return "\n".join(code for told, code in found if "no-run" not in told)


def run(code: str, folder: Path) -> str:
    script = folder / "document.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_runs(tmp_path: Path) -> None:
    run(README_NAMES + blocks(REPOSITORY / "README.md"), tmp_path)
    assert (tmp_path / "run" / "store" / "CURRENT").is_file()


# What a page prints when it keeps its promises.
PROMISES = {
    "how-to/train-in-your-loop.md": ["the same rows, to the last bit: True"],
    "tutorials/first-model.md": ["the same losses, to the last bit: True", "as trained: True"],
    "tutorials/serve-a-model.md": ["the same vectors: True"],
}
PAGES = sorted(
    page.relative_to(DOCUMENTS).as_posix() for page in DOCUMENTS.rglob("*.md") if blocks(page)
)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    said = run(blocks(DOCUMENTS / page), tmp_path)
    for promise in PROMISES.get(page, []):
        assert promise in said


def test_pages_with_promises_are_run() -> None:
    assert set(PROMISES) <= set(PAGES)


def test_blocks_that_do_not_run_are_python() -> None:
    for page in DOCUMENTS.rglob("*.md"):
        for _, code in BLOCK.findall(page.read_text()):
            compile(code, str(page), "exec")
