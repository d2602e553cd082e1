"""Positions, shuffles, ranks and workers: every sample once, and the same order after a resume."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from torch.utils.data import DataLoader

import tierbed as tb
from tierbed.data import ColumnData, CriteoData, build_vocabulary
from tierbed.data.order import known_order
from tierbed.errors import InvalidError
from tierbed_bench.generator import GeneratedData, write_criteo_tsv

pyarrow = pytest.importorskip("pyarrow")

from columns_kit import FLAT, SAMPLES, log, numbers, parquet_files, read, same  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log as Parquet and as CSV, a source with counted rows and a stream."""
    folder = tmp_path_factory.mktemp("positions")
    parquet_files(folder)
    pyarrow.csv.write_csv(log().drop_columns(["tags"]), folder / "log.csv")
    return folder


KINDS = ("part_*.parquet", "log.csv")


def opened(files: Path, kind: str, **more: Any) -> ColumnData:
    return read(str(files / kind), ids=FLAT, **more)


@settings(max_examples=20, deadline=None)
@given(data=strategies.data())
def test_every_sample_comes_once_over_ranks_and_workers(files: Path, data: Any) -> None:
    draw = data.draw
    kind = draw(strategies.sampled_from(KINDS))
    world_size = draw(strategies.integers(1, 4))
    workers = draw(strategies.integers(1, 3))
    size = draw(strategies.integers(1, 40))
    shuffle = draw(strategies.sampled_from([0, 1, 16, 50, 1000]))
    first, stop = sorted(draw(strategies.tuples(*[strategies.integers(0, SAMPLES)] * 2)))
    whole = opened(files, kind, batch_size=size, shuffle=shuffle, seed=4).part(first, stop)
    found: list[int] = []
    for rank in range(world_size):
        share = whole.shard(rank, world_size)
        alone = numbers(share)
        # As a DataLoader has its workers take turns.
        turns = [[b for _, b in share.walk(0, share_of(at, workers))] for at in range(workers)]
        in_turn = [turns[at % workers][at // workers] for at in range(sum(map(len, turns)))]
        assert numbers(in_turn) == alone
        found += alone
    assert sorted(found) == list(range(first, stop))
    if world_size == 1 and not shuffle:
        assert found == list(range(first, stop))
    even = [list(whole.shard(rank, world_size, even=True)) for rank in range(world_size)]
    assert len({tuple(map(len, batches)) for batches in even}) == 1
    left_out = stop - first - sum(len(batch) for batches in even for batch in batches)
    most = world_size if kind.endswith("parquet") else world_size * size
    assert 0 <= left_out < max(most, 1) or world_size == 1


def share_of(at: int, workers: int) -> Any:
    from tierbed.data.dataset import WorkerPart

    return WorkerPart(at, workers)


@settings(max_examples=20, deadline=None)
@given(data=strategies.data())
def test_a_position_is_exact_to_the_batch(files: Path, data: Any) -> None:
    draw = data.draw
    kind = draw(strategies.sampled_from(KINDS))
    options: dict[str, Any] = {
        "batch_size": draw(strategies.integers(1, 30)),
        "shuffle": draw(strategies.sampled_from([0, 7, 40])),
        "seed": draw(strategies.integers(0, 3)),
    }
    world_size = draw(strategies.integers(1, 3))
    rank = draw(strategies.integers(0, world_size - 1))
    epoch = draw(strategies.integers(0, 2))

    def fresh() -> ColumnData:
        return opened(files, kind, **options).shard(rank, world_size)

    first = fresh()
    first.set_epoch(epoch)
    batches = list(first)
    done = draw(strategies.integers(0, len(batches)))
    walk = iter(first)
    for _ in range(done):
        next(walk)
    state = json.loads(json.dumps(first.state_dict()))
    again = fresh()
    again.load_state_dict(state)
    rest = list(again)
    assert len(rest) == len(batches) - done
    assert all(same(one, other) for one, other in zip(rest, batches[done:], strict=True))
    # The next epoch begins at the beginning.
    assert numbers(again) == numbers(batches)


def test_a_shuffle_mixes_and_depends_on_seed_and_epoch(files: Path) -> None:
    data = opened(files, KINDS[0], shuffle=50, seed=1)
    order = numbers(data)
    assert sorted(order) == list(range(SAMPLES))
    assert order != sorted(order)
    # Samples of far row groups stand side by side.
    assert sum(abs(a - b) > 20 for a, b in pairwise(order)) > SAMPLES / 3
    assert numbers(data) == order
    data.set_epoch(1)
    assert numbers(data) != order
    data.set_epoch(0)
    assert numbers(data) == order
    assert numbers(opened(files, KINDS[0], shuffle=50, seed=2)) != order
    # The order does not depend on the size of batches.
    assert numbers(opened(files, KINDS[0], shuffle=50, seed=1, batch_size=3)) == order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_with_workers_yields_the_batches_of_the_dataset(
    files: Path, kind: str, workers: int
) -> None:
    data = opened(files, kind, shuffle=30, seed=2)
    expected = list(data)
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    for _ in range(2):
        found = list(loader)
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    walk = iter(data)
    next(walk), next(walk)
    found = list(DataLoader(data, batch_size=None, num_workers=workers))
    assert all(same(one, other) for one, other in zip(found, expected[2:], strict=True))


def test_workers_that_live_on_hear_of_the_epoch_and_of_an_early_end(files: Path) -> None:
    data = opened(files, KINDS[0], shuffle=30, seed=2)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        data.set_epoch(epoch)
        next(iter(loader))
        assert numbers(loader) == numbers(data)


def test_text_logs_and_generated_samples_work_with_workers_and_ranks(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "log", 200, scale=0.001, seed=3)
    build_vocabulary(tmp_path / "log", tmp_path / "v")
    for whole in (
        CriteoData(tmp_path / "log", tmp_path / "v", 16),
        GeneratedData(0.001, 200, 16, seed=3),
    ):
        expected = list(whole)
        found = list(DataLoader(whole, batch_size=None, num_workers=2))
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))
        labels = torch.cat([batch.label for at in range(3) for batch in whole.shard(at, 3)])
        assert torch.equal(labels, torch.cat([batch.label for batch in expected]))
        assert {whole.shard(at, 3, even=True).count() for at in range(3)} == {66}


def test_the_text_of_a_log_has_the_ids_of_its_columns(tmp_path: Path) -> None:
    """One vocabulary for both readers, one row per token."""
    import pyarrow.csv

    write_criteo_tsv(tmp_path / "log", 200, scale=0.001, seed=3)
    build_vocabulary(tmp_path / "log", tmp_path / "v")
    text = CriteoData(tmp_path / "log", tmp_path / "v", 64)
    names = ["label", *(f"I{at}" for at in range(1, 14)), *text.feature_names]
    table = pyarrow.csv.read_csv(
        tmp_path / "log",
        read_options=pyarrow.csv.ReadOptions(column_names=names),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={name: pyarrow.string() for name in text.feature_names},
            strings_can_be_null=True,
        ),
    )
    data = tb.data.columns(
        table,
        ids={name: tb.data.Tokens() for name in text.feature_names},
        label="label",
        dense=names[1:14],
        missing="fill",
        log_dense=True,
        batch_size=64,
        vocabulary=tmp_path / "w",
    )
    assert data.table_sizes() == text.table_sizes()
    for one, other in zip(data, text, strict=True):
        assert torch.equal(one.sparse.values(), other.sparse.values())
        assert torch.equal(one.label, other.label)
        assert torch.allclose(one.dense, other.dense)


def test_the_position_of_a_worker_goes_back_to_that_worker(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchdata's StatefulDataLoader does, in one process."""
    from types import SimpleNamespace

    from tierbed.data import dataset

    whole = list(opened(files, KINDS[0]))

    def inside(at: int, of: int = 2) -> None:
        monkeypatch.setattr(
            dataset, "get_worker_info", lambda: SimpleNamespace(id=at, num_workers=of)
        )

    for taken in (0, 1, 3):
        states = []
        for at in range(2):
            inside(at)
            worker = opened(files, KINDS[0])
            walk = iter(worker)
            for number in range(taken):
                assert same(next(walk), whole[2 * number + at])
            states.append(json.loads(json.dumps(worker.state_dict())))
        for at, state in enumerate(states):
            inside(at)
            worker = opened(files, KINDS[0])
            worker.load_state_dict(state)
            rest = list(worker)
            expected = whole[2 * taken + at :: 2]
            assert all(same(one, other) for one, other in zip(rest, expected, strict=True))
    other = opened(files, KINDS[0])
    other.load_state_dict(states[0])
    inside(0, of=3)
    with pytest.raises(InvalidError, match="resume with as many workers"):
        next(iter(other))


def test_the_state_of_other_data_is_refused(files: Path) -> None:
    state = opened(files, KINDS[0]).state_dict()
    for other in (
        opened(files, KINDS[0], shuffle=5),
        opened(files, KINDS[0], dense=[]),
        opened(files, KINDS[0]).shard(0, 2),
        opened(files, KINDS[0]).part(0, 5),
        opened(files, "part_0.parquet"),
    ):
        with pytest.raises(InvalidError, match="other data"):
            other.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_sent_to_workers_by_path(files: Path, kind: str) -> None:
    data = opened(files, kind, shuffle=20)
    sent = pickle.dumps(data)
    assert numbers(pickle.loads(sent)) == numbers(data)


def test_a_vocabulary_is_sent_to_workers_by_path(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "log", 100, scale=0.001, seed=3)
    build_vocabulary(tmp_path / "log", tmp_path / "v")
    ids = {"site": tb.data.Tokens()}
    for data in (
        CriteoData(tmp_path / "log", tmp_path / "v", 16),
        tb.data.columns(log(), ids=ids, batch_size=16, vocabulary=tmp_path / "w"),
    ):
        sent = pickle.dumps(data)
        for one, other in zip(pickle.loads(sent), data, strict=True):
            assert torch.equal(one.sparse.values(), other.sparse.values())


def test_counts_and_lengths(files: Path) -> None:
    data = opened(files, KINDS[0])
    assert (data.count(), len(data)) == (SAMPLES, 13)
    assert (data.shard(1, 2).count(), len(data.shard(1, 2))) == (52, 7)
    train, held = data.split_last(0.2)
    assert (numbers(train), numbers(held)) == (list(range(82)), list(range(82, SAMPLES)))
    stream = opened(files, KINDS[1])
    with pytest.raises(TypeError, match="call count"):
        len(stream)
    assert stream.count() == SAMPLES
    train, held = stream.split_last(0.2)
    assert (numbers(train), numbers(held)) == (list(range(82)), list(range(82, SAMPLES)))
    reader = read(log().to_reader())
    with pytest.raises(InvalidError, match="not known"):
        reader.count()
    assert numbers(reader) == list(range(SAMPLES))
    with pytest.raises(InvalidError, match="read once"):
        list(reader)
    with pytest.raises(InvalidError, match="rank must be"):
        data.shard(2, 2)
    with pytest.raises(InvalidError, match="divide those of all ranks"):
        data.shard(0, 2).shard(0, 2)


def test_orders_are_known_where_the_source_tells_them(files: Path) -> None:
    for source in (str(files / KINDS[0]), str(files / KINDS[1]), log()):
        data = read(source, ids=FLAT, shuffle=20, seed=1)
        order, again = known_order(data, None), known_order(read(source, ids=FLAT), None)
        assert not isinstance(order, str)
        assert not isinstance(again, str)
        assert order.fingerprint != again.fingerprint
        assert numbers(order.batches()) == numbers(data)
        loader = DataLoader(data, batch_size=None, num_workers=2)
        of_loader = known_order(loader, None)
        assert not isinstance(of_loader, str)
        assert of_loader.fingerprint == order.fingerprint
        assert isinstance(known_order(DataLoader(data, 2, collate_fn=list), None), str)
        data.set_epoch(1)
        other = known_order(data, None)
        assert not isinstance(other, str)
        assert other.fingerprint != order.fingerprint
    assert known_order(read(log().to_reader()), None) == "a RecordBatchReader can be read once"
    changed = log().set_column(2, "user", pyarrow.array([1] * SAMPLES, pyarrow.int32()))
    one, other = known_order(read(log()), None), known_order(read(changed), None)
    assert not isinstance(one, str)
    assert not isinstance(other, str)
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_ahead_goes_on_in_its_epoch(files: Path, workers: int) -> None:
    def ahead(store: tb.Store) -> tuple[ColumnData, Any]:
        data = read(str(files / KINDS[0]), ids={"user": 1000}, shuffle=40, seed=3)
        loader = DataLoader(data, batch_size=None, num_workers=workers)
        emb = tb.EmbeddingBagCollection(data.tables(4), store=store)
        return data, tb.lookahead(loader if workers else data, emb, window=4)

    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        data, first = ahead(store)
        data.set_epoch(2)
        expected = numbers(data)
        walk = iter(first)
        found = numbers([next(walk) for _ in range(3)])
        state = first.state_dict()
        walk.close()
        _, again = ahead(store)
        again.load_state_dict(state)
        assert found + numbers(again) == expected


def test_planning_moves_and_counts_nothing() -> None:
    table = log().set_column(2, "user", pyarrow.array([None, *range(1, SAMPLES)]))
    data = read(table, ids={"user": 1000}, missing="fill").shard(0, 2)
    order = known_order(data, None)
    assert not isinstance(order, str)
    assert numbers(order.batches()) == numbers(data)
    assert data.missing_counts == {"user": 1}


def test_training_in_forward_order_has_the_rows_of_training_by_window(
    files: Path, tmp_path: Path
) -> None:
    rows = []
    for order in ("forward", "window"):
        ids = {"user": 1000}
        data = read(str(files / KINDS[0]), ids=ids, shuffle=40, seed=3)
        with tb.Store.open(tmp_path / order, dram_budget="16MiB", order=order) as store:
            emb = tb.EmbeddingBagCollection(data.tables(4), store=store)
            loader = DataLoader(data, batch_size=None, num_workers=1)
            for batch in tb.lookahead(loader, emb):
                emb(batch.sparse).values().sin().sum().backward()
            rows.append(store.read_rows("user", 0, 1000))
    assert torch.equal(*rows)
