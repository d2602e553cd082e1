"""Remedies of data sources, training runs and the files of tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import tierbed as tb
from tierbed.cli import main
from tierbed.data import build_vocabulary
from tierbed.data.source import DataOptions, Source
from tierbed.recipes.run import Run, TrainOptions, load_run, read_run
from tierbed_bench.generator import GeneratedData, write_criteo_tsv

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
)

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

STORE = {"dram_budget": BUDGET}


def generated(samples: int = 64) -> GeneratedData:
    return GeneratedData(0.0005, samples, 16, seed=1)


def options(**changes: Any) -> TrainOptions:
    return replace(TrainOptions(embedding_dim=4, batch_size=16), **changes)


def source() -> Source:
    return Source(generated(), DataOptions(format="synthetic"), 64, 0)


def ran(folder: Path, **changes: Any) -> Run:
    run = Run(folder, source(), options(**changes), 64, store_options=STORE)
    run.train()
    return run


# ---------------------------------------------------------------- sources


def test_a_file_or_a_pattern_is_at_least_one(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "log.tsv", 20, scale=0.0005, seed=1)
    with refused(tb.InvalidError, "name at least one file or pattern"):
        build_vocabulary([], tmp_path / "v")
    assert build_vocabulary(tmp_path / "log.tsv", tmp_path / "v").sample_count == 20
    assert build_vocabulary(str(tmp_path / "*.tsv"), tmp_path / "w").sample_count == 20


def test_the_samples_of_a_text_log_are_counted(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "log.tsv", 20, scale=0.0005, seed=1)
    build_vocabulary(tmp_path / "log.tsv", tmp_path / "v")
    log = tb.data.CriteoData(tmp_path / "log.tsv", tmp_path / "v", 8).part(0, None)
    with refused(TypeError, "call count() first"):
        len(log)
    assert len(log.part(0, log.count())) == 3


def test_generated_samples_stop_where_one_says() -> None:
    with refused(tb.InvalidError, "say where to stop"):
        list(generated().batches(0, None, 16))
    assert sum(len(batch) for batch in generated().batches(0, 40, 16)) == 40


# ---------------------------------------------------------------- training runs


def test_a_run_goes_on_with_its_options(tmp_path: Path) -> None:
    ran(tmp_path / "run").close()
    remedy = "use the same options and data to continue it, or another folder"
    with refused(tb.InvalidError, remedy):
        ran(tmp_path / "run", lr=0.5)
    again = ran(tmp_path / "run")
    assert again.resumed_from_step == again.steps == 4
    again.close()
    ran(tmp_path / "other", lr=0.5).close()


def test_the_folder_of_a_run_is_that_of_its_training(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with refused(tb.InvalidError, "name the folder given to tierbed train as --store"):
        read_run(tmp_path / "none")
    ran(tmp_path / "run").close()
    assert read_run(tmp_path / "run")["options"]["embedding_dim"] == 4


def test_a_run_without_a_checkpoint_is_trained_first(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", source(), options(), 64, store_options=STORE)
    run.close()
    with refused(tb.InvalidError, "train it first"):
        load_run(tmp_path / "run", **STORE)
    ran(tmp_path / "run").close()
    store, _, _ = load_run(tmp_path / "run", **STORE)
    assert store.load_extra() is not None
    store.close()


def test_samples_remain_to_train_on(tmp_path: Path, capsys: Any) -> None:
    store = ["--store", str(tmp_path / "run"), "--dram-budget", BUDGET, "--dim", "4"]
    data = ["--format", "synthetic", "--scale", "0.0005", *store]
    assert main(["train", *data, "--samples", "1", "--eval-last", "0.9"]) == 2
    assert "check --data and --eval-last" in " ".join(capsys.readouterr().err.split())
    assert main(["train", *data, "--samples", "300", "--eval-last", "0.5"]) == 0


# ---------------------------------------------------------------- tables and collections


def test_reading_only_looks_at_a_path(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        collection(store)
        store.checkpoint("last", keep=True)
    with refused(tb.InvalidError, "give its path"):
        opened(None, backend="memory", read_only=True)
    for options in ({}, {"checkpoint": "last"}):
        with opened(tmp_path, read_only=True, **options) as store:
            assert rows_of(store).shape == (ROWS, 8)


def test_rows_of_a_snapshot_are_streamed_from_its_store(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        store.checkpoint("last")
        store.publish(tmp_path / "snapshot")
        with snapshot_of(tmp_path / "snapshot") as snapshot:
            served = tb.EmbeddingBagCollection([table()], store=snapshot)
            with refused(tb.UnsupportedError, "use the training store"):
                list(served.iter_full_state())
        assert sum(rows.shape[0] for _, _, rows in emb.iter_full_state()) == ROWS


def test_bags_with_inverse_indices_are_expanded_first(tmp_path: Path) -> None:
    class Shared:
        """TorchRec's bags of two samples, one of which serves both."""

        def __init__(self, bags: tb.KeyedJaggedTensor, inverse: Any) -> None:
            self.bags, self.inverse = bags, inverse

        def __getattr__(self, name: str) -> Any:
            return getattr(self.bags, name)

        def inverse_indices_or_none(self) -> Any:
            return self.inverse

    remedy = "expand it to one bag per sample and feature first"
    shared = Shared(bags(7), (["item"], torch.tensor([[0, 0]])))
    with opened(None, backend="memory") as store:
        emb = collection(store)
        # A collection gives samples their vectors by itself.
        assert emb(shared).values().shape == (2, 8)
        step(emb)
        store.publish(tmp_path / "snapshot")
    with snapshot_of(tmp_path / "snapshot") as snapshot:
        with refused(tb.UnsupportedError, remedy):
            snapshot.lookup(shared)
        assert snapshot.lookup(Shared(bags(7, 7), None)).values().shape == (2, 8)


def test_a_compiled_graph_ends_with_its_module() -> None:
    with opened(None, backend="memory") as store:
        emb = collection(store)
        # What a compiled graph holds of its module is this number.
        handle = emb._binding.handle

        def call() -> torch.Tensor:
            one = torch.tensor([1])
            found: torch.Tensor = torch.ops.tierbed.lookup(
                torch.zeros(1), one, torch.tensor([0, 1]), None, handle, 1, 8, True, False
            )
            return found

        expected = call()
        assert torch.equal(expected, emb(bags(1)).values())
        del emb
        with refused(tb.ClosedError, "keep the module alive while a compiled graph of it is used"):
            call()


def test_a_scaled_loss_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        emb, linear = collection(store), torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        store.checkpoint("before")
        before = rows_of(store)
        scaler.scale(linear(emb(bags(1)).values()).sum()).backward()
        with refused(tb.InvalidError, "call set_grad_scaler(scaler) on the collection before"):
            scaler.step(optimizer)
        assert not torch.equal(rows_of(store), before)
    with opened(tmp_path) as store:
        emb = collection(store)
        assert torch.equal(rows_of(store), before)
        emb.set_grad_scaler(scaler)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        emb.set_grad_scaler(scaler)
        scaler.scale(linear(emb(bags(1)).values()).sum()).backward()
        scaler.step(optimizer)
