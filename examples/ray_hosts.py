"""Has Ray Train start the ranks of ``sharded_hosts.py``, and restart them when some are lost.

    python examples/ray_hosts.py --storage s3://runs --name machine --workers 4

Ray gives each worker a place in the cluster. Rows are saved straight to the run's storage; Ray is
told where the last checkpoint is, and hands that to the workers it starts again.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import ray.train
import sharded_hosts
from ray.train.torch import TorchConfig, TorchTrainer

from tierbed import dist as tbd


def work(config: dict[str, Any]) -> None:
    """Trains as one worker."""

    def restore(rows: sharded_hosts.Rows) -> int:
        extra = tbd.ray_load(rows)
        return 0 if extra is None else int(extra["step"])

    def keep(rows: sharded_hosts.Rows, step: int) -> None:
        tbd.ray_checkpoint(rows, f"step-{step}", extra={"step": step}, metrics={"step": step})

    sharded_hosts.train(sharded_hosts.Options(**config), restore, keep)


def main() -> None:
    """Reads the options and trains on a cluster, or on one that is made here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True, help="folder that all nodes see, or s3://")
    parser.add_argument("--name", required=True, help="of the run; the same one goes on")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--failures", type=int, default=3, help="restarts at most")
    parser.add_argument("--steps", type=int, default=sharded_hosts.Options.steps)
    given = parser.parse_args()
    # Workers on other nodes need the function, and not this folder.
    ray.cloudpickle.register_pickle_by_value(sharded_hosts)
    trainer = TorchTrainer(
        work,
        train_loop_config=dataclasses.asdict(sharded_hosts.Options(steps=given.steps)),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers),
        run_config=ray.train.RunConfig(
            name=given.name,
            storage_path=given.storage,
            failure_config=ray.train.FailureConfig(max_failures=given.failures),
        ),
    )
    result = trainer.fit()
    print(f"last checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
