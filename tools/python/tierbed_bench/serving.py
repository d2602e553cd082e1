"""How many requests does a server take, what do they cost it, and what happens beyond that?

An open loop asks Tierbed by its protocols, and Redis and memcached, for the same rows
(:mod:`tierbed_bench.serving_systems`). Latency counts from the moment when a request was meant to
be sent; a run whose requests were sent late is void; answers are compared with the rows. Parts:

- ``cost``: processor time of the server for a request, all rows in memory, beside the engine's
  own in this process, rounds interleaved;
- ``sweep``: growing rates, all rows in memory, until a server does not keep up;
- ``half_load``: Tierbed with a share of the rows in memory: latency at half of its saturation,
  beside the engine's own in this process;
- ``overload``: the same server at twice its saturation, and its recovery;
- ``activation``, ``activations``: deltas that come meanwhile
  (:mod:`tierbed_bench.serving_activation`);
- ``predict``: processor time of Tierbed for a prediction of a DLRM, asked in a closed loop
  (:mod:`tierbed_bench.serving_predict`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tierbed._util.report import print_table, write_json
from tierbed.config.words import NotNegative, Positive
from tierbed.errors import InvalidError
from tierbed_bench.serving_activation import activation, activations, reload
from tierbed_bench.serving_predict import measure_predictions
from tierbed_bench.serving_report import curves, ratios
from tierbed_bench.serving_systems import (
    PEERS,
    AbsentError,
    Rows,
    System,
    command,
    generator_core,
    started,
)
from tierbed_bench.serving_triton import triton_packages
from tierbed_bench.suite import write_suite

__all__ = ["Bench", "ServingOptions", "run_serving"]

Row = dict[str, Any]
PARTS = ("cost", "sweep", "half_load", "overload", "activation", "activations", "predict")
PROTOCOLS = ("lookup", "infer", "grpc")
MIB = 1 << 20
# A rate is kept up with when so many of its requests are answered in time.
KEPT_SHARE = 0.99
# A server is itself again when a span is answered as before, but for this factor.
RECOVERED_FACTOR = 2.0
# A sweep that is given no rates doubles until a rate is too much, then halves the step.
BISECTIONS = 2
DOUBLINGS = 12
COLUMNS = (
    *("part", "system", "samples", "connections", "rate", "good_per_s", "refused"),
    *("p50_us", "p99_us", "cpu_us"),
)


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """What is measured.

    Args:
        parts: cost, sweep, half_load, overload, activation, activations, predict, by comma.
        protocols: Of Tierbed, by comma: lookup (safetensors), infer and grpc (Open Inference
            Protocol).
        peers: Other servers, by comma: redis, memcached, extstore, triton.
        rates: Requests a second of a sweep, by comma; else they double from the first on.
        first_rate: The first rate of a sweep that is given none, and the rate of ``cost``.
        rows: Rows of the table.
        dim: Elements of a row.
        ids: Ids of a sample.
        samples: Samples of a request.
        skew: How uneven rows are asked for; 0 is evenly.
        dram_share: Of all parts but ``cost``, ``sweep`` and ``predict``: memory of Tierbed, as a
            share of the rows.
        changed_share: Share of the rows that a delta changes.
        deltas: Of ``activations``: how many come.
        predict_samples: Of ``predict``: samples of a request, by comma.
        predict_connections: Of ``predict``: connections that ask at once, by comma.
        seconds: Length of a run.
        rounds: Of ``cost`` and ``predict``: rounds over all; of ``activation``: deltas.
        arrivals: poisson is as of many callers, constant is equally far apart.
        p99_ms_max: Above it a rate is too much.
        connections: Open before the first request.
        connections_max: Most that are open; beyond them requests are late.
        check_every: Every so manieth answer is compared with the rows.
        scratch: Folder for snapshots, deleted again; by default the folder of results.
        quick: Few rows, short runs, three rates.
        seed: Of arrivals and ids.
    """

    parts: tuple[str, ...] = PARTS
    protocols: tuple[str, ...] = PROTOCOLS
    peers: tuple[str, ...] = PEERS
    rates: tuple[float, ...] = ()
    first_rate: Positive = 1_000
    rows: Positive = 4_000_000
    dim: Positive = 32
    ids: Positive = 26
    samples: Positive = 1
    skew: float = 1.05
    dram_share: float = 0.05
    changed_share: float = 0.01
    deltas: Positive = 100
    predict_samples: tuple[int, ...] = (1, 16, 128)
    predict_connections: tuple[int, ...] = (1, 8)
    seconds: float = 10.0
    rounds: Positive = 5
    arrivals: Literal["poisson", "constant"] = "poisson"
    p99_ms_max: float = 10.0
    connections: Positive = 64
    connections_max: Positive = 1_024
    check_every: NotNegative = 100
    scratch: Path | None = None
    quick: bool = False
    seed: int = 1


@dataclass
class Bench:
    """A run of the suite: what is measured, and what was told.

    Args:
        options: What is measured.
        rows: What the servers answer.
        told: Rows of the result.
        absent: What is left out, and why.
        runs: Calls of the generator; each asks for other ids.
    """

    options: ServingOptions
    rows: Rows
    told: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    runs: int = 0

    def load(self, system: System, rates: Sequence[float], seconds: float) -> list[Row]:
        """Asks at some rates, one after another."""
        return self.ask(system, [{"rate": rate, "seconds": seconds} for rate in rates])

    def ask(self, system: System, phases: Sequence[Row], *, versions: int = 0) -> list[Row]:
        """Asks in some phases, one after another; every call asks for other ids.

        Args:
            system: Who is asked.
            phases: Rates and seconds.
            versions: Deltas that may have come: an answer has the rows of one of them, or of none.
        """
        self.runs += 1
        options = self.options
        answer = command(
            "load",
            target=system.target,
            shape=self.rows.shape,
            phases=phases,
            versions=versions,
            spread=options.arrivals,
            seed=options.seed + 1_000 * self.runs,
            connections=options.connections,
            connections_max=options.connections_max,
            check_every=options.check_every,
            pids=system.pids,
            core=generator_core(),
        )
        told: list[Row] = answer["phases"]
        wrong = sum(phase["wrong"] for phase in told)
        if wrong:
            raise RuntimeError(f"{wrong} answers of {system.name} have other rows than were asked")
        return told

    def tell(self, part: str, system: str, phase: Row, **more: Any) -> None:
        """Notes a run."""
        self.told.append({"part": part, "system": system, **_flat(phase), **more})

    def cost(self, systems: Sequence[System]) -> None:
        """Processor time for a request, in interleaved rounds."""
        runs: dict[str, list[Row]] = {system.name: [] for system in systems}
        engine: list[Row] = []
        rate, seconds = float(self.options.first_rate), self.options.seconds
        for number in range(self.options.rounds):
            first = number % len(systems)
            for system in [*systems[first:], *systems[:first]]:
                [_, phase] = self.load(system, [rate, rate], seconds / 2)
                runs[system.name].append(phase)
            engine.append(self._engine(_least(3 * self.rows.byte_count), is_filled=True))
        for name, phases in runs.items():
            valid = [phase for phase in phases if not phase["is_void"]]
            costs = [_cpu_us(phase) for phase in valid or phases]
            # The round in the middle stands for all.
            at = sorted(range(len(costs)), key=costs.__getitem__)[len(costs) // 2]
            shown = (valid or phases)[at]
            void = len(phases) - len(valid)
            self.tell("cost", name, {**shown, "cpu_us": median(costs)}, void_runs=void)
        engine.sort(key=lambda row: row["cpu_us"])
        self.told.append({"part": "cost", "system": "engine", **engine[len(engine) // 2]})

    def sweep(self, part: str, system: System) -> float:
        """Grows the rate until the server does not keep up; returns the largest one it took."""
        options = self.options
        taken, refused = 0.0, None
        rates = list(options.rates)
        steps = 3 if options.quick else DOUBLINGS
        self.load(system, [rates[0] if rates else float(options.first_rate)], options.seconds)
        for rate in rates or [options.first_rate * 2.0**at for at in range(steps)]:
            if not self._keeps_up(part, system, rate):
                refused = rate
                break
            taken = rate
        for _ in range(0 if rates or options.quick else BISECTIONS):
            if refused is None or not taken:
                break
            rate = (taken * refused) ** 0.5
            if self._keeps_up(part, system, rate):
                taken = rate
            else:
                refused = rate
        return taken

    def _keeps_up(self, part: str, system: System, rate: float) -> bool:
        [phase] = self.load(system, [rate], self.options.seconds)
        is_kept = (
            not phase["is_void"]
            and phase["good"] >= KEPT_SHARE * phase["offered"]
            and phase["good_us"]["p99"] <= 1e3 * self.options.p99_ms_max
        )
        self.tell(part, system.name, phase, is_kept=is_kept)
        return is_kept

    def limited(self) -> None:
        """Half of saturation, and twice of it, with a share of the rows in memory."""
        options = self.options
        dram_bytes = _least(int(options.dram_share * self.rows.byte_count))
        with started(
            "tierbed", self.rows, dram_bytes=dram_bytes, protocols=options.protocols
        ) as systems:
            for system in systems:
                saturation = self.sweep("limited", system)
                if not saturation:
                    self.absent[f"{system.name} limited"] = "it kept up with no rate"
                    continue
                if "half_load" in options.parts:
                    [phase] = self.load(system, [saturation / 2], options.seconds)
                    self.tell("half_load", system.name, phase, saturation=saturation)
                if "overload" in options.parts:
                    self.overload(system, saturation)
        if "half_load" in options.parts:
            engine = self._engine(dram_bytes, is_filled=False)
            self.told.append({"part": "half_load", "system": "engine", **engine})

    def overload(self, system: System, saturation: float) -> None:
        """Twice a rate, and what is left when it is over."""
        rates = [saturation / 2, 2 * saturation, saturation / 2]
        calm, over, after = self.load(system, rates, self.options.seconds)
        usual_us = RECOVERED_FACTOR * calm["good_us"]["p99"]
        recovered = next(
            (
                at * after["span_s"]
                for at, span in enumerate(after["spans"])
                if span["good"] and not span["refused"] and span["p99_us"] <= usual_us
            ),
            None,
        )
        self.tell(
            "overload",
            system.name,
            over,
            saturation=saturation,
            goodput_share=over["good_per_s"] / saturation,
            recovered_s=recovered,
        )

    def _engine(self, dram_bytes: int, *, is_filled: bool) -> Row:
        """The same lookups in this process, one after another."""
        count = int(500 * self.options.seconds / self.options.samples**0.5) + 1
        told = command(
            "engine",
            snapshot=str(self.rows.snapshot),
            shape=self.rows.shape,
            dram_budget_bytes=dram_bytes,
            is_filled=is_filled,
            seed=self.options.seed,
            warm_count=2 * count,
            count=count,
        )
        times = {f"{name}_us": value for name, value in told["good_us"].items() if name[0] == "p"}
        return {
            **times,
            "cpu_us": told["cpu_us_per_request"],
            "pages_per_request": told["pages_per_request"],
        }


def run_serving(out: Path, options: ServingOptions, json_path: Path | None = None) -> Path:
    """Runs the suite; writes ``serve.json`` and ``serve.png`` to ``out``."""
    _check(options)
    if options.quick:
        options = replace(
            options,
            rows=min(options.rows, 100_000),
            seconds=min(options.seconds, 0.5),
            rounds=min(options.rounds, 2),
            first_rate=min(options.first_rate, 100),
            deltas=min(options.deltas, 3),
        )
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.scratch or out) as folder:
        shape = {
            "row_count": options.rows,
            "dim": options.dim,
            "id_count": options.ids,
            "sample_count": options.samples,
            "skew": options.skew,
            "changed_share": options.changed_share,
        }
        bench = Bench(options, Rows(folder=Path(folder), shape=shape))
        if set(options.parts) != {"predict"}:
            bench.rows.write()
        if {"cost", "sweep"} & set(options.parts):
            _in_memory(bench)
        if {"half_load", "overload"} & set(options.parts):
            bench.limited()
        dram_bytes = _least(int(options.dram_share * bench.rows.byte_count))
        if "activation" in options.parts:
            activation(bench, dram_bytes)
            if "triton" in options.peers:
                try:
                    reload(bench)
                except AbsentError as absent:
                    bench.absent["triton activation"] = str(absent)
        if "activations" in options.parts:
            activations(bench, dram_bytes, options.deltas)
        if "predict" in options.parts:
            bench.told += measure_predictions(
                bench.rows.folder,
                shape,
                samples=options.predict_samples,
                connections=options.predict_connections,
                seconds=options.seconds,
                rounds=options.rounds,
                seed=options.seed,
                with_triton="triton" in options.peers and _is_triton_here(bench),
            )
    shown = [{name: row.get(name) for name in COLUMNS} for row in bench.told]
    print_table("requests for rows, open loop; predictions, closed", shown, COLUMNS)
    for name, reason in bench.absent.items():
        print(f"{name} is left out: {reason}")
    told = {"shape": shape, "left_out": bench.absent, "measured": "measured-cpu"}
    path = write_suite(out, "serve", bench.told, ratios(bench.told), curves(bench.told), told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _is_triton_here(bench: Bench) -> bool:
    try:
        triton_packages()
    except AbsentError as reason:
        bench.absent["triton predict"] = str(reason)
        return False
    return True


def _in_memory(bench: Bench) -> None:
    """Runs the parts for which every server has all rows in memory."""
    options, rows = bench.options, bench.rows
    dram_bytes = _least(3 * rows.byte_count)
    with ExitStack() as running:
        systems: list[System] = []
        for name in ("tierbed", *options.peers):
            try:
                systems += running.enter_context(
                    started(name, rows, dram_bytes=dram_bytes, protocols=options.protocols)
                )
            except AbsentError as reason:
                bench.absent[name] = str(reason)
        if "cost" in options.parts:
            bench.cost(systems)
        if "sweep" in options.parts:
            for system in systems:
                bench.sweep("sweep", system)


def _least(dram_bytes: int) -> int:
    """A budget that small tables open with, too."""
    return max(dram_bytes, 4 * MIB)


def _flat(phase: Row) -> Row:
    """One flat row of a phase: percentiles beside counts, no spans."""
    flat = {name: value for name, value in phase.items() if not isinstance(value, (dict, list))}
    for name, value in phase["good_us"].items():
        if name != "count":
            flat[f"{name}_us"] = value
    flat["refused_p99_us"] = phase["refused_us"]["p99"]
    flat.setdefault("cpu_us", _cpu_us(phase))
    return flat


def _cpu_us(phase: Row) -> float:
    """Processor time of the server for a good answer; that of refusals is in it."""
    return float(phase["server_cpu_us"] / max(phase["good"], 1))


def _check(options: ServingOptions) -> None:
    for name, words, known in [
        ("parts", options.parts, PARTS),
        ("protocols", options.protocols, PROTOCOLS),
        ("peers", options.peers, PEERS),
    ]:
        unknown = set(words) - set(known)
        if unknown:
            raise InvalidError(f"--{name} must be of {', '.join(known)}; found {sorted(unknown)}")
    if not options.parts or not options.protocols:
        raise InvalidError("--parts and --protocols must name at least one")
