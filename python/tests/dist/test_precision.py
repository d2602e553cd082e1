"""Outputs and rows that travel in fewer bytes: the same on any number of ranks, near to f32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ranks import SAMPLES, SHARDINGS, TABLES, draw, join, run_ranks

import tierbed as tb
from tierbed import dist as tbd

# Of a number, by rounding to nearest: half of the last place.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def lookup_and_step(count: int, name: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on ``count`` ranks; outputs before and after it, of all samples."""
    plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
    how = tbd.ExchangeOptions(**options)
    drawn = [draw(part, SAMPLES[part], False) for part in range(4)]
    per_rank = 4 // count

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        first = rank.rank * per_rank
        batch = join(drawn[first : first + per_rank])
        with tbd.ShardedEmbeddingBagCollection(
            TABLES, store=store, plan=plan, ranks=rank, optimizer=tb.SGD(lr=0.05), exchange=how
        ) as sharded:
            out = sharded(batch).values()
            before = out.detach().clone()
            (out * out.detach()).sum().backward()
            after = sharded(batch).values().detach().clone()
        return before, after

    found = run_ranks(count, work)
    return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_outputs_are_sums_rounded_once(name: str, dtype: torch.dtype) -> None:
    exact, _ = lookup_and_step(1, name)
    one = lookup_and_step(1, name, output_dtype=dtype)
    assert one[0].dtype == dtype
    assert torch.equal(one[0], exact.to(dtype))
    for count in (2, 4):
        many = lookup_and_step(count, name, output_dtype=dtype)
        assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True)), count


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.int8])
def test_rows_travel_narrow_within_their_tolerance(dtype: torch.dtype) -> None:
    exact, _ = lookup_and_step(1, "row-wise")
    one = lookup_and_step(1, "row-wise", row_dtype=dtype)
    # At most 3 rows a bag; int8 errs by 1/500 of a row's range and 1/128 at its bounds.
    largest = exact.abs().max()
    relative = ROUNDING.get(dtype, 2 / 500 + 1 / 128)
    assert 0 < (one[0] - exact).abs().max() <= 3 * relative * 4 * largest
    for count in (2, 4):
        many = lookup_and_step(count, "row-wise", row_dtype=dtype)
        assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True)), count


def test_rows_of_whole_tables_do_not_travel() -> None:
    exact = lookup_and_step(2, "table-wise")
    narrow = lookup_and_step(2, "table-wise", row_dtype=torch.int8)
    assert all(torch.equal(a, b) for a, b in zip(exact, narrow, strict=True))


def test_other_types_are_refused() -> None:
    (rank,) = tbd.local_ranks(1)
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    for options, match in [
        ({"output_dtype": torch.float64}, "output_dtype must be"),
        ({"output_dtype": torch.int8}, "outputs travel in"),
        ({"row_dtype": torch.uint8}, "row_dtype must be"),
    ]:
        with pytest.raises(tb.InvalidError, match=match):
            tbd.ShardedEmbeddingBagCollection(
                TABLES, store=store, ranks=rank, exchange=tbd.ExchangeOptions(**options)
            )
