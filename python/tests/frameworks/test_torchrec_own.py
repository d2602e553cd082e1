"""TorchRec's own unit tests of its collections and models, with our collections in their place.

Its wheel has no tests. Take the files named below of its repository, and name their folder in the
environment variable ``TORCHREC_TESTS``, or put them into ``.tools/torchrec``; otherwise this is
skipped. Rows are drawn by TorchRec and copied, so that tests may compare numbers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierbed.torchrec as tbr

from .torchrec_kit import memory, torchrec

TOOLS = Path(__file__).resolve().parents[3] / ".tools"
FOLDER = Path(os.environ.get("TORCHREC_TESTS") or TOOLS / "torchrec")
# Of torchrec/modules/tests and torchrec/models/tests.
FILES = ("test_embedding_modules.py", "test_dlrm.py", "test_deepfm.py")
if not all((FOLDER / file).is_file() for file in FILES):
    pytest.skip("needs TorchRec's own tests, see above", allow_module_level=True)
pytest.importorskip("parameterized", reason="TorchRec's own tests need it")

# Why tests are left out, and the end of their names.
LEFT_OUT = {
    "TorchScript compiles no module whose rows lie in a store": (
        "test_scripting",
        "test_fx_script",
        "EmbeddingBagCollectionTest.test_fx",
        "EmbeddingCollectionTest.test_fx",
    ),
    "a store has rows, and no device meta": (
        "test_forward_with_meta_device",
        "EmbeddingBagCollectionTest.test_device",
        "EmbeddingCollectionTest.test_device",
    ),
    "a collection over a store has a table": ("test_no_sparse",),
    "needs modules that the wheel lacks": (
        "test_export_serialization",
        "test_wrapper_functionality_0_basic_with_multiple_features",
        "test_wrapper_functionality_1_empty_sparse_features",
    ),
}


# What the files import and no wheel has; only tests that are left out use it.
ABSENT = {
    "torchrec.distributed.test_utils.test_input": ["ModelInput"],
    "torchrec.ir": [],
    "torchrec.ir.serializer": ["JsonSerializer"],
    "torchrec.ir.utils": ["decapsulate_ir_modules", "encapsulate_ir_modules"],
}
for absent, names in ABSENT.items():
    if absent not in sys.modules and importlib.util.find_spec(absent) is None:
        sys.modules[absent] = types.ModuleType(absent)
        sys.modules[absent].__dict__.update(dict.fromkeys(names, object), __path__=[])


def substituted(file: str) -> Any:
    """TorchRec's file of tests, in which the collections are ours."""
    name = f"torchrec_own_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for kind in ("EmbeddingBagCollection", "EmbeddingCollection"):
        if hasattr(module, kind):
            setattr(module, kind, in_store(getattr(torchrec, kind)))
    return module


def in_store(theirs: Any) -> Any:
    def collection(*args: Any, **options: Any) -> Any:
        return tbr.replace(theirs(*args, **options), memory())

    return collection


def cases(suite: Any) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestCase):
            yield test
        else:
            yield from cases(test)


CASES = {
    case.id().partition(".")[2]: case
    for file in FILES
    for case in cases(unittest.defaultTestLoader.loadTestsFromModule(substituted(file)))
}


@pytest.mark.parametrize("name", CASES)
def test_theirs_passes_with_ours(name: str) -> None:
    for reason, ends in LEFT_OUT.items():
        if name.endswith(ends) and not name.startswith(("DenseArch", "InteractionArch")):
            pytest.skip(reason)
    result = unittest.TestResult()
    CASES[name].run(result)
    assert result.testsRun == 1
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]


def test_what_is_left_out_is_there() -> None:
    for end in (end for ends in LEFT_OUT.values() for end in ends):
        assert any(name.endswith(end) for name in CASES), end
