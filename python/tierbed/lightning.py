"""Rows in training by Lightning's ``Trainer``: checkpoints, resuming, checks, counters.

Lightning is imported when a function here is called. A module that trains rows by a ``Trainer``::

    store = tierbed.lightning.open_store("run/store", ckpt_path, dram_budget="4GiB")

    class Model(lightning.LightningModule):
        def train_dataloader(self):
            return tb.lookahead(loader, self.emb)

        def configure_optimizers(self):
            return tb.RowOptimizer(self.emb, torch.optim.Adam(self.top.parameters()))

    trainer = lightning.Trainer(
        callbacks=[tierbed.lightning.callback(store)],
        plugins=[tierbed.lightning.checkpoint_io(store)],
    )
    trainer.fit(model, ckpt_path=ckpt_path)

Every file that Lightning writes has a kept checkpoint of the store, dropped with the file. The
look-ahead is a loader with a state, so that a run goes on in the middle of an epoch, with the
generators that its shuffle is drawn from.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.file_checkpoints import Record, check_at, drop_checkpoints, keep_checkpoint
from tierbed.train.scalars import scalars
from tierbed.train.store import Store

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.io import CheckpointIO

__all__ = ["callback", "checkpoint_io", "open_store"]

# Where a file of Lightning has the record of the store.
_KEY = "tierbed_store"


def open_store(
    path: str | os.PathLike[str],
    ckpt_path: str | os.PathLike[str] | None = None,
    *,
    weights_only: bool = True,
    **options: Any,
) -> Store:
    """Opens the store at ``path``, where the file at ``ckpt_path`` left it.

    Args:
        path: Folder of the store.
        ckpt_path: A file that was saved with :func:`checkpoint_io`; None opens the store as it is.
        weights_only: As of ``torch.load``: False for files with objects, of those you trust.
        options: As for :meth:`tierbed.Store.open`.

    Raises:
        InvalidError: The file knows of no store, or the store keeps no such checkpoint.
    """
    if ckpt_path is None:
        return Store.open(path, **options)
    import torch

    saved = torch.load(ckpt_path, map_location="cpu", weights_only=weights_only).get(_KEY)
    if saved is None:
        raise InvalidError(
            f"{os.fspath(ckpt_path)} was saved without the store; save with "
            "Trainer(plugins=[tierbed.lightning.checkpoint_io(store)])"
        )
    return Store.open(path, checkpoint=Record.of(saved).name, **options)


def checkpoint_io(store: Store) -> CheckpointIO:
    """Returns what saves the store with each file of Lightning, for ``Trainer(plugins=[...])``.

    Args:
        store: Where the rows of the module live; with a path.

    Raises:
        UnsupportedError: At the first save: several ranks, a store in memory or of several shards,
            or a file that is written beside the training.
        InvalidError: Where a file is loaded that is not of where the store stands.
    """
    return _io_class()(store)  # type: ignore[no-any-return]


def callback(store: Store, log_every: int = 0) -> Callback:
    """Returns what checks that a ``Trainer`` reaches the rows, and logs the store's counters.

    Args:
        store: Where the rows of the module live.
        log_every: Steps between logs of :func:`tierbed.scalars` to the trainer's loggers; 0 for
            none.

    Raises:
        InvalidError: When training begins: gradients are accumulated or clipped, and no
            RowOptimizer collects those of the rows; or checkpoints are made without
            :func:`checkpoint_io`.
    """
    return _callback_class()(store, log_every)  # type: ignore[no-any-return]


@functools.cache
def _io_class() -> Any:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    class StoreCheckpointIO(TorchCheckpointIO):
        def __init__(self, store: Store) -> None:
            super().__init__()
            self.store = store

        def save_checkpoint(
            self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
        ) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise UnsupportedError(
                    "rows go on training while a file is saved by a thread; leave out "
                    "AsyncCheckpointIO"
                )
            record = keep_checkpoint(self.store, path)
            super().save_checkpoint({**checkpoint, _KEY: record.as_dict()}, path, storage_options)
            drop_checkpoints(self.store, path, but=record.name)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
            check_at(self.store, checkpoint.get(_KEY), path)
            return checkpoint

        def remove_checkpoint(self, path: Any) -> None:
            super().remove_checkpoint(path)
            drop_checkpoints(self.store, path)

    return StoreCheckpointIO


@functools.cache
def _callback_class() -> Any:
    from lightning.pytorch import Callback

    class StoreCallback(Callback):
        def __init__(self, store: Store, log_every: int) -> None:
            self.store = store
            self.log_every = log_every

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            _check_checkpoints(trainer)
            _check_gradients(trainer, pl_module, self.store)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if self.log_every and trainer.global_step % self.log_every == 0:
                for logger in trainer.loggers:
                    logger.log_metrics(scalars(self.store), step=trainer.global_step)

    return StoreCallback


def _check_checkpoints(trainer: Any) -> None:
    io = trainer.strategy.checkpoint_io
    while not isinstance(io, _io_class()) and getattr(io, "checkpoint_io", None) is not None:
        io = io.checkpoint_io  # One that wraps another.
    if trainer.checkpoint_callbacks and not isinstance(io, _io_class()):
        raise InvalidError(
            "the trainer saves checkpoints without the rows; give it "
            "plugins=[tierbed.lightning.checkpoint_io(store)], or enable_checkpointing=False"
        )


def _check_gradients(trainer: Any, pl_module: Any, store: Store) -> None:
    if store.watch.collector() is not None:
        return
    asked = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches > 1,
        "gradient_clip_val": bool(trainer.gradient_clip_val),
        "precision='16-mixed'": getattr(trainer.precision_plugin, "scaler", None) is not None,
    }
    missed = [name for name, is_asked in asked.items() if is_asked]
    if missed and pl_module.automatic_optimization:
        raise InvalidError(
            f"{', '.join(missed)} of the trainer would not reach the rows; return "
            "tierbed.RowOptimizer(self, dense_optimizer) from configure_optimizers"
        )
