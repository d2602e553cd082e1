"""Servers that follow a channel: each answer is of one version, whichever the channel is at."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deltas_served import (
    Training,
    _is,
    _predictions_by_http,
    _rows_by_http,
    _until,
)

import tierbed as tb
from tierbed.cli.serving import Followed, Reading, Recording, ask
from tierbed.serve import ServeOptions, Server

QUIET = ServeOptions(log_level="off")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.store.close()


def follow(folder: Path, **given: Any) -> tb.Follow:
    return tb.Follow(
        folder / "models",
        local=folder / "here",
        poll="20ms",
        sync_bandwidth="1GiB",
        dram_budget="16MiB",
        **given,
    )


def test_predictions_are_of_one_version_across_swaps(training: Training, tmp_path: Path) -> None:
    versions = tb.Versions(tmp_path / "models")
    versions.push(training.base, channel="stable")
    asked = [_rows_by_http, _predictions_by_http]
    stop = threading.Event()
    for number in range(1, 7):
        # Two deltas upon each other, then whole ones.
        training.delta(tmp_path / f"delta-{number}", is_chained=True)

    def ask_on(kind: int) -> int:
        count, wanted = 0, [pair[kind] for pair in training.wanted]
        while not stop.is_set():
            answer = asked[kind](server)
            [_] = [at for at, one in enumerate(wanted) if _is(kind, answer, one)]
            count += 1
        return count

    def is_at(number: int) -> bool:
        return all(_is(kind, asked[kind](server), training.wanted[number][kind]) for kind in (0, 1))

    with (
        Server(follow(tmp_path), "127.0.0.1:0", options=QUIET) as server,
        ThreadPoolExecutor() as pool,
    ):
        assert server.predicts
        assert is_at(0)
        try:
            going = [pool.submit(ask_on, kind) for kind in (0, 1, 0, 1)]
            for number in (1, 2):
                versions.push(tmp_path / f"delta-{number}", channel="stable")
                _until(lambda number=number: is_at(number))  # type: ignore[misc]
            for number in (3, 4, 5, 6):
                versions.push(training.whole(number), channel="stable")
                _until(lambda number=number: is_at(number))  # type: ignore[misc]
            for back, number in ((4, 3), (2, 1), (1, 0), (3, 2)):
                versions.rollback("stable", to=back)
                _until(lambda number=number: is_at(number))  # type: ignore[misc]
        finally:
            stop.set()
        assert all(one.result() > 0 for one in going)
        told = ask(f"http://{server.address}", "/health")
        assert (told["status"], told["version"]) == ("ok", 3)
        # Published by hand: nobody said when the step committed.
        assert told["freshness_s"] is None


def test_a_publisher_and_a_server_agree(tmp_path: Path) -> None:
    store = tb.Store.open(tmp_path / "store", dram_budget="16MiB", order="window")
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=50, embedding_dim=8)
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
    ids = tb.KeyedJaggedTensor(["item"], torch.arange(50), lengths=torch.ones(50).int())
    rows = {"features": {"item": {"values": list(range(50)), "offsets": list(range(51))}}}
    with tb.Publisher(store, None, tmp_path / "models", channel="stable") as publisher:
        emb(ids).values().sum().backward()
        publisher.step()
        began_s = time.time()
        publisher.publish_now()
        with Server(follow(tmp_path), "127.0.0.1:0", options=QUIET) as server:
            url = f"http://{server.address}"
            for _ in range(4):
                emb(ids).values().square().sum().backward()
                publisher.step()
                version = publisher.publish_now().version
                _until(lambda version=version: ask(url, "/health")["version"] == version)  # type: ignore[misc]
                answer = torch.tensor(ask(url, "/v1/lookup", rows)["features"]["item"])
                assert torch.equal(answer, emb(ids).values().detach())
            fresh_s = ask(url, "/health")["freshness_s"]
            assert 0 <= fresh_s <= time.time() - began_s
            told = next(
                line
                for line in ask(url, "/metrics").splitlines()
                if line.startswith("tierbed_freshness_seconds ")
            )
            assert float(told.split()[1]) >= fresh_s
    store.close()


def test_a_version_says_when_its_step_committed(training: Training, tmp_path: Path) -> None:
    store = training.store
    with tb.Publisher(store, None, tmp_path / "models", channel="stable") as publisher:
        publisher.publish_now()
    [told] = (tmp_path / "models" / "v").glob("*/att.committed.json")
    at_ms = json.loads(told.read_bytes())["committed_at_ms"]
    assert 0 <= time.time() * 1e3 - at_ms < 600_000
    # What is published by hand has the same bytes whenever that is.
    assert not (training.base / "att.committed.json").exists()
    wrong = tmp_path / "wrong"
    training.store.publish(wrong, attachments={"committed.json": b"soon"})
    with (
        tb.Snapshot.open(wrong) as snapshot,
        pytest.raises(tb.CorruptionError, match="publish again, without an attachment"),
    ):
        Server(snapshot, "127.0.0.1:0", options=QUIET)


def test_wrong_uses_name_the_remedy(training: Training, tmp_path: Path) -> None:
    with pytest.raises(tb.InvalidError, match="publish to it, or follow one that"):
        follow(tmp_path).begin()
    with pytest.raises(tb.InvalidError, match="see that the location can be reached"):
        follow(tmp_path).begin()
    versions = tb.Versions(tmp_path / "models")
    versions.push(training.base, channel="stable")
    for bad in ({"channel": "a/b"}, {"swap_share": 0.0}, {"readers": 0}):
        with pytest.raises(tb.InvalidError):
            follow(tmp_path, **bad).begin()
    following = follow(tmp_path).begin()
    with pytest.raises(tb.ClosedError, match="give each server its own folder"):
        follow(tmp_path).begin()
    assert (following.version, following.behind) == (1, None)
    server = following.serve("127.0.0.1:0", None, QUIET)
    with pytest.raises(tb.ClosedError, match="make another Follow, with a folder of its own"):
        following.snapshot()
    with pytest.raises(tb.InvalidError, match="push the delta to the channel"):
        server.apply(os.fspath(training.delta(tmp_path / "delta")))
    server.stop()
    deltas = ServeOptions(deltas=tmp_path, log_level="off")
    other = tb.Follow(tmp_path / "models", local=tmp_path / "other", sync_bandwidth="1GiB")
    with pytest.raises(tb.InvalidError, match="push the deltas to the channel, and leave out"):
        Server(other, "127.0.0.1:0", options=deltas)


def test_a_forked_child_is_refused(training: Training, tmp_path: Path) -> None:
    tb.Versions(tmp_path / "models").push(training.base, channel="stable")
    following = follow(tmp_path).begin()
    first = following.snapshot()
    child = os.fork()
    if child == 0:
        refused = 0
        for asks, remedy in (
            (lambda: following.version, "follow the channel in the process that shall answer"),
            (first.attachment_names, "open a snapshot of the version's folder"),
        ):
            try:
                asks()
            except tb.ClosedError as error:
                refused += remedy in str(error)
        os._exit(40 + refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42
    assert following.version == 1
    first.close()


def test_the_command_line_names_what_is_missing(tmp_path: Path) -> None:
    place = f"{tmp_path / 'models'}@stable"
    with pytest.raises(tb.InvalidError, match="add --local FOLDER, each server has its own"):
        Followed().follow(place, Reading(), Recording())
    recording = Recording(record=tmp_path / "log")
    with pytest.raises(tb.InvalidError, match="give them to a server of one version"):
        Followed(local=tmp_path / "here").follow(place, Reading(), recording)
    assert Followed().follow(str(tmp_path), Reading(), Recording()) is None
    followed = Followed(local=tmp_path / "here").follow(place, Reading(), Recording())
    assert followed is not None
    assert (followed.location, followed.channel) == (str(tmp_path / "models"), "stable")
