"""Rows of a snapshot on a device: the bits of the host, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hot_cases import SIZES, counts, published

import tierbed as tb
from tierbed.errors import InvalidError, UnsupportedError

CASES = Path(__file__).with_name("hot_cases.py")


def test_lookups_on_a_device_have_the_bits_of_the_host() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    path = [str(CASES.parents[2]), *filter(None, sys.path)]
    found = subprocess.run(
        [sys.executable, str(CASES)],
        capture_output=True,
        text=True,
        env={**variables, "PYTHONPATH": os.pathsep.join(path)},
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert len(found.stdout.split()) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"counts": {"x": torch.ones(3)}}, "no table 'x'"),
        ({"counts": {"a": torch.ones(3)}}, "one for each of its rows"),
        ({"misses_max": 0}, "misses_max must be"),
        ({"budget": "16KiB"}, "raise budget, or lower misses_max"),
        ({"counts": {"a": torch.zeros(300)}}, "holds no used row"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    options: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("tierbed.dist.kernels.launch.check_device", lambda *_: None)
    path = published(tmp_path)
    hot = tb.HotRows(**{"counts": counts(), **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=said):
        tb.Snapshot.open(path, device="cpu", hot=hot)
    # The snapshot was closed, and what the error says helps.
    hot = tb.HotRows(counts=counts(), budget="4MiB", misses_max=1000)
    with tb.Snapshot.open(path, device="cpu", hot=hot) as snapshot:
        assert snapshot.stats()["device"]["row_count"] > 0
        with pytest.raises(UnsupportedError, match="without hot rows"):
            snapshot.record(tmp_path / "log")
    with tb.Snapshot.open(path) as snapshot:
        snapshot.record(tmp_path / "log")
        assert "device" not in snapshot.stats()


def test_hot_rows_need_a_device(tmp_path: Path) -> None:
    path = published(tmp_path)
    with pytest.raises(InvalidError, match='device="cuda"'):
        tb.Snapshot.open(path, hot=tb.HotRows(counts=counts()))


def test_outputs_go_to_the_device_of_a_snapshot(tmp_path: Path) -> None:
    with tb.Snapshot.open(published(tmp_path), device="meta") as snapshot:
        bags = tb.KeyedJaggedTensor(["a"], torch.tensor([3]), lengths=torch.tensor([1]))
        assert snapshot.lookup(bags).values().device.type == "meta"
        configs = [tb.EmbeddingBagConfig(name="a", num_embeddings=SIZES["a"], embedding_dim=8)]
        emb = tb.EmbeddingBagCollection(configs, store=snapshot)
        assert emb.device.type == "meta"
        assert emb(bags).values().device.type == "meta"


def test_without_triton_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tierbed.dist.kernels.launch", None)
    path = published(tmp_path)
    with pytest.raises(UnsupportedError, match="install triton"):
        tb.Snapshot.open(path, device="cpu", hot=tb.HotRows(counts=counts()))
    tb.Snapshot.open(path, device="cpu").close()
