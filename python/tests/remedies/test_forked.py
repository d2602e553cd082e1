"""Remedies for what a forked child may not use: the child does what the error says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign.processes import call

import tierbed as tb
from tierbed import _native
from tierbed.serve import Server
from tierbed_bench.generator import write_criteo_tsv

from .kit import bags, collection, opened, refused, snapshot_of, step, table

#: An address with a port that is free.
FREE = "127.0.0.1:0"


def in_child(work: Callable[[], Any]) -> Any:
    """Forks and returns what ``work`` gives there; a child that fails or hangs fails here."""
    ended = call(work)
    assert not ended.error, ended
    assert not ended.came, ended
    return ended.value


def test_a_worker_makes_a_reader_of_its_own(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "log.tsv", 50, scale=0.0005, seed=1)

    def made() -> Any:
        options = {"format": "criteo", "bad_lines": "fail"}
        return _native.CriteoReader([str(tmp_path / "log.tsv")], options)

    reader = made()
    assert reader.skip(10) == 10

    def child() -> int:
        with refused(tb.ClosedError, "make another one in the worker"):
            reader.skip(10)
        return int(made().skip(100))

    assert in_child(child) == 50
    assert reader.skip(100) == 40


def _published(folder: Path, first: int) -> None:
    with opened(folder.with_name(f"store-{first}")) as store:
        step(collection(store), first)
        store.publish(folder)


def _row(snapshot: tb.Snapshot) -> list[float]:
    emb = tb.EmbeddingBagCollection([table()], store=snapshot)
    row: list[float] = emb(bags(1)).values()[0].tolist()
    return row


def test_a_worker_opens_what_apply_makes_of_deltas(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        step(emb)
        store.publish(tmp_path / "base")
        step(emb)
        store.publish(tmp_path / "delta", base=tmp_path / "base")
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "whole")
    with snapshot_of(tmp_path / "base") as snapshot, Server(snapshot, FREE) as server:
        before = _row(snapshot)
        pickle.loads(pickle.dumps(snapshot)).close()
        server.apply(tmp_path / "delta")
        now = _row(snapshot)
        assert now != before
        with refused(TypeError, "open what Snapshot.apply makes of them there"):
            pickle.dumps(snapshot)

        def child() -> list[float]:
            with refused(tb.ClosedError, "open what Snapshot.apply makes of them in the worker"):
                _row(snapshot)
            with refused(tb.ClosedError, "start another one in the process that shall answer"):
                server.apply(tmp_path / "delta")
            with snapshot_of(tmp_path / "whole") as own:
                return _row(own)

        assert in_child(child) == now


def test_a_snapshot_is_published_beside_the_one_that_workers_read(tmp_path: Path) -> None:
    _published(tmp_path / "a", 0)
    with snapshot_of(tmp_path / "a") as snapshot:
        before = _row(snapshot)
        # Into a new folder: a worker goes on reading what its parent reads.
        _published(tmp_path / "b", 500)
        assert in_child(lambda: _row(snapshot)) == before
        # Into the same one: a worker opens it for itself.
        (tmp_path / "a").rename(tmp_path / "old")
        (tmp_path / "b").rename(tmp_path / "a")

        def child() -> list[float]:
            remedy = "publish into a new folder, or open the snapshot in the worker"
            with refused(tb.ClosedError, remedy):
                _row(snapshot)
            with snapshot_of(tmp_path / "a") as own:
                return _row(own)

        assert in_child(child) != before
        assert _row(snapshot) == before


def test_a_worker_starts_a_server_of_its_own(tmp_path: Path) -> None:
    _published(tmp_path / "a", 0)
    with snapshot_of(tmp_path / "a") as snapshot, Server(snapshot, FREE) as server:

        def child() -> bool:
            with refused(tb.ClosedError, "start another one in the process that shall answer"):
                server.wait(0.0)
            with snapshot_of(tmp_path / "a") as own, Server(own, FREE) as another:
                return another.address.startswith("127.0.0.1:")

        assert in_child(child)
