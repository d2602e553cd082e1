"""DLRM-DCNv2 keeps what its text promises."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from example_kit import last, run

SMALL = ["--scale=1e-4", "--batch=64", "--dim=8", "--width=32", "--budget=12MiB"]


def test_it_has_the_bits_of_plain_torch_and_ranks(tmp_path: Path) -> None:
    figure = tmp_path / "auc.svg"
    said = run("dlrm_dcnv2.py", *SMALL, "--batches=60", "--check", f"--figure={figure}")
    assert "0 weights differ in bits from plain torch" in said
    assert last(said, "on disk", "AUC") == last(said, "plain torch", "AUC")
    assert last(said, "on disk", "AUC") > 0.6
    assert "<svg" in figure.read_text()


def test_it_reads_a_log_in_the_layout_of_criteo(tmp_path: Path) -> None:
    draws = random.Random(5)
    log = tmp_path / "day.tsv"
    with log.open("w") as file:
        for _ in range(1500):
            tokens = [f"{draws.randrange(40):08x}" for _ in range(26)]
            # The first feature tells the label, and nothing else does.
            label = int(int(tokens[0], 16) % 4 == 0)
            file.write("\t".join([str(label), *["1"] * 13, *tokens]) + "\n")
    said = run("dlrm_dcnv2.py", *SMALL, "--epochs=6", f"--data={log}", "--check")
    assert "0 weights differ in bits from plain torch" in said
    assert last(said, "on disk", "AUC") > 0.8


@pytest.mark.slow
def test_it_reads_days_as_mlperf_has_them(tmp_path: Path) -> None:
    draws = np.random.default_rng(5)
    for day in range(2):
        # The first feature tells the label, and nothing else does.
        ids = {str(at): draws.integers(0, 3, (700, 1 + at % 3)) for at in range(26)}
        np.savez(tmp_path / f"day_{day}_sparse_multi_hot.npz", **ids)
        np.save(tmp_path / f"day_{day}_dense.npy", np.ones((700, 13), np.float32))
        np.save(tmp_path / f"day_{day}_labels.npy", (ids["0"] == 1).astype(np.int32))
    said = run("dlrm_dcnv2.py", *SMALL, "--epochs=6", f"--data={tmp_path}", "--check")
    assert "0 weights differ in bits from plain torch" in said
    assert last(said, "on disk", "AUC") > 0.8


@pytest.mark.slow
def test_it_learns_a_real_log(real_log: Path) -> None:
    said = run("dlrm_dcnv2.py", "--scale=1e-3", "--dim=16", "--width=64", f"--data={real_log}")
    assert last(said, "on disk", "AUC") > 0.68
