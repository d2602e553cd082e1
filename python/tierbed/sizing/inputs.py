"""Inputs of a sizing: numbers with units, each with where it comes from.

What the user gives goes before what a file of measurements has, and that before the defaults. A
default is measured, and names its file of results, or it is assumed, and says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tierbed.errors import InvalidError

__all__ = ["Input", "Inputs", "Measured", "read_measured"]

ASSUMED = "assumed"


@dataclass(frozen=True)
class Input:
    """A number that a sizing is made of.

    Args:
        name: What it is called; also its option, with dashes.
        value: Its value.
        unit: Its unit.
        origin: Where it comes from.
    """

    name: str
    value: float
    unit: str
    origin: str


def _assumed(name: str, value: float, unit: str, why: str = "") -> Input:
    return Input(name, value, unit, f"{ASSUMED}: {why}" if why else ASSUMED)


_SERVING = "measured: docs/results/data/serving.json"
_TRAINING = "measured: docs/results/data/training.json"
_HOST = "a server of 2026"

#: Reads of a sample by share of the rows' bytes in memory, where rows are placed.
PAGES_BY_SHARE: tuple[tuple[float, float], ...] = ((0.01, 2.1), (0.05, 1.24), (1.0, 0.0))
PAGES_ORIGIN = "measured: docs/results/data/tiers.json, f32 rows of a small log, placed"

DEFAULTS: tuple[Input, ...] = (
    # The model.
    _assumed("dim", 64, "elements"),
    _assumed("element_bytes", 4, "B", "f32"),
    _assumed("ids", 26, "per sample", "as Criteo"),
    _assumed("dram_share", 0.01, "of the rows' bytes"),
    # What is asked.
    _assumed("samples", 1, "per request"),
    _assumed("request_bytes", 200, "B per request", "headers of HTTP"),
    _assumed("answer_bytes", 4, "B per sample", "a score"),
    # What it costs: the slope over samples of a request, and the rest.
    Input("request_us", 30.0, "us of a core per request", f"{_SERVING}, infer, 1 and 128 samples"),
    Input("sample_us", 9.56, "us of a core per sample", f"{_SERVING}, infer, 1 and 128 samples"),
    Input("page_us", 6.51, "us of a core per page", f"{_SERVING}, 5 % of the rows in memory"),
    _assumed("rpc_us", 40, "us of a core per request and shard"),
    _assumed("utilization", 0.5, "of a resource", "the rest is for peaks"),
    _assumed("copies", 2, "of each row on other hosts", "one may fail"),
    # Memory and disk.
    _assumed("index_bits", 32, "bits per row in the index"),
    _assumed("head_share", 0.05, "of the rows in the index", "--head-rows 5%"),
    _assumed("replica_ratio", 0.0, "replicas per row"),
    _assumed("disk_ratio", 1.3, "B on disk per live byte", "overlays, and the next version"),
    _assumed("overlays", 8, "deltas that a server keeps"),
    _assumed("overlay_row_bytes", 2.5, "B per changed row of a delta"),
    # Freshness.
    _assumed("changed_rows_per_s", 100_000, "rows/s"),
    _assumed("publish_interval_s", 60, "s"),
    _assumed("poll_s", 5, "s"),
    _assumed("sync_gbit", 25, "Gbit/s of a download"),
    _assumed("verify_gb_per_s", 1.0, "GB/s of checksums"),
    # A host.
    _assumed("host_cores", 32, "cores", _HOST),
    _assumed("host_dram", 512e9, "B", _HOST),
    _assumed("host_ssd", 15.36e12, "B", "4 drives of 3.84 TB"),
    _assumed("host_iops", 3.2e6, "reads/s", "4 drives of 800,000"),
    _assumed("host_ssd_gb_per_s", 12, "GB/s", "4 drives of 3 GB/s"),
    _assumed("host_gbit", 100, "Gbit/s each way", _HOST),
    Input("host_per_month", 1588, "money per month", "MaxEmbed, Table 2, as in `tierbed tco`"),
    Input("ssd_per_gb", 0.3125, "money per GB", "MaxEmbed, Table 2: PM1735"),
    _assumed("ssd_months", 36, "months to pay off a drive"),
    # Training.
    _assumed("ranks", 8, "per host"),
    _assumed("rank_cores", 1, "cores per rank"),
    _assumed("batch", 1024, "samples per rank and step"),
    Input("step_us", 23.1, "us of a rank per sample", f"{_TRAINING}, DLRM, forward, 1,024"),
    Input("disk_id_bytes", 51.6, "B read and written per id", f"{_TRAINING}, forward, 5 %"),
    Input("train_disk_ratio", 1.18, "B on disk per live byte", f"{_TRAINING}, forward, 5 %"),
    _assumed("state_bytes", 4, "B of optimizer state per row", "row-wise Adagrad"),
    _assumed("unique_share", 1.0, "distinct of the ids of a host's step", "no row is asked twice"),
)
UNITS: Mapping[str, str] = {one.name: one.unit for one in DEFAULTS} | {
    "table": "B of rows",
    "requests_per_s": "requests/s",
    "samples_per_s": "samples/s",
    "pages": "pages read per sample",
    "shards_per_request": "shards that a request asks",
    "disk_bytes": "B read and written per sample",
    "wire_bytes": "B per sample that a host of two receives",
    "hosts": "hosts that train",
}
_WHOLE = {"dim", "ids", "samples", "copies", "ranks", "batch", "hosts", "overlays"}
_SHARES = {"dram_share", "utilization", "head_share", "unique_share"}
_MAY_BE_ZERO = {
    *("request_bytes", "answer_bytes", "page_us", "rpc_us", "replica_ratio", "overlays"),
    *("changed_rows_per_s", "publish_interval_s", "poll_s", "host_per_month", "ssd_per_gb"),
    *(
        "disk_id_bytes",
        "disk_bytes",
        "state_bytes",
        "pages",
        "wire_bytes",
        "head_share",
        "dram_share",
    ),
}


@dataclass(frozen=True)
class Measured:
    """What a file of measurements says of inputs.

    Args:
        path: The file.
        values: By input.
        told: What the values are of: a command and a date, where the file has them.
    """

    path: str
    values: Mapping[str, float]
    told: str = ""


def read_measured(paths: Iterable[str | os.PathLike[str]]) -> list[Measured]:
    """Reads files of measurements.

    That is the JSON of `tierbed bench cluster`, of `tierbed plan` (what training reads and writes),
    of two runs of `tierbed bench serve --parts cost` with other `--samples`, whose slope is the
    cost of a sample, or an object ``inputs`` of names and numbers.

    Args:
        paths: The files.

    Raises:
        InvalidError: A file has no measured input.
    """
    found: list[Measured] = []
    costs: dict[int, tuple[float, str]] = {}
    for given in paths:
        path = os.fspath(given)
        try:
            told = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidError(
                f"--measured: cannot read {path} ({error}); name a JSON file of results"
            ) from error
        cost = _cost(told) if isinstance(told, dict) else None
        values = _values(told) if isinstance(told, dict) else {}
        if cost is not None:
            costs[cost[0]] = cost[1], path
        elif values:
            said = " ".join(str(told[name]) for name in ("command", "date") if name in told)
            found.append(Measured(path, values, said))
        else:
            raise InvalidError(
                f"--measured: {path} has no input; name the JSON of `tierbed bench cluster`, of "
                "`tierbed bench serve` or of `tierbed plan`, or write inputs as an object `inputs`"
            )
    return found + _slope(costs)


def _slope(costs: Mapping[int, tuple[float, str]]) -> list[Measured]:
    if not costs:
        return []
    few, many = min(costs), max(costs)
    if few == many:
        raise InvalidError(
            f"--measured: {costs[few][1]} has requests of {few} samples only; give a second file "
            "of `tierbed bench serve --parts cost` with other --samples"
        )
    (few_us, one), (many_us, other) = costs[few], costs[many]
    sample_us = (many_us - few_us) / (many - few)
    values = {"sample_us": sample_us, "request_us": few_us - few * sample_us}
    return [Measured(f"{one} and {other}", values, f"{few} and {many} samples")]


def _cost(found: dict[str, Any]) -> tuple[int, float] | None:
    """Samples of a request and what it costs, of the JSON of `tierbed bench serve`."""
    if found.get("suite") != "serve":
        return None
    costs = [
        float(row["cpu_us"])
        for row in found.get("rows", [])
        if row.get("part") == "cost" and row.get("system") == "tierbed_infer"
    ]
    return (int(found["shape"]["sample_count"]), min(costs)) if costs else None


def _values(found: dict[str, Any]) -> dict[str, float]:
    if isinstance(found.get("inputs"), dict):
        return {str(name): value for name, value in found["inputs"].items()}
    if "later_epoch_read_bytes_per_batch" in found:
        moved = sum(found[f"later_epoch_{way}_bytes_per_batch"] for way in ("read", "write"))
        return {"disk_bytes": moved * found["batch_count"] / found["samples"]}
    return {}


class Inputs:
    """The inputs of a sizing; those that were used are known.

    Args:
        given: What the user gave, by input.
        measured: What was measured, the first file last: later ones go before.
        origins: Where the user gave an input, by input.

    Raises:
        InvalidError: A number is out of its range, or there is no such input.
    """

    def __init__(
        self,
        given: Mapping[str, float],
        measured: Iterable[Measured] = (),
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self._inputs = {one.name: one for one in DEFAULTS}
        self._used: dict[str, Input] = {}
        for file in measured:
            told = f"measured: {file.path}" + (f", {file.told}" if file.told else "")
            for name, value in file.values.items():
                self._set(name, value, told)
        for name, value in given.items():
            self._set(name, value, f"given: {(origins or {}).get(name, 'by the caller')}")

    def _set(self, name: str, value: float, origin: str) -> None:
        if name not in UNITS:
            raise InvalidError(
                f"there is no input {name!r} ({origin}); there are {', '.join(sorted(UNITS))}"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise InvalidError(f"{name} must be a number from 0 ({origin}), not {value!r}")
        if value == 0 and name not in _MAY_BE_ZERO:
            raise InvalidError(f"{name} must be more than 0 ({origin})")
        if name in _WHOLE and value != int(value):
            raise InvalidError(f"{name} must be a whole number ({origin}), not {value}")
        if name in _SHARES and value > 1:
            raise InvalidError(f"{name} is a share, at most 1 ({origin}), not {value}")
        self._inputs[name] = Input(name, float(value), UNITS[name], origin)

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def __getitem__(self, name: str) -> float:
        """The value of an input, which is used then."""
        one = self._inputs.get(name)
        if one is None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidError(f"the plan needs {name}; give {option}")
        self._used[name] = one
        return one.value

    @property
    def pages(self) -> float:
        """Pages that a sample reads, with this share of the rows' bytes in memory.

        Raises:
            InvalidError: The share is below what was measured, and nobody gave the pages.
        """
        if "pages" in self:
            return self["pages"]
        share, points = self["dram_share"], PAGES_BY_SHARE
        if share < points[0][0]:
            raise InvalidError(
                f"no pages were measured with {share:.2%} of the rows in memory; give --pages, "
                "which `tierbed place` and `tierbed sim cache` count on a log of yours"
            )
        for (low, most), (high, least) in pairwise(points):
            if share <= high:
                part = math.log(share / low) / math.log(high / low)
                value = most + (least - most) * part
                break
        self._used["pages"] = Input("pages", value, UNITS["pages"], PAGES_ORIGIN)
        return value

    @property
    def used(self) -> list[Input]:
        """The inputs that were used, in the order of the defaults, and what has none first."""
        order = {one.name: at for at, one in enumerate(DEFAULTS)}
        return sorted(self._used.values(), key=lambda one: order.get(one.name, -1))
