"""Publishes beside training: do they hold the rows of one step, and end when they must?"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from publisher_kit import SIZES, Clock, Served, Training, rows_of

import tierbed as tb


def test_training_goes_on_while_a_version_is_written(training: Training, clock: Clock) -> None:
    with training.publisher(delta_every=60) as publisher:
        for _ in range(3):
            training.step()
            training.note()
            clock.now_s += 60
            publisher.step()
            # These change rows that are being copied, and are not of the version.
            for _ in range(20):
                training.step()
                publisher.step()
            publisher.promote("stable")
            assert Served(training).check(training).step == training.steps - 20
            assert publisher.stats().foreground_reason is None
    assert publisher.stats().failure_count == 0


def test_a_publish_beside_training_is_a_future(training: Training) -> None:
    training.step()
    training.note()
    told: list[tuple[int, int]] = []
    out = training.folder / "beside"
    publish = training.store.publish_async(
        out, training.dense, progress=lambda done, total: told.append((done, total))
    )
    for _ in range(20):
        training.step()
    assert publish.result().row_count == sum(SIZES.values())
    assert told == sorted(told)
    assert told[-1] == (sum(SIZES.values()),) * 2
    with tb.Snapshot.open(out) as snapshot:
        found = rows_of(snapshot)
    for name in SIZES:
        assert torch.equal(found[name], training.was[1][name])
    # What changed since is known.
    delta = training.store.publish_async(training.folder / "delta", base=out).result()
    assert 0 < delta.row_count <= 20 * 2 * training.batch


def test_a_publish_beside_training_ends_with_its_store(training: Training) -> None:
    training.step()
    started = threading.Event()

    def wait(done: int, total: int) -> None:
        started.set()
        if done < total:
            time.sleep(0.01)

    out = training.folder / "beside"
    publish = training.store.publish_async(out, progress=wait)
    assert started.wait(10)
    with pytest.raises(tb.InvalidError, match="under way"):
        training.store.publish_async(training.folder / "another")
    training.store.close()
    with pytest.raises(tb.errors.ClosedError):
        publish.result(10)
    with pytest.raises(tb.InvalidError):
        tb.Snapshot.open(out)


def test_a_callback_that_raises_ends_a_publish_beside_training(training: Training) -> None:
    training.step()

    def refuse(done: int, total: int) -> None:
        raise KeyError(f"{done} of {total}")

    with pytest.raises(KeyError):
        training.store.publish_async(training.folder / "beside", progress=refuse).result()
    training.step()
    training.store.publish_async(training.folder / "again").result()


def test_along_a_plan_training_stands_still(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=99, embedding_dim=4)]
        tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        with pytest.raises(tb.UnsupportedError, match="call publish"):
            store.publish_async(tmp_path / "beside")
        with tb.Publisher(store, None, tmp_path / "models", delta_every="1ms") as publisher:
            time.sleep(0.01)
            publisher.step()
            publisher.promote("stable")
            reason = publisher.stats().foreground_reason
    assert reason is not None
    assert "only while training stands still" in reason
