"""The two towers keep what their text promises."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from example_kit import last, run

REAL = Path(__file__).parents[4] / "shared" / "data" / "queries" / "amz-beauty.txt.gz"
SMALL = ["--dim=16", "--budget=4MiB", "--drawn=64"]


def test_they_have_the_bits_of_plain_torch_and_retrieve(tmp_path: Path) -> None:
    figure, vectors = tmp_path / "recall.svg", tmp_path / "items.npy"
    options = ["--users=2000", "--items=1200", "--epochs=4", "--check"]
    said = run("two_tower.py", *SMALL, *options, f"--figure={figure}", f"--vectors={vectors}")
    assert "0 weights differ in bits from plain torch" in said
    found = last(said, "on disk", "recall@20")
    assert found == last(said, "plain torch", "recall@20")
    # Of 1,200 items 20 are guessed right once in 60; of a user's two clusters of 30, in 3.
    assert found > 0.2
    assert "<svg" in figure.read_text()
    written = np.load(vectors)
    assert written.shape == (1200, 16)
    assert np.allclose(np.linalg.norm(written, axis=1), 1, atol=1e-5)


def test_they_read_histories(tmp_path: Path) -> None:
    log = tmp_path / "log.txt.gz"
    with gzip.open(log, "wt") as file:
        file.writelines(f"{at % 50} {(at + 1) % 50} {(at + 2) % 50}\n" for at in range(300))
    said = run("two_tower.py", *SMALL, "--epochs=1", f"--data={log}")
    assert 0 <= last(said, "on disk", "recall@20") <= 1


@pytest.mark.slow
def test_they_learn_a_real_log() -> None:
    if not REAL.is_file():
        pytest.skip(f"real log not at hand ({REAL.name} beside the checkout)")
    said = run("two_tower.py", "--dim=32", "--budget=8MiB", "--epochs=8", f"--data={REAL}")
    # Of 12,101 items 20 are guessed right in 0.2 %.
    assert last(said, "on disk", "recall@20") > 0.03
