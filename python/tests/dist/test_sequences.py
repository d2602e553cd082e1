"""Sequences on ranks as threads against one process: outputs, rows, state, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ranks import run_ranks

import tierbed as tb
from tierbed import dist as tbd

TABLES = [
    tb.EmbeddingConfig(60, 8, "item", ["history", "target"]),
    tb.EmbeddingConfig(9, 8, "place", ["place"]),
]
ROWS = {"history": 60, "target": 60, "place": 9}
# Uneven, and a rank without samples.
SAMPLES = [3, 0, 5]


def draw(step: int, rank: int) -> tb.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    samples = SAMPLES[rank]
    lengths = torch.randint(0, 4, (len(ROWS), samples), generator=generator)
    values = [
        torch.randint(0, rows, (int(of_feature.sum()),), generator=generator)
        for rows, of_feature in zip(ROWS.values(), lengths, strict=True)
    ]
    return tb.KeyedJaggedTensor(
        list(ROWS), torch.cat(values), lengths=lengths.view(-1), stride=samples
    )


def scaled(rows: dict[str, tb.JaggedTensor]) -> torch.Tensor:
    return torch.stack([part.values().sin().sum() for part in rows.values()]).sum()


def together(step: int) -> tb.KeyedJaggedTensor:
    batches = [draw(step, rank) for rank in range(len(SAMPLES))]
    parts = [[batch[key] for batch in batches] for key in ROWS]
    return tb.KeyedJaggedTensor(
        list(ROWS),
        torch.cat([part.values() for of_key in parts for part in of_key]),
        lengths=torch.cat([part.lengths() for of_key in parts for part in of_key]),
    )


@pytest.mark.parametrize("optimizer", [tb.Adam(lr=0.1), tb.SGD(lr=0.5)])
def test_ranks_have_the_bits_of_one_process(optimizer: Any) -> None:
    def work(rank: tbd.LocalRank) -> Any:
        outputs = []
        plan = tbd.ShardingPlan(len(SAMPLES), {"item": tbd.RowWise(), "place": tbd.TableWise(1)})
        with (
            tb.Store.open(backend="memory", dram_budget="16MiB") as store,
            tbd.ShardedEmbeddingCollection(
                TABLES, store=store, plan=plan, ranks=rank, optimizer=optimizer
            ) as emb,
        ):
            for step in range(3):
                rows = emb(draw(step, rank.rank))
                outputs.append({key: part.values().detach().clone() for key, part in rows.items()})
                assert rows["history"].lengths().numel() == SAMPLES[rank.rank]
                scaled(rows).backward()
        return outputs

    of_ranks = run_ranks(len(SAMPLES), work)
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = tb.EmbeddingCollection(TABLES, store=store, optimizer=optimizer)
        for step in range(3):
            rows = emb(together(step))
            for key, part in rows.items():
                found = torch.cat([outputs[step][key] for outputs in of_ranks])
                assert torch.equal(found, part.values()), (step, key)
            scaled(rows).backward()


def test_a_checkpoint_of_ranks_is_loaded(tmp_path: Any) -> None:
    def work(rank: tbd.LocalRank) -> Any:
        batch, found = draw(0, rank.rank), []
        for loads in (False, True):
            with (
                tb.Store.open(backend="memory", dram_budget="16MiB") as store,
                tbd.ShardedEmbeddingCollection(TABLES, store=store, ranks=rank) as emb,
            ):
                if loads:
                    assert emb.load(tmp_path / "saved") == {"step": 1}
                else:
                    scaled(emb(batch)).backward()
                    emb.save(tmp_path / "saved", {"step": 1})
                rows = emb.eval()(batch)
                found.append({key: part.values().clone() for key, part in rows.items()})
        return [torch.equal(found[0][key], found[1][key]) for key in ROWS]

    assert run_ranks(len(SAMPLES), work) == [[True] * len(ROWS)] * len(SAMPLES)


def test_tables_of_several_dims_are_refused() -> None:
    (rank,) = tbd.local_ranks(1)
    tables = [tb.EmbeddingConfig(9, 8, "a"), tb.EmbeddingConfig(9, 4, "b")]
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    with pytest.raises(tb.InvalidError, match="need one dim"):
        tbd.ShardedEmbeddingCollection(tables, store=store, ranks=rank)
    emb = tbd.ShardedEmbeddingCollection(tables[:1], store=store, ranks=rank)
    with emb, pytest.raises(tb.UnsupportedError, match="larger batches instead of accumulation"):
        tb.RowOptimizer(emb)
