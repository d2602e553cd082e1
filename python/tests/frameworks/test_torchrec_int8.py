"""Rows that FBGEMM keeps in a byte per weight, and what other collections of TorchRec keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import tierbed as tb
import tierbed.torchrec as tbr

from .torchrec_kit import ROWS, bag_configs, batches, memory, torchrec

from torchrec.inference.modules import quantize_embeddings  # isort: skip

NAMES = ("embedding_bags.t1.weight", "embedding_bags.t2.weight")


def fused(dim: int) -> dict[str, torch.Tensor]:
    """Rows with scale and bias in float32 behind the codes."""
    quantize = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized
    generator = torch.Generator().manual_seed(5)
    return {name: quantize(torch.randn(ROWS, dim, generator=generator)) for name in NAMES}


@pytest.mark.parametrize("dim", [8, 20])
def test_fused_rows_become_what_fbgemm_makes_of_them(dim: int, tmp_path: Path) -> None:
    state = fused(dim)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "theirs")
    expected = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(state[NAMES[0]])
    for way in ("dictionary", "checkpoint"):
        with memory() as store:
            mine = tbr.from_configs(bag_configs(dim=dim), store)
            options: Any = {"int8": "scale_bias_last", "chunk_rows": 33}
            if way == "dictionary":
                tbr.load_state_dict(mine, state, **options)
            else:
                tbr.load_checkpoint(mine, tmp_path / "theirs", prefix="model", **options)
            rows = store.read_rows("t1", 0, ROWS)
            # FBGEMM rounds once, after adding.
            torch.testing.assert_close(rows, expected, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("dim", [8, 20])
def test_a_quantized_model_trains_on(dim: int) -> None:
    model = torch.nn.Sequential(torchrec.EmbeddingBagCollection(bag_configs(dim=dim)))
    quantized = quantize_embeddings(model, torch.qint8, inplace=False)
    with memory() as store:
        mine = torch.nn.Sequential(
            tbr.from_configs(bag_configs(dim=dim), store, optimizer=tb.SGD(lr=0.1))
        )
        tbr.load_state_dict(mine, quantized.state_dict(), int8="scale_bias_first")
        for kjt in batches(3):
            expected, found = quantized(kjt).values(), mine(kjt).values()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        found.sum().backward()
        assert store.steps_done("t1") == 1


def test_rows_of_bytes_say_how_they_lie() -> None:
    state = fused(8)
    with memory() as store:
        mine = tbr.from_configs(bag_configs(), store)
        with pytest.raises(tb.InvalidError, match="give int8='scale_bias_last' or"):
            tbr.load_state_dict(mine, state)
        whole = {name: codes.to(torch.int32) for name, codes in state.items()}
        with pytest.raises(tb.InvalidError, match=r"are torch\.int32; give int8="):
            tbr.load_state_dict(mine, whole, int8="scale_bias_last")
        with pytest.raises(tb.InvalidError, match="int8 must be one of"):
            tbr.load_state_dict(mine, state, int8="first")  # type: ignore[arg-type]
        cut = {name: codes[:, :-1] for name, codes in state.items()}
        with pytest.raises(
            tb.InvalidError, match="have 15 bytes, and 8 codes with scale and bias take"
        ):
            tbr.load_state_dict(mine, cut, int8="scale_bias_last")
        tbr.load_state_dict(mine, state, int8="scale_bias_last")


def test_quantized_shards_are_of_whole_rows() -> None:
    class Columns:
        """A sharded tensor in two shards of columns."""

        def __init__(self, whole: torch.Tensor) -> None:
            self.whole = whole

        def metadata(self) -> None: ...

        def size(self) -> torch.Size:
            return self.whole.shape

        def local_shards(self) -> list[Any]:
            return [
                type(
                    "Shard", (), {"tensor": part, "metadata": type("M", (), {"shard_offsets": at})}
                )
                for part, at in ((self.whole[:, :8], [0, 0]), (self.whole[:, 8:], [0, 8]))
            ]

    state = fused(8)
    with memory() as store:
        mine = tbr.from_configs(bag_configs(), store)
        columns = {name: Columns(codes) for name, codes in state.items()}
        with pytest.raises(tb.InvalidError, match="shard tables by rows before they are quantized"):
            tbr.load_state_dict(mine, columns, int8="scale_bias_last")
        tbr.load_state_dict(mine, state, int8="scale_bias_last")
