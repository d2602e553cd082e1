"""Distributed checkpoints of torch: any ranks, both layouts, little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_ranks import SHARDINGS, TABLES, all_rows, check_rows, draw, run_ranks, train
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist import dcp as tdcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {config.name: f"model.bags.embedding_bags.{config.name}.weight" for config in TABLES}


def collection(rank: tbd.LocalRank, sharding: str, optimizer: Any, seed: int = 0) -> Any:
    return tbd.ShardedEmbeddingBagCollection(
        TABLES,
        store=tb.Store.open(backend="memory", dram_budget="16MiB", seed=seed),
        plan=tbd.ShardingPlan(rank.count, SHARDINGS[sharding](rank.count)),
        ranks=rank,
        optimizer=optimizer,
    )


def state_of(rows: Any, layout: Any) -> dict[str, Any]:
    """A dictionary as a program would make it, with values of its own beside."""
    if layout == "compact":
        return {"rows": tdcp.table_states(rows, layout="compact"), "step": 3}
    return {
        "model": tdcp.table_states(rows, prefix="bags"),
        "optim": tdcp.optimizer_states(rows, prefix="bags"),
        "dense": {"weight": torch.full((2, 2), 7.0)},
        "step": 3,
    }


def save(path: Path, states: list[dict[str, Any]], **options: Any) -> None:
    """What ``dcp.save`` does on several ranks, without processes."""
    writer = dcp.FileSystemWriter(path)
    planners = [tdcp.SavePlanner(**options) for _ in states]
    plans: list[SavePlan] = []
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


def trained(count: int, sharding: str, optimizer: Any, batches: list[Any]) -> list[Any]:
    """Collections of ``count`` ranks that trained on the batches of rank 0, still joined."""

    def work(rank: tbd.LocalRank) -> Any:
        rows = collection(rank, sharding, optimizer)
        empty = draw(0, 0, False)
        train(rows, [batch if rank.rank == 0 else empty for batch in batches])
        return rows

    return run_ranks(count, work)


def close(rows: list[Any]) -> None:
    run_ranks(len(rows), lambda rank: rows[rank.rank].close())


def check_goes_on(found: list[Any], whole: Any, sharding: str) -> None:
    """Rows and state are those of one process, now and after another step."""
    plan = tbd.ShardingPlan(len(found), SHARDINGS[sharding](len(found)))
    for rank, rows in enumerate(found):
        check_rows(rows.store, whole.store, plan, rank)
    more = [draw(9, 8, False)]
    run_ranks(
        len(found),
        lambda rank: train(found[rank.rank], more if rank.rank == 0 else [draw(0, 0, False)]),
    )
    train(whole, more)
    for rank, rows in enumerate(found):
        check_rows(rows.store, whole.store, plan, rank)
    close(found)


@pytest.mark.parametrize("layout", ["dense", "compact"])
@pytest.mark.parametrize("saved", ["table-wise", "row-wise", "column-wise", "mixed"])
def test_dcp_carries_rows_from_some_ranks_to_others(
    saved: str, layout: str, tmp_path: Path
) -> None:
    of_rows = [] if saved == "column-wise" else [tb.RowWiseAdagrad(lr=0.05)]
    for optimizer in [tb.Adam(lr=0.05), tb.SGD(lr=0.05), *of_rows]:
        path = tmp_path / type(optimizer).__name__
        before = trained(2, saved, optimizer, [draw(1, 9, False), draw(2, 9, False)])
        states = run_ranks(2, lambda rank, rows=before: state_of(rows[rank.rank], layout))
        # Chunks of a few rows: each table has several.
        save(path, states, chunk_bytes=400)
        close(before)
        for count, loaded in [(1, "table-wise"), (4, saved), (2, "mixed")]:
            whole = tb.EmbeddingBagCollection(
                TABLES,
                store=tb.Store.open(backend="memory", dram_budget="16MiB"),
                optimizer=optimizer,
            )
            train(whole, [draw(1, 9, False), draw(2, 9, False)])
            found = run_ranks(
                count, lambda rank, way=loaded, by=optimizer: collection(rank, way, by)
            )
            into = run_ranks(count, lambda rank, rows=found: state_of(rows[rank.rank], layout))
            for state in into:
                state["step"] = 0
                tdcp.load(state, checkpoint_id=path, no_dist=True)
                assert state["step"] == 3
                assert layout == "compact" or torch.equal(
                    state["dense"]["weight"], torch.full((2, 2), 7.0)
                )
            check_goes_on(found, whole, loaded)


def test_only_rows_that_were_written_are_in_a_compact_layout(tmp_path: Path) -> None:
    (rank,) = tbd.local_ranks(1)
    optimizer = tb.Adagrad(lr=0.05)
    with collection(rank, "table-wise", optimizer) as rows:
        ids = torch.tensor([3, 77, 150, 151])
        lengths = torch.tensor([0, 0, 0, 4])
        rows(
            tb.KeyedJaggedTensor(["x", "y", "z", "w"], ids, lengths=lengths)
        ).values().sum().backward()
        tdcp.save(state_of(rows, "compact"), checkpoint_id=tmp_path / "ck", no_dist=True)
        expected = all_rows(rows.store, TABLES[2])
        counts = rows.store.use_counts("c", 0, 200)
    read = {"rows": {"c.rows": torch.zeros(4, dtype=torch.int64), "c.weights": torch.zeros(4, 8)}}
    dcp.load(read, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert torch.equal(read["rows"]["c.rows"], ids)
    assert torch.equal(read["rows"]["c.weights"], expected[0][ids])
    with collection(rank, "table-wise", optimizer) as rows:
        tdcp.load(state_of(rows, "compact"), checkpoint_id=tmp_path / "ck", no_dist=True)
        assert all(map(torch.equal, all_rows(rows.store, TABLES[2]), expected))
        assert torch.equal(rows.store.use_counts("c", 0, 200), counts)
        seen: list[int] = []
        rows.store.scan(lambda table, found, *_: seen.extend(found.tolist()))
        assert seen == ids.tolist(), "others stay unwritten"


def test_what_does_not_fit_is_refused_and_says_what_helps(tmp_path: Path) -> None:
    (rank,) = tbd.local_ranks(1)
    path: Any = {"checkpoint_id": tmp_path / "ck", "no_dist": True}
    with collection(rank, "table-wise", tb.Adam(lr=0.05)) as rows:
        train(rows, [draw(1, 9, False)])
        tdcp.save({"bags": tdcp.table_states(rows)}, **path)
        compact = tdcp.table_states(rows, layout="compact")
        tdcp.save(compact, checkpoint_id=tmp_path / "compact", no_dist=True)
        with pytest.raises(tb.InvalidError, match="load into a new store"):
            tdcp.load(compact, checkpoint_id=tmp_path / "compact", no_dist=True)
        expected = all_rows(rows.store, TABLES[0])
    with collection(rank, "table-wise", tb.Adam(lr=0.05)) as rows:
        compact = tdcp.table_states(rows, layout="compact")
        with pytest.raises(CheckpointException, match=r"load it by tierbed\.dist\.dcp\.load"):
            dcp.load(
                compact,
                checkpoint_id=tmp_path / "compact",
                planner=tdcp.LoadPlanner(),
                no_dist=True,
            )
        tdcp.load(compact, checkpoint_id=tmp_path / "compact", no_dist=True)
        assert torch.equal(all_rows(rows.store, TABLES[0])[0], expected[0])
    with collection(rank, "table-wise", tb.Adam(lr=0.05)) as rows:
        with pytest.raises(tb.InvalidError, match="begin with more than the collection's"):
            tdcp.load(tdcp.table_states(rows), **path)
        tdcp.load(tdcp.table_states(rows, prefix="bags"), **path)
        assert torch.equal(all_rows(rows.store, TABLES[0])[0], expected[0])
        optim = tdcp.optimizer_states(rows, prefix="bags")
        of_a = optim["state"]["bags.embedding_bags.a.weight"]
        zeros = {name: torch.zeros(of_a[name].size) for name in ("a.momentum1", "a.exp_avg_sq")}
        dcp.save(
            {"state": {"bags.embedding_bags.a.weight": zeros}},
            checkpoint_id=tmp_path / "stepless",
            no_dist=True,
        )
        wanted = {"state": {"bags.embedding_bags.a.weight": of_a}}
        with pytest.raises(tb.InvalidError, match="give load its steps="):
            tdcp.load(wanted, checkpoint_id=tmp_path / "stepless", no_dist=True)
        tdcp.load(wanted, steps=5, checkpoint_id=tmp_path / "stepless", no_dist=True)
        assert rows.store.steps_done("a") == 5
    narrow = [tb.EmbeddingBagConfig(60, 4, "a")]
    with (
        tbd.ShardedEmbeddingBagCollection(
            narrow, store=tb.Store.open(backend="memory", dram_budget="8MiB"), ranks=rank
        ) as rows,
        pytest.raises(tb.InvalidError, match="has size"),
    ):
        tdcp.load(tdcp.table_states(rows, prefix="bags"), **path)
    coded = [tb.EmbeddingBagConfig(60, 8, "a", data_type=tb.DataType.FP16)]
    with (
        tbd.ShardedEmbeddingBagCollection(coded, store=tb.CodedStore(), ranks=rank) as rows,
        pytest.raises(tb.UnsupportedError, match="use save of the collection"),
    ):
        tdcp.table_states(rows)


MEASURED = """
import sys
import torch
import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist import dcp as tdcp

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def grown(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    work()
    return peak() - before

def rows(name, count):
    (rank,) = tbd.local_ranks(1)
    store = tb.Store.open(f"{sys.argv[1]}/{name}", backend="file", dram_budget="16MiB")
    tables = [tb.EmbeddingBagConfig(count, 256, "a")]
    return tbd.ShardedEmbeddingBagCollection(
        tables, store=store, ranks=rank, optimizer=tb.SGD(lr=0.1)
    )

for name, count in (("warm", 100), ("measured", 40_000)):
    with rows(f"{name}-saved", count) as one:
        state = tdcp.table_states(one)
        saving = grown(lambda: tdcp.save(state, checkpoint_id=f"{sys.argv[1]}/{name}", no_dist=True,
                                         chunk_bytes=1 << 17))
        first = one.store.read_rows("a", count - 50, 50)
    with rows(f"{name}-loaded", count) as other:
        state = tdcp.table_states(other)
        loading = grown(lambda: tdcp.load(state, checkpoint_id=f"{sys.argv[1]}/{name}",
                                          no_dist=True))
        assert torch.equal(first, other.store.read_rows("a", count - 50, 50))
print(saving, loading)
"""


def test_dcp_save_stays_in_memory(tmp_path: Path) -> None:
    """A table of 20 times the limit passes through it, out and in."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    saving, loading = map(int, found.stdout.split())
    limit = 40_000 * 256 * 4 // 20
    assert saving < limit, f"{saving >> 20} MiB"
    # What the store buffers of the rows that are written is within its budget.
    assert loading < limit + (16 << 20), f"{loading >> 20} MiB"
