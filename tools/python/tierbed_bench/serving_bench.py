"""What ``tierbed bench serve`` measures with, and how it asks a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tierbed.config.words import NotNegative, Positive
from tierbed_bench.serving_systems import (
    PEERS,
    Rows,
    System,
    command,
    generator_core,
    started,
)

__all__ = ["PARTS", "PROTOCOLS", "Bench", "ServingOptions", "least_budget"]

Row = dict[str, Any]
PARTS = (
    "cost",
    "sweep",
    "half_load",
    "overload",
    "activation",
    "activations",
    "memory",
    "predict",
    "gateway",
    "lost_replica",
)
PROTOCOLS = ("lookup", "infer", "grpc")
MIB = 1 << 20
# A rate is kept up with when so many of its requests are answered in time.
KEPT_SHARE = 0.99
# A server is itself again when a span is answered as before, but for this factor.
RECOVERED_FACTOR = 2.0
# A sweep that is given no rates doubles until a rate is too much, then halves the step.
BISECTIONS = 2
DOUBLINGS = 12
# Runs of a rate, when the generator was late in all but the last.
VOID_RUNS_MAX = 3


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """What is measured.

    Args:
        parts: cost, sweep, half_load, overload, activation, activations, memory, predict, gateway,
            lost_replica, by comma.
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
        memory_rate: Of ``memory``: requests a second.
        memory_p99_ms_max: Of ``memory``: what the 99th percentile must not exceed.
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
    memory_rate: float = 5_000.0
    memory_p99_ms_max: float = 2.0
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
        if wrong and not system.may_lose:
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
            engine.append(self._engine(least_budget(3 * self.rows.byte_count), is_filled=True))
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
        phase = self.load_on_time(system, rate)
        is_kept = self.is_good(phase, self.options.p99_ms_max)
        self.tell(part, system.name, phase, is_kept=is_kept)
        return is_kept

    def load_on_time(self, system: System, rate: float) -> Row:
        """Asks at one rate, some times over where the generator is late; the last run may be void.

        A late send adds to the latency that is judged: what is kept in spite of it is kept.
        """
        [phase] = self.load(system, [rate], self.options.seconds)
        for _ in range(VOID_RUNS_MAX - 1):
            if not phase["is_void"]:
                break
            [phase] = self.load(system, [rate], self.options.seconds)
        return phase

    @staticmethod
    def is_good(phase: Row, p99_ms_max: float) -> bool:
        """Whether a run's requests were answered with their rows, and in time."""
        return bool(
            not phase["wrong"]
            and phase["good"] >= KEPT_SHARE * phase["offered"]
            and phase["good_us"]["p99"] <= 1e3 * p99_ms_max
        )

    def limited(self) -> None:
        """Half of saturation, and twice of it, with a share of the rows in memory."""
        options = self.options
        dram_bytes = least_budget(int(options.dram_share * self.rows.byte_count))
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


def least_budget(dram_bytes: int) -> int:
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
