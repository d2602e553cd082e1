"""The demo: train, kill, resume, compare, publish, serve, ask, verify, report.

Every step is a command anyone can type; the demo types them, in processes of their own, and
checks what they leave behind. It ends with a table and a picture.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from tierbed import _native
from tierbed._util.bytes import format_bytes
from tierbed._util.report import print_table, write_json
from tierbed.config.optim import OPTIMIZERS
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.config.words import ModelKind, Range
from tierbed.data.source import DataOptions, Source, open_source
from tierbed.errors import InvalidError, TierbedError
from tierbed.recipes.run import auto_batch_size, load_run
from tierbed_bench.common import percentile
from tierbed_bench.figures import save_figure

__all__ = ["DemoOptions", "run_demo"]

TIMES_THE_BUDGET = 10
BUDGET_MIN_BYTES = 8 << 20
OPTIMIZER = "adagrad"
LOOKUPS = 500
PREDICTIONS = 256


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What to show.

    Args:
        out: Folder of report, run and snapshot.
        data: A file in Criteo's layout; else generated.
        samples: Samples to generate.
        scale: Share of Criteo's published cardinalities to generate.
        seed: Of everything random.
        model: What is on top of the tables.
    """

    out: Path = Path("demo-out")
    data: Path | None = None
    samples: Annotated[int, Range(5000)] = 120_000
    scale: float = 0.05
    seed: int = 1
    model: ModelKind = "dlrm"


@dataclass(frozen=True)
class _Sizes:
    dim: int
    dram_budget_bytes: int
    table_bytes: int


class _Demo:
    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.run = options.out / "run"
        self.reference = options.out / "reference"
        self.snapshot = options.out / "snapshot"
        self.facts: dict[str, Any] = {}
        self.started_s = time.perf_counter()

    # ------------------------------------------------------------ steps

    def prepare(self) -> _Sizes:
        """Opens the data and chooses a budget of a tenth of the tables."""
        for folder in (self.run, self.reference, self.snapshot):
            shutil.rmtree(folder, ignore_errors=True)
        self.options.out.mkdir(parents=True, exist_ok=True)
        source = self.source()
        for dim in (16, 32, 64, 128, 256):
            optimizer = OPTIMIZERS[OPTIMIZER]()
            tables = [
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim)
                for name, rows in source.table_sizes.items()
            ]
            table_bytes = sum(_native.table_bytes(table.schema(optimizer, 0)) for table in tables)
            budget = table_bytes // TIMES_THE_BUDGET
            if budget >= BUDGET_MIN_BYTES:
                break
        else:
            raise InvalidError(
                "the data has too few distinct values for tables ten times a useful budget; "
                "give a longer file"
            )
        budget = min(budget, 16 << 20)
        self.facts.update(
            samples=source.train_samples + source.eval_samples,
            rows=sum(source.table_sizes.values()),
            embedding_dim=dim,
            table_bytes=table_bytes,
            dram_budget_bytes=budget,
            tables_over_budget=table_bytes / budget,
        )
        self.train_samples = source.train_samples
        return _Sizes(dim, budget, table_bytes)

    def source(self) -> Source:
        """Opens the demo's data as ``tierbed train`` does."""
        return open_source(self.data_options(), self.run / "vocabulary")

    def data_options(self) -> DataOptions:
        """Returns what ``tierbed train`` is told about the data."""
        options = self.options
        if options.data is not None:
            return DataOptions("criteo", (str(options.data),), eval_share=0.2, seed=options.seed)
        return DataOptions(
            "synthetic",
            samples=options.samples,
            eval_share=0.2,
            seed=options.seed,
            scale=options.scale,
        )

    def train_command(self, folder: Path, sizes: _Sizes, *more: str) -> list[str]:
        """Returns the command that trains into ``folder``."""
        options = self.options
        if options.data is not None:
            data = ["--format", "criteo", "--data", str(options.data)]
        else:
            data = ["--format", "synthetic", "--samples", str(options.samples)]
            data += ["--scale", str(options.scale)]
        return [
            *("train", *data, "--eval-last", "0.2", "--model", options.model),
            *("--store", str(folder), "--dim", str(sizes.dim), "--seed", str(options.seed)),
            *("--dram-budget", str(sizes.dram_budget_bytes), *more),
        ]

    def train_killed(self, sizes: _Sizes) -> None:
        """Trains until the second checkpoint, then kills the process without warning."""
        steps = self.train_samples // auto_batch_size(self.train_samples)
        every = max(1, steps // 5)
        self.checkpoint_steps = every
        command = self.train_command(self.run, sizes, "--checkpoint-steps", str(every))
        _say(command)
        with subprocess.Popen(_python(command), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            seen = 0
            told = []
            for line in process.stderr:
                told.append(line)
                seen += line.startswith("checkpoint")
                if seen == 2:
                    time.sleep(0.3)  # some steps beyond the checkpoint, which will be lost
                    process.kill()
                    break
            process.stderr.read()
            code = process.wait()
        if seen < 2:
            raise TierbedError(f"training ended with {code} before it could be killed: {told}")
        print("   killed with SIGKILL behind the second checkpoint")

    def train_rest(self, sizes: _Sizes) -> None:
        """Continues the killed run; beside it, the same training in memory, never stopped."""
        whole = self.options.out / "reference.json"
        rest = self.options.out / "train.json"
        if self.options.data is not None:
            # The reference has its own folder; the vocabulary is the same file.
            self.reference.mkdir(parents=True)
            shutil.copy(self.run / "vocabulary", self.reference / "vocabulary")
        memory = ["--backend", "memory", "--dram-budget", "64GiB", "--json", str(whole)]
        reference = _python(self.train_command(self.reference, sizes, *memory))
        with subprocess.Popen(
            reference, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as beside:
            every = ["--checkpoint-steps", str(self.checkpoint_steps), "--json", str(rest)]
            _tierbed(self.train_command(self.run, sizes, *every))
            _, told = beside.communicate()
            if beside.returncode != 0:
                raise TierbedError(f"the reference training failed: {told}")
        result = json.loads(rest.read_text())
        names = ("auc", "pr_auc", "logloss", "samples_per_s", "dram_peak_bytes", "disk_bytes")
        self.facts.update({name: result[name] for name in (*names, "steps")})
        self.facts["resumed_from_step"] = result["resumed_from_step"]
        self.facts["auc_in_memory"] = json.loads(whole.read_text())["auc"]

    def compare(self, sizes: _Sizes) -> None:
        """Compares every row, state and dense weight of the two trainings."""
        budget = {"dram_budget": sizes.dram_budget_bytes}
        with ExitStack() as stack:
            store, model, _ = load_run(self.run, **budget)
            stack.callback(store.close)
            other, other_model, _ = load_run(self.reference, backend="memory", dram_budget="64GiB")
            stack.callback(other.close)
            whole = {
                table["name"]: other.read_rows_and_state(table["name"], 0, table["row_count"])
                for table in other.tables()
            }
            counts = {
                name: other.use_counts(name, 0, rows.shape[0]) for name, (rows, _) in whole.items()
            }
            used_there = sum(int((count > 0).sum()) for count in counts.values())
            used = differing = 0

            def compare(
                name: str, rows: Tensor, weights: Tensor, state: Tensor, uses: Tensor
            ) -> None:
                nonlocal used, differing
                theirs, their_state = (part[rows] for part in whole[name])
                equal = (weights == theirs).all(1) & (state == their_state).all(1)
                equal &= uses == counts[name][rows]
                used += int((uses > 0).sum())
                differing += int((~equal).sum())

            store.scan(compare)
            # Rows that one training used and the other did not differ too.
            differing += abs(used - used_there)
            dense = zip(model.state_dict().values(), other_model.state_dict().values(), strict=True)
            dense_equal = all(torch.equal(a, b) for a, b in dense)
        self.facts.update(
            rows_trained=used, rows_that_differ=differing, dense_weights_equal=dense_equal
        )
        if differing or not dense_equal:
            raise TierbedError(f"the trainings differ: {differing} rows, dense {dense_equal}")

    def publish(self, sizes: _Sizes) -> None:
        """Publishes the model as a snapshot."""
        path = self.options.out / "publish.json"
        budget = ["--dram-budget", str(sizes.dram_budget_bytes), "--json", str(path)]
        _tierbed(["publish", "--store", str(self.run), "--out", str(self.snapshot), *budget])

    def serve(self, sizes: _Sizes) -> None:
        """Serves the snapshot and asks it over HTTP."""
        command = ["serve", str(self.snapshot), "--address", "127.0.0.1:0"]
        command += ["--dram-budget", str(sizes.dram_budget_bytes), "--drain-delay", "0"]
        _say(command)
        with subprocess.Popen(_python(command), stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if "http://" not in line:
                    raise TierbedError(f"the server did not start: {line}")
                url = line.split()[-1]
                print(f"   {line.strip()}")
                self.ask(url, sizes)
            finally:
                process.terminate()
                process.wait()

    def ask(self, url: str, sizes: _Sizes) -> None:
        """Looks rows up and predicts over HTTP; compares both with the training store."""
        store, model, _ = load_run(self.run, dram_budget=sizes.dram_budget_bytes)
        with store:
            source = self.source()
            first = source.train_samples
            batch = next(iter(source.batches(first, first + PREDICTIONS, PREDICTIONS)))
            names = batch.sparse.keys()
            waits = []
            lookup_error = 0.0
            for at in range(min(LOOKUPS, 4 * PREDICTIONS)):
                name = names[at % len(names)]
                ids = batch.sparse[name].values()[:8]
                request = {"features": {name: {"values": ids.tolist(), "offsets": [0, 8]}}}
                started_s = time.perf_counter()
                answer = json.loads(_post(f"{url}/v1/lookup", json.dumps(request).encode()))
                waits.append(1e6 * (time.perf_counter() - started_s))
                found = torch.tensor(answer["features"][name][0])
                # Added in index order, as the kernels do: the answer must have the same bits.
                wanted = functools.reduce(torch.add, store.gather_rows(name, ids))
                lookup_error = max(lookup_error, float((found - wanted).abs().max()))
            body = save({"dense": batch.dense, "values": batch.sparse.values()})
            answered = load(_post(f"{url}/v1/predict", body, "application/x-safetensors"))
            with torch.inference_mode():
                expected = torch.sigmoid(model(batch.dense, batch.sparse))
        health = json.loads(_get(f"{url}/health"))
        metrics = _get(f"{url}/metrics").decode()
        self.waits_us = waits
        self.facts.update(
            health=health["status"],
            metrics_lines=len(metrics.splitlines()),
            http_lookups=len(waits),
            http_lookup_us_p50=median(waits),
            http_lookup_us_p99=percentile(waits, 0.99),
            http_lookup_error_max=lookup_error,
            http_predictions=len(answered["probability"]),
            http_prediction_error_max=float((answered["probability"] - expected).abs().max()),
        )
        if lookup_error > 0 or self.facts["http_prediction_error_max"] > 1e-6:
            raise TierbedError("the server answers other numbers than the training store")

    def verify(self) -> None:
        """Checks every checksum of run and snapshot."""
        for folder, name in ((self.run, "store"), (self.snapshot, "snapshot")):
            path = self.options.out / f"verify-{name}.json"
            _tierbed(["verify", str(folder), "--json", str(path)])
            self.facts[f"{name}_pages_verified"] = json.loads(path.read_text())["pages"]

    def report(self) -> None:
        """Prints the table, writes JSON and picture."""
        self.facts["seconds"] = time.perf_counter() - self.started_s
        out = self.options.out
        write_json(out / "report.json", self.facts)
        save_figure(out / "report.png", self.draw, (11, 4.2))
        rows = [{"shown": told, "value": value} for told, value in _told(self.facts)]
        print_table(f"Tierbed demo: what was shown ({self.options.model})", rows)
        print(f"report: {out / 'report.json'}, picture: {out / 'report.png'}")

    def draw(self, figure: Any) -> None:
        """Draws memory, accuracy and latencies."""
        facts = self.facts
        sizes, areas, waits = figure.subplots(1, 3)
        names = ["tables", "on disk", "budget", "peak used"]
        keys = ("table_bytes", "disk_bytes", "dram_budget_bytes", "dram_peak_bytes")
        sizes.bar(names, [facts[key] / 2**20 for key in keys], color=["#999"] * 2 + ["#3b6ea5"] * 2)
        sizes.set_ylabel("MiB")
        sizes.set_yscale("log")
        sizes.set_title(f"Tables {facts['tables_over_budget']:.0f} times the budget")
        areas.bar(
            ["killed, resumed,\non disk", "uninterrupted,\nin memory"],
            [facts["auc"], facts["auc_in_memory"]],
            color=["#3b6ea5", "#999"],
        )
        areas.set_ylim(0.5, max(0.6, facts["auc"] + 0.05))
        areas.set_title(f"Test AUC; {facts['rows_that_differ']} rows differ")
        waits.hist(self.waits_us, bins=40, color="#b5651d")
        waits.set_xlabel("us per HTTP lookup of 8 rows")
        waits.set_title(f"p99 {facts['http_lookup_us_p99']:.0f} us")


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Runs the demo and returns its facts."""
    demo = _Demo(options)
    if options.data is not None and not options.data.is_file():
        raise InvalidError(f"no such file: {options.data}", {"path": str(options.data)})
    _head(1, "data")
    sizes = demo.prepare()
    print(
        f"   {demo.facts['rows']:,} rows, {format_bytes(sizes.table_bytes)} of tables, "
        f"budget {format_bytes(sizes.dram_budget_bytes)}"
    )
    steps: list[tuple[str, Callable[[], None]]] = [
        ("train, and kill the process", lambda: demo.train_killed(sizes)),
        ("continue, evaluate; train the same in memory", lambda: demo.train_rest(sizes)),
        ("compare both, bit for bit", lambda: demo.compare(sizes)),
        ("publish a snapshot", lambda: demo.publish(sizes)),
        ("serve it, look up and predict over HTTP", lambda: demo.serve(sizes)),
        ("verify every checksum", demo.verify),
    ]
    for number, (what, step) in enumerate(steps, start=2):
        _head(number, what)
        step()
    demo.report()
    return demo.facts


def _told(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("tables", f"{format_bytes(facts['table_bytes'])}, {facts['rows']:,} rows"),
        (
            "memory budget",
            f"{format_bytes(facts['dram_budget_bytes'])}: "
            f"1/{facts['tables_over_budget']:.0f} of the tables",
        ),
        ("memory used at most", format_bytes(facts["dram_peak_bytes"])),
        ("on disk (touched pages only)", format_bytes(facts["disk_bytes"])),
        ("training speed", f"{facts['samples_per_s']:,.0f} samples/s"),
        ("killed, continued at step", f"{facts['resumed_from_step']} of {facts['steps']}"),
        (
            "rows and states that differ from training in memory",
            f"{facts['rows_that_differ']} of {facts['rows']:,}; dense weights equal: "
            f"{facts['dense_weights_equal']}",
        ),
        ("test AUC, PR-AUC, log-loss", "{auc:.4f}, {pr_auc:.4f}, {logloss:.4f}".format(**facts)),
        (
            "HTTP lookups",
            f"{facts['http_lookups']}, p50 {facts['http_lookup_us_p50']:.0f} us, "
            f"p99 {facts['http_lookup_us_p99']:.0f} us, "
            f"largest difference {facts['http_lookup_error_max']:.1e}",
        ),
        (
            "HTTP predictions",
            f"{facts['http_predictions']}, "
            f"largest difference {facts['http_prediction_error_max']:.1e}",
        ),
        (
            "checksums verified",
            f"{facts['store_pages_verified']:,} store pages, "
            f"{facts['snapshot_pages_verified']:,} snapshot pages",
        ),
        ("all in", f"{facts['seconds']:.0f} s"),
    ]


def _python(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "tierbed.cli", *command]


def _say(command: list[str]) -> None:
    print("   $ tierbed " + " ".join(command), flush=True)


def _head(number: int, what: str) -> None:
    print(f"{number}. {what}", flush=True)


def _tierbed(command: list[str]) -> None:
    _say(command)
    done = subprocess.run(_python(command), stdout=subprocess.DEVNULL, env=os.environ, check=False)
    if done.returncode != 0:
        raise TierbedError(f"tierbed {command[0]} ended with code {done.returncode}")


def _post(url: str, body: bytes, kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": kind})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return bytes(answer.read())


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310
        return bytes(answer.read())
