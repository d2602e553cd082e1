"""Rows that were imported or trained by window come to a plan, with the bits of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from test_forward_order import (
    BATCHES,
    BUDGET,
    DIMS,
    ROWS,
    Known,
    Training,
    assert_same,
    assert_same_rows,
    forward_training,
    itself,
    memory_training,
)

import tierbed as tb

OpenStore = Callable[..., tb.Store]
#: Batches trained by window: in the middle of an epoch.
BEFORE = 9


def windowed(open_store: OpenStore, theirs: Training, steps: int = BEFORE) -> Training:
    """A store trained by window and checkpointed, in step with ``theirs``."""
    ours = forward_training(open_store, order="window")
    batches = list(Known())[:steps]
    assert_same(ours.run(batches), theirs.run(batches, window=0))
    ours.save()
    ours.store.close()
    return ours


def test_a_later_session_follows_a_plan_from_where_training_stood(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = memory_training(open_store, "adagrad")
    windowed(open_store, theirs)
    ours = forward_training(open_store, order="auto")
    ours.load()
    with caplog.at_level(logging.WARNING):
        found = ours.run(Known(), window=4, start=BEFORE)
    assert_same(found, theirs.run(Known(start=BEFORE), window=0))
    order = ours.store.order()
    assert (order["kind"], order["epoch"], order["batch"]) == ("forward", 1, 0)
    assert (order["replan_count"], order["fallback_count"], order["reason"]) == (1, 0, None)
    assert order["rows_moved"] > 0
    assert "by window" not in caplog.text
    assert ours.store.steps_done("a") == BATCHES
    assert_same(ours.run(Known(), window=4), theirs.run(Known(), window=0))
    assert_same_rows(ours.store, theirs.store)


def test_an_end_before_the_first_step_along_the_plan_changes_nothing(
    open_store: OpenStore,
) -> None:
    theirs = memory_training(open_store)
    windowed(open_store, theirs)
    ours = forward_training(open_store, order="auto")
    next(tb.lookahead(Known(), ours.emb, window=4, key=itself, start=BEFORE))
    assert ours.store.order()["replan_count"] == 1
    ours.store.close()
    # The rows lie along the plan now; where training stood the caller knows.
    ours = forward_training(open_store, order="auto")
    ours.load()
    found = ours.run(Known(), window=4, start=BEFORE)
    assert ours.store.order()["replan_count"] == 0
    assert_same(found, theirs.run(Known(start=BEFORE), window=0))
    assert_same_rows(ours.store, theirs.store)


def test_shards_that_were_trained_by_window_follow_a_plan(open_store: OpenStore) -> None:
    ours = forward_training(open_store, order="window", shards=2, dram_budget="24MiB")
    theirs = memory_training(open_store)
    batches = list(Known())[:BEFORE]
    assert_same(ours.run(batches), theirs.run(batches, window=0))
    ours.save()
    ours.store.close()
    ours = forward_training(open_store, order="auto", shards=2, dram_budget="24MiB")
    ours.load()
    assert_same(ours.run(Known(), window=4), theirs.run(Known(), window=0))
    assert_same_rows(ours.store, theirs.store)
    order = ours.store.order()
    assert (order["kind"], order["replan_count"]) == ("forward", 1)


def test_readers_keep_their_checkpoint_while_rows_come_to_a_plan(open_store: OpenStore) -> None:
    theirs = memory_training(open_store)
    windowed(open_store, theirs)
    ours = forward_training(open_store, order="auto")
    ours.load()
    before = open_store(None, dram_budget=BUDGET, read_only=True)
    batches = tb.lookahead(Known(), ours.emb, window=4, key=itself)
    first = next(batches)
    assert ours.store.order()["replan_count"] == 1
    assert_same_rows(before, theirs.store)
    found = [ours.step(first), *(ours.step(batch) for batch in batches)]
    ours.save()
    # Its files are gone by name; what it has open stays as it was.
    assert_same_rows(before, theirs.store)
    assert_same(found, theirs.run(Known(), window=0))
    with open_store(None, dram_budget=BUDGET, read_only=True) as after:
        assert_same_rows(after, theirs.store)
        assert after.order()["kind"] == "forward"


def test_one_session_needs_a_checkpoint_before_the_plan(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = forward_training(open_store, order="auto"), memory_training(open_store)
    unknown = list(Known())
    assert_same(ours.run(unknown), theirs.run(unknown, window=0))
    assert_same(ours.run(Known()), theirs.run(Known(), window=0))
    assert ours.store.order()["kind"] == "window"
    assert "call store.checkpoint before the batches of a plan" in caplog.text
    ours.save()
    assert_same(ours.run(Known()), theirs.run(Known(), window=0))
    assert ours.store.order()["kind"] == "forward"
    assert_same_rows(ours.store, theirs.store)


def test_rows_that_were_written_are_trained_in_a_store_that_insists_on_a_plan(
    open_store: OpenStore,
) -> None:
    ours, theirs = forward_training(open_store), memory_training(open_store)
    for name, dim in DIMS.items():
        rows = torch.randn(ROWS[name], dim, generator=torch.Generator().manual_seed(dim))
        for training in (ours, theirs):
            training.store.write_rows(name, 0, rows)
    with pytest.raises(tb.InvalidError, match=r"store\.checkpoint"):
        ours.run(Known())
    with pytest.raises(tb.InvalidError, match="insists on one"):
        ours.step(next(iter(Known())))
    ours.store.checkpoint("imported")

    assert_same(ours.run(Known()), theirs.run(Known(), window=0))
    assert_same_rows(ours.store, theirs.store)
    assert ours.store.order()["kind"] == "forward"
