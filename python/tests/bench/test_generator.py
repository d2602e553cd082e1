"""The generator: the same samples for the same seed, whatever the batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierbed.errors import InvalidError
from tierbed_bench.generator import GeneratedData, scale_for_rows, write_criteo_tsv


def labels(data: GeneratedData) -> torch.Tensor:
    return torch.cat([batch.label for batch in data])


def test_batches_do_not_matter() -> None:
    whole = GeneratedData(0.001, 1_000, 1_000, seed=5)
    (batch,) = list(whole)
    assert batch.sparse.keys() == whole.feature_names
    assert batch.dense.shape == (1_000, 13)
    parts = list(GeneratedData(0.001, 1_000, 333, seed=5))
    assert [len(part) for part in parts] == [333, 333, 333, 1]
    assert torch.equal(torch.cat([part.dense for part in parts]), batch.dense)
    for feature in whole.feature_names:
        ids = torch.cat([part.sparse[feature].values() for part in parts])
        assert torch.equal(ids, batch.sparse[feature].values())
    later = GeneratedData(0.001, 100, 50, seed=5, first_sample=900)
    assert torch.equal(labels(later), batch.label[900:])
    assert not torch.equal(labels(GeneratedData(0.001, 1_000, 1_000, seed=6)), batch.label)


def test_ids_fit_and_clicks_are_a_quarter() -> None:
    data = GeneratedData(0.01, 40_000, 4_096, seed=1)
    sizes = dict(data.table_sizes())
    for batch in data:
        for name, size in sizes.items():
            ids = batch.sparse[name].values()
            assert 0 <= int(ids.min()) <= int(ids.max()) < size
    assert 0.24 < float(labels(data).mean()) < 0.28


def test_scale_counts_rows() -> None:
    assert sum(size for _, size in GeneratedData(1.0, 0, 1, seed=1).table_sizes()) == 33_762_577
    scale = scale_for_rows(200_000)
    total = sum(size for _, size in GeneratedData(scale, 0, 1, seed=1).table_sizes())
    assert 190_000 < total <= 200_000


def test_resume_and_split() -> None:
    data = GeneratedData(0.001, 1_000, 128, seed=5)
    assert len(data) == 8
    walk = iter(data)
    for _ in range(3):
        next(walk)
    fresh = GeneratedData(0.001, 1_000, 128, seed=5)
    fresh.load_state_dict(data.state_dict())
    whole = labels(GeneratedData(0.001, 1_000, 128, seed=5))
    assert torch.equal(labels(fresh), whole[384:])
    assert torch.equal(labels(fresh), whole), "the next pass begins at the beginning"
    with pytest.raises(InvalidError, match="seed"):
        GeneratedData(0.001, 1_000, 128, seed=6).load_state_dict(data.state_dict())
    train, held = GeneratedData(0.001, 1_000, 128, seed=5).split_last(0.1)
    assert (len(labels(train)), len(labels(held))) == (900, 100)


def test_options_are_checked(tmp_path: Path) -> None:
    for scale in [0.0, 1.5]:
        with pytest.raises(InvalidError, match="scale"):
            GeneratedData(scale, 1, 1, seed=1)
    with pytest.raises(InvalidError):
        GeneratedData(0.1, -1, 1, seed=1)
    with pytest.raises(InvalidError, match="packing"):
        write_criteo_tsv(tmp_path / "log", 1, scale=0.1, seed=1, packing="bz2")  # type: ignore[arg-type]


def test_a_callback_can_stop_the_writing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_criteo_tsv(tmp_path / "log", 100_000, scale=0.001, seed=1, progress=stop)
