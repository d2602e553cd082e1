"""Ratios and curves of ``tierbed bench serve``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from tierbed_bench.common import ratio

__all__ = ["curves", "ratios"]

Row = dict[str, Any]
BASELINES = ("redis", "memcached", "triton", "engine")


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Requests a core next to the peers', what the network adds, and what overload leaves.

    A ratio above 1 is better than the baseline.
    """
    found: dict[str, float | None] = {}
    cost = {row["system"]: row["cpu_us"] for row in rows if row["part"] == "cost"}
    for system in cost:
        for baseline in BASELINES:
            if system.startswith("tierbed") and baseline in cost:
                found[f"per_core_{system}_vs_{baseline}"] = ratio(cost[baseline], cost[system])
    predicted: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["part"] == "predict":
            which = f"{row['samples']}x{row['connections']}"
            predicted.setdefault(which, {})[row["system"]] = row["cpu_us"]
    for which, by_system in predicted.items():
        theirs = by_system.get("triton_predict")
        for system, word in (("tierbed_predict", "predict"), ("tierbed_aoti", "aoti")):
            if theirs is not None and system in by_system:
                found[f"per_core_{word}_{which}_vs_triton"] = ratio(theirs, by_system[system])
    half = {row["system"]: row["p99_us"] for row in rows if row["part"] == "half_load"}
    for system, p99_us in half.items():
        if system != "engine" and "engine" in half:
            found[f"half_load_p99_{system}_vs_engine"] = ratio(half["engine"], p99_us)
    through = {row["system"]: row for row in rows if row["part"] == "gateway"}
    if len(through) == 2:
        one = next(row for name, row in through.items() if name != "tierbed_gateway")
        for name in ("p99_us", "cpu_us"):
            found[f"gateway_{name}_vs_one_server"] = ratio(
                one[name], through["tierbed_gateway"][name]
            )
    for row in rows:
        if row["part"] == "overload":
            found[f"overload_goodput_{row['system']}_vs_saturation"] = row["goodput_share"]
    for system in dict.fromkeys(row["system"] for row in rows if row["part"] == "activation"):
        own = [row for row in rows if (row["part"], row["system"]) == ("activation", system)]
        # The other way round than the row has it: above 1 is better.
        if times := [ratio(1.0, row["p99_ratio"]) for row in own if row["p99_ratio"]]:
            found[f"activation_p99_{system}_vs_steady"] = median(times)
    return found


def curves(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Draws latency by rate, and what a request costs."""

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        swept = [row for row in rows if row["part"] in ("sweep", "limited")]
        for part, system in dict.fromkeys((row["part"], row["system"]) for row in swept):
            own = [row for row in swept if (row["part"], row["system"]) == (part, system)]
            own.sort(key=lambda row: row["rate"])
            label = system if part == "sweep" else f"{system}, rows on disk"
            line = "-" if part == "sweep" else "--"
            x, y = [row["rate"] for row in own], [row["p99_us"] / 1e3 for row in own]
            left.plot(x, y, line, marker="o", label=label)
        left.set(xscale="log", yscale="log", xlabel="requests/s offered", ylabel="p99, ms")
        if swept:
            left.legend(fontsize="small")
        cost = [row for row in rows if row["part"] == "cost"]
        # Predictions of one sample over one connection stand beside lookups.
        of_one = {"samples": 1, "connections": 1}
        cost += [row for row in rows if row["part"] == "predict" and of_one.items() <= row.items()]
        names = [f"{row['part']} {row['system']}" for row in cost]
        right.barh(names, [row["cpu_us"] for row in cost])
        right.set_xlabel("server's processor us per request, rows in memory")
        right.invert_yaxis()

    return draw
