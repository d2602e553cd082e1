"""Compiled models: the dense part in machine code, which a server asks without Python.

``torch.export`` traces a model's ``head``, AOTInductor makes a library of it. Its weights are those
that were published with it, so one library does for all versions of a model.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tierbed.errors import InvalidError, UnsupportedError
from tierbed.nn.embedding import RowSource
from tierbed.serve.models import Scorer, ServedModel

__all__ = ["compile_dense"]

ABOUT, CODE = "dense.aoti.json", "dense.aoti.so"
#: Samples of the batch that is traced: any number but 0 and 1, which are traced as constants.
TRACED = 16
#: Where the module is within what is traced.
WITHIN = "answering.module."
#: Instruction sets that a compiler may use of the processor it runs on.
USED = ("avx", "amx", "fma", "f16c", "bmi", "sse", "ssse", "abm", "movbe", "popcnt", "sve", "asimd")
OPTIONS: dict[str, Any] = {
    # Every generation brings its own parameters: none may become a part of the code.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    # A server has threads of its own, each with a batch.
    "cpp.threads": 1,
    # A model is compiled once, and its headers with it are sooner than headers for many.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}


class _Listed(nn.Module):
    """The outputs of a model, in order, contiguous."""

    def __init__(self, answering: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.answering, self.names = answering, names

    def forward(self, dense: Tensor, rows: Tensor) -> list[Tensor]:
        answer = self.answering(dense, rows)
        return [answer[name].contiguous() for name in self.names]


def compile_dense(model: nn.Module | ServedModel, tables: RowSource) -> dict[str, bytes]:
    """Compiles the dense part of a model for :class:`Server`, which then asks it without Python.

    Pass the result to ``publish(..., attachments=...)`` with the same model, for a snapshot and for
    all deltas: the code takes the parameters that are published with it. It runs on processors with
    the instruction sets of this one, and by this minor version of torch. It takes some seconds and
    a C++ compiler.

    Args:
        model: A module with a ``head``, perhaps as a :class:`ServedModel`.
        tables: The store that it is published from, or a snapshot.

    Returns:
        Attachments: the code, and what is told of it.

    Raises:
        InvalidError: The module has no head, does not say what it takes, or answers in another
            form.
        UnsupportedError: There is no compiler, or ``torch.export`` cannot trace the head.

    Examples:
        >>> from tierbed.nn import DLRM
        >>> store = tb.Store.open("store", dram_budget="16MiB")
        >>> model = DLRM(2, {"item": 100}, store=store, embedding_dim=8)
        >>> code = tb.serve.compile_dense(model, store)
        >>> _ = store.publish("snapshot", model, attachments=code)
        >>> sorted(code)
        ['dense.aoti.json', 'dense.aoti.so']
        >>> store.close()
    """
    _check_compiler()
    given = model if isinstance(model, ServedModel) else ServedModel(model)
    with _modes_kept(given.module), torch.random.fork_rng(devices=[]):
        scorer = Scorer(given, tables)
        code = _code_of(scorer)
    module = given.module
    config = getattr(module, "config", None)
    about = {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu_flags": [flag for flag in _cpu_flags() if flag.startswith(USED)],
        "inputs": scorer.inputs,
        "rows_width": scorer.widths[1],
        "outputs": scorer.outputs,
        "config": config() if callable(config) else None,
        "parameters": {
            f"{WITHIN}{name}": {"name": name, "shape": list(value.shape)}
            for name, value in module.state_dict().items()
        },
    }
    return {ABOUT: json.dumps(about).encode(), CODE: code}


def _check_compiler() -> None:
    from torch._inductor import config

    named = config.cpp.cxx
    names = [name for name in (named if isinstance(named, (list, tuple)) else [named]) if name]
    if not any(shutil.which(name) for name in names):
        raise UnsupportedError(
            f"compiling a model takes a C++ compiler, and there is no {' or '.join(names)}; "
            "install g++, or name a compiler in the environment variable CXX"
        )


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    """Leaves a module that trains as it was."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, is_training in modes:
            part.training = is_training


def _code_of(scorer: Scorer) -> bytes:
    """Compiles what ``scorer`` asks; the bytes of a shared library."""
    from torch._inductor import aot_compile

    module = scorer.answering.module
    named = _Listed(scorer.answering, [output["name"] for output in scorer.outputs])
    example = tuple(torch.zeros(TRACED, width) for width in scorer.widths)
    batch = torch.export.Dim("batch", min=1)
    try:
        _check_layout(module)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            traced = torch.export.export(
                named, example, dynamic_shapes=({0: batch}, {0: batch}), strict=False
            )
            path = Path(folder, "dense.so")
            options = {**OPTIONS, "aot_inductor.output_path": str(path)}
            aot_compile(traced.module(), example, options=options)
            code = path.read_bytes()
        if b"aoti_torch_proxy_executor_call_function" in code:
            raise InvalidError("it has operators that only Python can call")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        name = type(module).__name__
        raise UnsupportedError(
            f"the head of {name} cannot be compiled: {reason}; publish it without compiled, and "
            "predict by python"
        ) from error
    return code


def _check_layout(module: nn.Module) -> None:
    """Parameters are published contiguous, and the code knows where each element lies."""
    state = module.state_dict().items()
    if wrong := [name for name, value in state if not value.is_contiguous()]:
        raise InvalidError(f"parameters {wrong} are not contiguous")


def _cpu_flags() -> list[str]:
    """Returns the instruction sets of this processor, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, told = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return told.split()
    return []
