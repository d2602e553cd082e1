"""The factors of ratings keep what their text promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_kit import last, run


def always_mean(said: str) -> float:
    return float(said.split("always the mean: RMSE ")[1].split()[0])


def test_it_has_the_bits_of_plain_torch_and_learns(tmp_path: Path) -> None:
    figure = tmp_path / "rmse.svg"
    options = ["--users=1000", "--items=500", "--ratings=40000", "--dim=7", "--budget=4MiB"]
    said = run("matrix_factorization.py", *options, "--check", f"--figure={figure}")
    assert "0 weights differ in bits from plain torch" in said
    assert last(said, "on disk", "RMSE") == last(said, "plain torch", "RMSE")
    assert last(said, "on disk", "RMSE") < 0.9 * always_mean(said)
    assert "<svg" in figure.read_text()


@pytest.mark.slow
def test_it_reads_ratings_and_holds_out_the_latest(tmp_path: Path) -> None:
    # The latest stand first: were they trained on, the held-out ones would be fives.
    latest = [f"{user},9,1,{2000 + user}" for user in range(1024)]
    earlier = [f"{at % 700},{at % 7},5,{at % 1000}" for at in range(9300)]
    log = tmp_path / "ratings.csv"
    log.write_text("\n".join(["user,item,rating,time", *latest, *earlier]))
    options = ["--dim=3", "--budget=4MiB", "--epochs=1", f"--data={log}"]
    assert always_mean(run("matrix_factorization.py", *options)) > 3.5
    colons = tmp_path / "ratings.dat"
    colons.write_text(log.read_text().replace(",", "::"))
    options[-1] = f"--data={colons}"
    assert always_mean(run("matrix_factorization.py", *options)) > 3.5
