"""Checkpoints that do not know of ranks: saved on some, loaded on others, to the last bit."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import (
    SAMPLES,
    SHARDINGS,
    TABLES,
    all_rows,
    check_rows,
    draw,
    join,
    optimizers,
    run_ranks,
    train,
)

import tierbed as tb
from tierbed import dist as tbd

STEPS = 4


def batches_of(count: int) -> list[list[tb.KeyedJaggedTensor]]:
    """Batches of each rank; joined they are the same for every number of ranks."""
    whole = [
        [draw(10 * step + part, SAMPLES[part], False) for part in range(4)] for step in range(STEPS)
    ]
    ends = [rank * 4 // count for rank in range(count + 1)]
    return [[join(parts[first:end]) for parts in whole] for first, end in itertools.pairwise(ends)]


def run(
    count: int, name: str, optimizer: Any, steps: range, load: Path | None, save: Path | None
) -> tuple[list[Any], tbd.ShardingPlan, list[tb.Store]]:
    plan = tbd.ShardingPlan(count, SHARDINGS[name](count))
    batches = batches_of(count)

    def work(rank: tbd.LocalRank) -> Any:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        sharded = tbd.ShardedEmbeddingBagCollection(
            TABLES, store=store, plan=plan, ranks=rank, optimizer=optimizer
        )
        with sharded:
            if load is not None:
                assert sharded.load(load) == {"step": steps.start}
            outputs, _ = train(sharded, [batches[rank.rank][step] for step in steps])
            if save is not None:
                sharded.save(save, extra={"step": steps.stop})
        return outputs, store

    found = run_ranks(count, work)
    outputs = [torch.cat([of_rank[0][at] for of_rank in found]) for at in range(len(steps))]
    return outputs, plan, [store for _, store in found]


def one_process(optimizer: Any) -> tuple[list[torch.Tensor], tb.Store]:
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    one = tb.EmbeddingBagCollection(TABLES, store=store, optimizer=optimizer)
    (batches,) = batches_of(1)
    # The upstream gradient counts steps from the start of a part.
    first, _ = train(one, batches[:2])
    second, _ = train(one, batches[2:])
    return [*first, *second], store


def check_loaded(
    name: str, count: int, optimizer: Any, folder: Path, expected: list[torch.Tensor], whole: Any
) -> None:
    outputs, plan, stores = run(count, name, optimizer, range(2, 4), folder, None)
    for found, wanted in zip(outputs, expected[2:], strict=True):
        assert torch.equal(found, wanted), (name, count, optimizer)
    for rank, store in enumerate(stores):
        check_rows(store, whole, plan, rank)


@pytest.mark.parametrize("saved", ["table-wise", "row-wise", "column-wise", "mirrored", "mixed"])
def test_saved_on_two_ranks_and_loaded_on_one_two_or_four(saved: str, tmp_path: Path) -> None:
    for optimizer in every_optimizer(saved):
        folder = tmp_path / type(optimizer).__name__
        expected, whole = one_process(optimizer)
        outputs, _, _ = run(2, saved, optimizer, range(2), None, folder)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected[:2], strict=True))
        for count, loaded in [(1, "table-wise"), (2, saved), (4, saved), (4, "mixed")]:
            check_loaded(loaded, count, optimizer, folder, expected, whole)


def every_optimizer(sharding: str) -> list[Any]:
    """All optimizers; columns of a row have no state of the whole row."""
    of_rows = [] if sharding == "column-wise" else [tb.PartialRowWiseAdam(lr=0.05)]
    return [*optimizers(sharding), *of_rows]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 3)])
def test_adam_goes_on_with_its_corrections_on_another_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    optimizer = tb.Adam(lr=0.05)
    expected, whole = one_process(optimizer)
    for name in SHARDINGS:
        folder = tmp_path / name
        run(before, name, optimizer, range(2), None, folder)
        check_loaded(name, after, optimizer, folder, expected, whole)
        _, _, stores = run(after, name, optimizer, range(2, 2), folder, None)
        held = [(store, table["name"]) for store in stores for table in store.tables()]
        assert {store.steps_done(table) for store, table in held} == {2}


def test_use_counts_survive(tmp_path: Path) -> None:
    _, _, saved = run(2, "table-wise", tb.SGD(lr=0.05), range(2), None, tmp_path / "kept")
    _, _, loaded = run(1, "table-wise", tb.SGD(lr=0.05), range(2, 2), tmp_path / "kept", None)
    expected = saved[1].use_counts("a", 0, 60)
    assert expected.max() > 0
    assert torch.equal(loaded[0].use_counts("a", 0, 60), expected)


def test_a_checkpoint_of_version_1_opens(tmp_path: Path) -> None:
    """It had no steps and no use counts, and only optimizers that need neither."""
    from safetensors.torch import load_file, save_file

    folder, optimizer = tmp_path / "kept", tb.Adagrad(lr=0.05)
    expected, whole = one_process(optimizer)
    run(2, "mixed", optimizer, range(2), None, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["version"] = 1
    del manifest["steps"]
    (folder / manifest.pop("extra")["name"]).rename(folder / "extra.pt")
    manifest["has_extra"] = True
    for file in manifest["files"]:
        del file["sha256"], file["rows"]
        parts = load_file(folder / file["name"])
        del parts["use_counts"]
        save_file(parts, folder / file["name"])
        raw = (folder / file["name"]).read_bytes()
        file.update(bytes=len(raw), crc32=zlib.crc32(raw))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    check_loaded("mixed", 2, optimizer, folder, expected, whole)


def test_columns_are_divided_otherwise_when_they_are_loaded(tmp_path: Path) -> None:
    optimizer = tb.Adagrad(lr=0.05)
    expected, whole = one_process(optimizer)
    for saved, loaded in [("column-wise", "row-wise"), ("row-wise", "column-wise")]:
        folder = tmp_path / saved
        run(4, saved, optimizer, range(2), None, folder)
        outputs, plan, stores = run(2, loaded, optimizer, range(2, 4), folder, None)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected[2:], strict=True))
        for rank, store in enumerate(stores):
            check_rows(store, whole, plan, rank)


def alone(**options: Any) -> tbd.ShardedEmbeddingBagCollection:
    (rank,) = tbd.local_ranks(1)
    store = tb.Store.open(backend="memory", dram_budget="16MiB", seed=options.pop("seed", 0))
    given = {"optimizer": tb.SGD(lr=0.05), "tables": TABLES, **options}
    return tbd.ShardedEmbeddingBagCollection(
        store=store,
        plan=tbd.ShardingPlan(1, SHARDINGS["table-wise"](1)),
        ranks=rank,
        **given,
    )


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with alone() as one:
        train(one, [draw(1, 5, False)])
        one.save(folder)
        rows = all_rows(one.store, TABLES[0])[0]
        with pytest.raises(tb.InvalidError, match="exists"):
            one.save(folder)
        with pytest.raises(tb.InvalidError, match="trained already"):
            one.load(folder)
        with pytest.raises(tb.InvalidError, match=r"no manifest\.json"):
            one.load(tmp_path)
    for options in [{"seed": 1}, {"optimizer": tb.Adagrad()}]:
        with alone(**options) as other, pytest.raises(tb.InvalidError, match="another shape"):
            other.load(folder)
    with alone() as one:
        assert one.load(folder) is None
        assert torch.equal(all_rows(one.store, TABLES[0])[0], rows)


@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_harmed_files_are_noticed(harm: str, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with alone() as one:
        train(one, [draw(1, 5, False)])
        one.save(folder)
    name = json.loads((folder / "manifest.json").read_text())["files"][0]["name"]
    raw = bytearray((folder / name).read_bytes())
    raw[-1] ^= 1
    if harm == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(raw if harm == "flip" else raw[:-5])
    with alone() as one, pytest.raises(tb.CorruptionError, match=name):
        one.load(folder)


def test_a_rank_that_cannot_save_is_named_and_nothing_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    plan = tbd.ShardingPlan(2, SHARDINGS["table-wise"](2))
    told: dict[int, str] = {}

    def work(rank: tbd.LocalRank) -> None:
        store = tb.Store.open(backend="memory", dram_budget="16MiB")
        if rank.rank == 1:

            def fail(*_: Any, **__: Any) -> None:
                raise OSError("no space left")

            monkeypatch.setattr(store, "scan", fail)
        with tbd.ShardedEmbeddingBagCollection(
            TABLES, store=store, plan=plan, ranks=rank, optimizer=tb.SGD()
        ) as sharded:
            with pytest.raises((tb.TierbedError, OSError)) as caught:
                sharded.save(folder)
            told[rank.rank] = str(caught.value)

    run_ranks(2, work)
    assert "rank 1 failed: no space left" in told[0]
    assert "no space left" in told[1]
    assert not folder.exists()
