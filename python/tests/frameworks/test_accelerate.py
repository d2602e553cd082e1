"""Accelerate trains rows as any other parameter, and resumes them with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb

accelerate = pytest.importorskip("accelerate")

from .kit import Model, assert_same, loader, numbers, sparse  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS = 3


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Loop:
    """An ordinary loop of Accelerate, with a scheduler, over several epochs.

    Args:
        folder: Where the store and the states lie.
        order: That of the store.
        state: A state to go on from.
        every: Batches of a step; ten batches of an epoch are no multiple of 4.
    """

    def __init__(
        self, folder: Path, order: str, state: Path | None = None, every: int = 4, **options: Any
    ) -> None:
        accelerate.utils.set_seed(1 if state is None else 2)
        settings = accelerate.utils.ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=True, total_limit=2
        )
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=every, project_config=settings
        )
        self.store = tb.accelerate.open_store(
            folder / "store", state, dram_budget="16MiB", order=order
        )
        model = Model(self.store)
        optimizer = model.optimizer()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        # In forward order all epochs have the batches of the plan.
        batches = loader("none" if order == "forward" else "seeded")
        self.ahead = tb.accelerate.lookahead(batches, model.emb, window=3, key=sparse)
        tb.accelerate.register(self.accelerator, self.store, self.ahead)
        self.batch = 0
        if state is not None:
            self.accelerator.load_state(state)
            self.batch = 10 * EPOCHS - 10 + 4

    def run(self, stop: int = 10 * EPOCHS) -> list[torch.Tensor]:
        while self.batch < stop:
            for batch in self.ahead:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model.loss(batch))
                    if self.accelerator.sync_gradients:
                        both = [
                            *self.model.top.parameters(),
                            *self.optimizer.optimizer.parameters(),
                        ]
                        self.accelerator.clip_grad_norm_(both, 0.1)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.batch += 1
                if self.batch == stop:
                    break
        return numbers(self.store, self.model)

    def close(self) -> None:
        self.store.close()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize(("order", "every"), [("auto", 4), ("window", 4), ("forward", 1)])
def test_a_run_in_two_parts_has_the_same_bits(tmp_path: Path, order: str, every: int) -> None:
    at = 10 * EPOCHS - 10 + 4
    whole = Loop(tmp_path / "whole", order, every=every)
    assert whole.store.steps_done("item") == 0
    found = whole.run()
    assert whole.store.steps_done("item") == EPOCHS * -(-10 // every)
    whole.close()
    first = Loop(tmp_path / "parts", order, every=every)
    first.run(at)
    first.accelerator.save_state()
    first.run(at + 5)  # What comes behind the state is gone.
    first.close()
    state = tmp_path / "parts" / "checkpoints" / "checkpoint_0"
    second = Loop(tmp_path / "parts", order, state, every=every)
    assert_same(second.run(), found)
    second.close()


def test_kept_checkpoints_go_with_the_folders(tmp_path: Path) -> None:
    loop = Loop(tmp_path, "window", every=1)
    for stop in (1, 2, 3, 4):
        loop.run(stop)
        loop.accelerator.save_state()
    states = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert states == ["checkpoint_2", "checkpoint_3"]
    assert len(loop.store.checkpoints()) == 2
    with pytest.raises(tb.InvalidError, match=r"close it, and open it with open_store"):
        loop.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")
    loop.close()
    again = Loop(tmp_path, "window", tmp_path / "checkpoints" / "checkpoint_2")
    assert again.store.steps_done("item") == 3
    again.close()


def test_a_state_without_the_store_is_refused(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(tb.InvalidError, match=r"was saved without the store; call tierbed"):
        tb.accelerate.open_store(tmp_path / "store", tmp_path / "state")
    with tb.accelerate.open_store(tmp_path / "store", dram_budget="16MiB") as store:
        Model(store)
        tb.accelerate.register(accelerator, store)
        with pytest.raises(tb.InvalidError, match="saved without the store; save it"):
            accelerator.load_state(tmp_path / "state")
        accelerator.save_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state")


def test_a_store_in_memory_is_not_saved(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        tb.accelerate.register(accelerator, store)
        with pytest.raises(tb.UnsupportedError, match="to go back to; open the store with"):
            accelerator.save_state(tmp_path / "state")
