"""Lightning's Trainer trains rows as any other parameter, and resumes them with the same bits."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb

lightning = pytest.importorskip("lightning")

from .kit import Model, assert_same, loader, numbers, sparse  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 25  # Two epochs of ten batches, and a half.


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, store: tb.Store, shuffle: str = "seeded", stop: int | None = None) -> None:
        super().__init__()
        self.model = Model(store)
        self.shuffle = shuffle
        self.stop = stop
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        if self.global_step == self.stop:
            os._exit(9)  # As a kill: nothing is closed or flushed.
        loss = self.model.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss.detach())
        return loss

    def train_dataloader(self) -> Any:
        return tb.lookahead(loader(self.shuffle), self.model.emb, window=3, key=sparse)

    def configure_optimizers(self) -> Any:
        optimizer = self.model.optimizer()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Fused(Lit):
    """Without a RowOptimizer: a backward steps the rows."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.model.top.parameters(), lr=0.05)


def trainer(folder: Path, store: tb.Store, save_every: int = 4, **options: Any) -> Any:
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=save_every, save_top_k=2, monitor="step",
        mode="max", save_last=True,
    )  # fmt: skip
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    return lightning.Trainer(
        max_steps=options.pop("max_steps", STEPS),
        accelerator="cpu",
        callbacks=[saves, tb.lightning.callback(store)],
        plugins=[tb.lightning.checkpoint_io(store)],
        **{**quiet, **options},
    )


def open_at(folder: Path, order: str, ckpt: Path | None = None) -> tb.Store:
    return tb.lightning.open_store(folder / "store", ckpt, dram_budget="16MiB", order=order)


def run(folder: Path, order: str, shuffle: str, stop: int | None, **options: Any) -> Any:
    """Trains in a folder, from its last file where it has one; returns the numbers."""
    last = folder / "last.ckpt"
    ckpt = last if last.exists() else None
    with open_at(folder, order, ckpt) as store:
        lightning.seed_everything(1 if ckpt is None else 2)
        module = Lit(store, shuffle, stop)
        trainer(folder, store, **options).fit(module, ckpt_path=ckpt)
        return [*numbers(store, module.model), torch.tensor(module.losses[-5:])]


def run_and_die(*args: Any, **options: Any) -> None:
    torch.set_num_threads(1)
    run(*args, **options)


@pytest.mark.parametrize(
    ("order", "shuffle", "options"),
    [
        ("auto", "seeded", {}),
        ("window", "global", {}),
        ("window", "seeded", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("forward", "none", {"precision": "bf16-mixed"}),
    ],
)
def test_a_run_that_was_killed_resumes_with_the_same_bits(
    tmp_path: Path, order: str, shuffle: str, options: dict[str, Any]
) -> None:
    whole = run(tmp_path / "whole", order, shuffle, None, **options)
    halves = tmp_path / "halves"
    # In the second epoch, two steps behind the last file.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_and_die, args=(halves, order, shuffle, 14), kwargs=options)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert_same(run(halves, order, shuffle, None, **options), whole)


def test_kept_checkpoints_come_and_go_with_the_files(tmp_path: Path) -> None:
    with open_at(tmp_path, "auto") as store:
        trainer(tmp_path, store).fit(Lit(store))
        files = sorted(path.name for path in tmp_path.glob("*.ckpt"))
        assert files == ["last.ckpt", "step=20.ckpt", "step=24.ckpt"]
        assert len(store.checkpoints()) == 3
    for file in files:
        with open_at(tmp_path, "auto", tmp_path / file) as store:
            saved = torch.load(tmp_path / file, weights_only=False)
            assert store.steps_done("item") == saved["global_step"]


def test_accumulation_and_clipping_reach_the_rows(tmp_path: Path) -> None:
    options: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_steps": 6}
    with open_at(tmp_path, "window") as store:
        lightning.seed_everything(1)
        module = Lit(store)
        trainer(tmp_path, store, **options).fit(module)
        found = numbers(store, module.model)
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        lightning.seed_everything(1)
        model = Model(store)
        optimizer = model.optimizer()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        batches = loader()
        for _ in range(2):
            for at, batch in enumerate(batches):
                (model.loss(batch) / 2).backward()
                if at % 2 == 1:
                    both = [*model.top.parameters(), *optimizer.parameters()]
                    torch.nn.utils.clip_grad_norm_(both, 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
                if store.steps_done("item") == 6:
                    break
            scheduler.step()
        assert_same(found, numbers(store, model))


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}], ids=["sums", "clips"]
)
def test_what_would_not_reach_the_rows_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with open_at(tmp_path, "auto") as store:
        with pytest.raises(tb.InvalidError, match=r"would not reach the rows; return tierbed.Row"):
            trainer(tmp_path, store, **options).fit(Fused(store))
        trainer(tmp_path, store, max_steps=2).fit(Fused(store))
        assert store.steps_done("item") == 2
        trainer(tmp_path, store, max_steps=2, **options).fit(Lit(store))


def test_files_without_the_rows_are_refused(tmp_path: Path) -> None:
    with open_at(tmp_path, "auto") as store:
        plain = lightning.Trainer(
            max_steps=2, accelerator="cpu", callbacks=[tb.lightning.callback(store)], logger=False,
            default_root_dir=tmp_path, enable_progress_bar=False,
        )  # fmt: skip
        with pytest.raises(tb.InvalidError, match=r"without the rows; give it plugins="):
            plain.fit(Lit(store))
        bare = lightning.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False,
        )  # fmt: skip
        bare.fit(Lit(store))
        bare.save_checkpoint(tmp_path / "bare.ckpt")
    with pytest.raises(tb.InvalidError, match=r"was saved without the store; save with Trainer"):
        open_at(tmp_path, "auto", tmp_path / "bare.ckpt")


def test_a_file_that_a_thread_saves_is_refused(tmp_path: Path) -> None:
    io = lightning.pytorch.plugins.io
    with open_at(tmp_path, "auto") as store:
        made = trainer(tmp_path, store, max_steps=4)
        made.strategy.checkpoint_io = io.AsyncCheckpointIO(tb.lightning.checkpoint_io(store))
        with pytest.raises(tb.UnsupportedError, match="saved by a thread; leave out Async"):
            made.fit(Lit(store))
        assert not store.checkpoints()
        trainer(tmp_path, store, max_steps=4).fit(Lit(store))
        assert store.checkpoints()


def test_a_store_that_stands_elsewhere_is_refused(tmp_path: Path) -> None:
    with open_at(tmp_path, "auto") as store:
        trainer(tmp_path, store).fit(Lit(store))
    older = tmp_path / "step=20.ckpt"
    with (
        open_at(tmp_path, "auto", tmp_path / "last.ckpt") as store,
        pytest.raises(tb.InvalidError, match=r"close it, and open it with open_store"),
    ):
        trainer(tmp_path, store).fit(Lit(store), ckpt_path=older)
    with open_at(tmp_path, "auto", older) as store:
        trainer(tmp_path, store).fit(Lit(store), ckpt_path=older)
        assert store.steps_done("item") == STEPS


def test_counters_go_to_the_loggers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = lightning.pytorch.loggers.TensorBoardLogger(tmp_path, name="logs")
    with open_at(tmp_path, "auto") as store:
        made = lightning.Trainer(
            max_steps=6, accelerator="cpu", logger=logger, enable_checkpointing=False,
            callbacks=[tb.lightning.callback(store, log_every=2)], enable_progress_bar=False,
        )  # fmt: skip
        made.fit(Lit(store))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Scalars("tierbed/steps")] == [2, 4, 6]
    assert [event.value for event in events.Scalars("tierbed/steps")] == [2, 4, 6]
