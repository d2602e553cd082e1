"""``tierbed publish --to``: versions of a store on disk, without a training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a checkpoint."""
    train(tmp_path / "store")
    return tmp_path / "store"


def train(path: Path, first: int = 0, count: int = 4000) -> None:
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=5000, embedding_dim=16)
    with tb.Store.open(path, dram_budget="16MiB") as store:
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.5))
        ids = torch.arange(first, first + count)
        bags = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
        emb(bags).values().sum().backward()
        store.checkpoint("trained", extra={"trained": first})


def publish(capsys: Any, store: Path, *arguments: str) -> Any:
    given = ["publish", "--store", str(store), "--dram-budget", "32MiB", *arguments]
    assert main([*given, "--json", "-"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def rows(location: Path, to: Path) -> torch.Tensor:
    pulled = tb.Versions(location).pull(to, channel="canary")
    ids = torch.arange(5000)
    bags = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
    whole = Path(pulled.folders[0])
    for at, delta in enumerate(pulled.folders[1:]):
        out = to / f"whole-{len(pulled.folders)}-{at}"
        tb.Snapshot.apply(whole, delta, out)
        whole = out
    with tb.Snapshot.open(whole, dram_budget="16MiB") as snapshot:
        return snapshot.lookup(bags)["item"].clone()


def trained_rows(store: Path) -> torch.Tensor:
    with tb.Store.open(store, dram_budget="16MiB") as opened:
        return opened.read_rows("item", 0, 5000)


def test_versions_follow_each_other(store: Path, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "models" / "ads"
    to = ("--to", str(place), "--channel", "canary")
    assert publish(capsys, store, *to)["chain"] == [1]
    for at in (2, 3):
        train(store, first=100 * at, count=20)
        assert publish(capsys, store, *to, "--delta")["chain"] == list(range(1, at + 1))
        assert torch.equal(rows(place, tmp_path / "here"), trained_rows(store))
    found = tb.Versions(place).list().versions
    assert found[1].file_bytes < found[0].file_bytes / 4
    # What belongs to the run is as it was.
    with tb.Store.open(store, dram_budget="16MiB") as opened:
        assert opened.load_extra() == {"trained": 300}
        assert opened.stats()["changes"]["base_count"] == 3


def test_a_delta_of_a_store_that_knows_nothing_compares(
    store: Path, tmp_path: Path, capsys: Any
) -> None:
    place = tmp_path / "models" / "ads"
    with tb.Store.open(store, dram_budget="16MiB") as opened:
        opened.publish(tmp_path / "out")
    tb.Versions(place).push(tmp_path / "out", channel="canary")
    train(store, first=300, count=20)
    assert publish(capsys, store, "--to", str(place), "--delta")["chain"] == [1, 2]
    assert torch.equal(rows(place, tmp_path / "here"), trained_rows(store))


def test_a_version_goes_to_a_folder_or_to_a_location(
    store: Path, tmp_path: Path, capsys: Any
) -> None:
    out, place = str(tmp_path / "out"), str(tmp_path / "ads")
    for wrong in ((), ("--out", out, "--to", place)):
        assert main(["publish", "--store", str(store), *wrong]) == 2
        assert "give --out or --to" in capsys.readouterr().err
    for wrong in (("--out", out, "--delta"), ("--to", place, "--base", out)):
        assert main(["publish", "--store", str(store), *wrong]) == 2
        assert "give --out with --base, or --to with --delta" in capsys.readouterr().err
    assert main(["publish", "--store", str(store), "--out", out, "--compiled"]) == 2
    assert "leave out --compiled" in capsys.readouterr().err
    assert publish(capsys, store, "--out", out)["row_count"] == 4000
    base = ("--out", str(tmp_path / "delta"), "--base", out)
    assert publish(capsys, store, *base)["row_count"] == 0
    assert publish(capsys, store, "--to", place)["chain"] == [1]
    assert publish(capsys, store, "--to", place, "--delta")["chain"] == [1, 2]
