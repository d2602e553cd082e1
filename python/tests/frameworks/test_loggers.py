"""Counters of a store go to loggers through their own public calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def store(open_store: Any) -> tb.Store:
    store: tb.Store = open_store("file")
    table = tb.EmbeddingBagConfig(10, 4, "item")
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
    ones = torch.ones(2, dtype=torch.int64)
    for _ in range(3):
        bags = tb.KeyedJaggedTensor(["item"], torch.tensor([1, 2]), lengths=ones)
        emb(bags).values().sum().backward()
    return store


def test_scalars_are_the_numbers_of_the_counters(store: tb.Store) -> None:
    stats, found = store.stats(), tb.scalars(store)
    assert found["tierbed/steps"] == stats["steps"] == 3
    assert found["tierbed/budget/limit_bytes"] == stats["budget"]["limit_bytes"]
    assert all(isinstance(value, float) for value in found.values())
    assert "tierbed/order/kind" not in found, "a word is no number"
    assert set(tb.scalars(store, "")) == {name.removeprefix("tierbed/") for name in found}


def test_tensorboard_takes_them(store: tb.Store, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in tb.scalars(store).items():
            writer.add_scalar(name, value, 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(tb.scalars(store))
    (event,) = events.Scalars("tierbed/steps")
    assert (event.step, event.value) == (7, 3)


def test_mlflow_takes_them(
    store: tb.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        mlflow.log_metrics(tb.scalars(store), step=7)
    found = mlflow.get_run(run.info.run_id).data.metrics
    assert found["tierbed/steps"] == 3
    assert set(found) == set(tb.scalars(store))


def test_wandb_takes_them_offline(
    store: tb.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="rows") as run:
        run.log(tb.scalars(store), step=7, commit=True)
        summary = dict(run.summary)
    assert summary["tierbed/steps"] == 3
    assert set(tb.scalars(store)) <= set(summary)
    assert list(tmp_path.rglob("*.wandb")), "nothing was written"
