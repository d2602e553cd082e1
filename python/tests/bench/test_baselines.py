"""The systems that benchmarks compare with compute what we compute, within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags
from tierbed_bench.baselines import FbgemmTables, TierbedTables, TorchTables, has_fbgemm

FEATURES = {"a": 60, "b": 40}
DIM, BATCH = 8, 32
# Float32 sums of a few dozen terms in another order.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

CASES = [
    pytest.param(TorchTables, tb.SGD(lr=0.1), id="torch-sgd"),
    pytest.param(TorchTables, tb.Adagrad(lr=0.1), id="torch-adagrad"),
    pytest.param(TorchTables, tb.Adam(lr=0.01), id="torch-adam"),
    pytest.param(FbgemmTables, tb.SGD(lr=0.1), id="fbgemm-sgd"),
    pytest.param(FbgemmTables, tb.Adagrad(lr=0.1), id="fbgemm-adagrad"),
    pytest.param(FbgemmTables, tb.RowWiseAdagrad(lr=0.1), id="fbgemm-row-wise"),
]


@pytest.mark.parametrize(("system", "optimizer"), CASES)
def test_a_step_of_each_is_a_step_of_ours(open_store: Any, system: Any, optimizer: Any) -> None:
    if system is FbgemmTables and not has_fbgemm():
        pytest.skip("FBGEMM is not installed (uv sync --inexact --group bench)")
    ours = TierbedTables(open_store("memory"), FEATURES, DIM, optimizer)
    theirs = system(FEATURES, DIM, optimizer)
    for feature in FEATURES:
        theirs.write_rows(feature, ours.read_rows(feature))
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        batch = random_bags(FEATURES, BATCH, seed=step)
        # Random gradients, then the plain sum's.
        grad = torch.randn(BATCH, 2 * DIM, generator=generator) if step < 15 else None
        ours.step(batch, grad)
        theirs.step(batch, grad)
    for feature, rows in FEATURES.items():
        found, expected = theirs.read_rows(feature), ours.read_rows(feature)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert found.shape == (rows, DIM)


def test_what_they_have_not_is_refused_and_said() -> None:
    with pytest.raises(tb.UnsupportedError, match="RowWiseAdagrad"):
        TorchTables(FEATURES, DIM, tb.RowWiseAdagrad())
    with pytest.raises(tb.UnsupportedError, match="weight decay"):
        TorchTables(FEATURES, DIM, tb.Adagrad(weight_decay=0.1))
    if has_fbgemm():
        with pytest.raises(tb.UnsupportedError, match="Adam"):
            FbgemmTables(FEATURES, DIM, tb.Adam())
    else:
        with pytest.raises(tb.UnsupportedError, match="group bench"):
            FbgemmTables(FEATURES, DIM, tb.SGD())
