"""Sparse models of HugeCTR: a folder with ``key``, ``emb_vector`` and sometimes ``slot_id``.

Keys are i64, vectors f32, little-endian, in the same order. Optimizer state is a file beside the
folder, ``<prefix>_opt_sparse_<iter>.model`` beside ``<prefix>_sparse_<iter>.model``: for each part
of the state the whole memory of each GPU, ``[max_vocabulary_size_per_gpu, D]`` f32.

Source: HugeCTR 25.03, ``localized_slot_sparse_embedding_hash.cu`` and ``opt_states_functor.cu``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tierbed.errors import CorruptionError, InvalidError, UnsupportedError
from tierbed.tables.found import FoundTable, State, TableFile
from tierbed.tables.rows import Rows, of_file
from tierbed.tables.state import StatePart
from tierbed.tables.writing import Report, bytes_of, numbers_of

__all__ = ["is_hugectr", "read_hugectr", "write_hugectr"]

_GPUS_MAX = 16


def is_hugectr(folder: Path) -> bool:
    """Whether a folder is a sparse model, or has some in it."""
    return any(True for _ in _models(folder))


def _models(folder: Path) -> list[Path]:
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    return [path for path in candidates if (path / "emb_vector").is_file()]


def read_hugectr(folder: Path) -> TableFile:
    """Opens a sparse model, or all those in a folder.

    Raises:
        CorruptionError: Files of one model do not have equally many rows.
    """
    return TableFile(folder, [_model(path) for path in _models(folder)])


def _model(folder: Path) -> FoundTable:
    keys, vectors = folder / "key", folder / "emb_vector"
    if not keys.is_file():
        raise CorruptionError(
            f"{folder} has emb_vector and no key; bring all its files again from where they were "
            "written",
            {"path": str(folder)},
        )
    count, rest = divmod(keys.stat().st_size, 8)
    size = vectors.stat().st_size
    if rest or size % (4 * max(1, count)) or (count == 0) != (size == 0):
        raise CorruptionError(
            f"{vectors} has {size} bytes, no whole vectors of {count} keys; bring all its files "
            "again from where they were written",
            {"path": str(folder)},
        )
    dim = size // (4 * count) if count else 0
    state = folder.with_name(folder.name.replace("_sparse_", "_opt_sparse_"))
    has_state = state != folder and state.is_file()
    ids = of_file(keys, (count,), "<i8", 0)

    def split(parts: list[StatePart]) -> State:
        _check_one_gpu(folder, ids)
        return _state(state, parts, count, dim)

    return FoundTable(
        name=folder.name.removesuffix(".model"),
        weight=of_file(vectors, (count, dim), "<f4", 0),
        ids=ids,
        split=split if has_state else None,
    )


def _state(path: Path, parts: list[StatePart], count: int, dim: int) -> dict[str, Rows]:
    """Returns the state of the first ``count`` rows, which lie where their vectors do."""
    size = path.stat().st_size
    held, rest = divmod(size, 4 * dim * max(1, len(parts)))
    if not parts or rest or held < count or any(part.width != dim for part in parts):
        raise InvalidError(
            f"{path} has {size} bytes, which is not the state of {count} rows of {dim} numbers in "
            f"{[part.name for part in parts]}; import without state, or give the optimizer that it "
            "is of",
            {"path": str(path)},
        )
    return {
        part.name: of_file(path, (count, dim), "<f4", 4 * dim * held * at)
        for at, part in enumerate(parts)
    }


def _check_one_gpu(folder: Path, ids: Rows) -> None:
    """Refuses state of several GPUs, of which each has rows of its own in the file.

    Keys lie by GPU then, which is the remainder of key or slot: one block for each.
    """
    slots = folder / "slot_id"
    owners = of_file(slots, (ids.count,), "<i8", 0).whole() if slots.is_file() else ids.whole()
    if len(owners) < 64:
        return
    for gpus in range(2, _GPUS_MAX + 1):
        gpu = torch.remainder(owners, gpus)
        if int(gpu.max()) > int(gpu.min()) and bool((gpu.diff() >= 0).all()):
            raise UnsupportedError(
                f"the state beside {folder} is of {gpus} GPUs, whose rows lie apart in it; save "
                "the model on one GPU, or import without state",
                {"path": str(folder)},
            )


def write_hugectr(tables: list[FoundTable], folder: Path, report: Report) -> None:
    """Writes a sparse model per table, as a DistributedSlotEmbedding and HPS read it.

    Without state: its file is as large as the hash table of a GPU, which a store does not know.
    """
    for table in tables:
        model = folder / table.short
        model.mkdir(parents=True)
        with (model / "key").open("wb") as file:
            for chunk in numbers_of(table).chunks(report.chunk_rows):
                file.write(bytes_of(chunk))
        with (model / "emb_vector").open("wb") as file:
            for chunk in report.chunks(table.weight):
                file.write(bytes_of(chunk))
