"""Everything that a GPU can be asked, in one command of less than ten minutes.

    python tools/python/gpu/gpu_campaign.py --out results
    python tools/python/gpu/gpu_campaign.py --out results --dry-run  # without a GPU: no times

Each stage is a process with a limit of its own, which writes a line per result at once. A stage
that fails or takes too long stops no other. What was predicted stands beside what was measured, in
``campaign.json`` and in the table at the end. Stages, those first whose answers matter most:

- probe: ceilings of the machine, ``gpu_probe.py``;
- exchange: bits, then forward, backward and the link, ``gpu_exchange.py``;
- end_to_end: DLRM with tables on SSD, ``gpu_end_to_end.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Stage:
    """A process of the campaign.

    Args:
        name: Of the stage and its files.
        script: Beside this one.
        seconds: Its limit.
        arguments: Of the script, before those of every stage.
    """

    name: str
    script: str
    seconds: float
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What was expected of a result, before it was measured.

    Args:
        part: The result's ``part``.
        of: Which of them: fields and their values.
        field: What is predicted.
        least: The least that was predicted.
        most: The most that was predicted.
        aim: What it must reach, at least; at most where it is a time. None: nothing.
    """

    part: str
    of: dict[str, Any]
    field: str
    least: float
    most: float
    aim: float | None = None

    def met(self, value: float) -> bool | None:
        """Tells whether ``value`` reaches the aim; None without one."""
        if self.aim is None:
            return None
        return value <= self.aim if self.field.endswith("_ms") else value >= self.aim


STAGES = (
    Stage("probe", "gpu_probe.py", 90.0),
    Stage("exchange", "gpu_exchange.py", 330.0, ("--seconds", "240")),
    Stage("end_to_end", "gpu_end_to_end.py", 150.0),
)

PREDICTIONS = (
    Prediction("kernel", {"load": "weak"}, "share_of_copy", 0.60, 0.75, aim=0.78),
    Prediction("kernel", {"load": "strong"}, "share_of_copy", 0.50, 0.65, aim=0.70),
    Prediction("kernel", {"load": "one-hot"}, "share_of_copy", 0.55, 0.70, aim=0.65),
    Prediction("kernel", {"load": "weak"}, "fused_ms", 4.9, 7.0),
    Prediction("kernel", {"load": "strong"}, "fused_ms", 1.0, 1.6),
    Prediction("kernel", {"load": "one-hot"}, "fused_ms", 0.12, 0.35),
    Prediction("step", {"load": "weak"}, "sgd_ms", 12.0, 19.0),
    Prediction("end_to_end", {"way": "ids_on_device"}, "samples_per_s", 1.7e5, 3.3e5),
    Prediction("end_to_end", {"way": "rows_on_host"}, "samples_per_s", 3.3e5, 5.5e5),
    Prediction("end_to_end", {"way": "windows_on_device"}, "samples_per_s", 1.5e6, 5e6, aim=3e6),
    Prediction("end_to_end_ratios", {}, "rows_on_host_vs_ids_on_device", 1.5, 3.2),
    Prediction("end_to_end_ratios", {}, "windows_on_device_vs_rows_on_device", 0.3, 0.8, aim=0.5),
)


def run(stage: Stage, out: Path, is_dry: bool) -> dict[str, Any]:
    """Runs a stage; returns how it ended. What it printed is in ``STAGE.log``."""
    lines = out / f"{stage.name}.jsonl"
    command = [sys.executable, str(HERE / stage.script), "--lines", str(lines), *stage.arguments]
    begun_s = time.perf_counter()
    with (out / f"{stage.name}.log").open("w") as log:
        try:
            ended: int | str = subprocess.run(
                [*command, *(["--dry-run"] if is_dry else [])],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=stage.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            ended = f"cut off after {stage.seconds:g} s"
    seconds = None if is_dry else time.perf_counter() - begun_s
    return {"stage": stage.name, "ended": ended, "seconds": seconds, "rows": told(lines)}


def told(lines: Path) -> list[dict[str, Any]]:
    """Returns what a stage told; a line that it was cut off in is none."""
    rows = []
    for line in lines.read_text().splitlines() if lines.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def compared(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each prediction with what was measured."""
    for one in PREDICTIONS:
        values = [
            row.get(one.field)
            for row in rows
            if row.get("part") == one.part and one.of.items() <= row.items()
        ]
        value = values[0] if values else None
        yield {
            "part": one.part,
            **one.of,
            "field": one.field,
            "predicted": [one.least, one.most],
            "aim": one.aim,
            "measured": value,
            "met": None if value is None else one.met(value),
        }


def main() -> int:
    """Runs the stages; returns 1 when one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=570.0, help="begin nothing after these")
    parser.add_argument("--only", choices=[stage.name for stage in STAGES], action="append")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: all paths, no times")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.perf_counter() + options.seconds
    result: dict[str, Any] = {"is_dry": options.dry_run, "stages": []}
    for stage in STAGES:
        if options.only and stage.name not in options.only:
            continue
        left_s = deadline_s - time.perf_counter()
        if left_s < 5.0:
            found: dict[str, Any] = {"stage": stage.name, "ended": "no time", "rows": []}
        else:
            limited = Stage(stage.name, stage.script, min(stage.seconds, left_s), stage.arguments)
            found = run(limited, options.out, options.dry_run)
        wrong = sum(row.get("equal") is False for row in found["rows"])
        print(f"{stage.name}: {found['ended']}, {len(found['rows'])} results, {wrong} differ")
        result["stages"].append(found)
        rows = [row for one in result["stages"] for row in one["rows"]]
        result["predictions"] = list(compared(rows))
        # After each stage: a campaign that is cut off has told what it knew.
        (options.out / "campaign.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in result.get("predictions", []):
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0 if all(stage["ended"] == 0 for stage in result["stages"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
