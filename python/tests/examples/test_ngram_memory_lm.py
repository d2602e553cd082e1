"""The language model with an n-gram memory on disk keeps what its text promises."""

from __future__ import annotations

from pathlib import Path

from example_kit import last, rows_mib, run

# A text of phrases that a memory learns quickly, and tables of several times the budget.
SMALL = ["--tokens=12000", "--vocabulary=200", "--length=32", "--rows=40000", "--budget=6MiB"]


def test_it_has_the_bits_of_plain_torch_and_the_memory_helps(tmp_path: Path) -> None:
    figure = tmp_path / "lm.svg"
    said = run("ngram_memory_lm.py", *SMALL, "--epochs=2", "--check", f"--figure={figure}")
    assert "0 weights differ in bits from plain torch" in said
    with_memory = last(said, "memory on disk", "perplexity")
    assert with_memory == last(said, "memory in plain torch", "perplexity")
    assert with_memory < 0.9 * last(said, "no memory", "perplexity")
    assert rows_mib(said, "memory on disk") <= 6
    # Rows and state of 2 orders, 4 heads, 40,000 rows and 16 elements.
    assert rows_mib(said, "memory in plain torch") == round(2 * 4 * 40_000 * 16 * 4 * 2 / 2**20, 1)
    assert "<svg" in figure.read_text()


def test_it_reads_files(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the rug. " * 400)
    said = run("ngram_memory_lm.py", *SMALL, "--epochs=1", f"--data={text}")
    # Few words that repeat: nearly certain after one epoch, and not after none (13 words).
    assert last(said, "memory on disk", "perplexity") < 4
