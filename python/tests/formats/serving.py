"""Fixtures of what is served and what placing needs: snapshots, deltas, placements, logs, plans."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed import dist as tbd
from tierbed.config import words
from tierbed.data import Vocabulary, build_vocabulary
from tierbed.placement import LogOptions, Placement, QueryLog, import_tables, place
from tierbed.serve import TierPlan
from tierbed_bench.generator import write_criteo_tsv

from .kit import (
    NOTE,
    ROWS,
    SEED,
    Case,
    Facts,
    bags_of,
    configs,
    digest,
    one_step,
    open_store,
    rows_of,
    train,
)

BACKENDS = ("direct", "mmap", "memory")
CODES = (tb.DataType.FP16, tb.DataType.BF16, tb.DataType.INT8)


def _lookup(path: Path, sizes: dict[str, int], **options: Any) -> Facts:
    """Returns digests of every row of a snapshot, read row by row and pooled in pairs."""
    with tb.Snapshot.open(path, dram_budget="8MiB", **options) as snapshot:
        found = {}
        for name, count in sizes.items():
            rows = snapshot.lookup(bags_of(name, torch.arange(count)))[name]
            pairs = tb.KeyedJaggedTensor(
                [name], torch.arange(count), lengths=torch.full((count // 2,), 2)
            )
            found[name] = {"rows": digest(rows), "pairs": digest(snapshot.lookup(pairs)[name])}
        return found


def _check_snapshot(path: Path, sizes: dict[str, int], wanted: Facts) -> None:
    for backend in BACKENDS:
        assert _lookup(path, sizes, backend=backend) == wanted
    with tb.Snapshot.open(path, dram_budget="8MiB") as snapshot:
        assert snapshot.verify() > 0


def _write_published(folder: Path) -> Facts:
    with open_store(folder / "store", "file") as store:
        train(store, 0, 30)
        store.publish(folder / "base", attachments={"note": NOTE})
        train(store, 30, 34)
        store.publish(folder / "delta", base=folder / "base")
        store.publish(folder / "next")
    facts = {name: _lookup(folder / name, ROWS) for name in ("base", "next")}
    for left in ("store", "next"):
        for file in (folder / left).iterdir():
            file.unlink()
        (folder / left).rmdir()
    return facts


def _check_published(folder: Path, facts: Facts) -> None:
    _check_snapshot(folder / "base", ROWS, facts["base"])
    with tb.Snapshot.open(folder / "base") as snapshot:
        assert snapshot.attachment("note") == NOTE
    tb.Snapshot.apply(folder / "base", folder / "delta", folder / "applied")
    _check_snapshot(folder / "applied", ROWS, facts["next"])


# Two groups of 65,536 rows in the index of a delta.
LARGE = {"large": 70_000}


def _train_large(store: tb.Store, rows: torch.Tensor) -> None:
    config = tb.EmbeddingBagConfig(name="large", num_embeddings=LARGE["large"], embedding_dim=6)
    emb = tb.EmbeddingBagCollection([config], store=store, optimizer=tb.Adagrad(lr=0.1))
    one_step(emb, bags_of("large", rows))


def _write_sparse(folder: Path) -> Facts:
    with open_store(folder / "store", "file") as store:
        _train_large(store, torch.arange(0, LARGE["large"], 700))
        store.publish(folder / "base")
        _train_large(store, torch.tensor([0, 7, 1400, 65_535, 65_536, 69_999]))
        store.publish(folder / "delta", base=folder / "base")
        store.publish(folder / "next")
    facts = {name: _lookup(folder / name, LARGE) for name in ("base", "next")}
    for left in ("store", "next"):
        shutil.rmtree(folder / left)
    return facts


def _check_sparse(folder: Path, facts: Facts) -> None:
    manifest = (folder / "delta" / "snapshot.json").read_text()
    assert manifest.startswith("tierbed-snapshot 4 ")
    _check_snapshot(folder / "base", LARGE, facts["base"])
    tb.Snapshot.apply(folder / "base", folder / "delta", folder / "applied")
    _check_snapshot(folder / "applied", LARGE, facts["next"])


# ---------------------------------------------------------------- placements and logs

PLACED = {"a": 50, "b": 30}


def _plain_tables() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(count, 4, generator=generator) for name, count in PLACED.items()}


def _write_placed(folder: Path) -> Facts:
    count = sum(PLACED.values())
    text = folder / "log.txt"
    text.write_text("".join(f"{at} {(at * 7 + 1) % count} {at * 3 % count}\n" for at in range(80)))
    log = QueryLog.read(text, options=LogOptions(row_count=count))
    log.write(folder / "log.bin")
    placement = place(log, rows_per_page=16, method="maxembed", ratio=0.3)
    placement.write(folder / "pages.tbp")
    placement.write_mapping(folder / "mapping.txt")
    files = {("a", "b"): folder / "pages.tbp"}
    import_tables(_plain_tables(), folder / "placed", placement=files)
    with tb.Snapshot.open(folder / "placed") as snapshot:
        snapshot.record(folder / "recorded", tables=["a"])
        snapshot.lookup(bags_of("a", torch.tensor([7, 3, 9])))
    return {
        "rows": _lookup(folder / "placed", PLACED),
        "queries": [log[at] for at in range(len(log))],
        "pages": [placement.page(at) for at in range(int(placement.info().page_count))],
    }


def _check_placed(folder: Path, facts: Facts) -> None:
    for name, kind in (("log.txt", "text"), ("log.bin", "maxembed")):
        log = QueryLog.read(folder / name, kind, LogOptions(row_count=sum(PLACED.values())))
        assert [log[at] for at in range(len(log))] == facts["queries"]
    recorded = QueryLog.read(folder / "recorded" / "a", options=LogOptions(row_count=PLACED["a"]))
    assert [recorded[at] for at in range(len(recorded))] == [[7], [3], [9]]
    placement = Placement.read(folder / "pages.tbp")
    pages = [placement.page(at) for at in range(int(placement.info().page_count))]
    assert pages == facts["pages"]
    mapping = Placement.read_mapping(folder / "mapping.txt", 16)
    assert mapping.info().page_count == len(pages)
    _check_snapshot(folder / "placed", PLACED, facts["rows"])


# ---------------------------------------------------------------- pages of coded rows

PAGE_CODECS: tuple[words.PageCodec, ...] = ("f16", "bf16", "int8", "int4", "gauss4")


def _write_coded_pages(folder: Path) -> Facts:
    facts: Facts = {}
    with open_store(folder / "store", "file") as store:
        train(store, 0, 30)
        for codec in PAGE_CODECS:
            store.publish(folder / codec, codec=codec)
            facts[codec] = {"base": _lookup(folder / codec, ROWS)}
        train(store, 30, 34)
        for codec in PAGE_CODECS:
            store.publish(folder / f"{codec}-delta", base=folder / codec)
            store.publish(folder / "next", codec=codec)
            facts[codec]["next"] = _lookup(folder / "next", ROWS)
            shutil.rmtree(folder / "next")
    shutil.rmtree(folder / "store")
    log = QueryLog.from_batches(80, [(torch.arange(160) * 7 % 80, torch.arange(0, 161, 2))])
    place(log, rows_per_page=16, method="maxembed", ratio=0.3).write(folder / "pages.tbp")
    files = {("a", "b"): folder / "pages.tbp"}
    import_tables(_plain_tables(), folder / "placed", placement=files, codec="int8")
    return {**facts, "placed": _lookup(folder / "placed", PLACED)}


def _check_coded_pages(folder: Path, facts: Facts) -> None:
    for codec in PAGE_CODECS:
        _check_snapshot(folder / codec, ROWS, facts[codec]["base"])
        tb.Snapshot.apply(folder / codec, folder / f"{codec}-delta", folder / "applied")
        _check_snapshot(folder / "applied", ROWS, facts[codec]["next"])
        shutil.rmtree(folder / "applied")
    _check_snapshot(folder / "placed", PLACED, facts["placed"])


# ---------------------------------------------------------------- tails


def _write_tails(folder: Path) -> Facts:
    sizes = {**ROWS, **LARGE}
    with open_store(folder / "store", "file") as store:
        train(store, 0, 30)
        _train_large(store, torch.arange(0, LARGE["large"], 70))
        _train_large(store, torch.arange(0, LARGE["large"], 700))
        store.publish(folder / "base", head_rows={"narrow": 20, "large": "30%"})
        store.publish(folder / "int8", head_rows=0, codec="int8")
        facts = {name: _lookup(folder / name, sizes) for name in ("base", "int8")}
        train(store, 30, 34)
        _train_large(store, torch.tensor([0, 7, 1401, 65_535, 65_536, 69_999]))
        store.publish(folder / "delta", base=folder / "base")
        store.publish(folder / "next")
    facts["next"] = _lookup(folder / "next", sizes)
    for left in ("store", "next"):
        shutil.rmtree(folder / left)
    return facts


def _check_tails(folder: Path, facts: Facts) -> None:
    sizes = {**ROWS, **LARGE}
    assert (folder / "base" / "snapshot.json").read_text().startswith("tierbed-snapshot 5 ")
    for name in ("base", "int8"):
        _check_snapshot(folder / name, sizes, facts[name])
    tb.Snapshot.apply(folder / "base", folder / "delta", folder / "applied")
    _check_snapshot(folder / "applied", sizes, facts["next"])


# ---------------------------------------------------------------- tiers and neighbours


def _counts() -> dict[str, torch.Tensor]:
    return {name: 1000.0 / (1 + torch.arange(count)) for name, count in PLACED.items()}


def _write_tiers(folder: Path) -> Facts:
    tables = _plain_tables()
    import_tables(tables, folder / "snapshot")
    tb.plan_tiers(tables, _counts(), dram_bytes=12_000, tails=("product2",)).save(
        folder / "tiers.plan"
    )
    with tb.Snapshot.open(folder / "snapshot") as snapshot:
        tb.find_neighbours(tables, _counts(), candidates=16).write(snapshot)
    return {"exact": _lookup(folder / "snapshot", PLACED), "planned": _planned_rows(folder)}


def _planned_rows(folder: Path) -> Facts:
    plan = TierPlan.load(folder / "tiers.plan")
    options = {"cache": [], "resident": plan, "misses": "surrogate"}
    return _lookup(folder / "snapshot", PLACED, **options)


def _check_tiers(folder: Path, facts: Facts) -> None:
    _check_snapshot(folder / "snapshot", PLACED, facts["exact"])
    assert _planned_rows(folder) == facts["planned"]
    tiers = ["f32:lru:8", tb.NeighbourTier(share=4)]
    cache = tb.CacheOptions(tiers=tiers, bytes_max=32_000)
    with tb.Snapshot.open(
        folder / "snapshot",
        cache=cache,
        misses="surrogate",
    ) as snapshot:
        found = snapshot.lookup(bags_of("a", torch.arange(PLACED["a"])))["a"]
    assert digest(found) == facts["exact"]["a"]["rows"]


# ---------------------------------------------------------------- vocabularies, ranks


def _write_vocabulary(folder: Path) -> Facts:
    write_criteo_tsv(folder / "day.tsv", 200, scale=0.001, seed=3)
    report = build_vocabulary(folder / "day.tsv", folder / "vocabulary", min_count=2)
    return {
        "samples": report.sample_count,
        "sizes": Vocabulary(folder / "vocabulary").table_sizes(),
    }


def _check_vocabulary(folder: Path, facts: Facts) -> None:
    again = build_vocabulary(folder / "day.tsv", folder / "again", min_count=2)
    assert again.sample_count == facts["samples"]
    kept, built = Vocabulary(folder / "vocabulary"), Vocabulary(folder / "again")
    assert [list(size) for size in kept.table_sizes()] == facts["sizes"]
    lines = (folder / "day.tsv").read_text().splitlines()
    for at, (name, _) in enumerate(kept.table_sizes()):
        tokens = [line.split("\t")[14 + at] or None for line in lines]
        assert torch.equal(kept.look_up(name, tokens), built.look_up(name, tokens))


def _sharded(store: tb.Store) -> tbd.ShardedEmbeddingBagCollection:
    (rank,) = tbd.local_ranks(1)
    plan = tbd.ShardingPlan(1, {name: tbd.TableWise(0) for name in ROWS})
    return tbd.ShardedEmbeddingBagCollection(
        configs(), store=store, plan=plan, ranks=rank, optimizer=tb.Adagrad(lr=0.1)
    )


def _write_ranks(folder: Path) -> Facts:
    with open_store(None, "memory") as store:
        train(store, 0, 4)
        with _sharded(store) as sharded:
            sharded.save(folder / "checkpoint", extra={"step": 4})
        return {"rows": rows_of(store)}


def _check_ranks(folder: Path, facts: Facts) -> None:
    with open_store(None, "memory") as store, _sharded(store) as sharded:
        assert sharded.load(folder / "checkpoint") == {"step": 4}
        assert rows_of(store) == facts["rows"]


def _coded(kind: tb.DataType) -> tbd.ShardedEmbeddingBagCollection:
    (rank,) = tbd.local_ranks(1)
    plan = tbd.ShardingPlan(1, {name: tbd.TableWise(0) for name in ROWS})
    tables = [dataclasses.replace(config, data_type=kind) for config in configs()]
    return tbd.ShardedEmbeddingBagCollection(
        tables, store=tb.CodedStore(seed=SEED), plan=plan, ranks=rank
    )


def _all_coded(sharded: tbd.ShardedEmbeddingBagCollection) -> dict[str, str]:
    """Returns digests of what every row of every table is decoded to."""
    count = max(ROWS.values())
    ids = [torch.arange(count) % rows for rows in ROWS.values()]
    lengths = torch.ones(len(ROWS) * count, dtype=torch.int64)
    found = sharded(tb.KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths))
    return {name: digest(found[name].detach().clone()) for name in ROWS}


def _write_coded(folder: Path) -> Facts:
    with open_store(None, "memory") as store:
        train(store, 0, 4)
        with _sharded(store) as sharded:
            sharded.save(folder / "rows")
    facts = {}
    for kind in CODES:
        with _coded(kind) as sharded:
            sharded.load(folder / "rows")
            sharded.save(folder / kind.name, extra={"step": 4})
            facts[kind.name] = _all_coded(sharded)
    shutil.rmtree(folder / "rows")
    return facts


def _check_coded(folder: Path, facts: Facts) -> None:
    for kind in CODES:
        with _coded(kind) as sharded:
            assert sharded.load(folder / kind.name) == {"step": 4}
            assert _all_coded(sharded) == facts[kind.name]


CASES = [
    Case("snapshot-and-delta", _write_published, _check_published),
    Case("sparse-delta", _write_sparse, _check_sparse),
    Case("placement-and-log", _write_placed, _check_placed),
    Case("coded-pages", _write_coded_pages, _check_coded_pages),
    Case("tails", _write_tails, _check_tails),
    Case("tiers-and-neighbours", _write_tiers, _check_tiers),
    Case("vocabulary", _write_vocabulary, _check_vocabulary),
    Case("ranks", _write_ranks, _check_ranks),
    Case("coded-ranks", _write_coded, _check_coded),
]
