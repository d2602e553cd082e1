"""Distributed checkpoints of ranks and of TorchRec's real models, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist import dcp as tdcp

from .test_torchrec_states import DIM, KINDS, one_rank, sharded, theirs
from .torchrec_kit import ROWS, bag_configs, batches

__all__ = ["one_rank"]

COUNT = 2


def tables() -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            name=config.name,
            feature_names=config.feature_names,
            pooling=config.pooling.name.lower(),
        )
        for config in bag_configs(dim=DIM)
    ]


def run_ranks(work: Any) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(COUNT) as threads:
        return list(threads.map(work, tbd.local_ranks(COUNT)))


def ranks(optimizer: Any) -> list[Any]:
    """Two ranks, one table by rows and one by columns, or whole."""
    other = tbd.RowWise() if optimizer.kind == "row_wise_adagrad" else tbd.ColumnWise()
    plan = tbd.ShardingPlan(COUNT, {"t1": tbd.RowWise(), "t2": other})

    def work(rank: Any) -> Any:
        return tbd.ShardedEmbeddingBagCollection(
            tables(),
            store=tb.Store.open(backend="memory", dram_budget="32MiB"),
            plan=plan,
            ranks=rank,
            optimizer=optimizer,
        )

    return run_ranks(work)


def save(path: Path, states: list[dict[str, Any]]) -> None:
    writer = dcp.FileSystemWriter(path)
    planners, plans = [tdcp.SavePlanner(chunk_bytes=4096) for _ in states], []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)


def step(model: Any, rows: list[Any], count: int) -> None:
    """Steps TorchRec's model, and the ranks with the same samples on rank 0."""
    for kjt in batches(count):
        model.module.bags(kjt).values().square().sum().backward()
        empty = tb.KeyedJaggedTensor(
            kjt.keys(),
            torch.empty(0, dtype=torch.int64),
            lengths=torch.empty(0, dtype=torch.int64),
            stride=0,
        )

        def work(rank: Any, kjt: Any = kjt, empty: Any = empty) -> None:
            found = rows[rank.rank](kjt if rank.rank == 0 else empty).values()
            found.square().sum().backward()

        run_ranks(work)


def same(rows: list[Any], state: dict[str, Any]) -> bool:
    """Whether all rows are those of a state dictionary, whole or sharded."""
    for table in ("t1", "t2"):
        value = state[f"bags.embedding_bags.{table}.weight"]
        if hasattr(value, "local_shards"):
            value = torch.cat([one.tensor for one in value.local_shards()], dim=1)
        parts = []
        for rank, one in enumerate(rows):
            way = one.plan.tables[table]
            bounds = one.plan.sharding(next(c for c in tables() if c.name == table))["bounds"]
            low, high = bounds[rank], bounds[rank + 1]
            is_rows = isinstance(way, tbd.RowWise)
            name = table if is_rows else f"{table}.columns.{low}"
            first, count = (low, high - low) if is_rows else (0, ROWS)
            parts.append(one.store.read_rows(name, first, count))
        whole = torch.cat(parts, dim=0 if is_rows else 1)
        if not torch.allclose(whole, value, rtol=0, atol=2e-6):
            return False
    return True


@pytest.mark.parametrize(("kind", "numbers", "optimizer"), KINDS[1:], ids=str)
def test_dcp_roundtrip_with_torchrec_names(
    kind: type[Any], numbers: Any, optimizer: Any, one_rank: None, tmp_path: Path
) -> None:
    model = sharded(kind, numbers, "table_wise")
    rows = ranks(optimizer)
    step(model, rows, 2)
    dcp.save(
        {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()},
        checkpoint_id=tmp_path / "theirs",
    )
    run_ranks(lambda rank: rows[rank.rank].close())
    rows = ranks(optimizer)
    for one in rows:
        wanted = {
            "model": tdcp.table_states(one, prefix="bags"),
            "optim": tdcp.optimizer_states(one, prefix="bags"),
        }
        tdcp.load(wanted, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert same(rows, model.state_dict())
    # Both go on with the same state, and theirs where ours is.
    step(model, rows, 3)
    assert same(rows, model.state_dict())
    states = [
        {
            "model": tdcp.table_states(one, prefix="bags"),
            "optim": tdcp.optimizer_states(one, prefix="bags"),
        }
        for one in rows
    ]
    save(tmp_path / "ours", states)
    other = sharded(kind, numbers, "table_wise")
    loaded: Any = {"model": other.state_dict(), "optim": other.fused_optimizer.state_dict()}
    loaded["model"] = {k: v for k, v in loaded["model"].items() if k.startswith("bags.")}
    dcp.load(loaded, checkpoint_id=tmp_path / "ours")
    other.load_state_dict({**other.state_dict(), **loaded["model"]})
    assert same(rows, other.state_dict())
    other.fused_optimizer.load_state_dict(loaded["optim"])
    step(other, rows, 2)
    assert same(rows, other.state_dict())
    run_ranks(lambda rank: rows[rank.rank].close())


def test_a_plain_model_of_torchrec_loads_what_ranks_saved(tmp_path: Path) -> None:
    rows = ranks(tb.SGD(lr=0.1))
    states = [{"model": tdcp.table_states(one, prefix="bags")} for one in rows]
    save(tmp_path / "ours", states)
    model = theirs()
    bags = {name: value for name, value in model.state_dict().items() if name.startswith("bags.")}
    assert not same(rows, model.state_dict())
    dcp.load({"model": bags}, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert same(rows, model.state_dict())
    with torch.no_grad():
        for value in bags.values():
            value.add_(1)
    dcp.save({"model": bags}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for state in states:
        tdcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert same(rows, model.state_dict())
    run_ranks(lambda rank: rows[rank.rank].close())
