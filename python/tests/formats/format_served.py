"""Makes snapshots and what lies beside them, and finds whether they still answer the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from format_recipes import TABLES, Training, mixed
from format_stores import RECIPES, digest, note_at, open_store

import tierbed as tb
from tierbed.placed import import_tables

Facts = dict[str, Any]
BACKENDS = ("direct", "mmap", "memory")


def plain_rows(count: int, dim: int, seed: int) -> torch.Tensor:
    """Rows from arithmetic alone: multiples of 1/64."""
    words = [mixed(seed, at) % 4096 - 2048 for at in range(count * dim)]
    return torch.tensor(words, dtype=torch.float32).view(count, dim) / 64


def asked(name: str, ids: torch.Tensor) -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor([name], ids, lengths=torch.ones_like(ids))


def answers(snapshot: tb.Snapshot) -> Facts:
    """Returns a hash of every row of every table, and of pooled bags of three rows."""
    found: Facts = {}
    vocabularies = snapshot.vocabularies()
    for table in snapshot.tables():
        name, count = table["name"], int(table["row_count"])
        ids = torch.arange(count)
        if name in vocabularies:
            # Ids that were seen, and some that never were.
            ids = torch.arange(1, 61) * 2**40 + list(TABLES).index(name)
            found[f"{name} ids"] = snapshot.translate(name, ids).tolist()
        rows = snapshot.lookup(asked(name, ids))[name]
        found[name] = digest(rows)
        lengths = torch.full((len(ids) // 3,), 3, dtype=torch.int64)
        bags = tb.KeyedJaggedTensor([name], ids[: 3 * len(lengths)], lengths=lengths)
        for pooling in ("sum", "mean"):
            found[f"{name} {pooling}"] = digest(snapshot.lookup(bags, pooling)[name])
    return found


def told(path: Path) -> Facts:
    """Returns what the snapshot at ``path`` answers, through every backend."""
    facts: Facts = {}
    for backend in BACKENDS:
        with tb.Snapshot.open(path, dram_budget="16MiB", backend=backend) as snapshot:
            assert snapshot.verify() > 0
            names = snapshot.native.attachment_names()
            attached = {name: snapshot.native.attachment(name) or b"" for name in names}
            found: Facts = {
                "identity": snapshot.identity,
                "answers": answers(snapshot),
                "attachments": {
                    name: hashlib.sha256(raw).hexdigest() for name, raw in attached.items()
                },
            }
        assert facts in ({}, found), f"{backend} answers otherwise"
        facts = found
    return facts


# ---------------------------------------------------------------- kinds of snapshots


def _published(folder: Path, recipe: Facts, steps: int) -> None:
    with open_store(recipe, folder / "store") as store:
        Training(recipe, store).run(0, steps)
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(plain_rows(2, 3, 1))
            model.bias.copy_(plain_rows(1, 2, 2)[0])
        store.publish(folder / "snapshot", model, attachments={"note": note_at(1)})


def make_plain(folder: Path) -> None:
    _published(folder, RECIPES["undecided"], 5)


def make_open(folder: Path) -> None:
    _published(folder, RECIPES["file_open"], 6)


def make_wide(folder: Path) -> None:
    tables = {"two": plain_rows(9, 1100, 1), "three": plain_rows(3, 2500, 2)}
    import_tables({**tables, "narrow": plain_rows(40, 4, 3)}, folder / "snapshot")


def circles(rows: int) -> tb.QueryLog:
    """Queries of four rows of one circle of seven."""
    queries = [
        sorted({(mixed(at) % (rows // 7)) * 7 + mixed(at, part) % 7 for part in range(4)})
        for at in range(120)
    ]
    offsets = torch.tensor([0, *(len(query) for query in queries)]).cumsum(0)
    values = torch.tensor([row for query in queries for row in query])
    return tb.QueryLog.from_batches(rows, [(values, offsets)])


def make_placed(folder: Path) -> None:
    placement = tb.place(circles(84), rows_per_page=8, method="maxembed", ratio=0.3)
    placement.write(folder / "placed.tbp")
    tables = {"a": plain_rows(50, 6, 1), "b": plain_rows(34, 6, 2), "c": plain_rows(40, 12, 3)}
    report = import_tables(
        tables, folder / "snapshot", placement={("a", "b"): folder / "placed.tbp"}
    )
    assert report["replica_count"] > 0


def check_snapshot(folder: Path, facts: Facts) -> None:
    assert told(folder / "snapshot") == facts


# ---------------------------------------------------------------- deltas


def make_delta(folder: Path) -> None:
    recipe = RECIPES["undecided"]
    with open_store(recipe, folder / "store") as store:
        training = Training(recipe, store)
        training.run(0, 4)
        store.publish(folder / "base")
        training.run(4, 6)
        store.publish(folder / "delta", base=folder / "base", attachments={"note": note_at(2)})
        store.publish(folder / "snapshot", attachments={"note": note_at(2)})


def check_delta(folder: Path, facts: Facts) -> None:
    """What the delta makes of the base answers as the snapshot that was published beside it."""
    check_snapshot(folder, facts)
    tb.Snapshot.apply(folder / "base", folder / "delta", folder / "applied", dram_budget="64MiB")
    found = told(folder / "applied")
    assert found["answers"] == facts["answers"]
    assert found["attachments"] == facts["attachments"]


# ---------------------------------------------------------------- beside a snapshot


def _tables() -> dict[str, torch.Tensor]:
    return {"a": plain_rows(600, 8, 4), "b": plain_rows(60, 8, 5)}


def _counts(tables: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 1000.0 / (1 + torch.arange(len(rows))) for name, rows in tables.items()}


def make_tiers(folder: Path) -> None:
    # More rows than a product code has entries, so that tails are rounded.
    tables = {"a": plain_rows(500, 8, 6), "b": plain_rows(200, 8, 7)}
    import_tables(tables, folder / "snapshot")
    for tail, size in (("product2", 14_000), ("default", 5_000)):
        plan = tb.plan_tiers(tables, _counts(tables), dram_bytes=size, tails=(tail,))
        assert plan.about["head_rows"] > 0
        plan.save(folder / f"{tail}.tiers")


def _from_memory(folder: Path) -> Facts:
    """Returns what two plans of tiers answer without one read."""
    found: Facts = {}
    for tail, misses in (("product2", "surrogate"), ("default", "default")):
        with tb.Snapshot.open(
            folder / "snapshot", cache=[], tiers=folder / f"{tail}.tiers", misses=misses
        ) as snapshot:
            found[tail] = answers(snapshot)
            assert snapshot.stats()["snapshot"]["io"]["read_count"] == 0
    return found


def tell_tiers(folder: Path) -> Facts:
    return {**told(folder / "snapshot"), "tiers": _from_memory(folder)}


def check_tiers(folder: Path, facts: Facts) -> None:
    assert tell_tiers(folder) == facts


def make_neighbours(folder: Path) -> None:
    tables = _tables()
    import_tables(tables, folder / "snapshot")
    near = tb.find_neighbours(tables, _counts(tables), candidates=64, nearest=3)
    with tb.Snapshot.open(folder / "snapshot") as snapshot:
        near.write(snapshot)


def tell_neighbours(folder: Path) -> Facts:
    tables = _tables()
    near = tb.find_neighbours(tables, _counts(tables), candidates=64, nearest=3)
    return {**told(folder / "snapshot"), "near": {n: p.tolist() for n, p in near.of.items()}}


def check_neighbours(folder: Path, facts: Facts) -> None:
    """Every answer is the row, or the row that the file says stands for it; some are."""
    near = facts.pop("near")
    check_snapshot(folder, facts)
    tables, names = _tables(), ("a", "b")
    cache = ["f32:ev_lfu:96", tb.NeighbourTier(share=4, inline=True)]
    approximate = 0
    with tb.Snapshot.open(
        folder / "snapshot", cache=cache, cache_bytes=24_000, misses="surrogate"
    ) as snapshot:
        for at in range(400):
            drawn = [mixed(at, part) % (64 if part < 6 else 600) for part in range(10)]
            rows = torch.tensor(sorted(set(drawn)))
            found = snapshot.lookup(asked("a", rows))["a"]
            for row, answer in zip(rows.tolist(), found, strict=True):
                if not torch.equal(answer, tables["a"][row]):
                    table, other = near["a"][row]
                    assert torch.equal(answer, tables[names[table]][other])
                    approximate += 1
    assert approximate > 0, "no neighbour ever answered"
