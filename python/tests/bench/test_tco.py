"""Do the costs follow from the prices, and are those of the paper's table among them?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed_bench.sim.cost import Prices, Space, total_cost


def test_the_prices_of_the_paper_give_its_table() -> None:
    space = Space(table_gb=225, ratio=0.8, replicated_gb=400)
    optane, nand = total_cost(space, Prices(), 1.16)
    assert (optane["cost_plain"], optane["cost_replicated"]) == (1869.25, 2088.0)
    assert nand["cost_plain"] == pytest.approx(1658.31, abs=0.005)
    assert nand["cost_replicated"] == 1713.0
    assert round(optane["performance_per_cost"], 2) == 1.04
    assert round(nand["performance_per_cost"], 2) == 1.12


def test_at_the_break_even_speedup_replicas_pay_for_themselves() -> None:
    space = Space(table_gb=1000, ratio=0.5)
    assert space.with_replicas_gb == 1500
    prices = Prices(server_per_month=100, drives_per_gb={"nvme": 0.2}, months=10)
    row = total_cost(space, prices, 1.0)[0]
    assert (row["cost_plain"], row["cost_replicated"]) == (120, 130)
    again = total_cost(space, prices, row["break_even_speedup"])[0]
    assert again["performance_per_cost"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Space(table_gb=-1, ratio=0.1),
        lambda: Space(table_gb=10, ratio=0.1, replicated_gb=9),
        lambda: Prices(drives_per_gb={}),
        lambda: Prices(months=0),
        lambda: total_cost(Space(table_gb=1, ratio=0), Prices(), float("nan")),
        lambda: total_cost(
            Space(table_gb=1, ratio=0), Prices(server_per_month=0, drives_per_gb={"x": 0}), 1
        ),
    ],
)
def test_impossible_numbers_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidError):
        wrong()  # type: ignore[operator]


def test_the_command_takes_prices_of_a_user(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "tco.json"
    given = ["--drive", "nvme=0.1", "--table-gb", "100", "--ratio", "0.2", "--speedup", "1.1"]
    assert main(["tco", *given, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["with_replicas_gb"] == pytest.approx(120)
    assert result["rows"][0]["cost_plain"] == 1598
    assert "nvme" in capsys.readouterr().out
    assert main(["tco", "--drive", "nvme"]) == 2
    assert "price per gigabyte" in capsys.readouterr().err
