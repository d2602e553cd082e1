"""What travels with a checkpoint or a snapshot beside the rows.

Dense parameters, the data position and the generators' state as data that is read without
running code; dense parameters of a published model as safetensors.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

# Named here because numpy loads it at first use, and its start swallows a Ctrl-C that comes then.
import numpy.random
import torch
from torch import Tensor

from tierbed.errors import InvalidError

__all__ = [
    "COMMITTED",
    "DENSE",
    "MODEL",
    "committed_now",
    "model_attachments",
    "pack",
    "rng_state",
    "set_rng_state",
    "unpack",
]

DENSE = "dense.safetensors"
MODEL = "model.json"
#: Says when the training step of a published model committed.
COMMITTED = "committed.json"


def committed_now() -> bytes:
    """Returns the attachment of a training step that ended just now."""
    return json.dumps({"committed_at_ms": time.time_ns() // 1_000_000}).encode()


def pack(tree: Mapping[str, Any]) -> bytes:
    """Writes nested dictionaries and lists of tensors and plain values as bytes.

    Raises:
        InvalidError: Something else is in the tree, so that it could not be read back safely.
    """
    buffer = io.BytesIO()
    torch.save(dict(tree), buffer)
    packed = buffer.getvalue()
    try:
        unpack(packed)
    except InvalidError as error:
        raise InvalidError(
            "extra may hold nested dictionaries and lists of tensors, numbers, texts and None "
            f"only: {error}"
        ) from error
    return packed


def unpack(packed: bytes) -> dict[str, Any]:
    """Reads what :func:`pack` wrote; tensors come back on the CPU."""
    try:
        tree: dict[str, Any] = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidError(f"not a tree of tensors and plain values: {reason}") from error
    return tree


def rng_state() -> dict[str, Any]:
    """Returns the state of torch's, Python's and numpy's global generators."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)  # noqa: NPY002
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss_next],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the global generators back to what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    words = keys.numpy().astype(np.uint32)
    numpy.random.set_state((name, words, position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def model_attachments(model: torch.nn.Module) -> dict[str, bytes]:
    """Writes a model's dense parameters, and its ``config()`` where it has one."""
    # `import tierbed` loads this file, and few programs publish.
    from safetensors.torch import save

    dense = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    parts = {DENSE: save(_without_sharing(dense))}
    config = getattr(model, "config", None)
    if callable(config):
        parts[MODEL] = json.dumps(config(), indent=2).encode()
    return parts


def _without_sharing(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share storage, which the format refuses."""
    seen: set[int] = set()
    out = {}
    for name, value in tensors.items():
        address = value.untyped_storage().data_ptr()
        out[name] = value.clone() if address in seen else value
        seen.add(address)
    return out
