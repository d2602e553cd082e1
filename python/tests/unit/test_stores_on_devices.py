"""Stores whose windows are on a device: what can be told without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tierbed as tb
from tierbed.errors import InvalidError, UnsupportedError


def test_without_triton_the_collection_takes_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tierbed.dist.kernels.launch", None)
    with pytest.raises(UnsupportedError, match="install triton"):
        tb.Store.open(tmp_path / "store", device="cpu")
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        table = tb.EmbeddingBagConfig(10, 4, "item")
        assert tb.EmbeddingBagCollection([table], store=store, device="cpu").device.type == "cpu"


def test_a_cpu_only_interprets(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(InvalidError, match="interpreter"):
        tb.Store.open(tmp_path / "store", device="cpu")
    # Nothing was made that another opener would find.
    assert not (tmp_path / "store").exists()
