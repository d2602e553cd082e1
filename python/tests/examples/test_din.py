"""The deep interest network keeps what its text promises."""

from __future__ import annotations

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
    log = tmp_path / "log.txt"
    # Half of the users take even items, the others odd ones.
    log.write_text("".join(f"{u % 2} {u % 2 + 2} {u % 2 + 4} {u % 2 + 6}\n" for u in range(600)))
    said = run("din.py", "--dim=8", "--budget=6MiB", "--epochs=8", f"--data={log}")
    # A drawn item is one that both could have taken in an eighth of all cases.
    assert last(said, "on disk", "AUC") > 0.55
