"""Cases of a Ray cluster of two nodes, run in a process of its own: Ray leaves threads behind."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

import tierbed as tb
from tierbed.placement import PlaceOptions, place_on_ray


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


def killed(cluster: Cluster) -> dict[str, Any]:
    """A node is taken away while its tasks run."""
    log = _log(24_000, 60_000)
    here = tb.place(log, rows_per_page=6, method="maxembed", ratio=0.2)
    told: list[tuple[int, int]] = []
    found: list[tb.Placement] = []

    def build() -> None:
        found.append(
            place_on_ray(
                log,
                PlaceOptions(rows_per_page=6, method="maxembed"),
                ratio=0.2,
                parts=32,
                progress=lambda done, total: told.append((done, total)),
            )
        )

    job = threading.Thread(target=build)
    job.start()
    while not told and job.is_alive():
        time.sleep(0.01)
    done_before = told[-1] if told else (0, 0)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    job.join()
    return {
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


def _cluster() -> Cluster:
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
    cluster = _cluster()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        print(json.dumps({"same": same(cluster), "killed": killed(cluster)}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
