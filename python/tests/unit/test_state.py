"""Does the state of a run come back whole?"""

import random
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed._util import state


def test_generators_continue_where_they_were() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    kept = state.unpack(state.pack(state.rng_state()))

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.gauss(0, 1), float(np.random.standard_normal())

    first = draw()
    draw()
    state.set_rng_state(kept)
    assert draw() == first


def test_a_checkpoint_loads_no_part_of_numpy_that_swallows_an_interrupt() -> None:
    """numpy starts ``numpy.random`` at first use, and a Ctrl-C that comes then is lost."""
    code = "import sys, tierbed; print('numpy.random' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "True\n"


def test_an_optimizer_state_survives() -> None:
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    packed = state.pack({"model": layer.state_dict(), "optimizer": optimizer.state_dict()})
    tree = state.unpack(packed)
    assert torch.equal(tree["model"]["weight"], layer.weight.detach())
    assert tree["optimizer"]["state"][0]["step"] == 1


@dataclass
class Code:
    text: str


def test_what_could_run_code_is_refused_when_written() -> None:
    with pytest.raises(tb.InvalidError, match="tensors, numbers, texts"):
        state.pack({"loader": Code("print('hello')")})


def test_bytes_of_another_kind_are_refused() -> None:
    with pytest.raises(tb.InvalidError):
        state.unpack(b"not a checkpoint")
