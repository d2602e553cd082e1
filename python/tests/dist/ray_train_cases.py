"""Cases of Ray Train on three nodes, run in a process of its own: Ray leaves threads behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import sharded_hosts
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig, TorchTrainer

from tierbed import dist as tbd


def work(config: dict[str, Any]) -> None:
    """Trains as one worker; tells its node, and is killed where the case says so."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    life = len(list(folder.glob(f"start-{rank}-*")))
    (folder / f"start-{rank}-{life}").touch()
    (folder / f"node-{rank}").write_text(ray.get_runtime_context().get_node_id())

    def restore(rows: Any) -> int:
        extra = tbd.ray_load(rows)
        return 0 if extra is None else int(extra["step"])

    def keep(rows: Any, step: int) -> None:
        tbd.ray_checkpoint(rows, f"step-{step}", {"step": step}, metrics={"step": step})
        if config["is_disturbed"] and life == 0 and rank == 1 and step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if config["is_disturbed"] and life == 1 and step == 16:
            (folder / f"waits-{rank}").touch()
            while True:  # Until its node, or that of the other one, is taken away.
                time.sleep(0.1)

    options = sharded_hosts.Options(
        steps=config["steps"], samples=48, every=4, timeout_s=config["timeout_s"]
    )
    sharded_hosts.train(options, restore, keep)


def run(folder: Path, name: str, **config: Any) -> dict[str, Any]:
    """Runs a trainer; returns where its last checkpoint is, and how often it was started."""
    notes = folder / name
    notes.mkdir(exist_ok=True)
    workers = config.pop("workers", 2)
    given = {"folder": str(notes), "is_disturbed": False, "steps": 24, "timeout_s": 10.0, **config}
    trainer = TorchTrainer(
        work,
        train_loop_config=given,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": 1}
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(folder / "runs"),
            failure_config=ray.train.FailureConfig(max_failures=6),
        ),
    )
    result = trainer.fit()
    starts = len(list(notes.glob("start-0-*")))
    return {"last": result.checkpoint.path, "starts": starts}


def take_a_node(cluster: Cluster, notes: Path) -> None:
    """Takes away the node of a worker that is not the head, once both wait."""
    while len(list(notes.glob("waits-*"))) < 2:
        time.sleep(0.1)
    head = cluster.head_node.node_id
    ids = [(notes / f"node-{rank}").read_text() for rank in (0, 1)]
    lost = next(found for found in ids if found != head)
    node = next(one for one in cluster.worker_nodes if one.node_id == lost)
    cluster.remove_node(node, allow_graceful=False)


def main() -> None:
    """Runs the cases on three nodes of one processor each; the second one loses a node."""
    folder = Path(sys.argv[1])
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**small)
    cluster.wait_for_nodes(timeout=60)
    paths = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": paths})
    try:
        found = {"calm": run(folder, "calm")}
        taker = threading.Thread(target=take_a_node, args=(cluster, folder / "disturbed"))
        taker.start()
        found["disturbed"] = run(folder, "disturbed", is_disturbed=True)
        taker.join()
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        found["disturbed"]["nodes_left"] = alive
        # The same name: Ray finds the run again, and its last checkpoint.
        found["fewer"] = run(folder, "calm", steps=28, workers=1)
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
