"""What do the example models come to on disk, beside the same models in plain torch?

Every example of the checkout runs with ``--check``, in a process of its own: on disk, and then in
plain torch with all rows in memory, from the same weights and over the same batches. Quality is
on what was held out. Rounds repeat the whole program, so the two alternate; times are medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from json import loads
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.errors import InvalidError
from tierbed_bench.common import ratio
from tierbed_bench.suite import write_suite

__all__ = ["EXAMPLES", "ExamplesOptions", "run_examples"]

MIB = 1 << 20


@dataclass(frozen=True)
class Example:
    """A program and what it is called with."""

    name: str
    program: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


# Rows and state of the language model take 256 MiB, 5 % of which are its budget.
_OF_LM = ("--tokens", "200000", "--epochs", "2", "--budget", "12.8MiB")
EXAMPLES = (
    Example("ngram_memory_lm", "ngram_memory_lm.py", _OF_LM, ("--tokens", "60000")),
    Example("two_tower", "two_tower.py", (), ("--users", "6000", "--epochs", "1")),
    Example("sasrec", "sasrec.py", (), ("--users", "2000", "--epochs", "1")),
    Example("hstu", "sasrec.py", ("--block", "hstu"), ("--users", "2000", "--epochs", "1")),
    Example("din", "din.py", (), ("--users", "2000", "--epochs", "1")),
    Example("matrix_factorization", "matrix_factorization.py", (), ("--epochs", "1")),
    Example("dlrm_dcnv2", "dlrm_dcnv2.py", (), ("--epochs", "1")),
    Example("graph_sage", "graph_sage.py", (), ("--epochs", "1")),
)


@dataclass(frozen=True, kw_only=True)
class ExamplesOptions:
    """What to run.

    Args:
        folder: The examples of a checkout.
        models: These only, by comma; all when empty.
        data: What a model reads, as two_tower=FILE, by comma; else it is generated.
        rounds: How often each program runs.
        threads: Threads of torch.
        quick: Small sizes, one epoch.
    """

    folder: Path = Path("examples")
    models: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    rounds: int = 3
    threads: int = 1
    quick: bool = False


def run_examples(out: Path, options: ExamplesOptions, json: Path | str | None = None) -> Path:
    """Runs the suite; writes ``examples.json`` to ``out``.

    Raises:
        InvalidError: An unknown model, or a folder without the programs.
    """
    chosen, data = _chosen(options), _data(options)
    told = [_measured(example, data.get(example.name, []), options) for example in chosen]
    rows = [row for of_example in told for row in of_example]
    print_table("Examples", rows)
    ratios: dict[str, float | None] = {}
    for row in rows:
        if row["system"] == "on_disk":
            ratios[f"{row['model']}_seconds_vs_torch"] = row["seconds_vs_torch"]
            ratios[f"{row['model']}_memory_vs_torch"] = row["memory_vs_torch"]
    path = write_suite(out, "examples", rows, ratios)
    if json is not None:
        write_json(json, loads(path.read_text()))
    return path


def _chosen(options: ExamplesOptions) -> list[Example]:
    known = {example.name: example for example in EXAMPLES}
    names = options.models or tuple(known)
    for name in names:
        if name not in known:
            raise InvalidError(f"no example is called {name}: {', '.join(known)}")
        if not (options.folder / known[name].program).is_file():
            raise InvalidError(f"{options.folder} has no {known[name].program}: give --folder")
    return [known[name] for name in names]


def _data(options: ExamplesOptions) -> dict[str, list[str]]:
    data: dict[str, list[str]] = {}
    for each in options.data:
        name, _, path = each.partition("=")
        if not path or name not in {example.name for example in EXAMPLES}:
            raise InvalidError(f"data is given as MODEL=FILE, not {each}")
        data.setdefault(name, []).append(path)
    return data


def _measured(example: Example, data: list[str], options: ExamplesOptions) -> list[dict[str, Any]]:
    """Runs a program some times; returns a row for each of its systems."""
    rounds = []
    with Progress(example.name, options.rounds, "rounds") as progress:
        for _ in range(options.rounds):
            rounds.append(_told(example, data, options))
            progress.advance()
    first = rounds[0]
    if any(_quality(each) != _quality(first) for each in rounds):
        raise InvalidError(f"{example.name} has another quality each time")
    rows: list[dict[str, Any]] = []
    for at, run in enumerate(first["runs"]):
        seconds = [each["runs"][at]["seconds"] for each in rounds]
        rows.append(
            {
                "model": example.name,
                "system": run["name"].replace(" ", "_").replace("memory_on_disk", "on_disk"),
                "data": "given" if data else "generated",
                "quality": first["quality"],
                "reached": run["quality"][-1],
                "epochs": len(run["quality"]),
                "seconds": median(seconds),
                "tokens_per_s": run["tokens"] / median(seconds) if run["tokens"] else None,
                "rows_memory_mib": run["rows_bytes"] / MIB,
            }
        )
    torch_run = next(at for at, row in enumerate(rows) if row["system"].endswith("plain_torch"))
    pairs = [each["runs"][0]["seconds"] / each["runs"][torch_run]["seconds"] for each in rounds]
    for row in rows:
        is_ours = row["system"] == "on_disk"
        row["seconds_vs_torch"] = median(pairs) if is_ours else None
        memory = row["rows_memory_mib"], rows[torch_run]["rows_memory_mib"]
        row["memory_vs_torch"] = ratio(*memory) if is_ours else None
    return rows


def _quality(told: dict[str, Any]) -> list[list[float]]:
    return [run["quality"] for run in told["runs"]]


def _told(example: Example, data: list[str], options: ExamplesOptions) -> dict[str, Any]:
    """Runs a program once; it fails unless disk and memory have the same bits."""
    program = (options.folder / example.program).resolve()
    words = [*example.options, *(example.quick if options.quick else ())]
    if data:
        words += ["--data", *(str(Path(path).resolve()) for path in data)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "told.json"
        done = subprocess.run(
            [sys.executable, str(program), "--check", "--json", str(path), *words],
            check=False,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise InvalidError(f"{example.program} failed: {done.stderr[-2000:]}{done.stdout}")
        told: dict[str, Any] = loads(path.read_text())
        return told
