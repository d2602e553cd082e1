"""Trains a DLRM whose tables are divided over the processes of one machine.

    torchrun --standalone --nproc-per-node 2 examples/sharded_dlrm.py --check

Each process draws its own samples and keeps its share of the tables in a store of its own. The
dense parts are copies that average their gradients. ``--check`` trains the same tables in one
process beside, with the samples and gradients of all ranks, and compares every bit.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierbed as tb
from tierbed import dist as tbd

DIM = 16
DENSE = 13
ROWS = {"site": 5_000, "user": 20_000, "item": 2_000, "hour": 24}
LONGEST_BAG = 5


def tables() -> list[tb.EmbeddingBagConfig]:
    """Returns the tables, one feature each."""
    return [tb.EmbeddingBagConfig(rows, DIM, name) for name, rows in ROWS.items()]


def draw(generator: torch.Generator, samples: int) -> tuple[tb.KeyedJaggedTensor, Tensor, Tensor]:
    """Draws ids, numbers and labels that depend on both."""
    lengths = torch.randint(0, LONGEST_BAG + 1, (len(ROWS), samples), generator=generator)
    ids = [
        torch.randint(0, rows, (int(of_table.sum()),), generator=generator)
        for rows, of_table in zip(ROWS.values(), lengths, strict=True)
    ]
    dense = torch.randn(samples, DENSE, generator=generator)
    labels = (dense[:, 0] + 0.3 * lengths[0] > 0.5).float()
    bags = tb.KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths.view(-1))
    return bags, dense, labels


class Dense(nn.Module):
    """What every rank has a copy of: DLRM's two networks and the products between."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Computes logits ``[B]``."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], pooled.view(-1, len(ROWS), DIM)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        above = torch.triu_indices(len(ROWS) + 1, len(ROWS) + 1, offset=1)
        pairs = products[:, above[0], above[1]]
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)


def divide(sharding: str, count: int) -> tbd.ShardingPlan:
    """Returns the plan called ``sharding`` for ``count`` ranks."""
    if sharding == "balanced":
        return tbd.ShardingPlan.balanced(tables(), count)
    if sharding == "table":
        return tbd.ShardingPlan(
            count, {name: tbd.TableWise(at % count) for at, name in enumerate(ROWS)}
        )
    ways = {"row": tbd.RowWise(), "column": tbd.ColumnWise(), "mirrored": tbd.Mirrored()}
    return tbd.ShardingPlan(count, dict.fromkeys(ROWS, ways[sharding]))


class OneProcess:
    """The same tables in one process, fed with what all ranks saw."""

    def __init__(self, optimizer: tb.Adagrad | tb.RowWiseAdagrad) -> None:
        self.store = tb.Store.open(backend="memory", dram_budget="256MiB")
        self.rows = tb.EmbeddingBagCollection(tables(), store=self.store, optimizer=optimizer)

    def step(self, bags: tb.KeyedJaggedTensor, pooled: Tensor, grad: Tensor) -> None:
        """Repeats a step on rank 0 and compares the outputs of all ranks."""
        seen: list[tuple[Tensor, ...]] = [()] * dist.get_world_size()
        mine = (bags.values(), bags.lengths().view(len(ROWS), -1), pooled.clone(), grad)
        dist.all_gather_object(seen, mine)
        if dist.get_rank() != 0:
            return
        lengths = torch.cat([one[1] for one in seen], dim=1)
        parts = [one[0].split(one[1].sum(dim=1).tolist()) for one in seen]
        ids = torch.cat([part[at] for at in range(len(ROWS)) for part in parts])
        out = self.rows(tb.KeyedJaggedTensor(list(ROWS), ids, lengths=lengths.view(-1))).values()
        if not torch.equal(out.detach(), torch.cat([one[2] for one in seen])):
            raise SystemExit("outputs differ from one process")
        out.backward(torch.cat([one[3] for one in seen]))

    def compare_rows(self, store: tb.Store, plan: tbd.ShardingPlan) -> None:
        """Compares the rows and state of every rank, by table."""
        held = {}
        for config in tables():
            way = plan.sharding(config)
            first, end = 0, ROWS[config.name]
            columns, name = slice(None), config.name
            bounds = way["bounds"][dist.get_rank() : dist.get_rank() + 2] if "bounds" in way else []
            if way["kind"] == "rows":
                first, end = bounds
            if way["kind"] == "columns":
                columns, name = slice(*bounds), f"{name}.columns.{bounds[0]}"
            if way["kind"] != "whole" or way["rank"] == dist.get_rank():
                rows = store.read_rows_and_state(name, first, end - first)
                held[config.name] = (first, end, columns, *rows)
        everybody: list[dict[str, tuple[int, int, slice, Tensor, Tensor]]] = [
            {} for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(everybody, held)
        # Only rank 0 trained them in one process.
        for rank, of_rank in enumerate(everybody if dist.get_rank() == 0 else []):
            for name, (first, end, columns, rows, state) in of_rank.items():
                weights, whole_state = self.store.read_rows_and_state(name, first, end - first)
                if columns != slice(None):
                    weights, whole_state = weights[:, columns], whole_state[:, columns]
                if not (torch.equal(rows, weights) and torch.equal(state, whole_state)):
                    raise SystemExit(f"rows of {name} on rank {rank} differ from one process")


def train(exchange: str, sharding: str, options: argparse.Namespace) -> None:
    """Trains this rank's part."""
    rank, count = dist.get_rank(), dist.get_world_size()
    steps, samples, is_checked = options.steps, options.samples, options.check
    plan = divide(sharding, count)
    # Columns of a row have no state of the whole row.
    of_rows = tb.Adagrad(lr=0.05) if sharding == "column" else tb.RowWiseAdagrad(lr=0.05)
    store = tb.Store.open(backend="memory", dram_budget="256MiB")
    torch.manual_seed(7)
    dense = Dense()
    optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    one = OneProcess(of_rows)
    how = tbd.ExchangeOptions(kind=exchange, samples_max=4096)
    with tbd.ShardedEmbeddingBagCollection(
        tables(), store=store, plan=plan, exchange=how, optimizer=of_rows
    ) as rows:
        for step in range(steps):
            # Batches need not be equally long.
            bags, numbers, labels = draw(generator, samples + rank)
            pooled = rows(bags).values()
            pooled.retain_grad()
            logits = dense(numbers, pooled)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            for parameter in dense.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= count
            optimizer.step()
            if is_checked:
                one.step(bags, pooled.detach(), pooled.grad)
            if rank == 0 and step % max(1, steps // 5) == 0:
                print(f"{exchange} step {step}: loss {loss.item():.4f}", flush=True)
        if is_checked:
            one.compare_rows(store, plan)
        if is_checked and rank == 0:
            what = f"{exchange}, {sharding}: {count} ranks"
            print(f"{what} have the bits of one process", flush=True)


def main() -> None:
    """Reads the options and trains, once per exchange."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--samples", type=int, default=256, help="of each rank and step")
    parser.add_argument(
        "--exchange", nargs="+", default=["auto"], choices=["auto", "one_sided", "collective"]
    )
    parser.add_argument(
        "--sharding",
        nargs="+",
        default=["balanced"],
        choices=["balanced", "table", "row", "column", "mirrored"],
        help="how tables are divided",
    )
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for exchange in options.exchange:
        for sharding in options.sharding:
            train(exchange, sharding, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
