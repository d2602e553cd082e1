"""GraphSAGE keeps what its text promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from example_kit import last, run

SMALL = ["--nodes=5000", "--dim=16", "--budget=6MiB", "--epochs=2"]


@pytest.mark.parametrize("tune", [[], ["--tune"]])
def test_it_has_the_bits_of_plain_torch_and_classifies(tune: list[str], tmp_path: Path) -> None:
    figure = tmp_path / "accuracy.svg"
    said = run("graph_sage.py", *SMALL, *tune, "--check", f"--figure={figure}")
    assert "0 weights differ in bits from plain torch" in said
    assert last(said, "on disk", "accuracy") == last(said, "plain torch", "accuracy")
    # Ten classes; features alone tell less than half.
    assert last(said, "on disk", "accuracy") > 0.65
    assert "<svg" in figure.read_text()


def test_it_reads_a_graph_and_uses_the_neighbours(tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    labels = draws.integers(0, 2, 3000)
    # A node's own features are noise; those of the nodes it links to tell its class.
    tells = np.arange(3000) < 300
    features = draws.normal(size=(3000, 8)).astype(np.float32)
    features[tells, 0] = 6 * labels[tells] - 3
    others = [np.flatnonzero(tells & (labels == label)) for label in (0, 1)]
    edges = [(node, draws.choice(others[labels[node]])) for node in range(300, 3000)]
    files = [tmp_path / name for name in ("edges.txt", "features.npy", "labels.npy")]
    np.savetxt(files[0], edges, fmt="%d")
    np.save(files[1], features)
    np.save(files[2], labels)
    said = run("graph_sage.py", "--budget=6MiB", "--epochs=3", "--data", *map(str, files))
    assert last(said, "on disk", "accuracy") > 0.9
