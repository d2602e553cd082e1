"""Trains a factorization machine over the ranks of several hosts, and goes on without lost ones.

On each of two hosts:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint FIRST_HOST:29400 examples/sharded_hosts.py --out s3://runs/machine

A step has the same samples whatever the number of ranks, which divide them. All ranks save every
few steps, to a bucket or to a folder that all hosts see. When a host is lost, torchrun starts the
ranks of the others again: they load the last checkpoint, whoever held its rows, and end with the
bits of a run that lost nothing. ``examples/ray_hosts.py`` has Ray start the same function.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierbed as tb
from tierbed import dist as tbd

FACTORS = 8
ROWS = {"site": 2_000, "user": 8_000, "item": 1_000}
LONGEST_BAG = 4
Rows = tbd.ShardedEmbeddingBagCollection


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train.

    Args:
        steps: Steps in all.
        samples: Samples of a step, of all ranks together.
        every: Steps between two checkpoints.
        timeout_s: How long a rank waits for the others.
    """

    steps: int = 60
    samples: int = 256
    every: int = 10
    timeout_s: float = 20.0


def tables() -> list[tb.EmbeddingBagConfig]:
    """Returns the tables: of each row a weight, and factors behind it."""
    init = tb.Normal(0.0, 0.05)
    return [
        tb.EmbeddingBagConfig(rows, 1 + FACTORS, name, init=init) for name, rows in ROWS.items()
    ]


def batch_of(step: int, samples: range, of: int) -> tuple[tb.KeyedJaggedTensor, Tensor]:
    """Draws the ``of`` samples of a step, and returns the bags and labels of some."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, LONGEST_BAG + 1, (len(ROWS), of), generator=generator)
    ids = [
        torch.randint(0, rows, (int(of_table.sum()),), generator=generator)
        for rows, of_table in zip(ROWS.values(), lengths, strict=True)
    ]
    labels = lengths.sum(dim=0) > 1.5 * LONGEST_BAG
    mine = slice(samples.start, samples.stop)
    parts = []
    for of_table, found in zip(lengths, ids, strict=True):
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), of_table.cumsum(0)])
        parts.append(found[int(ends[samples.start]) : int(ends[samples.stop])])
    own = lengths[:, mine].contiguous()
    bags = tb.KeyedJaggedTensor(list(ROWS), torch.cat(parts), lengths=own.view(-1))
    return bags, labels[mine].float()


def logits_of(pooled: Tensor) -> Tensor:
    """Computes the factorization machine: weights, and products of all pairs ``[B]``."""
    vectors = pooled.view(-1, len(ROWS), 1 + FACTORS)
    weights, factors = vectors[..., 0], vectors[..., 1:]
    pairs = _added(factors, 1).square() - _added(factors.square(), 1)
    return _added(weights, 1) + 0.5 * _added(pairs, 1)


def _added(values: Tensor, dim: int) -> Tensor:
    """Adds along ``dim`` in order; that of ``sum`` may depend on the size of the batch."""
    return functools.reduce(torch.add, values.unbind(dim))


def train(
    options: Options, restore: Callable[[Rows], int], keep: Callable[[Rows, int], None]
) -> float:
    """Trains this rank's part of each step, and returns the loss of its samples in the last one.

    Args:
        options: What to train.
        restore: Loads the last checkpoint, and returns the steps that were done.
        keep: Saves a checkpoint after so many steps.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    first, end = (options.samples * at // count for at in (rank, rank + 1))
    loss = 0.0
    with (
        tb.Store.open(backend="memory", dram_budget="64MiB") as store,
        Rows(
            tables(),
            store=store,
            plan=tbd.ShardingPlan(count, {name: tbd.RowWise() for name in ROWS}),
            optimizer=tb.RowWiseAdagrad(lr=0.05),
            exchange=tbd.ExchangeOptions(timeout_s=options.timeout_s),
        ) as rows,
    ):
        for step in range(restore(rows), options.steps):
            bags, labels = batch_of(step, range(first, end), options.samples)
            logits = logits_of(rows(bags).values())
            # Each sample counts the same, whoever has it. In float64, because vectors of float32
            # have other last bits than what is left over of a batch.
            summed = nn.functional.binary_cross_entropy_with_logits(
                logits.double(), labels.double(), reduction="sum"
            )
            (summed / options.samples).backward()
            loss = summed.item() / (end - first)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                keep(rows, step + 1)
                if rank == 0:
                    print(f"step {step + 1} on {count} ranks: loss {loss:.4f}", flush=True)
    return loss


def main() -> None:
    """Reads the options, joins the other ranks, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="what checkpoints lie below: folder or s3://")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--samples", type=int, default=Options.samples, help="of all ranks")
    parser.add_argument("--every", type=int, default=Options.every)
    parser.add_argument("--timeout", type=float, default=Options.timeout_s, help="seconds")
    given = parser.parse_args()
    dist.init_process_group("gloo")

    def restore(rows: Rows) -> int:
        # Rank 0 looks: all load the same one.
        told = [tbd.find_checkpoints(given.out)[-1:] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told)
        last: list[str] = told[0] or []
        extra = rows.load(last[0]) if last else None
        return 0 if extra is None else int(extra["step"])

    def keep(rows: Rows, step: int) -> None:
        rows.save(f"{given.out}/step-{step}", extra={"step": step})

    options = Options(
        steps=given.steps, samples=given.samples, every=given.every, timeout_s=given.timeout
    )
    train(options, restore, keep)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
