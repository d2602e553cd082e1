"""What grows when tables are larger than memory, and how?

Tables of a given size and of a tenth of it go through the same phases: plan, epochs in forward
order, kills and restarts, a whole model, window and cold order, publish, placement, lookups in
little memory, checks and exports. Each phase has a process of its own, so that its peak memory is
its own, and its row is kept in ``big.jsonl`` when it ends.

Every row is trained in the first epoch, and the second reads rows from disk. Rows of a sample must
have the bits of a run that was never killed and had ten times the memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierbed._util.bytes import format_bytes, parse_bytes
from tierbed._util.report import print_table, write_json
from tierbed.config.words import Positive
from tierbed.errors import InvalidError, TierbedError
from tierbed_bench.big import room
from tierbed_bench.big.data import Shape, shape_for
from tierbed_bench.big.report import checks_of, draw, growth_of, ratios_of
from tierbed_bench.big.sizes import PARTS, OneSize, Wanted
from tierbed_bench.suite import write_suite

__all__ = ["BigOptions", "run_big"]

QUICK_SIZE = "128MiB"
#: Checkpoints in an epoch of full size; what was overwritten since the last one takes disk.
CHECKPOINTS = 16


@dataclass(frozen=True, kw_only=True)
class BigOptions:
    """What is measured.

    Args:
        size: Bytes of all rows, without optimizer state; by default 2.5 times the machine's
            memory, or what the disk holds.
        smaller: The size that is compared with, as a share of the whole.
        budget: Memory of a store.
        dim: Elements of a row.
        tables: Tables, each of a feature with one id per sample.
        batch: Samples of a batch.
        seconds: Of phases that are bounded by time, such as training by window.
        queries: Of the log by which a table is placed.
        parts: Of training,windows,serving.
        scratch: Folder for all stores, deleted again; by default that of --out.
        quick: 128 MiB of rows, about a minute.
        seed: Of all that is drawn.
    """

    size: str | None = None
    smaller: float = 0.1
    budget: str = "512MiB"
    dim: Positive = 64
    tables: Positive = 16
    batch: Positive = 2048
    seconds: float = 30.0
    queries: Positive = 5000
    parts: tuple[str, ...] = PARTS
    scratch: Path | None = None
    quick: bool = False
    seed: int = 1


def run_big(out: Path, options: BigOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``big.json``, ``big.jsonl`` and ``big.png`` to ``out``.

    Raises:
        InvalidError: Unknown parts, or a size of which nothing can be measured.
        TierbedError: Phases failed; what was measured is written all the same.
    """
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        raise InvalidError(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    if not 0.0 < options.smaller < 1.0:
        raise InvalidError(f"smaller is a share between 0 and 1, not {options.smaller}")
    out.mkdir(parents=True, exist_ok=True)
    scratch = out if options.scratch is None else options.scratch
    scratch.mkdir(parents=True, exist_ok=True)
    size_bytes, chosen_by = _size(options, scratch)
    kept = out / "big.jsonl"
    kept.write_text("")
    batches = _shape(options, size_bytes).batch_count
    wanted = _wanted(options, kept, max(1, batches // CHECKPOINTS))
    sizes: list[OneSize] = []
    labelled = (("smaller", options.smaller), ("full", 1.0))
    for label, share in labelled:
        shape = _shape(options, int(size_bytes * share))
        with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-big-") as folder:
            one = OneSize(label, shape, Path(folder), wanted)
            sizes.append(one)
            one.run()
    return _written(out, options, sizes, chosen_by, json_path)


def _size(options: BigOptions, scratch: Path) -> tuple[int, str]:
    if options.size is not None:
        return parse_bytes(options.size, "size"), "asked for"
    if options.quick:
        return parse_bytes(QUICK_SIZE), "quick"
    # Ratios of needs are those of large tables.
    like = _shape(options, 100 << 30)
    return room.default_size(scratch, like, serves="serving" in options.parts)


def _shape(options: BigOptions, table_bytes: int) -> Shape:
    return shape_for(
        table_bytes,
        tables=options.tables,
        dim=options.dim,
        batch=min(options.batch, 256) if options.quick else options.batch,
        seed=options.seed,
    )


def _wanted(options: BigOptions, kept: Path, checkpoint_batches: int) -> Wanted:
    return Wanted(
        budget_bytes=parse_bytes(options.budget, "budget"),
        seconds=min(options.seconds, 1.0) if options.quick else options.seconds,
        queries=min(options.queries, 50) if options.quick else options.queries,
        checkpoint_batches=checkpoint_batches,
        parts=options.parts,
        kept=kept,
    )


def _written(
    out: Path,
    options: BigOptions,
    sizes: Sequence[OneSize],
    chosen_by: str,
    json_path: Path | None,
) -> Path:
    phases = [row for size in sizes for row in size.rows]
    curves = {name: curve for size in sizes for name, curve in size.curves.items()}
    growth, checks, ratios = growth_of(phases), checks_of(phases), ratios_of(phases)
    full = sizes[-1].shape
    told: dict[str, Any] = {
        "size_bytes": full.table_bytes,
        "size_chosen_by": chosen_by,
        "smaller_bytes": sizes[0].shape.table_bytes,
        "row_count": full.row_count,
        "batches": full.batch_count,
        "tables": full.tables,
        "dim": full.dim,
        "batch": full.batch,
        "drawn_share": full.drawn_share,
        "checkpoint_batches": sizes[-1].wanted.checkpoint_batches,
        "budget": options.budget,
        "torch_threads": 1,
        "seconds": sizes[-1].wanted.seconds,
        "seed": options.seed,
        "checks": checks,
        "phases": phases,
        "curves": curves,
    }
    print(
        f"{format_bytes(full.table_bytes)} of rows ({chosen_by}), next to "
        f"{format_bytes(sizes[0].shape.table_bytes)}, with {options.budget} of memory"
    )
    columns = ["phase", "variant", "measure", "smaller", "full", "full_by_smaller"]
    print_table("what grows, and how", growth, columns)
    broken = [check for check in checks if not check["is_met"]]
    if broken:
        names = ["size", "phase", "variant", "check", "found", "bound"]
        print_table("what does not hold", broken, names)
    path = write_suite(out, "big", growth, ratios, draw(phases, curves), told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    failed = [f"{row['size']} {row['phase']}" for row in phases if "failed" in row]
    if failed:
        raise TierbedError(f"phases failed: {', '.join(failed)}; see {path} for the reasons")
    return path
