"""Snapshots whose tables have a head and a tail by id: the same rows, and a small index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.placement import import_files, import_tables
from tierbed.placement.files import HeadRows
from tierbed.serve import Server

SIZES = {"item": 60_000, "user": 300}
DIM = 8


def bags(name: str, ids: torch.Tensor) -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor([name], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def collection(store: tb.Store, sizes: dict[str, int], dim: int) -> tb.EmbeddingBagCollection:
    tables = [
        tb.EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=dim)
        for name, size in sizes.items()
    ]
    return tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.1))


def step(emb: tb.EmbeddingBagCollection, name: str, ids: torch.Tensor) -> None:
    emb(bags(name, ids)).values().square().sum().backward()


def zipf(count: int, size: int, seed: int) -> torch.Tensor:
    """Ids of which few are asked for often, in no order of ids."""
    generator = torch.Generator().manual_seed(seed)
    rank = (size ** torch.rand(count, generator=generator, dtype=torch.float64)).long() - 1
    return rank * 7_919 % size


def train(emb: tb.EmbeddingBagCollection, first: int, last: int) -> None:
    for at in range(first, last):
        ids = {name: zipf(200, size, at) for name, size in SIZES.items()}
        lengths = torch.ones(sum(len(one) for one in ids.values()), dtype=torch.int64)
        both = tb.KeyedJaggedTensor(list(SIZES), torch.cat(list(ids.values())), lengths=lengths)
        emb(both).values().square().sum().backward()


def answers(snapshot: tb.Snapshot) -> dict[str, torch.Tensor]:
    return {
        name: snapshot.lookup(bags(name, torch.arange(size)))[name] for name, size in SIZES.items()
    }


def rows_of(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with tb.Snapshot.open(path, dram_budget="4MiB", **options) as snapshot:
        snapshot.verify()
        return answers(snapshot)


def rows_upon(base: Path, delta: Path) -> dict[str, torch.Tensor]:
    with tb.Snapshot.open(base, dram_budget="4MiB") as snapshot:
        before = answers(snapshot)
        with Server(snapshot, "127.0.0.1:0") as server:
            server.apply(delta)
            snapshot.verify()
            found = answers(snapshot)
    assert not same(found, before)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in SIZES)


HEADS: list[HeadRows] = [0, 70, "5%", "100%", {"item": "1%"}]


@pytest.mark.parametrize("how", [{"order": "window"}, {"order": "window", "shards": 2}])
def test_rows_are_those_of_a_publish_without_tails(tmp_path: Path, how: dict[str, Any]) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB", **how) as store:
        train(collection(store, SIZES, DIM), 0, 20)
        plain = store.publish(tmp_path / "plain")
        wanted = rows_of(tmp_path / "plain")
        for at, head_rows in enumerate(HEADS):
            path = tmp_path / f"tail-{at}"
            report = store.publish(path, head_rows=head_rows)
            assert report.row_count == plain.row_count
            assert report.index_bytes < plain.index_bytes
            assert same(rows_of(path), wanted)
            assert (path / "snapshot.json").read_text().startswith("tierbed-snapshot 5 ")
        for number, codec in enumerate(("int8", "gauss4")):
            store.publish(tmp_path / f"plain-{codec}", codec=codec)
            store.publish(tmp_path / f"tail-{codec}", codec=codec, head_rows="5%")
            wanted = rows_of(tmp_path / f"plain-{codec}")
            for backend in ("direct", "mmap", "memory"):
                assert same(rows_of(tmp_path / f"tail-{codec}", backend=backend), wanted), number


def test_deltas_come_upon_a_tail_and_into_it(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB", order="window") as store:
        emb = collection(store, SIZES, DIM)
        train(emb, 0, 10)
        store.publish(tmp_path / "base", head_rows="5%")
        train(emb, 10, 13)
        for changes in ("tracked", "compared"):
            store.publish(tmp_path / changes, base=tmp_path / "base", changes=changes)
        store.publish(tmp_path / "full")
    wanted = rows_of(tmp_path / "full")
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "tracked", tmp_path / "next")
    assert same(rows_of(tmp_path / "next"), wanted)
    assert (tmp_path / "next" / "snapshot.json").read_text().startswith("tierbed-snapshot 5 ")
    assert same(rows_upon(tmp_path / "base", tmp_path / "compared"), wanted)


def test_ids_of_an_open_vocabulary_lie_in_a_tail(tmp_path: Path) -> None:
    table = tb.EmbeddingBagConfig(name="ad", num_embeddings=None, embedding_dim=DIM)
    ids = torch.arange(3000) * 1_000_003 + (1 << 60)
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB", order="window") as store:
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))
        step(emb, "ad", ids)
        step(emb, "ad", ids[::7])
        store.publish(tmp_path / "base", head_rows="5%")
        step(emb, "ad", torch.cat([ids[::100], ids[:50] + 1]))
        store.publish(tmp_path / "delta", base=tmp_path / "base")
        store.publish(tmp_path / "full")
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    asked = bags("ad", torch.cat([ids, ids[:50] + 1]))
    found = []
    for name in ("next", "full"):
        with tb.Snapshot.open(tmp_path / name, dram_budget="8MiB") as snapshot:
            snapshot.verify()
            found.append(snapshot.lookup(asked)["ad"])
    assert torch.equal(*found)


def test_a_publisher_gives_whole_versions_a_head(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB", order="window") as store:
        emb = collection(store, SIZES, DIM)
        train(emb, 0, 5)
        with tb.Publisher(store, None, tmp_path / "models", head_rows="5%") as publisher:
            publisher.publish_now(full=True)
            train(emb, 5, 7)
            publisher.publish_now(full=False)
        store.publish(tmp_path / "full")
    chain = tb.Versions(tmp_path / "models").pull(tmp_path / "local", channel="canary").folders
    assert len(chain) == 2
    assert (Path(chain[0]) / "rows.tails").exists()
    found = rows_upon(Path(chain[0]), Path(chain[1]))
    assert same(found, rows_of(tmp_path / "full"))


def test_files_without_a_head_need_no_index(tmp_path: Path) -> None:
    rows = {name: torch.randn(size, DIM) for name, size in SIZES.items()}
    plain = import_tables(rows, tmp_path / "plain")
    report = import_tables(rows, tmp_path / "tail", head_rows=0)
    assert (report.index_bytes, report.pages_bytes) == (0, plain.pages_bytes)
    assert same(rows_of(tmp_path / "tail"), rows)
    torch.save(rows["item"], tmp_path / "item.pt")
    report = import_files({"item": tmp_path / "item.pt"}, tmp_path / "files", head_rows="1%")
    assert 0 < report.index_bytes < 60_000 // 8 + 2 * 4096


def test_an_index_of_a_twentieth_costs_no_page_more(tmp_path: Path) -> None:
    """Index bytes at most 0.15, pages at most 1.03, behind the same cache."""
    size, dim = 100_000, 32
    with tb.Store.open(None, dram_budget="256MiB", backend="memory") as store:
        emb = collection(store, {"item": size}, dim)
        for ids in torch.arange(size).split(20_000):
            step(emb, "item", ids)
        for at in range(60):
            step(emb, "item", zipf(8000, size, at))
        plain = store.publish(tmp_path / "plain")
        tail = store.publish(tmp_path / "tail", head_rows="5%")
    assert tail.row_count == plain.row_count == size
    assert tail.index_bytes <= 0.15 * plain.index_bytes, (tail, plain)
    cache = tb.CacheOptions(bytes_max=size * dim * 4 // 20)
    pages, answers = {}, {}
    for name in ("plain", "tail"):
        with tb.Snapshot.open(tmp_path / name, dram_budget="64MiB", cache=cache) as snapshot:
            found = []
            for at in range(400):
                if at == 100:
                    before = snapshot.stats()["snapshot"]["lookups"]["pages_read"]
                ids = zipf(400, size, 1000 + at)
                lengths = torch.full((20,), 20)
                asked = tb.KeyedJaggedTensor(["item"], ids, lengths=lengths)
                found.append(snapshot.lookup(asked)["item"])
            pages[name] = snapshot.stats()["snapshot"]["lookups"]["pages_read"] - before
            answers[name] = torch.cat(found)
    assert torch.equal(answers["plain"], answers["tail"])
    assert pages["tail"] <= 1.03 * pages["plain"], pages


def test_heads_are_given_on_the_command_line(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB") as store:
        train(collection(store, SIZES, DIM), 0, 5)
        store.checkpoint_rows("done")
        wanted = {name: store.read_rows(name, 0, size) for name, size in SIZES.items()}
    arguments = ["--head-rows", "5%", "--json", str(tmp_path / "out.json")]
    store_path = str(tmp_path / "store")
    assert main(["publish", "--store", store_path, "--out", str(tmp_path / "run"), *arguments]) == 0
    assert same(rows_of(tmp_path / "run"), wanted)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["index_bytes"] <= 60_000 // 8 + 2 * 4096
    torch.save(wanted["item"], tmp_path / "item.pt")
    table = ["--table", f"item={tmp_path / 'item.pt'}"]
    out = ["--out", str(tmp_path / "files"), "--head-rows", "0"]
    assert main(["snapshot", *table, *out]) == 0
    assert (tmp_path / "files" / "rows.tails").stat().st_size == 0
