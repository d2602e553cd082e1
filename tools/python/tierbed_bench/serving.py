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
- ``memory``: the least memory that answers every row in time
  (:mod:`tierbed_bench.serving_memory`);
- ``gateway``, ``lost_replica``: a gateway over two shards beside one server, and the loss of one of
  two servers of a shard (:mod:`tierbed_bench.serving_shards`);
- ``predict``: processor time of Tierbed for a prediction of a DLRM, asked in a closed loop
  (:mod:`tierbed_bench.serving_predict`).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tierbed._util.report import print_table, write_json
from tierbed.errors import InvalidError
from tierbed_bench.serving_activation import activation, activations, reload
from tierbed_bench.serving_bench import PARTS, PROTOCOLS, Bench, ServingOptions, least_budget
from tierbed_bench.serving_memory import least_memory
from tierbed_bench.serving_predict import measure_predictions
from tierbed_bench.serving_process import awake
from tierbed_bench.serving_report import curves, ratios
from tierbed_bench.serving_shards import gateway, lost_replica
from tierbed_bench.serving_systems import PEERS, AbsentError, Rows, System, started
from tierbed_bench.serving_triton import triton_packages
from tierbed_bench.suite import write_suite

__all__ = ["ServingOptions", "run_serving"]

Row = dict[str, Any]
COLUMNS = (
    *("part", "system", "samples", "connections", "rate", "good_per_s", "refused"),
    *("p50_us", "p99_us", "cpu_us"),
)


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
            memory_rate=min(options.memory_rate, 200),
        )
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.scratch or out) as folder, awake() as is_awake:
        shape = {
            "row_count": options.rows,
            "dim": options.dim,
            "id_count": options.ids,
            "sample_count": options.samples,
            "skew": options.skew,
            "changed_share": options.changed_share,
        }
        bench = Bench(options, Rows(folder=Path(folder), shape=shape))
        _measure(bench)
    shown = [{name: row.get(name) for name in COLUMNS} for row in bench.told]
    print_table("requests for rows, open loop; predictions, closed", shown, COLUMNS)
    for name, reason in bench.absent.items():
        print(f"{name} is left out: {reason}")
    told = {"shape": shape, "left_out": bench.absent, "measured": "measured-cpu"}
    told["idle_processors"] = "kept awake" if is_awake else "may sleep"
    path = write_suite(out, "serve", bench.told, ratios(bench.told), curves(bench.told), told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _measure(bench: Bench) -> None:
    """Runs the parts that are wanted."""
    options, shape = bench.options, bench.rows.shape
    if set(options.parts) != {"predict"}:
        bench.rows.write()
    if {"cost", "sweep"} & set(options.parts):
        _in_memory(bench)
    if {"half_load", "overload"} & set(options.parts):
        bench.limited()
    dram_bytes = least_budget(int(options.dram_share * bench.rows.byte_count))
    if "activation" in options.parts:
        activation(bench, dram_bytes)
        if "triton" in options.peers:
            try:
                reload(bench)
            except AbsentError as absent:
                bench.absent["triton activation"] = str(absent)
    if "activations" in options.parts:
        activations(bench, dram_bytes, options.deltas)
    if "memory" in options.parts:
        least_memory(bench)
    if "gateway" in options.parts:
        gateway(bench, least_budget(3 * bench.rows.byte_count))
    if "lost_replica" in options.parts:
        lost_replica(bench, least_budget(3 * bench.rows.byte_count))
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
            absent=bench.absent,
        )


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
    dram_bytes = least_budget(3 * rows.byte_count)
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
