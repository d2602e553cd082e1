"""Lookups and backwards of ranks on two hosts, beside TorchRec's table-wise sharding over gloo.

Both systems run in the same ranks, in turns: a round of one, then one of the other, each round with
the other one first. Tables are whole on one rank, vectors travel as float32, rows are stepped by
SGD. Links have the rate that is asked for. Times are of the slowest rank, processor times of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import tierbed as tb
from tierbed import dist as tbd
from tierbed.config.words import Positive
from tierbed_bench.hosts import sent_bytes

__all__ = ["PeerOptions", "peer_row", "time_both"]

LR = 0.05


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """What is looked up.

    Args:
        tables: Tables, one feature each.
        rows: Rows of a table.
        dim: Elements of a row.
        batch: Samples of a rank and step.
        steps: Steps of a round.
        rounds: Rounds of each system; the one in the middle counts.
        ids: Ids of a bag.
        seed: Of the ids.
    """

    tables: Positive = 26
    rows: Positive = 50_000
    dim: Positive = 64
    batch: Positive = 512
    steps: Positive = 5
    rounds: Positive = 5
    ids: Positive = 1
    seed: int = 0

    def names(self) -> list[str]:
        """Returns what tables and features are called."""
        return [f"t{at}" for at in range(self.tables)]


def time_both(options: PeerOptions) -> dict[str, Any]:
    """Times both systems as one rank; returns seconds, processor time and bytes of each round."""
    torch.set_num_threads(1)
    batches = [_batch(options, step) for step in range(options.steps)]
    found: dict[str, Any] = {"tierbed": [], "torchrec": []}
    with tb.Store.open(backend="memory", dram_budget="2GiB") as store:
        ours, theirs = _tierbed(options, store), _torchrec(options)
        steps = {"tierbed": ours[0], "torchrec": theirs}
        for step in steps.values():
            _round(step, batches)
        for number in range(options.rounds):
            order = list(steps) if number % 2 == 0 else list(steps)[::-1]
            for name in order:
                found[name].append(_round(steps[name], batches))
        ours[1]()
    return found


def peer_row(options: PeerOptions, found: list[dict[str, Any]], rate: str) -> dict[str, Any]:
    """Returns the figures of both systems, and their ratios."""

    def middle(name: str, at: int, over: Callable[[list[float]], float]) -> float:
        rounds = zip(*[of_rank[name] for of_rank in found], strict=True)
        return median(over([one[at] for one in of_round]) for of_round in rounds)

    row: dict[str, Any] = {"ids_per_bag": options.ids, "rate": rate}
    for name in ("tierbed", "torchrec"):
        row[f"{name}_ms"] = 1000 * middle(name, 0, max) / options.steps
        row[f"{name}_cpu_ms"] = 1000 * middle(name, 1, sum) / options.steps
        row[f"{name}_bytes"] = middle(name, 2, sum) / options.steps
    row["time_ratio"] = row["tierbed_ms"] / row["torchrec_ms"]
    row["cpu_ratio"] = row["tierbed_cpu_ms"] / row["torchrec_cpu_ms"]
    return row


def _round(step: Callable[[Any], None], batches: list[Any]) -> tuple[float, float, int]:
    dist.barrier()
    started_s, cpu_s, sent = time.perf_counter(), time.process_time(), sent_bytes()
    for batch in batches:
        step(batch)
    spent = time.perf_counter() - started_s, time.process_time() - cpu_s
    dist.barrier()
    return (*spent, sent_bytes() - sent)


def _batch(options: PeerOptions, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = (options.seed * 1000 + dist.get_rank()) * 1000 + step
    generator = torch.Generator().manual_seed(seed)
    count = options.tables * options.batch
    ids = torch.randint(0, options.rows, (count * options.ids,), generator=generator)
    return ids, torch.full((count,), options.ids)


def _tierbed(
    options: PeerOptions, store: tb.Store
) -> tuple[Callable[[Any], None], Callable[[], None]]:
    count = dist.get_world_size()
    names = options.names()
    tables = [tb.EmbeddingBagConfig(options.rows, options.dim, name) for name in names]
    ways = {name: tbd.TableWise(at % count) for at, name in enumerate(names)}
    plan = tbd.ShardingPlan(count, ways)
    rows = tbd.ShardedEmbeddingBagCollection(
        tables, store=store, plan=plan, optimizer=tb.SGD(lr=LR)
    )

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        ids, lengths = batch
        bags = tb.KeyedJaggedTensor(names, ids, lengths=lengths)
        out = rows(bags).values()
        torch.autograd.backward((out * 0.5).sum())

    return step, rows.close


def _torchrec(options: PeerOptions) -> Callable[[Any], None]:
    import torchrec
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    count = dist.get_world_size()
    names = options.names()
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=options.dim, num_embeddings=options.rows, feature_names=[name]
        )
        for name in names
    ]
    model = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": LR})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model,
        {name: table_wise(rank=at % count) for at, name in enumerate(names)},
        sharder=sharder,
        local_size=1,
        world_size=count,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        ids, lengths = batch
        bags = torchrec.KeyedJaggedTensor(keys=names, values=ids, lengths=lengths)
        out = sharded(bags).values()
        torch.autograd.backward((out * 0.5).sum())

    return step
