"""Remedies of opening, of tables, and of arguments of a store."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.train import checkpoints, opened as open_stores

from .kit import (
    DIM,
    ROWS,
    bags,
    collection,
    flip,
    opened,
    put_back,
    refused,
    rows_of,
    step,
    table,
    trained,
)

# ---------------------------------------------------------------- folders


@pytest.mark.parametrize("options", [{}, {"shards": 2}])
def test_a_folder_of_other_files_is_left_alone_for_a_new_one(tmp_path: Path, options: dict) -> None:  # type: ignore[type-arg]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with refused(tb.InvalidError, "name a new or empty folder"):
        opened(tmp_path / "photos", **options)
    with opened(tmp_path / "new", **options) as store:
        collection(store, table("a"), table("b"))


def test_a_pointer_that_is_lost_is_put_back_by_repair(tmp_path: Path) -> None:
    path = tmp_path / "store"
    rows = trained(path, keep="old")
    (path / "CURRENT").unlink()
    with refused(tb.CorruptionError, "list the commits that are whole by `tierbed repair FOLDER`"):
        opened(path)
    with opened(tmp_path / "new") as store:
        step(collection(store))
    (commit,) = [one for one in checkpoints.find_commits(path) if not one.is_kept]
    assert main(["repair", str(path), "--commit", str(commit.number)]) == 0
    with opened(path) as store:
        assert torch.equal(rows_of(store), rows)


def test_a_pointer_of_something_else_is_no_store(tmp_path: Path) -> None:
    rows = trained(tmp_path / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "CURRENT").write_text("something else 9 1 00000000\n")
    with refused(tb.InvalidError, "name the folder of a store"):
        opened(tmp_path / "other")
    with opened(tmp_path / "store") as store:
        assert torch.equal(rows_of(store), rows)


def test_a_folder_without_a_store_is_not_looked_at(tmp_path: Path) -> None:
    remedy = "name the folder of a store, or open it for training to begin one"
    path = tmp_path / "store"
    path.mkdir()
    with refused(tb.InvalidError, remedy):
        opened(path, read_only=True)
    rows = trained(path)
    with opened(path, read_only=True) as store:
        assert torch.equal(rows_of(store), rows)


def test_repair_of_a_folder_without_commits_names_another(tmp_path: Path) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    trained(path)
    shutil.copytree(path, copy)
    for file in path.iterdir():
        file.unlink()
    with refused(tb.InvalidError, "name the folder of a store, or restore it from a copy"):
        checkpoints.find_commits(path)
    put_back(copy, path)
    assert [one.is_whole for one in checkpoints.find_commits(path)] == [True]


def test_a_damaged_commit_is_not_put_in_force_and_another_is(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path) as store:
        emb = collection(store)
        step(emb)
        store.checkpoint("one", keep=True)
        first = rows_of(store)
        step(emb)
        store.checkpoint("two")
    manifest = max(path.glob("commit-*.manifest"))
    flip(manifest)
    damaged, whole = sorted(checkpoints.find_commits(path), key=lambda commit: commit.is_whole)
    with refused(tb.CorruptionError, "choose another one of `tierbed repair FOLDER`"):
        checkpoints.put_in_force(path, damaged.number)
    assert whole.is_kept
    with opened(path, checkpoint=whole.name) as store:
        assert torch.equal(rows_of(store), first)


def test_a_store_that_is_open_is_gone_on_with_or_closed(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    emb = collection(store)
    with refused(tb.ClosedError, "go on with that store, or call its close()"):
        opened(tmp_path / "store")
    step(emb)
    store.close()
    opened(tmp_path / "store").close()


def test_a_native_store_that_is_open_is_closed_first(tmp_path: Path) -> None:
    """The engine's own words, where no `Store` of Python has the folder."""
    store = opened(tmp_path / "store")
    open_stores._OPENED.discard(store)
    with refused(tb.ClosedError, "use what has it open, or close that first; then open it again"):
        opened(tmp_path / "store")
    store.close()
    opened(tmp_path / "store").close()


CHILD = """
import sys, tierbed as tb
store = tb.Store.open(sys.argv[1], dram_budget="8MiB")
print("open", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("way", ["close", "end"])
def test_a_store_that_another_process_has_is_opened_when_that_lets_go(
    tmp_path: Path, way: str
) -> None:
    path = tmp_path / "store"
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        remedy = "close the store there, or end that process, then open it again"
        with refused(tb.ClosedError, remedy) as caught:
            opened(path)
        assert caught.value.context["holder_pid"] == str(child.pid)
        if way == "end":
            child.kill()
        else:
            child.stdin.write("\n")
            child.stdin.close()
        child.wait()
    opened(path).close()


def test_a_link_that_leads_nowhere_is_mended_by_the_file_it_names(tmp_path: Path) -> None:
    path = tmp_path / "store"
    rows = trained(path)
    shutil.move(path / "CURRENT", tmp_path / "elsewhere")
    (path / "CURRENT").symlink_to(tmp_path / "there")
    with refused(tb.CorruptionError, "bring back the file that it names"):
        opened(path)
    shutil.move(tmp_path / "elsewhere", tmp_path / "there")
    with opened(path) as store:
        assert torch.equal(rows_of(store), rows)


# ---------------------------------------------------------------- options


def test_a_store_is_opened_with_the_backend_it_was_made_with(tmp_path: Path) -> None:
    rows = trained(tmp_path / "store", backend="cold")
    with refused(tb.InvalidError, "open it with the stored backend") as caught:
        opened(tmp_path / "store", backend="file")
    with opened(tmp_path / "store", backend=caught.value.context["stored"]) as store:
        assert torch.equal(rows_of(store), rows)


def test_a_number_of_shards_is_that_of_the_store(tmp_path: Path) -> None:
    both = (table("a"), table("b"))
    with opened(tmp_path / "two", shards=2, order="window") as store:
        collection(store, *both)
        store.checkpoint("one")
    remedy = "open it with as many shards as it has, or without shards"
    with refused(tb.InvalidError, remedy) as caught:
        opened(tmp_path / "two", shards=3)
    for shards in (int(caught.value.context["stored"]), None):
        opened(tmp_path / "two", shards=shards).close()


def test_more_shards_than_tables_are_fewer_shards_or_more_tables(tmp_path: Path) -> None:
    remedy = "open a new store with fewer shards, or add more tables"
    with opened(tmp_path / "a", shards=2) as store, refused(tb.InvalidError, remedy):
        step(collection(store))
    with opened(tmp_path / "b", shards=1) as store:
        step(collection(store))
    with opened(tmp_path / "c", shards=2) as store:
        emb = collection(store, table("item"), table("user"))
        batch = tb.KeyedJaggedTensor(
            ["item", "user"], torch.tensor([1, 2]), lengths=torch.ones(2, dtype=torch.int64)
        )
        emb(batch).values().sum().backward()


def test_what_several_shards_cannot_do_one_shard_does(tmp_path: Path) -> None:
    with opened(tmp_path / "two", shards=2, order="window") as store:
        collection(store, table("a"), table("b"))
        store.checkpoint("one")
        with refused(tb.UnsupportedError, "open a new store with one shard"):
            store.checkpoint("kept", keep=True)
    with opened(tmp_path / "one", shards=1) as store:
        step(collection(store))
        store.checkpoint("kept", keep=True)
        assert [kept.name for kept in store.checkpoints()] == ["kept"]


def test_options_that_several_shards_do_not_have(tmp_path: Path) -> None:
    remedy = 'open the store with on_mismatch="error", or with one shard'
    with refused(tb.UnsupportedError, remedy):
        opened(tmp_path / "a", shards=2, on_mismatch="fallback")
    opened(tmp_path / "a", shards=2, on_mismatch="error").close()
    opened(tmp_path / "b", shards=1, on_mismatch="fallback").close()
    remedy = 'open the store with durability="checkpoint", or with one shard'
    with refused(tb.UnsupportedError, remedy):
        opened(tmp_path / "c", shards=2, durability="step", backend="lsm")
    opened(tmp_path / "c", shards=2, durability="checkpoint", backend="lsm").close()
    opened(tmp_path / "d", shards=1, durability="step", backend="lsm").close()


def test_a_log_of_every_step_is_that_of_a_tree(tmp_path: Path) -> None:
    remedy = "open it with backend lsm, or with durability checkpoint"
    with refused(tb.InvalidError, remedy):
        opened(tmp_path / "a", durability="step", backend="file")
    opened(tmp_path / "a", durability="step", backend="lsm").close()
    opened(tmp_path / "b", durability="checkpoint", backend="file").close()


def test_a_store_that_is_read_only_is_opened_to_train(tmp_path: Path) -> None:
    trained(tmp_path / "store")
    with opened(tmp_path / "store", read_only=True) as store:
        emb = collection(store)
        remedy = "open it without read_only to train or to checkpoint"
        with refused(tb.UnsupportedError, remedy):
            step(emb)
        with refused(tb.UnsupportedError, remedy):
            store.checkpoint("never")
    with opened(tmp_path / "store") as store:
        step(collection(store))
        store.checkpoint("more")


def test_a_closed_store_is_opened_again(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    emb = collection(store)
    store.checkpoint("one")
    store.close()
    with refused(tb.ClosedError, "open it again"):
        step(emb)
    with opened(tmp_path / "store") as store:
        step(collection(store))


def test_forward_order_takes_a_path_and_no_backend(tmp_path: Path) -> None:
    with refused(tb.InvalidError, "give a path and leave the backend out"):
        step(collection(opened(tmp_path / "a", order="forward", backend="file")))
    opened(tmp_path / "b", order="forward").close()


# ---------------------------------------------------------------- tables


def test_ids_out_of_range_fit_a_larger_table(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        emb = collection(store)
        with refused(tb.InvalidError, "check the ids, or make num_embeddings larger"):
            emb(bags(1, ROWS))
        emb(bags(1, ROWS - 1)).values().sum().backward()
    with opened(tmp_path / "b") as store:
        collection(store, table(rows=ROWS + 1))(bags(1, ROWS)).values().sum().backward()


def test_a_table_is_given_as_it_is_stored(tmp_path: Path) -> None:
    rows = trained(tmp_path / "store")
    remedy = "give the table as it is stored, or choose another name or folder"
    with opened(tmp_path / "store") as store:
        with refused(tb.InvalidError, remedy):
            collection(store, table(embedding_dim=2 * DIM))
        collection(store)
        collection(store, table("other", embedding_dim=2 * DIM))
        assert torch.equal(rows_of(store), rows)
    with opened(tmp_path / "new") as store:
        collection(store, table(embedding_dim=2 * DIM))


def test_a_table_has_the_seed_it_was_made_with(tmp_path: Path) -> None:
    rows = trained(tmp_path / "store", seed=3)
    remedy = "open the store with the seed it was made with (0 if none was given), or give the "
    with opened(tmp_path / "store") as store:
        with refused(tb.InvalidError, remedy) as caught:
            collection(store)
        seed = int(re.findall(r"give the table seed (\d+)", str(caught.value))[0])
        collection(store, table(seed=seed))
        assert torch.equal(rows_of(store), rows)
    with opened(tmp_path / "store", seed=3) as store:
        collection(store)
        assert torch.equal(rows_of(store), rows)


def test_an_open_vocabulary_is_stored_by_a_backend_that_grows(tmp_path: Path) -> None:
    remedy = "give num_embeddings, or choose the backend `file`"

    def fill(store: tb.Store, rows: int | None) -> None:
        emb = collection(store, table(rows=rows))
        for first in range(0, 5000, 500):
            step(emb, first if rows is None else 0, 500)

    with opened(tmp_path / "a", backend="mmap") as store, refused(tb.UnsupportedError, remedy):
        fill(store, None)
    with opened(tmp_path / "b", backend="mmap") as store:
        fill(store, ROWS)
    with opened(tmp_path / "c", backend="file") as store:
        fill(store, None)


def test_a_name_of_an_open_table_is_not_that_of_a_dense_one(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        collection(store, table(rows=None))
        remedy = "leave num_embeddings away, or choose another name"
        with refused(tb.InvalidError, remedy):
            collection(store, table())
        step(collection(store, table(rows=None)))
        collection(store, table("other"))


def test_a_dense_table_has_no_open_vocabulary(tmp_path: Path) -> None:
    trained(tmp_path / "store")
    with opened(tmp_path / "store") as store:
        remedy = "give its num_embeddings, or choose another name"
        with refused(tb.InvalidError, remedy):
            collection(store, table(rows=None))
        collection(store, table("other", rows=None))
        step(collection(store))


# ---------------------------------------------------------------- numbers and tensors


def test_a_gradient_that_is_not_finite_is_skipped_or_scaled(tmp_path: Path) -> None:
    remedy = (
        "find where the loss overflows, or skip such steps with set_grad_scaler or "
        "on_nonfinite='skip'"
    )
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        with refused(tb.InvalidError, remedy):
            (emb(bags(1)).values() * float("inf")).sum().backward()
        before = rows_of(store)
        skipping = collection(store, on_nonfinite="skip")
        (skipping(bags(1)).values() * float("inf")).sum().backward()
        assert skipping.skipped_steps == 1
        emb.set_grad_scaler(torch.amp.GradScaler("cpu"))
        (emb(bags(1)).values() * float("inf")).sum().backward()
        assert torch.equal(rows_of(store), before)


@pytest.mark.parametrize(
    ("wrong", "remedy", "mended"),
    [
        (lambda rows: rows.t().contiguous().t(), "pass tensor.contiguous()", "contiguous"),
        (lambda rows: rows.to_sparse(), "such as tensor.detach() or tensor.to_dense()", "to_dense"),
    ],
)
def test_a_tensor_that_cannot_be_shared(wrong: Any, remedy: str, mended: str) -> None:
    rows = torch.rand(2, DIM)
    with opened(None, backend="memory") as store:
        collection(store)
        with refused(tb.InvalidError, remedy):
            store.write_rows("item", 0, wrong(rows))
        store.write_rows("item", 0, getattr(wrong(rows), mended)())
        assert torch.equal(store.read_rows("item", 0, 2), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_of_a_device_is_passed_from_memory() -> None:
    rows = torch.rand(2, DIM, device="cuda")
    with opened(None, backend="memory") as store:
        collection(store)
        with refused(tb.InvalidError, "pass tensor.cpu()"):
            store.write_rows("item", 0, rows)
        store.write_rows("item", 0, rows.cpu())
        assert torch.equal(store.read_rows("item", 0, 2), rows.cpu())


def test_an_output_is_a_tensor_of_its_own() -> None:
    with opened(None, backend="memory") as store:
        collection(store)
        plan = store.native.plan([0], ["sum"])
        memory = torch.zeros(64, dtype=torch.int64)
        out = memory.view(torch.float32)[:DIM].view(1, DIM)
        ends = torch.tensor([0, 1])
        with refused(tb.InvalidError, "pass a tensor of its own, such as tensor.clone()"):
            store.native.lookup(plan, memory[:1], ends, None, out)
        store.native.lookup(plan, memory[:1].clone(), ends, None, out)


def test_a_backend_of_the_laboratory_is_part_of_its_build(tmp_path: Path) -> None:
    """Tests run where `make setup` was: the remedy was followed, and the store opens."""
    opened(tmp_path / "store", backend="hashdb").close()
