"""The deep interest network keeps what its text promises."""

from __future__ import annotations

import random
from pathlib import Path

from example_kit import last, run


def test_it_has_the_bits_of_plain_torch_and_ranks(tmp_path: Path) -> None:
    figure = tmp_path / "auc.svg"
    options = ["--users=1500", "--items=400", "--dim=16", "--budget=6MiB", "--epochs=2"]
    said = run("din.py", *options, "--check", f"--figure={figure}")
    assert "0 weights differ in bits from plain torch" in said
    assert last(said, "on disk", "AUC") == last(said, "plain torch", "AUC")
    assert last(said, "on disk", "AUC") > 0.65
    assert "<svg" in figure.read_text()


def test_it_reads_histories(tmp_path: Path) -> None:
    draws = random.Random(5)
    log = tmp_path / "log.txt"
    # Half of the users take even items, the others odd ones.
    lines = [[user % 2 + 2 * draws.randrange(10) for _ in range(6)] for user in range(600)]
    log.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    said = run("din.py", "--dim=8", "--budget=6MiB", "--epochs=6", f"--data={log}")
    # A drawn item is one of the other half every second time: the best AUC is 0.75.
    assert last(said, "on disk", "AUC") > 0.65
