"""Rows in training by Hugging Face Accelerate: states that are saved and loaded, loaders.

Accelerate is imported when a function here is called. A loop that trains rows::

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4)
    store = tierbed.accelerate.open_store("run/store", state_dir, dram_budget="4GiB")
    optimizer = tb.RowOptimizer(emb, torch.optim.Adam(top.parameters()))
    top, optimizer = accelerator.prepare(top, optimizer)
    ahead = tierbed.accelerate.lookahead(loader, emb)
    tierbed.accelerate.register(accelerator, store, ahead)
    if state_dir is not None:
        accelerator.load_state(state_dir)
    for batch in ahead:
        with accelerator.accumulate(top):
            accelerator.backward(loss(top, emb(batch.sparse)))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("run/state")

Every folder that ``save_state`` writes has a kept checkpoint of the store. Those of folders that
are gone are dropped at the next save.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierbed.errors import InvalidError
from tierbed.train.file_checkpoints import Record, check_at, drop_unnamed, keep_checkpoint
from tierbed.train.lookahead import Lookahead, lookahead as _lookahead, sparse_of
from tierbed.train.store import Store

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["lookahead", "open_store", "register"]

_FILE = "tierbed_store.json"


def open_store(
    path: str | os.PathLike[str],
    state_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Store:
    """Opens the store at ``path``, where the state in ``state_dir`` left it.

    Args:
        path: Folder of the store.
        state_dir: A folder of ``save_state``; None opens the store as it is.
        options: As for :meth:`tierbed.Store.open`.

    Raises:
        InvalidError: The state knows of no store, or the store keeps no such checkpoint.
    """
    if state_dir is None:
        return Store.open(path, **options)
    saved = _record_in(Path(state_dir))
    if saved is None:
        raise InvalidError(
            f"{os.fspath(state_dir)} was saved without the store; call "
            "tierbed.accelerate.register(accelerator, store) before save_state"
        )
    return Store.open(path, checkpoint=Record.of(saved).name, **options)


def register(accelerator: Accelerator, store: Store, ahead: Any = None) -> None:
    """Lets ``save_state`` save the store, and ``load_state`` check that it stands there.

    Args:
        accelerator: The accelerator.
        store: Where the rows live; with a path.
        ahead: A look-ahead whose place in the epoch is saved and loaded with the state.

    Raises:
        UnsupportedError: At a save: several ranks, a store in memory, or of several shards.
        InvalidError: At a load: the store does not stand where the state was saved.
    """

    def save(_models: Any, _weights: Any, output_dir: str) -> None:
        folder = Path(output_dir)
        record = keep_checkpoint(store, folder)
        part = folder / f"{_FILE}.part"
        part.write_text(json.dumps(record.as_dict()))
        part.replace(folder / _FILE)
        beside = [_record_in(other) for other in folder.resolve().parent.iterdir()]
        drop_unnamed(store, folder.parent, {one["name"] for one in beside if one is not None})

    def load(_models: Any, input_dir: str) -> None:
        check_at(store, _record_in(Path(input_dir)), input_dir)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    if ahead is not None:
        accelerator.register_for_checkpointing(ahead)


def lookahead(
    loader: Iterable[Any],
    emb: Any,
    window: int = 64,
    key: Callable[[Any], Any] = sparse_of,
    *,
    epochs: int = 1,
) -> Any:
    """Looks ahead in a loader, and tells Accelerate where the epoch ends.

    ``accelerator.accumulate`` steps at the last batch of an epoch: of the loader's, not of what was
    read ahead. Do not ``prepare`` the loader before.

    Args:
        loader: As for :func:`tierbed.lookahead`; with a length.
        emb: As for :func:`tierbed.lookahead`.
        window: As for :func:`tierbed.lookahead`.
        key: As for :func:`tierbed.lookahead`.
        epochs: As for :func:`tierbed.lookahead`.

    Returns:
        An iterable with a length and a state, as :class:`tierbed.train.lookahead.Lookahead`.
    """
    return _loader_class()(_lookahead(loader, emb, window, key, epochs=epochs))


def _record_in(folder: Path) -> dict[str, Any] | None:
    try:
        saved: dict[str, Any] = json.loads((folder / _FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return saved


@functools.cache
def _loader_class() -> Any:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class AheadLoader(DataLoaderStateMixin):
        def __init__(self, ahead: Lookahead[Any]) -> None:
            self.gradient_state = GradientState()
            self._ahead = ahead

        def __len__(self) -> int:
            return len(self._ahead)

        def __iter__(self) -> Any:
            self.begin()
            try:
                for batch in self._ahead:
                    self.end_of_dataloader = self._ahead.is_last
                    yield batch
            finally:
                self.end()

        def state_dict(self) -> dict[str, Any]:
            return self._ahead.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._ahead.load_state_dict(state_dict)

    return AheadLoader
