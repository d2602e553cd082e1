"""The examples in docstrings run as written, and every public class has one."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed import serve
from tierbed.adapters import dynamicemb, graphbolt

# One example shows what all errors have in common.
CLASSES = [
    name
    for name in tb.__all__
    if inspect.isclass(getattr(tb, name))
    and (not issubclass(getattr(tb, name), Exception) or name == "TierbedError")
]
FUNCTIONS = ["find_neighbours", "lookahead", "place", "plan_tiers"]
NAMED = {name: getattr(tb, name) for name in CLASSES + FUNCTIONS} | {"Server": serve.Server}
OF_NN = ["NgramHash", "NgramMemory", "sampled_logits", "top_k"]
NAMED |= {name: getattr(tb.nn, name) for name in OF_NN}
OF_TABLES = ["export_tables", "find_tables", "import_tables"]
NAMED |= {name: getattr(tb.tables, name) for name in OF_TABLES}
OF_ADAPTERS = [dynamicemb.TierbedStorage, graphbolt.TierbedFeature, graphbolt.TierbedFeatureStore]
NAMED |= {kind.__name__: kind for kind in OF_ADAPTERS}
NAMED["from_pretrained"] = tb.EmbeddingBag.from_pretrained


@pytest.mark.parametrize("name", NAMED)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"tb": tb, "torch": torch}
    found = doctest.DocTestFinder(recurse=False).find(NAMED[name], name, globs=names)
    assert any(test.examples for test in found), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@pytest.mark.parametrize("name", NAMED)
def test_the_site_shows_the_example_as_code(name: str) -> None:
    """Only under this title does the site's reader of docstrings take prompts for code."""
    doc = inspect.getdoc(NAMED[name]) or ""
    title = doc.split(">>>", 1)[0].rstrip().rsplit("\n\n", 1)[-1].splitlines()[0]
    assert title == "Examples:", f"the example of {name} stands under {title!r}"
