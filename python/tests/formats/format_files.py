"""Makes logs, placements, vocabularies and checkpoints of ranks, and reads them again."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import torch
from format_recipes import TABLES, config, draw, mixed
from format_served import Facts, circles, plain_rows
from format_stores import digest, extra_at

import tierbed as tb
from tierbed import dist as tbd
from tierbed.data import Vocabulary, build_vocabulary
from tierbed.placed import import_tables
from tierbed.placement import Placement, QueryLog, place

# ---------------------------------------------------------------- logs and placements


def make_logs(folder: Path) -> None:
    log = circles(84)
    log.write(folder / "log.bin")
    lines = [" ".join(map(str, log[at])) for at in range(len(log))]
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    import_tables({"a": plain_rows(40, 4, 1), "b": plain_rows(30, 4, 2)}, folder / "snapshot")
    with tb.Snapshot.open(folder / "snapshot") as snapshot:
        snapshot.record(folder / "recorded", tables=[("a", "b")])
        for at in range(30):
            snapshot.lookup(draw_recorded(at))
    placement = place(log, rows_per_page=8, method="maxembed", ratio=0.3)
    placement.write(folder / "placed.tbp")
    placement.write_mapping(folder / "mapping.bin")
    # What a build that goes on later leaves behind.
    place(log, rows_per_page=8, method="ours", ratio=0.2, kept=folder / "kept").write(
        folder / "ours.tbp"
    )


def draw_recorded(at: int) -> tb.KeyedJaggedTensor:
    ids = torch.tensor([mixed(at, part) % 30 for part in range(4)])
    return tb.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([2, 2]))


def _queries(log: QueryLog) -> list[list[int]]:
    return [log[at] for at in range(len(log))]


def _pages(placement: Placement) -> list[list[int]]:
    return [placement.page(at) for at in range(int(placement.info()["page_count"]))]


def tell_logs(folder: Path) -> Facts:
    recorded = QueryLog.read(folder / "recorded" / "a+b", row_count=70)
    assert len(recorded) == 30
    binary = QueryLog.read(folder / "log.bin", "maxembed")
    text = QueryLog.read(folder / "log.txt", row_count=84)
    assert _queries(binary) == _queries(text)
    mapping = Placement.read_mapping(folder / "mapping.bin", 8)
    return {
        "queries": _queries(binary),
        "recorded": _queries(recorded),
        "placed": _pages(Placement.read(folder / "placed.tbp")),
        "mapping": _pages(mapping),
        "ours": _pages(Placement.read(folder / "ours.tbp")),
    }


def check_logs(folder: Path, facts: Facts) -> None:
    assert tell_logs(folder) == facts
    log = QueryLog.read(folder / "log.bin", "maxembed")
    again = place(log, rows_per_page=8, method="ours", ratio=0.2, kept=folder / "kept")
    assert _pages(again) == facts["ours"], "a kept build went on to another placement"


# ---------------------------------------------------------------- vocabularies


def make_vocabulary(folder: Path) -> None:
    def tokens(sample: int) -> list[str]:
        drawn = [mixed(sample, column) for column in range(26)]
        return ["" if one % 9 == 0 else f"{one % (5 + 3 * at):08x}" for at, one in enumerate(drawn)]

    lines = ["\t".join(["1", *["2"] * 13, *tokens(sample)]) for sample in range(200)]
    (folder / "log.tsv").write_text("\n".join(lines) + "\n")
    build_vocabulary(folder / "log.tsv", folder / "vocabulary", min_count=2)


def tell_vocabulary(folder: Path) -> Facts:
    found: Facts = {}
    for resident in (0, 1 << 20):
        vocabulary = Vocabulary(folder / "vocabulary", resident)
        rows = {
            name: vocabulary.look_up(name, [f"{at:08x}" for at in range(90)] + [None]).tolist()
            for name in vocabulary.feature_names
        }
        told = {"rows": rows, "identity": vocabulary.identity(), "least": vocabulary.min_count}
        assert found in ({}, told)
        found = told
    return found


def check_vocabulary(folder: Path, facts: Facts) -> None:
    assert tell_vocabulary(folder) == facts


# ---------------------------------------------------------------- checkpoints of ranks

_RANKED = ("a", "c", "d")
_SHARDING = {"a": tbd.RowWise(), "c": tbd.Mirrored(), "d": tbd.TableWise(1)}
_CODED = {"a": tb.DataType.INT8, "c": tb.DataType.FP16, "d": tb.DataType.BF16}


def _on_ranks(count: int, work: Any) -> list[Any]:
    """Runs ``work`` once per rank, each in a thread of its own."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(rank: tbd.LocalRank) -> None:
        try:
            results[rank.rank] = work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in tbd.local_ranks(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def _plan(count: int) -> tbd.ShardingPlan:
    ways = dict(_SHARDING) if count > 1 else {name: tbd.TableWise(0) for name in _RANKED}
    return tbd.ShardingPlan(count, ways)


def _trained(rank: tbd.LocalRank, folder: Path | None, save: Path | None, steps: range) -> Any:
    store = tb.Store.open(backend="memory", dram_budget="16MiB", seed=5)
    count = rank.count
    collection = tbd.ShardedEmbeddingBagCollection(
        [config(name) for name in _RANKED],
        store=store,
        plan=_plan(count),
        ranks=rank,
        optimizer=tb.Adam(lr=0.01),
    )
    extra = None
    with collection:
        if folder is not None:
            extra = collection.load(folder)
        for step in steps:
            for part in range(rank.rank, 2, count) if count == 2 else [None]:
                pooled = collection(_part(step, part)).values()
                (pooled * (pooled.detach() * 0.3 + 0.1)).sum().backward()
        if save is not None:
            collection.save(save, extra={"step": steps.stop})
    return store, extra


def _part(step: int, part: int | None) -> tb.KeyedJaggedTensor:
    """Half of the samples of a step, or all of them."""
    names = list(_RANKED)
    parts = [draw(names, step, seed=3 + at) for at in range(2)]
    if part is not None:
        return parts[part]
    joined = {
        name: tb.JaggedTensor(
            torch.cat([one[name].values() for one in parts]),
            lengths=torch.cat([one[name].lengths() for one in parts]),
        )
        for name in names
    }
    return tb.KeyedJaggedTensor.from_jt_dict(joined)


def _coded_tables() -> list[tb.EmbeddingBagConfig]:
    return [dataclasses.replace(config(name), data_type=_CODED[name]) for name in _RANKED]


def make_ranks(folder: Path) -> None:
    stores = _on_ranks(2, lambda rank: _trained(rank, None, folder / "ranks", range(4)))
    assert all(extra is None for _, extra in stores)
    ((whole, _),) = _on_ranks(1, lambda rank: _trained(rank, None, None, range(4)))
    tables = _coded_tables()
    coded = tb.CodedStore.of(whole, tables)

    def save(rank: tbd.LocalRank) -> None:
        with tbd.ShardedEmbeddingBagCollection(
            tables, store=coded, plan=_plan(1), ranks=rank
        ) as collection:
            collection.save(folder / "coded", extra=extra_at(4))

    _on_ranks(1, save)


def tell_ranks(folder: Path) -> Facts:
    """Returns what one rank finds in what two saved, and how it trains on."""
    facts: Facts = {}
    for name, steps in (("loaded", range(4, 4)), ("trained on", range(4, 7))):
        ((store, extra),) = _on_ranks(
            1, lambda rank, steps=steps: _trained(rank, folder / "ranks", None, steps)
        )
        assert extra == {"step": 4}
        facts[name] = {}
        for table in _RANKED:
            rows, state = store.read_rows_and_state(table, 0, int(TABLES[table][0] or 0))
            facts[name][table] = [digest(rows), digest(state), store.steps_done(table)]
    facts["coded"] = _coded_answers(folder / "coded")
    return facts


def _coded_answers(folder: Path) -> Facts:
    store, tables = tb.CodedStore(seed=5), _coded_tables()

    def load(rank: tbd.LocalRank) -> Any:
        with tbd.ShardedEmbeddingBagCollection(
            tables, store=store, plan=_plan(1), ranks=rank
        ) as collection:
            return collection.load(folder)

    (extra,) = _on_ranks(1, load)
    wanted = extra_at(4)
    assert torch.equal(extra["model"].pop("weight"), wanted["model"].pop("weight"))
    assert extra == wanted
    return {name: digest(store.read_rows(name, 0, int(TABLES[name][0] or 0))) for name in _RANKED}


def check_ranks(folder: Path, facts: Facts) -> None:
    assert tell_ranks(folder) == facts
    # Saved in the middle on two ranks and gone on with on one: as one process all the way.
    ((whole, _),) = _on_ranks(1, lambda rank: _trained(rank, None, None, range(7)))
    for table in _RANKED:
        rows, state = whole.read_rows_and_state(table, 0, int(TABLES[table][0] or 0))
        assert facts["trained on"][table][:2] == [digest(rows), digest(state)]
