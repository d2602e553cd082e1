"""Files that dynamicemb keeps a table in, as its storage writes and reads them.

Keys and scores are i64, weights and state f32, row after row. Beside them a file of JSON has the
optimizer's numbers. :mod:`tierbed.tables` reads and writes whole folders of such files.

Source: recsys-examples v26.06.01, ``key_value_table.py``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierbed.errors import CorruptionError, InvalidError
from tierbed.tables.rows import Rows, of_file

__all__ = [
    "Batch",
    "Form",
    "Paths",
    "has_state",
    "read_numbers",
    "read_rows",
    "write_numbers",
    "write_rows",
]

_ROWS = 65536


@dataclass(frozen=True)
class Paths:
    """Files of a table; None for what is left out."""

    keys: str
    weights: str
    scores: str | None
    state: str | None

    def without_state(self) -> Paths:
        """Returns them without the file of state."""
        return replace(self, state=None)

    def present(self) -> Paths:
        """Returns them without scores and state where these files are not there."""
        return replace(self, scores=_if_there(self.scores), state=_if_there(self.state))


def _if_there(path: str | None) -> str | None:
    return path if path is not None and os.path.exists(path) else None


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the files of a table look like."""

    dim: int
    kept_state_dim: int
    evict_strategy: str | None
    has_ages: bool
    dist_type: str


@dataclass(frozen=True)
class Batch:
    """Some rows of files: ``[N]``, ``[N, D]``, ``[N]`` or None, ``[N, S]`` or None."""

    keys: Tensor
    weights: Tensor
    scores: Tensor | None
    state: Tensor | None


def write_numbers(path: str, form: Form, numbers: dict[str, Any], step_score: int | None) -> None:
    """Writes the optimizer's numbers.

    Args:
        path: The file.
        form: Of the table.
        numbers: Of the optimizer.
        step_score: Score of the running step.
    """
    told = {**numbers, "dist_type": form.dist_type}
    if form.evict_strategy is not None:
        told["evict_strategy"] = form.evict_strategy
    if step_score is not None:
        told["step_score"] = step_score
    Path(path).write_text(json.dumps(told, indent=4))


def read_numbers(path: str, form: Form) -> dict[str, Any]:
    """Returns the optimizer's numbers.

    Args:
        path: The file.
        form: Of the table that is to get the rows.

    Raises:
        CorruptionError: The file is missing, or no JSON.
        InvalidError: Rows of another eviction or distribution of keys.
    """
    try:
        told: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise CorruptionError(
            f"{path} has no numbers of an optimizer ({error}); bring all its files again from "
            "where they were written",
            {"path": path},
        ) from error
    for name, ours in (("evict_strategy", form.evict_strategy), ("dist_type", form.dist_type)):
        theirs = told.get(name, "roundrobin" if name == "dist_type" else None)
        if theirs and ours and theirs != ours:
            raise InvalidError(
                f"{path} is of {name} {theirs!r}, and the table of {ours!r}; give the table that "
                f"{name}",
                {"path": path},
            )
    return told


def has_state(paths: Paths, told: dict[str, Any], kind: str | None, form: Form) -> bool:
    """Whether files have the state of an optimizer; warns when they lack it, or have another's.

    Args:
        paths: The files.
        told: The numbers of :func:`read_numbers`.
        kind: The optimizer's ``opt_type``.
        form: Of the table.
    """
    if form.kept_state_dim == 0:
        return False
    theirs = told.get("opt_type")
    why = None
    if paths.state is None:
        why = "there is no file of state"
    elif theirs and theirs != kind:
        why = f"the files have the state of {theirs}, and the table trains with {kind}"
    if why is not None:
        warnings.warn(f"{why}: the table's starts anew", RuntimeWarning, stacklevel=3)
    return why is None


def write_rows(
    paths: Paths,
    form: Form,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None, Tensor]],
    timestamp: int,
) -> None:
    """Writes rows.

    Args:
        paths: The files.
        form: Of the table.
        batches: As ``export_keys_values`` yields them.
        timestamp: From which ages are counted.
    """
    with ExitStack() as stack:

        def opened(path: str | None) -> Any:
            return None if path is None else stack.enter_context(Path(path).open("wb"))

        keys_file, weights_file = opened(paths.keys), opened(paths.weights)
        scores_file, state_file = opened(paths.scores), opened(paths.state)
        for keys, weights, state, scores in batches:
            keys_file.write(_bytes(keys))
            weights_file.write(_bytes(weights))
            if scores_file is not None:
                scores_file.write(_bytes(timestamp - scores if form.has_ages else scores))
            if state_file is not None and state is not None:
                state_file.write(_bytes(state[:, : form.kept_state_dim]))


def read_rows(paths: Paths, form: Form, timestamp: int) -> Iterator[Batch]:
    """Reads rows; of several ranks, those whose keys are this rank's.

    Args:
        paths: The files.
        form: Of the table.
        timestamp: From which ages are counted.

    Raises:
        CorruptionError: A file is missing, or has another number of rows than the keys.
    """
    count = _size(paths.keys) // 8
    keys = _rows(paths.keys, (count,), "<i8")
    weights = _rows(paths.weights, (count, form.dim), "<f4")
    scores = None if paths.scores is None else _rows(paths.scores, (count,), "<i8")
    shape = (count, form.kept_state_dim)
    state = None if paths.state is None else _rows(paths.state, shape, "<f4")
    rank, ranks = _place()
    for first in range(0, count, _ROWS):
        rows = min(_ROWS, count - first)
        ids = keys.read(first, rows)
        own = ids % ranks == rank
        score = None if scores is None else scores.read(first, rows)[own]
        if score is not None and form.has_ages:
            score = (timestamp - score).clamp_min(0)
        yield Batch(
            ids[own],
            weights.read(first, rows)[own],
            score,
            None if state is None else state.read(first, rows)[own],
        )


def _place() -> tuple[int, int]:
    """Returns the rank of this process, and how many there are."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).numpy())


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _rows(path: str, shape: tuple[int, ...], kind: str) -> Rows:
    values = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    size, asked = _size(path), values * int(kind[-1])
    if size != asked:
        raise _damaged(path, f"{size} bytes, not the {asked} of {shape[0]} keys")
    return of_file(Path(path), shape, kind, 0)


def _damaged(path: str, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} has no whole rows ({why}); bring all its files again from where they were written",
        {"path": path},
    )
