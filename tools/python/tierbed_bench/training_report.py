"""How do slices become rows, ratios, a table and a picture?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tierbed._util.report import print_table, write_json
from tierbed_bench.common import percentile, ratio
from tierbed_bench.suite import write_suite

__all__ = ["Outcome", "ratios_of", "row_of", "shown", "write_training"]

Slice = Mapping[str, Any]


@dataclass
class Outcome:
    """What one system's run brought; ``skipped`` says why it brought nothing."""

    name: str
    kind: str
    order: str
    threads: int
    scale: float
    batch_len: int
    dram_share: float
    look_ahead: int | str
    table_bytes: int
    skipped: str | None = None
    plan: Slice | None = None
    opened: Slice | None = None
    first_epoch: Slice | None = None
    warm: Slice | None = None
    checkpoint: Slice | None = None
    storage: Slice | None = None
    slices: list[Slice] = field(default_factory=list)
    beside: list[Slice] = field(default_factory=list)  # the forward order's, of the same batches


def _seconds(part: Slice) -> float:
    return float(sum(part["steps_us"]) + part["tail_us"]) / 1e6


def rate(part: Slice) -> float:
    """Row updates per second of whole steps: storage, pooled output and update."""
    return float(part["row_updates"]) / max(_seconds(part), 1e-9)


def row_rate(part: Slice) -> float:
    """Row updates per second of storage and update: without the time to pool the output.

    Where that time is not told apart, of whole steps.
    """
    pooling_s = float(part.get("lookup_us", 0)) / 1e6
    return float(part["row_updates"]) / max(_seconds(part) - pooling_s, 1e-9)


def _is_parted(outcome: Outcome) -> bool:
    """Whether lookup and update were timed apart; tables of others have whole steps only."""
    return all("lookup_us" in part for part in outcome.slices)


def _grown(slices: Sequence[Slice], name: str) -> float | None:
    found = [part["growth"][name] for part in slices if name in part["growth"]]
    return float(sum(found)) if found else None


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Returns one flat row: parameters, then metrics; None where a system has none."""
    row: dict[str, Any] = {
        "system": outcome.name,
        "order": outcome.order,
        "dram_share": outcome.dram_share,
        "window": outcome.look_ahead,
        "scale": outcome.scale,
        "batch_len": outcome.batch_len,
        "threads": outcome.threads,
        "through_python": outcome.kind == "python",
    }
    if outcome.skipped is not None or not outcome.slices:
        return {**row, "skipped": outcome.skipped or "no slice was measured"}
    slices = outcome.slices
    updates = float(sum(part["row_updates"] for part in slices))
    steps = [us for part in slices for us in part["steps_us"]]
    typical = percentile(steps, 0.5)
    row |= {
        "measured_batches": sum(part["batches"] for part in slices),
        "row_updates": int(updates),
        "row_updates_per_s": median(row_rate(part) for part in slices),
        "step_row_updates_per_s": median(rate(part) for part in slices),
        "lookup_ms_per_step": _lookup_ms(outcome),
        "cpu_ns_per_row_update": median(p["cpu_ns"] / p["row_updates"] for p in slices),
        "storage_cpu_ns_per_row_update": _storage_cpu(outcome),
        "step_ms_p50": typical / 1e3,
        "step_ms_p99": percentile(steps, 0.99) / 1e3,
        "step_ms_p999": percentile(steps, 0.999) / 1e3,
        "step_ms_max": max(steps) / 1e3,
        "stalls_over_10x_median": sum(us > 10 * typical for us in steps),
        "steps": len(steps),
    }
    row |= _storage_columns(slices, updates, sum(part["batches"] for part in slices))
    row |= _once_columns(outcome)
    return row


def _lookup_ms(outcome: Outcome) -> float | None:
    if not _is_parted(outcome):
        return None
    taken_us = float(sum(part["lookup_us"] for part in outcome.slices))
    return taken_us / 1e3 / float(sum(part["batches"] for part in outcome.slices))


def _storage_cpu(outcome: Outcome) -> float | None:
    """Processor time without the step's arithmetic, all threads."""
    if outcome.storage is not None:  # a pass moves rows and computes nothing
        return ratio(float(outcome.storage["cpu_ns"]), float(outcome.storage["row_updates"]))
    if outcome.kind != "keyed":
        return None
    return median(
        ratio(float(part["cpu_ns"] - part["growth"]["train_cpu_ns"]), float(part["row_updates"]))
        for part in outcome.slices
    )


def _storage_columns(slices: Sequence[Slice], updates: float, batches: int) -> dict[str, Any]:
    def per(name: str, by: float, factor: float = 1.0) -> float | None:
        grown = _grown(slices, name)
        return None if grown is None else factor * grown / by

    written, changed = _grown(slices, "device_write_bytes"), _grown(slices, "changed_bytes")
    merged, dropped = _grown(slices, "rows_merged"), _grown(slices, "rows_dropped")
    last = slices[-1]["counters"]
    return {
        "block_ms_per_step": per("blocked_us", batches, 1e-3),
        "train_ms_per_step": per("train_cpu_ns", batches, 1e-6),
        "storage_waits": _grown(slices, "wait_count"),
        "read_bytes_per_row_update": per("device_read_bytes", updates),
        "written_bytes_per_row_update": per("device_write_bytes", updates),
        "device_reads_per_row_update": per("device_read_count", updates),
        "write_amplification": ratio(written, changed) if written and changed else None,
        "space_amplification": (
            ratio(last["disk_bytes"], last["live_bytes"]) if last.get("live_bytes") else None
        ),
        "gc_efficiency": ratio(dropped or 0.0, merged) if merged else None,
        "block_loads_per_row_update": per("block_loads", updates),
        "block_reloads": _grown(slices, "block_reloads"),
        "compaction_s": per("compaction_us", 1e6),
        "uncounted_bytes": last.get("uncounted_bytes"),
    }


def _once_columns(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "resident_peak_bytes": max(part["resident_peak_bytes"] for part in outcome.slices)
    }
    if outcome.checkpoint is not None:
        row["checkpoint_s"] = outcome.checkpoint["seconds"]
    if outcome.opened is not None:
        row["fill_s"] = outcome.opened["seconds"]
    if outcome.first_epoch is not None:
        row["first_epoch_row_updates_per_s"] = rate(outcome.first_epoch)
    if outcome.plan is not None:
        updates = outcome.first_epoch["row_updates"] if outcome.first_epoch else 0
        samples = outcome.plan["batches"] * outcome.batch_len
        row |= {
            "plan_cpu_ns_per_row_update": ratio(outcome.plan["cpu_ns"], updates),
            "plan_bytes_per_sample": outcome.plan["file_bytes"] / samples,
            "plan_s": outcome.plan["seconds"],
            "plan_resident_peak_bytes": outcome.plan["resident_peak_bytes"],
        }
    return row


_RATIOS = {
    "forward_vs_rocksdb": ("forward", "rocksdb"),
    "forward_vs_memory": ("forward", "memory"),
    "forward_pipelined_vs_memory": ("forward_pipelined", "memory"),
    "forward_vs_torch": ("forward_python", "torch"),
    "forward_vs_fbgemm": ("forward_python", "fbgemm"),
    "forward_2_threads_vs_torch": ("forward_python_2_threads", "torch_2_threads"),
    "forward_2_threads_vs_fbgemm": ("forward_python_2_threads", "fbgemm_2_threads"),
    "forward_vs_hashdb": ("forward", "hashdb"),
    "forward_vs_file": ("forward", "file"),
    "forward_vs_recdb": ("forward", "recdb"),
    "forward_native_vs_torch": ("forward", "torch"),
    "forward_native_vs_fbgemm": ("forward", "fbgemm"),
    "forward_2_5_percent_vs_forward": ("forward_2_5_percent", "forward"),
    "forward_20_percent_vs_forward": ("forward_20_percent", "forward"),
    "cold_vs_rocksdb": ("cold", "rocksdb"),
    "recdb_vs_rocksdb": ("recdb", "rocksdb"),
    "hashdb_vs_rocksdb": ("hashdb", "rocksdb"),
    "file_vs_rocksdb": ("file", "rocksdb"),
    **{
        f"recdb_vs_{name}": ("parts_recdb", f"parts_{name}")
        for name in (
            "recdb_without_hot_rows",
            "recdb_without_sorter",
            "recdb_without_picker",
            "recdb_without_scheduler",
            "plain_lsm",
        )
    },
}


def ratios_of(outcomes: Sequence[Outcome]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Returns ratios of row updates per second, and why some are missing.

    A ratio is of storage and update when both sides time the pooled output apart, with the ratio
    of whole steps beside it (``_step``); else it is of whole steps. Each system's slices are first
    divided by the forward order's of the same batches, taken right before; a ratio is the median
    of one system's shares over the other's.
    """
    known = {outcome.name: outcome for outcome in outcomes}
    ratios: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for name, (system, baseline) in _RATIOS.items():
        is_parted = all(side in known and _is_parted(known[side]) for side in (system, baseline))
        speed = row_rate if is_parted else rate
        sides = [_share(known, side, speed) for side in (system, baseline)]
        missing = [
            f"{side}: {_reason(known, side)}"
            for side, share in zip((system, baseline), sides, strict=True)
            if share is None
        ]
        if missing:
            ratios[name] = None
            notes[name] = "; ".join(missing)
        else:
            ratios[name] = ratio(sides[0] or 0.0, sides[1] or 0.0)
            if is_parted:
                steps = [_share(known, side, rate) or 0.0 for side in (system, baseline)]
                ratios[f"{name}_step"] = ratio(*steps)
    cpu = {name: _storage_cpu(o) for name, o in known.items() if o.slices}
    forward_cpu, rocks_cpu = cpu.get("forward"), cpu.get("rocksdb")
    if forward_cpu and rocks_cpu:
        ratios["rocksdb_storage_cpu_vs_forward"] = ratio(rocks_cpu, forward_cpu)
    return ratios, notes


def _share(
    known: Mapping[str, Outcome], name: str, speed: Callable[[Slice], float]
) -> float | None:
    """Speed relative to the forward order on the same batches; None when it did not run."""
    outcome = known.get(name)
    if outcome is None or outcome.skipped is not None or not outcome.slices:
        return None
    if not outcome.beside:
        return 1.0  # the forward order itself
    pairs = zip(outcome.slices, outcome.beside, strict=True)
    return median(speed(own) / speed(beside) for own, beside in pairs)


def _reason(known: Mapping[str, Outcome], name: str) -> str:
    outcome = known.get(name)
    if outcome is None:
        return "not asked for"
    return outcome.skipped or "no slice was measured"


_SHOWN = (
    "system",
    "dram_share",
    "window",
    "row_updates_per_s",
    "step_row_updates_per_s",
    "cpu_ns_per_row_update",
    "storage_cpu_ns_per_row_update",
    "step_ms_p50",
    "step_ms_p999",
    "stalls_over_10x_median",
    "block_ms_per_step",
    "read_bytes_per_row_update",
    "written_bytes_per_row_update",
    "write_amplification",
    "space_amplification",
    "checkpoint_s",
    "resident_peak_bytes",
)


def shown(
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, float | None],
    notes: Mapping[str, str],
) -> None:
    """Prints the tables."""
    names = [name for name in _SHOWN if any(row.get(name) is not None for row in rows)]
    ran = [row for row in rows if "skipped" not in row]
    print_table("training: row updates by system", ran, names)
    left_out = [
        {"system": row["system"], "reason": row["skipped"]} for row in rows if "skipped" in row
    ]
    if left_out:
        print_table("left out", left_out)
    told = [
        {"ratio": name, "value": value, "missing": notes.get(name, "").partition(":")[0]}
        for name, value in ratios.items()
    ]
    print_table("ratios of row updates per second", told)


def write_training(
    out: Path,
    rows: Sequence[dict[str, Any]],
    ratios: Mapping[str, float | None],
    told: Mapping[str, Any],
    json_path: Path | None,
) -> Path:
    """Writes ``training.json`` and ``training.png``, and a copy of the JSON to ``json_path``."""
    path = write_suite(out, "training", rows, ratios, _bars(rows), told)
    if json_path is not None:
        import json

        write_json(json_path, json.loads(path.read_text()))
    return path


def _bars(rows: Sequence[Mapping[str, Any]]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        ran = [row for row in rows if "skipped" not in row]
        names = [str(row["system"]).replace("_", " ") for row in ran]
        left, right = figure.subplots(1, 2)
        left.barh(names, [row["step_row_updates_per_s"] for row in ran], color="#3b6ea5")
        left.set_xscale("log")
        left.set_xlabel("row updates per second of whole steps (median of slices)")
        left.invert_yaxis()
        moved = [
            (row["read_bytes_per_row_update"] or 0) + (row["written_bytes_per_row_update"] or 0)
            for row in ran
        ]
        right.barh(names, moved, color="#b5651d")
        right.set_xlabel("bytes read and written per row update")
        right.set_yticklabels([])
        right.invert_yaxis()

    return draw
