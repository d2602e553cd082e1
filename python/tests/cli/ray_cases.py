"""Cases of a Ray cluster of two nodes, run in a process of its own: Ray leaves threads behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import ray
import torch
from ray.cluster_utils import Cluster

import tierbed as tb
from tierbed.placement import PlaceOptions, RayQueryLog, log_of_columns, place_on_ray


def _log(rows: int, queries: int) -> tb.QueryLog:
    draw = random.Random(4)
    values, offsets = [], [0]
    for _ in range(queries):
        circle = draw.randrange(rows // 8)
        values += [(circle * 8 + draw.randrange(12)) % rows for _ in range(6)]
        offsets.append(len(values))
    return tb.QueryLog.from_batches(rows, [(torch.tensor(values), torch.tensor(offsets))])


def _pages(placement: tb.Placement) -> list[list[int]]:
    return [placement.page(at) for at in range(placement.info().page_count)]


def same(cluster: Cluster) -> dict[str, Any]:
    """Every method builds on two nodes what one machine builds."""
    log = _log(800, 3000)
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    equal = {}
    for method, ratio in [("shp", 0.0), ("maxembed", 0.3), ("grown", 0.1), ("by_frequency", 0.0)]:
        here = tb.place(log, rows_per_page=6, method=method, ratio=ratio, seed=5)
        options = PlaceOptions(rows_per_page=6, method=method, seed=5)
        there = place_on_ray(log, options, ratio=ratio, parts=8)
        equal[method] = _pages(here) == _pages(there)
    return {"nodes": len(nodes), "equal": equal}


def _written(folder: str, log: tb.QueryLog, files: int = 4) -> str:
    """Writes a log as columns: a record for each query."""
    each = -(-len(log) // files)
    for at in range(files):
        part = [log[query] for query in range(at * each, min(len(log), (at + 1) * each))]
        table = pyarrow.table({"rows": part, "other": [0] * len(part)})
        pyarrow.parquet.write_table(table, f"{folder}/{at}.parquet", row_group_size=1000)
    return f"{folder}/*.parquet"


@contextlib.contextmanager
def _carried() -> Iterator[list[int]]:
    """Counts the bytes that pass through the driver."""
    carried, get, put = [0], ray.get, ray.put

    def counting_get(refs: Any, **more: Any) -> Any:
        found = get(refs, **more)
        carried[0] += len(ray.cloudpickle.dumps(found))
        return found

    def counting_put(value: Any, **more: Any) -> Any:
        carried[0] += len(ray.cloudpickle.dumps(value))
        return put(value, **more)

    ray.get, ray.put = counting_get, counting_put
    try:
        yield carried
    finally:
        ray.get, ray.put = get, put


def blocks(cluster: Cluster) -> dict[str, Any]:
    """Columns are read, placed and judged by workers; the driver sees no log."""
    log = _log(800, 60_000)
    # Small files would all be one block.
    ray.data.DataContext.get_current().target_max_block_size = 1 << 18
    with tempfile.TemporaryDirectory() as folder:
        address = _written(folder, log)
        with _carried() as carried:
            held = RayQueryLog.read(ray, address, {"rows": None})
            earlier, later = held.split(0.8)
            options = PlaceOptions(rows_per_page=6, method="maxembed", seed=5)
            there = place_on_ray(earlier, options, ratio=0.3, parts=8)
            ordered = earlier.ordered_by_use(there)
            reads, home_pages = later.reads(ordered)
            whole = place_on_ray(
                held, PlaceOptions(rows_per_page=6, method="by_frequency"), ratio=0.0
            )
        local = log_of_columns(address, {"rows": None})
    before, after = local.split(0.8)
    here = tb.place(before, rows_per_page=6, method="maxembed", ratio=0.3, seed=5)
    used = here.ordered_by_use(before)
    return {
        "blocks": len(held.blocks),
        "queries": [len(held), len(earlier), len(later)],
        "queries_here": [len(local), len(before), len(after)],
        "equal": {
            "maxembed": _pages(here) == _pages(there),
            "ordered": used.reads(after) == ordered.reads(after),
            "reads": used.reads(after) == reads,
            "home_pages": abs(used.connectivity(after) - home_pages) < 1e-9,
            "by_frequency": _pages(whole)
            == _pages(tb.place(local, rows_per_page=6, method="by_frequency", ratio=0.0)),
        },
        "log_bytes": 4 * local.pin_count,
        "carried_bytes": carried[0],
    }


def _kill_a_worker() -> str | None:
    """Kills a process of this cluster that does a task; returns the task."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (folder / "cmdline").read_text().split("\0")[0]
            if name.startswith(("ray::_split", "ray::_order", "ray::_scores", "ray::_pages")):
                os.kill(int(folder.name), signal.SIGKILL)
                return name
    return None


def killed(cluster: Cluster) -> dict[str, Any]:
    """A worker is killed and a node is taken away while tasks run on blocks of columns."""
    log = _log(24_000, 60_000)
    told: list[tuple[int, int]] = []
    found: list[tb.Placement] = []
    with tempfile.TemporaryDirectory() as folder:
        held = RayQueryLog.read(ray, _written(folder, log), {"rows": 24_000})
        here = tb.place(log, rows_per_page=6, method="maxembed", ratio=0.2)

        def build() -> None:
            options = PlaceOptions(rows_per_page=6, method="maxembed")
            more: dict[str, Any] = {"ratio": 0.2, "parts": 32}
            found.append(
                place_on_ray(held, options, progress=lambda *now: told.append(now), **more)
            )

        job = threading.Thread(target=build)
        job.start()
        while not told and job.is_alive():
            time.sleep(0.01)
        worker = None
        while worker is None and job.is_alive():
            worker = _kill_a_worker()
        done_before = told[-1] if told else (0, 0)
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
        job.join()
    return {
        "worker": worker,
        "done_before": done_before,
        "nodes": _nodes_after_loss(),
        "equal": bool(found) and _pages(found[0]) == _pages(here),
    }


def _nodes_after_loss() -> int:
    """Counts nodes once the cluster has noticed that one is gone, which takes it seconds."""
    for _ in range(600):
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        if alive < 2:
            break
        time.sleep(0.1)
    return alive


def start_cluster() -> Cluster:
    """Starts two nodes of one processor each; a busy machine may need a second try."""
    small = {"num_cpus": 1, "object_store_memory": 128 << 20}
    for tries_left in (2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(**small, include_dashboard=False)
            cluster.add_node(**small)
            cluster.wait_for_nodes(timeout=60)
            return cluster
        except Exception:
            cluster.shutdown()
            if tries_left == 0:
                raise
    raise AssertionError


def main() -> None:
    """Starts two nodes, runs the cases, and prints what they found. The last one loses a node."""
    cluster = start_cluster()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        found = {one.__name__: one(cluster) for one in (same, blocks, killed)}
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
