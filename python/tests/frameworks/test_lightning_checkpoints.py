"""Tables of a model that Lightning trained, from its checkpoint into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.tables import find_tables, import_tables

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

ROWS, DIM = 50, 4


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A table and a layer, each with an optimizer of its own."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.head = torch.nn.Linear(DIM, width)

    def training_step(self, batch: Any, _: int) -> None:
        """Steps both."""
        loss = self.head(self.bag(batch[0])).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        """Returns both."""
        rows = torch.optim.SparseAdam(self.bag.parameters(), lr=0.05)
        return [torch.optim.Adam(self.head.parameters()), rows]


def test_a_checkpoint_of_lightning_comes_in_with_its_state(tmp_path: Path) -> None:
    ids = torch.randint(0, ROWS, (24, 3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=6)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **options
    )
    model = Model()
    trainer.fit(model, loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    file = find_tables(tmp_path / "last.ckpt")
    assert [one.name for one in file.tables] == ["state_dict.bag.weight", "state_dict.head.weight"]
    assert "optimizer_states.1.state.0" in file.numbered_state()
    with tb.Store.open(tmp_path / "store", dram_budget="4MiB") as store:
        done = import_tables(
            store,
            tmp_path / "last.ckpt",
            "bag",
            state_keys={"bag": "optimizer_states.1.state.0"},
            optimizer=tb.Adam(lr=0.05),
        )
        assert done[0].has_state
        assert store.steps_done("bag") == 4
        rows, state = store.read_rows_and_state("bag", 0, ROWS)
    assert torch.equal(rows, model.bag.weight)
    theirs = trainer.optimizers[1].state[model.bag.weight]
    assert torch.equal(state, torch.cat([theirs["exp_avg"], theirs["exp_avg_sq"]], dim=1))
