"""A file that comes into a store is not in memory meanwhile, neither read nor mapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

ROWS, DIM = 200_000, 64
MEASURED = """
import sys
import tierbed as tb

def memory(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

with tb.Store.open(sys.argv[2], dram_budget="16MiB") as store:
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    read = {"optimizer": tb.SGD(lr=0.1), "chunk_rows": 4096}
    tb.tables.import_tables(store, sys.argv[1], {"item": "item.weight"}, **read)
    grown = memory("VmHWM") - before
    print(grown, float(store.read_rows("item", 0, store.table("item")["row_count"]).sum()))
"""


@pytest.mark.parametrize("kind", ["npy", "pt", "safetensors"])
def test_a_file_that_is_imported_takes_no_memory(kind: str, tmp_path: Path) -> None:
    rows, file = torch.rand(ROWS, DIM), tmp_path / f"item.{kind}"
    if kind == "npy":
        np.save(file, rows.numpy())
    elif kind == "pt":
        torch.save({"item.weight": rows}, file)
    else:
        save_file({"item.weight": rows}, file)
    found = subprocess.run(
        [sys.executable, "-c", MEASURED, str(file), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    grown, total = map(float, found.stdout.split())
    assert total == pytest.approx(float(rows.sum()), rel=1e-4)
    # The store's budget of 16 MiB, and a chunk or two; the file has 51 MB.
    assert grown < 24e6


def test_numbers_of_every_kind_come_as_they_are(tmp_path: Path) -> None:
    from tierbed.tables.tensors import read_safetensors, read_torch

    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
    kinds += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    tensors = {
        f"{at}.weight": (torch.arange(12) % 2).reshape(6, 2).to(kind)
        for at, kind in enumerate(kinds)
    }
    tensors["one"] = torch.tensor(7)
    save_file(tensors, tmp_path / "all.safetensors")
    torch.save(tensors, tmp_path / "all.pt")
    for read in (read_safetensors(tmp_path / "all.safetensors"), read_torch(tmp_path / "all.pt")):
        for name, tensor in tensors.items():
            rows = read.tensors[name]
            assert rows.dtype == tensor.dtype
            assert torch.equal(rows.whole().reshape(tensor.shape), tensor), name
            assert torch.equal(rows.read(0, 1).flatten(), tensor.flatten()[: rows.width])
