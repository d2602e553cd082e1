"""Versions that are cut while a model trains: are they the step they say, whatever happens?"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from publisher_kit import DIM, SIZES, Clock, Served, Training, rows_of

import tierbed as tb
from tierbed import _native
from tierbed.data import BatchOrder
from tierbed.serve import Server


def test_each_version_is_the_step_that_it_names(training: Training, clock: Clock) -> None:
    with training.publisher(delta_every=60) as publisher:
        for step in range(1, 60):
            training.step()
            training.note()
            clock.now_s += 20
            publisher.step()
            stats = publisher.stats()
            if stats.is_writing or stats.is_uploading or step % 3 == 0:
                publisher.promote("stable")  # waits for what is on its way
                Served(training).check(training)
        stats = publisher.stats()
    assert stats.full_count >= 1
    assert stats.delta_count >= 10
    assert (stats.failure_count, stats.last_error) == (0, None)
    # What was trained since the last version is published at the end.
    assert Served(training).check(training).step == training.steps
    assert publisher.stats().steps_behind == 0


def test_nothing_is_published_before_it_is_due(training: Training, clock: Clock) -> None:
    with training.publisher(delta_every="60s") as publisher:
        for _ in range(5):
            training.step()
            publisher.step()
        clock.now_s += 59
        publisher.step()
        assert publisher.stats().version is None
        assert not training.location.exists()
        clock.now_s += 1
        training.note()
        publisher.step()
        publisher.promote("stable")
        assert publisher.stats().version == 1
        assert publisher.stats().freshness_s == 0
        clock.now_s += 7
        assert publisher.stats().freshness_s == 7


def test_deltas_cost_what_changed_and_join_after_eight(training: Training) -> None:
    for _ in range(100):
        training.step()
    training.batch = 1
    with training.publisher(delta_every=60) as publisher:
        chains = []
        for _ in range(12):
            training.step()
            training.note()
            chains.append(publisher.publish_now().chain)
            served = Served(training).check(training)
            assert served.step == training.steps
    assert chains[0] == (1,)
    assert [len(chain) for chain in chains[1:9]] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert chains[9] == (1, 10)
    assert chains[10] == (1, 10, 11)
    found = tb.Versions(training.location).list()
    sizes = {one.version: one.file_bytes for one in found.versions}
    assert max(sizes[at] for at in range(2, 10)) < sizes[1]
    assert training.store.stats()["changes"]["deltas_compared"] == 0


def test_a_server_answers_from_the_chain(training: Training) -> None:
    """As servers do: deltas upon an open snapshot, one after the other."""
    with training.publisher() as publisher:
        for _ in range(4):
            training.step()
            training.note()
            publisher.publish_now()
    served = Served(training).check(training)
    assert len(served.folders) == 4
    with tb.Snapshot.open(served.folders[0]) as snapshot, Server(snapshot, "127.0.0.1:0") as server:
        for delta in served.folders[1:]:
            server.apply(delta)
        found = rows_of(snapshot)
        for name in SIZES:
            assert torch.equal(found[name], served.rows[name])
    # Upon the snapshot alone it would be wrong, and is refused.
    with (
        tb.Snapshot.open(served.folders[0]) as snapshot,
        Server(snapshot, "127.0.0.1:0") as server,
        pytest.raises(tb.InvalidError, match="not made against what answers now"),
    ):
        server.apply(served.folders[2])


def test_whole_versions_come_when_they_are_due(
    training: Training, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierbed.train import channel

    wall = Clock()
    monkeypatch.setattr(channel.time, "time", wall.monotonic, raising=False)
    with training.publisher(delta_every=60, full_every="1h") as publisher:
        counts = []
        for _ in range(8):
            training.step()
            training.note()
            wall.now_s += 1200
            publisher.publish_now()
            counts.append(publisher.stats().full_count)
            Served(training).check(training)
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3]
    assert publisher.stats().full_reason == "the last whole version is old enough"


def test_after_a_restart_the_chain_goes_on(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(20):
        training.step()
    with training.publisher() as publisher:
        publisher.publish_now()
        training.step()
        assert publisher.publish_now().chain == (1, 2)
        training.checkpoint()
        training.step()
        # Of a step that the next trainer goes back behind.
        assert publisher.publish_now().chain == (1, 2, 3)
    training.store.close()
    again = Training(tmp_path)
    assert again.steps == 21
    again.step()
    again.note()
    with again.publisher() as publisher:
        assert publisher.publish_now().chain == (1, 2, 4), "on the newest that the notes reach"
        assert publisher.stats().full_count == 0
    assert Served(again).check(again).step == 22
    again.store.close()


def test_where_the_notes_do_not_reach_a_whole_version_follows(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.checkpoint()
    with training.publisher() as publisher:
        publisher.publish_now()
    training.store.close()
    again = Training(tmp_path)
    again.step()
    again.note()
    with again.publisher() as publisher:
        assert publisher.publish_now().chain == (2,)
        reason = publisher.stats().full_reason
        assert reason is not None
        assert "does not know what changed" in reason
    Served(again).check(again)
    again.store.close()


def test_checkpoints_are_made_where_they_are_asked_for(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.publisher(checkpoint=training.checkpoint) as publisher:
        training.step()
        publisher.publish_now()
        training.step()
        publisher.publish_now()
    training.store.close()
    # What is served last can be trained on, and the whole version is known.
    again = Training(tmp_path)
    assert again.steps == 2
    again.step()
    again.note()
    with again.publisher() as publisher:
        assert publisher.publish_now().chain == (1, 3)
    Served(again).check(again)
    again.store.close()


def test_another_machine_brings_what_a_delta_is_made_against(training: Training) -> None:
    with training.publisher() as publisher:
        training.step()
        publisher.publish_now()
        training.step()
        publisher.publish_now()
    shutil.rmtree(training.folder / "store.published")
    training.step()
    training.note()
    with training.publisher() as publisher:
        assert publisher.publish_now(full=False).chain == (1, 2, 3)
        Served(training).check(training)
        training.step()
        training.note()
        assert publisher.publish_now(full=True).chain == (4,)
    Served(training).check(training)


def test_a_damaged_base_makes_the_next_version_whole(training: Training) -> None:
    with training.publisher() as publisher:
        training.step()
        publisher.publish_now()
        local = training.folder / "store.published" / "canary"
        # Rows that were noted are not compared: of the base a delta needs the manifest.
        (pages,) = local.glob("*/rows.pages")
        pages.write_bytes(bytes(pages.stat().st_size))
        training.step()
        training.note()
        assert publisher.publish_now().chain == (1, 2)
        Served(training).check(training)
        for manifest in local.glob("*/snapshot.json"):
            manifest.write_bytes(bytes(manifest.stat().st_size))
        for _ in range(10):
            training.step()
        training.note()
        assert publisher.publish_now().chain == (3,)
        assert publisher.stats().full_reason == "the channel's snapshot is not in the local folder"
    Served(training).check(training)


def test_a_delta_that_cannot_be_made_is_a_whole_version(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = training.store.publish

    def refuse(*given: Any, **named: Any) -> Any:
        if named.get("base") is not None:
            raise tb.CorruptionError("attachment is missing or changed", {})
        return publish(*given, **named)

    with training.publisher() as publisher:
        training.step()
        publisher.publish_now()
        monkeypatch.setattr(training.store, "publish", refuse)
        training.step()
        training.note()
        assert publisher.publish_now().chain == (2,)
        reason = publisher.stats().full_reason
        assert reason is not None
        assert reason.startswith("no delta could be made: attachment is missing")
    Served(training).check(training)


class Failing:
    """Pushes that fail, as often as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.push: Callable[..., Any] = _native.push_version
        self.left, self.is_late = 0, False
        monkeypatch.setattr(_native, "push_version", self)

    def __call__(self, *given: Any) -> Any:
        if self.left == 0:
            return self.push(*given)
        self.left -= 1
        if self.is_late:
            self.push(*given)
        raise tb.IoError("connection reset")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def test_a_failed_push_is_told_and_done_again(
    training: Training, clock: Clock, failing: Failing
) -> None:
    with training.publisher(delta_every=60) as publisher:

        def due() -> tb.results.PublisherStats:
            training.step()
            training.note()
            clock.now_s += 60
            publisher.step()
            publisher._guard(publisher._wait)
            return publisher.stats()

        failing.left = 1
        stats = due()
        assert (stats.version, stats.failure_count) == (None, 1)
        assert stats.last_error == "connection reset"
        # The whole version that was written is pushed again, not written again.
        assert due().version == 1
        assert Served(training).check(training).step == 1
        assert publisher.stats().last_error is None
        failing.left = 2
        assert due().version == 1
        assert due().failure_count == 3
        stats = due()
        assert (stats.version, stats.delta_count) == (2, 1)
        assert Served(training).check(training).step == 5
        kept = training.folder / "store.published" / "canary"
        assert len([one for one in kept.iterdir() if one.is_dir()]) == 2


def test_a_push_that_only_seemed_to_fail_is_no_other_publisher(
    training: Training, failing: Failing
) -> None:
    failing.is_late = True
    with training.publisher() as publisher:
        for at in range(1, 4):
            failing.left = 1
            training.step()
            training.note()
            assert publisher.publish_now().chain == tuple(range(1, at + 1))
            Served(training).check(training)


def test_errors_are_raised_where_that_is_asked_for(training: Training, failing: Failing) -> None:
    failing.left = 9
    publisher = training.publisher(delta_every=0, on_error="raise")
    training.step()
    publisher.step()
    with pytest.raises(tb.IoError, match="connection reset"):
        publisher.close()


def test_of_two_publishers_one_is_told(tmp_path: Path) -> None:
    one, two = Training(tmp_path / "one"), Training(tmp_path / "two")
    two.location = one.location
    first, second = one.publisher(), two.publisher()
    one.step()
    first.publish_now()
    two.step()
    two.note()
    assert second.publish_now().chain == (2,), "it has other rows, and begins anew"
    one.step()
    one.note()
    with pytest.raises(tb.InvalidError, match="another publisher moved ads/canary to 2"):
        first.publish_now()
    # It is not taken back by the next one that is due, but by a word.
    with pytest.raises(tb.InvalidError, match=r"take the channel over with publish_now\(full=Tr"):
        first.publish_now()
    first.step()
    assert first.stats().last_error is not None
    Served(two).check(two)
    assert first.publish_now(full=True).version == 3
    Served(one).check(one)
    one.step()
    one.note()
    assert first.publish_now().chain == (3, 4)
    Served(one).check(one)
    for publisher in (first, second):
        publisher.close()
    for training in (one, two):
        training.store.close()


def test_a_rollback_by_hand_is_not_undone(training: Training) -> None:
    publisher = training.publisher()
    for _ in range(2):
        training.step()
        publisher.publish_now()
    tb.Versions(training.location).rollback("canary", to=1)
    training.step()
    with pytest.raises(tb.InvalidError, match="another publisher moved ads/canary to 1"):
        publisher.publish_now()
    publisher.close()
    found = tb.Versions(training.location).channel("canary")
    assert found is not None
    assert found.version == 1


def test_old_versions_are_pruned_and_none_that_a_channel_has(training: Training) -> None:
    with training.publisher(keep="0s") as publisher:
        training.step()
        publisher.publish_now(full=True)
        publisher.promote("stable")
        for _ in range(3):
            training.step()
            publisher.publish_now(full=True)
        training.step()
        training.note()
        publisher.publish_now()
    versions = tb.Versions(training.location)
    assert [one.version for one in versions.list().versions] == [1, 4, 5]
    Served(training).check(training)
    Served(training, "stable")


def test_a_delta_needs_a_version(training: Training) -> None:
    with training.publisher() as publisher:
        training.step()
        with pytest.raises(tb.InvalidError, match="publish a whole version first"):
            publisher.publish_now(full=False)
        training.note()
        publisher.publish_now(full=True)
        training.step()
        training.note()
        assert publisher.publish_now(full=False).chain == (1, 2)
    Served(training).check(training)


def test_rows_come_coded_as_they_are_asked_for(training: Training) -> None:
    with training.publisher(codec="f16") as publisher:
        for _ in range(3):
            training.step()
            publisher.publish_now()
    served = Served(training)
    for name, size in SIZES.items():
        rows = training.store.read_rows(name, 0, size)
        # Rows never written are exact.
        coded = rows.half().float()
        is_right = (served.rows[name] == coded) | (served.rows[name] == rows)
        assert bool(is_right.all())
        assert not torch.equal(served.rows[name], rows)


class Epochs:
    """A loader of a known order."""

    def __init__(self, training: Training, count: int) -> None:
        self.training, self.count = training, count

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (self.training.draw(at) for at in range(self.count))

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return self.epoch()

    def known_order(self) -> BatchOrder:
        return BatchOrder("publisher", self.epoch, 0, self.count)


@pytest.mark.parametrize("shards", [1, 2])
def test_in_forward_order_versions_are_cut_where_epochs_end(
    tmp_path: Path, clock: Clock, shards: int
) -> None:
    training = Training(tmp_path, order="forward", shards=shards, dram_budget="64MiB")
    loader = Epochs(training, 6)
    published = []
    with training.publisher(delta_every=60) as publisher:
        for _ in range(4):
            for batch in tb.lookahead(loader, training.emb, window=3, key=lambda batch: batch):
                training.train_on(batch)
                clock.now_s += 45
                publisher.step()
                publisher._wait()
                version = publisher.stats().version
                if version is not None and version > len(published):
                    published.append(training.steps)
        assert published == [6, 12, 18, 24]
        assert publisher.stats().delta_count >= 1
    training.note()
    assert Served(training).check(training).step == 24
    training.store.close()


@pytest.mark.parametrize("options", [{"backend": "cold"}, {"order": "window", "shards": 2}])
def test_every_store_publishes(tmp_path: Path, options: dict[str, Any]) -> None:
    training = Training(tmp_path, **{"dram_budget": "64MiB", **options})
    with training.publisher() as publisher:
        for _ in range(5):
            for _ in range(3):
                training.step()
            training.note()
            publisher.publish_now()
            assert Served(training).check(training).step == training.steps
        assert publisher.stats().delta_count >= 3
    training.store.close()


def test_rows_that_look_ahead_brought_are_published_too(training: Training, clock: Clock) -> None:
    batches = [training.draw(at) for at in range(30)]
    with training.publisher(delta_every=10) as publisher:
        for batch in tb.lookahead(batches, training.emb, window=8, key=lambda batch: batch):
            training.train_on(batch)
            clock.now_s += 3
            training.note()
            publisher.step()
            publisher._wait()
        assert publisher.stats().delta_count >= 4
    Served(training).check(training)


def test_open_vocabularies_are_published_with_what_was_evicted(tmp_path: Path) -> None:
    store = tb.Store.open(tmp_path / "store", dram_budget="32MiB", order="window")
    table = tb.EmbeddingBagConfig(
        name="item",
        num_embeddings=None,
        embedding_dim=DIM,
        virtual_table_eviction_policy=tb.TimestampBasedEvictionPolicy(eviction_ttl_mins=5),
    )
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.5))

    def ask(source: Any, ids: torch.Tensor) -> torch.Tensor:
        bags = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
        found: torch.Tensor = source(bags)["item"].detach().clone()
        return found

    wanted = torch.arange(1, 40) * 2**33
    with tb.Publisher(store, None, tmp_path / "ads") as publisher:
        for at in range(6):
            ids = torch.arange(1 + 6 * at, 8 + 6 * at) * 2**33
            ask(emb, ids)
            bags = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
            emb(bags).values().sum().backward()
            if at == 3:
                store.evict(now_mins=(1 << 32) - 1)
            publisher.publish_now()
    assert publisher.stats().delta_count >= 3
    pulled = tb.Versions(tmp_path / "ads").pull(tmp_path / "here", channel="canary")
    whole = Path(pulled.folders[0])
    for at, delta in enumerate(pulled.folders[1:]):
        tb.Snapshot.apply(whole, delta, tmp_path / f"whole-{at}")
        whole = tmp_path / f"whole-{at}"
    with tb.Snapshot.open(whole) as snapshot:
        whole = tmp_path / "whole"
        store.publish(whole)
        with tb.Snapshot.open(whole) as full:
            assert torch.equal(ask(snapshot.lookup, wanted), ask(full.lookup, wanted))
    store.close()


def test_a_full_disk_is_told_and_training_goes_on(training: Training) -> None:
    import resource

    with training.publisher() as publisher:
        training.step()
        publisher.publish_now()
        for _ in range(40):
            training.step()
        # So that the store itself has nothing to write.
        training.checkpoint()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        import signal

        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            with pytest.raises(tb.TierbedError):
                publisher.publish_now()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        training.step()
        training.note()
        publisher.publish_now()
        stats = publisher.stats()
        assert (stats.failure_count, stats.last_error) == (1, None)
    Served(training).check(training)


def test_a_forked_child_has_no_publisher(training: Training) -> None:
    with training.publisher() as publisher:
        training.step()
        publisher.publish_now()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            for call in (publisher.step, publisher.publish_now, lambda: publisher.promote("a")):
                with contextlib.suppress(BaseException):
                    try:
                        call()
                    except tb.ClosedError as error:
                        told.append(str(error))
            publisher.close()
            os.write(writing, json.dumps(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = json.loads(os.read(reading, 1 << 16))
        os.close(reading)
        os.close(writing)
        assert len(told) == 3
        assert all("publish there, or make one where the store is opened" in text for text in told)
        training.step()
        training.note()
        publisher.publish_now()
    Served(training).check(training)


def test_a_publisher_is_neither_copied_nor_used_behind_its_end(training: Training) -> None:
    publisher = training.publisher()
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(tb.UnsupportedError, match="make it where the store trains"):
            copied(publisher)
    publisher.close()
    publisher.close()
    with pytest.raises(tb.ClosedError, match="make a new one, which goes on from here"):
        publisher.step()
    training.step()
    training.note()
    with training.publisher() as publisher:
        publisher.publish_now()
    Served(training).check(training)


def test_behind_an_error_nothing_is_published(training: Training) -> None:
    with contextlib.suppress(ZeroDivisionError), training.publisher() as publisher:
        training.step()
        publisher.step()
        raise ZeroDivisionError
    assert not training.location.exists()


def test_wrong_arguments_name_the_remedy(training: Training) -> None:
    with pytest.raises(tb.InvalidError, match="give local"):
        tb.Publisher(tb.Store.open(backend="memory"), None, training.location)
    with pytest.raises(tb.InvalidError, match="delta_every=None"):
        training.publisher(placement="rows.tbp")
    with pytest.raises(tb.InvalidError, match="write for example 60s"):
        training.publisher(delta_every="soon")
    first = training.publisher()
    with pytest.raises(tb.ClosedError, match="close it, or give local another folder"):
        training.publisher()
    training.publisher(local=training.folder / "other").close()
    first.close()


def test_a_store_without_a_folder_publishes_from_a_given_one(tmp_path: Path) -> None:
    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=50, embedding_dim=DIM)
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.5))
    ids = torch.arange(20)
    bags = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
    with tb.Publisher(store, None, tmp_path / "ads", local=tmp_path / "local") as publisher:
        for _ in range(3):
            emb(bags).values().sum().backward()
            publisher.publish_now()
        assert publisher.stats().delta_count == 1
    store.close()


def test_a_placement_is_published_whole(training: Training) -> None:
    queries = (torch.tensor([0, 5, 9, 5, 9]), torch.tensor([0, 3, 5]))
    log = tb.QueryLog.from_batches(SIZES["item"], [queries] * 20)
    placed = training.folder / "item.tbp"
    tb.place(log).write(placed)
    with training.publisher(placement={"item": placed}, delta_every=None) as publisher:
        for at in (1, 2):
            training.step()
            training.note()
            assert publisher.publish_now().chain == (at,)
            Served(training).check(training)
