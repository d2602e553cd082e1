"""Models for Triton's Python backend: rows of tables, and predictions with them.

All requests of a batch are worked on at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_prediction_model", "write_rows_model"]

# Samples of a batch at most.
BATCH_MAX = 4_096

# The backend's own interpreter sees no environment, so that its packages are named here.
_HEAD = """
import sys
sys.path[:0] = {packages}
import json
import numpy as np
import triton_python_backend_utils as triton


def parameter(args, name):
    return json.loads(args["model_config"])["parameters"][name]["string_value"]


def joined(parts):
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

"""

_ROWS = """
class TritonPythonModel:
    def initialize(self, args):
        names = json.loads(parameter(args, "tables"))
        loaded = {name: np.load(name) for name in dict.fromkeys(names)}
        self.tables = [loaded[name] for name in names]
        self.is_one = len(loaded) == 1
        self.sizes = np.array([len(table) for table in self.tables])

    def gather(self, ids):
        if self.is_one:
            return self.tables[0][ids].reshape(len(ids), -1)
        parts = [table[ids[:, at]] for at, table in enumerate(self.tables)]
        return np.concatenate(parts, axis=1)

    def execute(self, requests):
        answers = [None] * len(requests)
        good, asked = [], []
        for at, request in enumerate(requests):
            ids = triton.get_input_tensor_by_name(request, "ids").as_numpy()
            if ids.size and (ids.min() < 0 or (ids >= self.sizes).any()):
                error = triton.TritonError("id is out of range", triton.TritonError.INVALID_ARG)
                answers[at] = triton.InferenceResponse(error=error)
            else:
                good.append(at)
                asked.append(ids)
        rows = self.gather(joined(asked)) if good else None
        start = 0
        for at, ids in zip(good, asked):
            part = triton.Tensor("pooled", rows[start : start + len(ids)])
            start += len(ids)
            answers[at] = triton.InferenceResponse([part])
        return answers
"""

_PREDICTION = """
import torch


class TritonPythonModel:
    def initialize(self, args):
        torch.set_num_threads(1)
        names = json.loads(parameter(args, "tables"))
        tables = [torch.from_numpy(np.load(name)) for name in names]
        self.rows = torch.cat(tables)
        self.starts = torch.tensor(np.cumsum([0] + [len(table) for table in tables[:-1]]))
        self.head = torch.jit.load(parameter(args, "head"))

    def execute(self, requests):
        names = ("dense", "ids")
        asked = [
            [triton.get_input_tensor_by_name(request, name).as_numpy() for name in names]
            for request in requests
        ]
        dense, ids = (torch.from_numpy(joined(parts)) for parts in zip(*asked))
        with torch.inference_mode():
            logits = self.head(dense, self.rows[ids + self.starts]).numpy()
        answers, start = [], 0
        for _, own in asked:
            part = triton.Tensor("logit", logits[start : start + len(own)])
            start += len(own)
            answers.append(triton.InferenceResponse([part]))
        return answers
"""


def write_rows_model(
    repository: Path,
    name: str,
    tables: Sequence[Path],
    *,
    dim: int,
    packages: Sequence[Path],
    batches: bool = True,
) -> None:
    """Writes a model that answers rows: input ``ids``, output ``pooled``.

    Args:
        repository: Folder of models.
        name: Of the model.
        tables: A file of NumPy for each feature, ``[rows, dim]``; features may share one.
        dim: Elements of a row.
        packages: Where NumPy is.
        batches: Whether requests are batched; else one without samples is answered, too.
    """
    inputs = [_tensor("ids", "INT64", [len(tables)], batches)]
    outputs = [_tensor("pooled", "FP32", [dim * len(tables)], batches)]
    _write(repository / name, _ROWS, packages, inputs, outputs, batches, tables=_names(tables))


def write_prediction_model(
    repository: Path,
    name: str,
    tables: Sequence[Path],
    *,
    head: Path,
    dense_width: int,
    packages: Sequence[Path],
) -> None:
    """Writes a model that predicts: inputs ``dense`` and ``ids``, output ``logit``.

    Args:
        repository: Folder of models.
        name: Of the model.
        tables: A file of NumPy for each feature, ``[rows, dim]``.
        head: The dense part in TorchScript: ``(dense [B, n], rows [B, F, D]) -> logits [B]``.
        dense_width: Numerical features.
        packages: Where NumPy and torch are.
    """
    inputs = [_tensor("dense", "FP32", [dense_width]), _tensor("ids", "INT64", [len(tables)])]
    # Triton adds the batch's dimension: what is left of it is none.
    outputs = [_tensor("logit", "FP32", [1]).replace(" }", " reshape: { shape: [ ] } }")]
    _write(
        *(repository / name, _PREDICTION, packages, inputs, outputs, True),
        tables=_names(tables),
        head=str(head),
    )


def _names(paths: Sequence[Path]) -> str:
    return json.dumps([str(path) for path in paths])


def _tensor(name: str, kind: str, shape: Sequence[int], batches: bool = True) -> str:
    dims = ", ".join(map(str, shape if batches else [-1, *shape]))
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}'


def _write(
    folder: Path,
    source: str,
    packages: Sequence[Path],
    inputs: Sequence[str],
    outputs: Sequence[str],
    batches: bool,
    **parameters: str,
) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    head = _HEAD.replace("{packages}", repr([str(path) for path in packages]))
    (folder / "1" / "model.py").write_text(head + source)
    lines = [
        'backend: "python"',
        f"max_batch_size: {BATCH_MAX if batches else 0}",
        f"input [ {', '.join(inputs)} ]",
        f"output [ {', '.join(outputs)} ]",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
        *(["dynamic_batching { }"] if batches else []),
    ]
    for key, value in parameters.items():
        # Triton's text quotes as JSON does.
        lines.append(
            f'parameters {{ key: "{key}" value: {{ string_value: {json.dumps(value)} }} }}'
        )
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
