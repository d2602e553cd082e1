"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb

# torch.compile keys its cache on disk by graphs, not by what our operators promise about shapes:
# what an earlier version compiled must not be tested.
_COMPILED = tempfile.TemporaryDirectory(prefix="tierbed-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _COMPILED.name

REPOSITORY = Path(__file__).resolve().parents[2]
_PLAYWRIGHT = REPOSITORY / ".tools" / "browser"

# Workers of the benchmarks are processes of their own, which must find their package too.
_FOUND = [str(REPOSITORY / "tools" / "python"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _FOUND if path)
REAL_LOG = REPOSITORY.parent / "shared" / "data" / "ctr" / "criteo_rows0-59999.tsv.gz"


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    # More threads add in another order; equal bits need equal orders.
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def real_log() -> Path:
    """A slice of a real click log in Criteo's layout, where it is at hand."""
    if not REAL_LOG.is_file():
        pytest.skip(f"real click log not at hand ({REAL_LOG.name} beside the checkout)")
    return REAL_LOG


OpenStore = Callable[..., tb.Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens stores that are closed after the test."""
    opened: list[tb.Store] = []

    def open_(backend: str | None = "memory", name: str = "store", **options: object) -> tb.Store:
        path = None if backend == "memory" else tmp_path / name
        options.setdefault("dram_budget", "64MiB")
        store = tb.Store.open(path, backend=backend, **options)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


# Not for the session: playwright's event loop runs in this thread until it ends, and asyncio would
# not start another one for other tests.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright; tests skip where `scripts/browser-deps` brought none."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None or not _PLAYWRIGHT.is_dir():
        pytest.skip("no browser; see scripts/browser-deps")
    sys.path.append(str(_PLAYWRIGHT))
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        pytest.skip(f"playwright does not fit this Python; see scripts/browser-deps ({error})")
    with sync_playwright() as playwright:
        # Root has no sandbox; the page is ours.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
