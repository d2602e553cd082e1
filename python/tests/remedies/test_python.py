"""Remedies of the Python package's own errors: the wrong call, what it advises, the right call."""

# ruff: noqa: SIM117 - what is open stands apart from what is refused.

from __future__ import annotations

import copy
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed import tables
from tierbed.cli import main
from tierbed.placement import import_tables
from tierbed.recipes.metrics import auc

from .kit import (
    BUDGET,
    ROWS,
    bags,
    collection,
    opened,
    refused,
    rows_of,
    snapshot_of,
    step,
    table,
    trained,
)

Call = Callable[[tb.Store], Any]


def _bag(store: tb.Store, **options: Any) -> tb.EmbeddingBag:
    return tb.EmbeddingBag(10, 4, store=store, **options)


def _twice(store: tb.Store, first: str | None, second: str | None) -> None:
    _bag(store, name=first)
    _bag(store, name=second)


def _jagged(*keys: str) -> tb.KeyedJaggedTensor:
    ids = torch.arange(len(keys))
    return tb.KeyedJaggedTensor(list(keys), ids, lengths=torch.ones_like(ids))


def _lookahead(store: tb.Store, **options: Any) -> None:
    emb = collection(store)
    for batch in tb.lookahead([{"ids": bags(1)}], emb, window=2, **options):
        emb(batch["ids"])


def _epochs(store: tb.Store, loader: Any) -> None:
    ahead = tb.lookahead(loader, collection(store), window=2, key=lambda batch: batch)
    for _ in range(2):
        assert len(list(ahead)) == 2


def _change(store: tb.Store, **options: Any) -> None:
    first = collection(store, optimizer=tb.SGD(lr=0.1))
    collection(store, **{"optimizer": None, **options})
    assert first.table_names() == ["item"]
    store.set_learning_rate(0.2, ["item"])


def _ids(store: tb.Store, ids: torch.Tensor) -> None:
    lengths = torch.ones(len(ids), dtype=torch.int64)
    collection(store)(tb.KeyedJaggedTensor(["item"], ids, lengths=lengths))


IDS = torch.tensor([1, 2], dtype=torch.int64)

CASES: list[tuple[str, Call, Call]] = [
    (
        "write for example 16MiB, 4GiB or 4000000000",
        lambda _: opened(None, backend="memory", dram_budget="lots"),
        lambda _: [
            opened(None, backend="memory", dram_budget=size).close()
            for size in ("16MiB", "4GiB", "4000000000", 4000000000)
        ],
    ),
    ("give tensor.long()", lambda s: _ids(s, IDS.float()), lambda s: _ids(s, IDS.float().long())),
    (
        "torch.as_tensor makes one",
        lambda _: tb.JaggedTensor([1, 2], lengths=IDS),  # type: ignore[arg-type]
        lambda _: tb.JaggedTensor(torch.as_tensor([1, 2]), lengths=torch.tensor([2])),
    ),
    (
        "use SGD, Adagrad, RowWiseAdagrad, Adam (lazy, as torch.optim.SparseAdam) or "
        "PartialRowWiseAdam",
        lambda s: collection(s, optimizer=torch.optim.LBFGS),
        lambda s: [
            collection(s, table(kind.__name__), optimizer=kind())
            for kind in (tb.SGD, tb.Adagrad, tb.RowWiseAdagrad, tb.Adam, tb.PartialRowWiseAdam)
        ],
    ),
    (
        "use EmbeddingConfig and EmbeddingCollection for rows that are not pooled",
        lambda s: collection(s, table(pooling=tb.PoolingType.NONE)),
        lambda s: tb.EmbeddingCollection(
            [tb.EmbeddingConfig(num_embeddings=9, embedding_dim=2, name="item")], store=s
        ),
    ),
    (
        "give each name=..., or the same name to share one table",
        lambda s: _twice(s, None, None),
        lambda s: [_twice(s, "a", "b"), _twice(s, "c", "c")],
    ),
    (
        "tierbed.Store.open(path) opens one",
        lambda _: collection("store"),
        collection,
    ),
    (
        "or make one with the same name, num_embeddings, embedding_dim and feature_names",
        lambda s: collection(s, tb.EmbeddingConfig(ROWS, 8, "item")),
        lambda s: collection(s, tb.EmbeddingBagConfig(ROWS, 8, "item")),
    ),
    (
        "give it an EmbeddingBagCollection or EmbeddingCollection",
        lambda _: tb.lookahead([], torch.nn.Linear(2, 2)),
        lambda s: tb.lookahead([], collection(s)),
    ),
    (
        "give lookahead a function that takes a batch and returns its KeyedJaggedTensor, such as "
        'key=lambda batch: batch["sparse"]',
        _lookahead,
        lambda s: _lookahead(s, key=lambda batch: batch["ids"]),
    ),
    (
        "for several epochs give an iterable that begins anew, such as a DataLoader",
        lambda s: _epochs(s, iter([bags(1), bags(2)])),
        lambda s: _epochs(s, [bags(1), bags(2)]),
    ),
    (
        "leave optimizer out to use that, or change the learning rate of the table with "
        "store.set_learning_rate(lr, tables)",
        lambda s: _change(s, optimizer=tb.SGD(lr=0.3)),
        _change,
    ),
    (
        "keep trained rows in fewer bytes in a tierbed.CodedStore",
        lambda s: collection(s, table(data_type=tb.DataType.FP16)),
        lambda s: tb.CodedStore.of(_with_rows(s), [table(data_type=tb.DataType.FP16)]),
    ),
    (
        "call eval() on the collection to train what is above it, or keep these tables in a "
        "tierbed.Store",
        lambda _: _coded_ranks(is_training=True),
        lambda s: [_coded_ranks(is_training=False), step(collection(s))],
    ),
    (
        "open it where it is used, and leave it out of what goes to other processes",
        pickle.dumps,
        lambda s: opened(None, backend="memory").close(),
    ),
    (
        "give one, or backend='memory'",
        lambda _: tb.Store.open(),
        lambda _: opened(None, backend="memory"),
    ),
    (
        "the model diverged, try a smaller learning rate",
        lambda _: auc(np.array([0, 1]), np.array([0.1, float("nan")])),
        lambda _: auc(np.array([0, 1]), np.array([0.1, 0.2])),
    ),
]


def _with_rows(store: tb.Store) -> tb.Store:
    step(collection(store))
    return store


def _coded() -> tb.CodedStore:
    with opened(None, backend="memory") as store:
        return tb.CodedStore.of(_with_rows(store), [table(data_type=tb.DataType.FP16)])


def _coded_ranks(*, is_training: bool) -> None:
    import tierbed.dist as tbd

    (rank,) = tbd.local_ranks(1)
    head = torch.nn.Linear(8, 1)
    tables = [table(data_type=tb.DataType.FP16)]
    with tbd.ShardedEmbeddingBagCollection(tables, store=_coded(), ranks=rank) as rows:
        head(rows.train(is_training)(bags(1)).values()).sum().backward()


@pytest.mark.parametrize(("remedy", "wrong", "right"), CASES, ids=[case[0][:40] for case in CASES])
def test_the_right_call_is_the_one_advised(remedy: str, wrong: Call, right: Call) -> None:
    for call, fails in ((wrong, True), (right, False)):
        with opened(None, backend="memory", dram_budget=BUDGET) as store:
            if not fails:
                call(store)
                continue
            with refused((tb.TierbedError, TypeError), remedy):  # type: ignore[arg-type]
                call(store)


def test_the_engine_refuses_to_train_coded_rows_too() -> None:
    remedy = "call eval() on the collection, or keep these tables in a tierbed.Store"
    head, coded = torch.nn.Linear(8, 1), table(data_type=tb.DataType.FP16)
    rows = collection(_coded(), coded, optimizer=None)
    with refused(tb.UnsupportedError, remedy):
        head(rows(bags(1)).values()).sum().backward()
    head(rows.eval()(bags(1)).values()).sum().backward()
    with opened(None, backend="memory") as store:
        step(collection(store))


def test_a_table_has_a_learning_rate_when_a_collection_uses_it(tmp_path: Path) -> None:
    trained(tmp_path / "store")
    with opened(tmp_path / "store") as store:
        with refused(tb.InvalidError, "make the collection first"):
            store.learning_rate("item")
        emb = collection(store)
        assert store.learning_rate("item") == 0.1
        assert emb


def test_a_loader_begins_where_the_store_stands(tmp_path: Path) -> None:
    from .test_order import Known, ahead, expected, train

    path = tmp_path / "store"
    with opened(path, order="forward") as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        for _ in range(4):
            train(emb, [next(batches)])
        store.checkpoint("four")
    remedy = "continue where the store stands with "
    for own in (0, 2, 6):
        shutil.copytree(path, tmp_path / f"copy{own}")
        with opened(tmp_path / f"copy{own}", order="forward") as store:
            emb = collection(store)

            def run(loader: Known, start: int, emb: Any = emb) -> None:
                train(emb, tb.lookahead(loader, emb, window=4, key=_itself, start=start))

            with refused(tb.InvalidError, remedy) as caught:
                run(Known(start=own), 3)
            told = str(caught.value)
            if own <= 4:
                run(Known(start=own), int(re.findall(r"with start=(\d+)", told)[0]))
            else:
                run(Known(start=int(re.findall(r"begins at batch (\d+), begin", told)[0])), 0)
            assert torch.equal(rows_of(store), expected(0))


def _itself(batch: Any) -> Any:
    return batch


def test_an_output_in_use_is_cloned_or_copied() -> None:
    import tierbed.dist as tbd

    remedy = "clone what is kept, or pass copies_outputs=True"
    (rank,) = tbd.local_ranks(1)

    def made(**options: Any) -> tbd.ShardedEmbeddingBagCollection:
        store = opened(None, backend="memory", dram_budget="16MiB")
        return tbd.ShardedEmbeddingBagCollection([table()], store=store, ranks=rank, **options)

    with made() as sharded:
        kept = sharded(bags(1)).values()
        clone = kept.clone()
        sharded(bags(1))
        with refused(tb.InvalidError, remedy):
            sharded(bags(1))
        del kept
        assert torch.equal(sharded(bags(1)).values(), clone)
    with made(exchange=tbd.ExchangeOptions(copies_outputs=True)) as sharded:
        outputs = [sharded(bags(1)).values() for _ in range(4)]
        assert all(torch.equal(output, clone) for output in outputs)


def test_a_snapshot_is_shared_or_opened_again(tmp_path: Path) -> None:
    import_tables({"item": torch.rand(9, 4)}, tmp_path / "snapshot")
    with snapshot_of(tmp_path / "snapshot") as snapshot:
        with refused(TypeError, "share it, or open it again"):
            copy.deepcopy(snapshot)
        with snapshot_of(tmp_path / "snapshot") as again:
            assert torch.equal(again.lookup(bags(1))["item"], snapshot.lookup(bags(1))["item"])
    with refused(tb.InvalidError, "give that too"):
        snapshot_of(tmp_path / "snapshot", tier_floor=1 << 16)
    budget = tb.TierBudget("1MiB")
    with snapshot_of(tmp_path / "snapshot", tier_budget=budget, tier_floor=1 << 16) as one:
        with refused(TypeError, "open it in the other process"):
            pickle.dumps(one)


def test_tables_go_into_files_that_hold_them(tmp_path: Path) -> None:
    path = tmp_path / "store"
    rows = trained(path)
    with opened(path) as store:
        with refused(tb.InvalidError, "end its name in one of ") as caught:
            tables.export_tables(store, tmp_path / "t.xyz", "item")
        for ending in re.findall(r"'(\.?\w+)'", str(caught.value).split("in one of")[1]):
            target = tmp_path / f"t.{ending.removeprefix('.')}"
            tables.export_tables(store, target, "item")
            tables.import_tables(store, target, "item")
        (tmp_path / "t.xyz").write_text("")
        with refused(tb.InvalidError, "use one of "):
            tables.import_tables(store, tmp_path / "t.xyz", "item")
        with refused(tb.InvalidError, "give file_format= (--format) for a folder"):
            tables.export_tables(store, tmp_path / "folder")
        tables.export_tables(store, tmp_path / "folder", file_format="npy")
        assert torch.equal(rows_of(store), rows)


def test_commands_name_what_they_lack(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "none").mkdir()
    trained(tmp_path / "store")
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "name the folder of a run, a store or a snapshot" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "store")]) == 0
    np.save(tmp_path / "t.npy", np.ones((5, 8), dtype="f4"))
    words = ["import", "--store", str(tmp_path / "store"), "--table", "new", "--create"]
    words += ["--file", str(tmp_path / "t.npy")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--create needs --optimizer" in said
    assert main([*words, "--optimizer", "sgd"]) == 0
