"""Every wrong call and every damaged file is an error of the right kind that names the thing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags


def collection(store: Any, rows: int = 1000, **options: Any) -> tb.EmbeddingBagCollection:
    config = tb.EmbeddingBagConfig(name="item", num_embeddings=rows, embedding_dim=8)
    return tb.EmbeddingBagCollection([config], store=store, **options)


def bags(*ids: int) -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor(
        ["item"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
    )


# ---------------------------------------------------------------- arguments


def test_what_is_no_tensor_or_of_another_type_is_named(open_store: Any) -> None:
    store = open_store()
    collection(store)
    rows = torch.ones(2, 8)
    for call, told in [
        (lambda: store.gather_rows("item", [1, 2]), "rows must be a torch.Tensor, not list"),
        (lambda: store.write_rows("item", 0, rows.numpy()), "weights must be .*, not ndarray"),
        (lambda: store.write_rows("item", 0, rows, [[1.0]]), "rows_state must be .*, not list"),
        (lambda: store.write_rows("item", 0, rows.half()), "found: float16"),
        (lambda: store.write_rows("item", 0, rows.bfloat16()), "found: bfloat16"),
        (lambda: store.gather_rows("item", torch.ones(2, dtype=torch.int16)), "found: int16"),
        (lambda: store.gather_rows("item", torch.ones(2).bool()), "found: bool"),
    ]:
        with pytest.raises(tb.InvalidError, match=told):
            call()


@pytest.mark.parametrize("row", [1000, -1, 2**40])
def test_an_id_out_of_range_names_table_and_id(open_store: Any, row: int) -> None:
    emb = collection(open_store())
    with pytest.raises(ValueError, match=rf"item.*{row}") as caught:
        emb(bags(1, row))
    assert isinstance(caught.value, tb.InvalidError)


def test_a_failed_batch_changes_no_row(open_store: Any) -> None:
    store = open_store("file")
    emb = collection(store)
    before = store.read_rows("item", 0, 1000)
    with pytest.raises(tb.InvalidError):
        emb(bags(1, 2, 1000))
    assert torch.equal(store.read_rows("item", 0, 1000), before)
    emb(bags(1, 2)).values().sum().backward()


def test_tensors_that_are_not_contiguous_are_named(open_store: Any) -> None:
    emb = collection(open_store())
    every_other = torch.arange(20)[::2]
    kjt = tb.KeyedJaggedTensor(["item"], every_other, lengths=torch.ones(10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"indices.*contiguous"):
        emb(kjt)


def test_a_column_of_one_sample_is_contiguous(open_store: Any) -> None:
    # Torch says so, too, and its remedy `contiguous()` returns the tensor as it is.
    emb = collection(open_store())
    columns = torch.tensor([[3, 5]])
    assert columns[:, 1].stride() == (2,)
    lengths = torch.ones(1, 2, dtype=torch.int64)[:, 1]
    found = emb(tb.KeyedJaggedTensor(["item"], columns[:, 1], lengths=lengths))
    assert torch.equal(found.values(), emb(bags(5)).values())
    found.values().sum().backward()


def test_an_output_that_shares_memory_with_an_input_is_refused(open_store: Any) -> None:
    store = open_store()
    collection(store)
    memory = torch.zeros(64, dtype=torch.int64)
    out = memory.view(torch.float32)[:8].view(1, 8)
    plan = store.native.plan([0], ["sum"])
    with pytest.raises(ValueError, match="out"):
        store.native.lookup(plan, memory[:1], torch.tensor([0, 1]), None, out)


@pytest.mark.parametrize("values", [torch.tensor([1.0]), torch.tensor([True])])
def test_tensors_of_another_kind_are_named(open_store: Any, values: torch.Tensor) -> None:
    store = open_store()
    collection(store)
    plan = store.native.plan([0], ["sum"])
    out = torch.empty(1, 8)
    with pytest.raises(ValueError, match="indices"):
        store.native.lookup(plan, values, torch.tensor([0, 1]), None, out)


def test_offsets_must_fit_the_values(open_store: Any) -> None:
    store = open_store()
    collection(store)
    plan = store.native.plan([0], ["sum"])
    for offsets in ([0, 2], [1, 1], [0, 1, 0]):
        with pytest.raises(ValueError, match="offset"):
            store.native.lookup(
                plan, torch.tensor([1]), torch.tensor(offsets), None, torch.empty(1, 8)
            )


def test_missing_features_and_weights_are_named(open_store: Any) -> None:
    store = open_store()
    with pytest.raises(tb.InvalidError, match="item"):
        collection(store)(random_bags({"user": 10}, 2, seed=0))
    with pytest.raises(tb.InvalidError, match="weights"):
        collection(store, is_weighted=True)(bags(1))


def test_bad_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(tb.InvalidError, match="backend"):
        tb.Store.open(tmp_path, backend="tape")
    with pytest.raises(tb.InvalidError, match="path"):
        tb.Store.open()
    with pytest.raises(tb.InvalidError, match="dram_budget"):
        tb.Store.open(tmp_path / "s", dram_budget="lots")
    with pytest.raises(tb.InvalidError, match="telepathy"):
        tb.Store.open(tmp_path / "s", io=tb.IoOptions(engine="telepathy"))
    assert not (tmp_path / "s" / "CURRENT").exists()


def test_another_shape_of_a_known_table_is_refused(open_store: Any) -> None:
    store = open_store()
    collection(store)
    with pytest.raises(tb.InvalidError, match="item"):
        collection(store, rows=2000)


# ---------------------------------------------------------------- budget, disk, owner


def refused_least(path: Path, budget: int) -> int | None:
    """Returns the least budget a refusal names; None when the budget does."""
    try:
        with tb.Store.open(path, dram_budget=budget) as store:
            collection(store)(bags(1, 2, 3)).values().sum().backward()
    except tb.InvalidError as error:
        return int(error.context["minimum_bytes"])
    return None


def test_too_small_a_budget_names_the_least(tmp_path: Path) -> None:
    # Each refusal names the least budget for the parts known by then, so following them ends.
    budgets = [10_000]
    while (least := refused_least(tmp_path / str(len(budgets)), budgets[-1])) is not None:
        assert least > budgets[-1]
        budgets.append(least)
    assert 2 <= len(budgets) <= 8
    assert budgets[-1] < 1 << 20


def test_a_batch_too_large_for_the_budget_names_the_least(tmp_path: Path) -> None:
    ids = list(range(0, 100_000, 3))
    with tb.Store.open(tmp_path / "a", dram_budget="512KiB") as store:
        emb = collection(store, rows=100_000)
        with pytest.raises(tb.InvalidError, match="minimum_bytes") as caught:
            emb(bags(*ids)).values().sum().backward()
    least = int(caught.value.context["minimum_bytes"])
    with tb.Store.open(tmp_path / "b", dram_budget=least) as store:
        emb = collection(store, rows=100_000)
        emb(bags(*ids)).values().sum().backward()


def test_a_disk_quota_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = tb.Store.open(path, dram_budget="1MiB", disk_quota="2MiB")
    emb = collection(store, rows=1_000_000)
    emb(bags(1, 2, 3)).values().sum().backward()
    store.checkpoint("good", extra={"step": 1})
    kept = store.read_rows("item", 0, 100)

    def fill() -> None:
        for seed in range(400):
            batch = random_bags({"item": 1_000_000}, 512, seed=seed)
            emb(batch).values().sum().backward()
            store.checkpoint("more")

    with pytest.raises(tb.NoSpaceError) as caught:
        fill()
    assert isinstance(caught.value, OSError)
    store.close()
    with tb.Store.open(path, dram_budget="1MiB", disk_quota="64MiB") as again:
        last = again.last_checkpoint()
        assert last is not None
        if last[1] == "good":
            assert torch.equal(again.read_rows("item", 0, 100), kept)
        assert again.verify() >= 0


def test_a_second_opener_is_turned_away(open_store: Any, tmp_path: Path) -> None:
    store = open_store("file")
    collection(store)
    store.checkpoint("one")
    with pytest.raises(tb.ClosedError, match="in this process already"):
        tb.Store.open(tmp_path / "store", dram_budget="4MiB")
    code = (
        "import tierbed as tb\n"
        f"try: tb.Store.open({str(tmp_path / 'store')!r}, dram_budget='4MiB')\n"
        "except tb.ClosedError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "in use by another opener" in done.stdout, done.stderr
    assert f"holder_pid: {os.getpid()}," in done.stdout


def test_opening_again_in_a_notebook_names_what_has_the_store(tmp_path: Path) -> None:
    """A cell that is run twice; dropping the name alone closes nothing, and closing does."""
    code = f"""
import torch, tierbed as tb
table = tb.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=2)
def cell():
    global store, emb, model
    store = tb.Store.open({str(tmp_path / "nb")!r}, dram_budget="4MiB", backend="file")
    emb = tb.EmbeddingBagCollection([table], store=store)
    model = torch.nn.Sequential(emb)
cell()
for drop in ("", "store", "emb"):
    if drop:
        del globals()[drop]
    try:
        cell()
    except tb.ClosedError as error:
        print(error.context["held_by"], "|", "close()" in str(error), "end that" in str(error))
model[0].store.close()
cell()
print("opened")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "store (Store), emb (EmbeddingBagCollection), model (Sequential) | True False",
        "emb (EmbeddingBagCollection), model (Sequential) | True False",
        "model (Sequential) | True False",
        "opened",
    ], done.stderr


def test_a_closed_store_says_so(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    store.close()
    with pytest.raises(tb.ClosedError):
        emb(bags(1))


def test_a_graph_outlives_its_collection(open_store: Any) -> None:
    store = open_store()
    out = collection(store)(bags(1)).values().sum()
    out.backward()
    assert store.stats()["steps"] == 1


def test_a_lost_handle_says_so() -> None:
    indices, offsets = torch.tensor([1]), torch.tensor([0, 1])
    with pytest.raises(tb.ClosedError, match="keep the module alive"):
        torch.ops.tierbed.lookup(torch.zeros(1), indices, offsets, None, 10**9, 1, 8, True)


# ---------------------------------------------------------------- damaged and foreign files


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    path = tmp_path / "trained"
    with tb.Store.open(path, dram_budget="4MiB") as store:
        emb = collection(store)
        emb(bags(*range(0, 1000, 2))).values().sum().backward()
        store.checkpoint("one", extra={"step": 1})
        store.publish(tmp_path / "published", attachments={"note": b"hello" * 100})
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def first_written_byte(path: Path) -> int:
    data = path.read_bytes()
    return next(at for at in range(0, len(data), 4096) if any(data[at : at + 4096])) + 100


def test_a_flipped_bit_in_a_page_is_found(trained: Path) -> None:
    rows = only(trained, "*.rows")
    flip(rows, first_written_byte(rows))
    with tb.Store.open(trained, dram_budget="4MiB") as store:
        with pytest.raises(tb.CorruptionError, match="item"):
            store.verify()
        with pytest.raises(tb.CorruptionError):
            store.read_rows("item", 0, 1000)


def test_a_truncated_rows_file_is_found(trained: Path) -> None:
    rows = only(trained, "*.rows")
    with rows.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(tb.CorruptionError), tb.Store.open(trained, dram_budget="4MiB") as store:
        store.verify()


@pytest.mark.parametrize("pattern", ["commit-*.manifest", "commit-*.pages", "commit-*.att.*"])
def test_flipped_bits_in_a_commit_are_found(trained: Path, pattern: str) -> None:
    target = sorted(trained.glob(pattern))[0]
    flip(target, target.stat().st_size // 2)

    def read_all() -> None:
        with tb.Store.open(trained, dram_budget="4MiB") as store:
            store.verify()
            store.load_extra()

    with pytest.raises(tb.CorruptionError):
        read_all()


def test_another_kind_of_folder_is_refused(tmp_path: Path, trained: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(tb.InvalidError, match=r"cat\.jpg"):
        tb.Store.open(photos, dram_budget="4MiB")
    with pytest.raises(tb.TierbedError):
        tb.Snapshot.open(photos, dram_budget="4MiB")
    with pytest.raises(tb.TierbedError):
        tb.Snapshot.open(trained, dram_budget="4MiB")
    (trained / "CURRENT").write_text("something else 9 1 00000000\n")
    with pytest.raises(tb.InvalidError):
        tb.Store.open(trained, dram_budget="4MiB")


@pytest.mark.parametrize("name", ["rows.pages", "rows.index", "att.note", "snapshot.json"])
def test_damage_in_a_snapshot_is_found(trained: Path, name: str) -> None:
    published = trained.parent / "published"
    target = published / name
    flip(target, target.stat().st_size // 2)

    def read_all() -> None:
        with tb.Snapshot.open(published, dram_budget="4MiB") as snapshot:
            snapshot.verify()
            snapshot.attachment("note")

    with pytest.raises((tb.CorruptionError, tb.InvalidError)):
        read_all()
    shutil.copytree(published, trained.parent / "short")
    with (trained.parent / "short" / name).open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    published = trained.parent / "short"
    with pytest.raises((tb.CorruptionError, tb.InvalidError)):
        read_all()


def test_publishing_over_something_is_refused(trained: Path) -> None:
    with (
        tb.Store.open(trained, dram_budget="4MiB") as store,
        pytest.raises(tb.TierbedError, match="published"),
    ):
        store.publish(trained.parent / "published")


def test_errors_carry_their_values(open_store: Any) -> None:
    emb = collection(open_store())
    with pytest.raises(tb.InvalidError) as caught:
        emb(bags(5000))
    assert caught.value.kind == "invalid"
    assert caught.value.context["table"] == "item"
    assert json.dumps(caught.value.context)


# ---------------------------------------------------------------- numbers the engine cannot hold


@pytest.mark.parametrize("minutes", [-5, 2**32, 2**40, 2**70])
def test_minutes_out_of_range_are_refused(open_store: Any, minutes: int) -> None:
    store = open_store("file")
    with pytest.raises(tb.InvalidError, match="now_mins"):
        store.evict(now_mins=minutes)


@pytest.mark.parametrize(
    ("first", "count"), [(-5, 1), (0, -5), (2**64, 1), (0, 2**31), (0, 2**70), (1000, 1)]
)
def test_rows_out_of_range_are_refused(open_store: Any, first: int, count: int) -> None:
    store = open_store("file")
    collection(store)
    with pytest.raises(tb.InvalidError, match="item"):
        store.read_rows("item", first, count)


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), 10**400])
def test_rates_that_are_no_numbers_are_refused(lr: float) -> None:
    with pytest.raises(tb.InvalidError, match="lr"):
        tb.Adagrad(lr=lr)


@pytest.mark.parametrize("value", [-1, 2**64, 2**70])
def test_shared_budgets_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(tb.InvalidError, match="limit"):
        tb.TierBudget(value)
    with pytest.raises(tb.InvalidError, match="epoch_groups"):
        tb.TierBudget("1MiB", epoch_groups=value)


def test_a_flipped_byte_in_the_header_of_a_tier_plan_names_the_file(tmp_path: Path) -> None:
    from tierbed.placement import import_tables

    tables = {"item": torch.arange(64.0).reshape(16, 4)}
    import_tables(tables, tmp_path / "snapshot")
    plan = tb.plan_tiers(tables, {"item": torch.ones(16)}, dram_bytes=4000)
    path = tmp_path / "plan"
    plan.save(path)
    whole = path.read_bytes()
    for at in range(8, 8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(tb.TierbedError, match=str(path)):
            tb.TierPlan.load(path)
