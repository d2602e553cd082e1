"""Checkpoints of ranks in a bucket: whole or absent, gone on with, read where they are needed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_kit import Line, Request, seaweedfs, settings
from test_checkpoints import alone, check_loaded, one_process, run
from test_ranks import TABLES, all_rows, draw, train

import tierbed as tb
from tierbed import dist as tbd
from tierbed._native import NativeObjects
from tierbed.dist import checkpoint_files, checkpoint_places
from tierbed.dist.checkpoint import save_rows

BUCKET = "runs"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweedfs(tmp_path_factory.mktemp("s3"), BUCKET) as found:
        yield found


@pytest.fixture
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some ten rows, so that there are some."""
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 1024)
    monkeypatch.setattr(checkpoint_files, "_ROWS_MIN", 8)


def lead_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings(endpoint).items():
        monkeypatch.setenv(name, value)


def fine(*_: object) -> str:
    return "fine"


def trained() -> tbd.ShardedEmbeddingBagCollection:
    one = alone(optimizer=tb.Adagrad(lr=0.05))
    train(one, [draw(1, 40, False), draw(2, 40, False)])
    return one


def rows_of(one: tbd.ShardedEmbeddingBagCollection) -> list[torch.Tensor]:
    assert isinstance(one.store, tb.Store)
    return [tensor for config in TABLES for tensor in all_rows(one.store, config)]


def loaded(path: str) -> list[torch.Tensor] | None:
    """Rows of the checkpoint at ``path``; None where there is none."""
    with alone(optimizer=tb.Adagrad(lr=0.05)) as one:
        if "manifest.json" not in dict(NativeObjects(path.removeprefix("file://")).list()):
            with pytest.raises(tb.InvalidError, match="is no checkpoint of ranks"):
                one.load(path)
            return None
        assert one.load(path) == {"step": 2}
        return rows_of(one)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def of_rows(requests: list[Request]) -> list[str]:
    return [r.name for r in requests if r.method == "PUT" and r.name.startswith("rank")]


def save_and_die(line: Line, path: str) -> int:
    """Saves in a child that ``line`` may kill; returns how it ended."""
    child = os.fork()
    if child:
        line.child = child  # type: ignore[attr-defined]
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.environ.update(settings(line.endpoint))
        with trained() as one:
            one.save(path, extra={"step": 2})
        status = 0
    finally:
        os._exit(status)


@pytest.mark.usefixtures("_small_files")
def test_checkpoint_in_a_bucket_is_whole_or_absent(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(endpoint, monkeypatch)
    with trained() as one:
        expected = rows_of(one)
    with Line(endpoint, fine) as line:
        assert save_and_die(line, f"s3://{BUCKET}/whole") == 0
        requests = list(line.requests)
    names = of_rows(requests)
    assert len(names) == len(set(names)) > 2 * checkpoint_files.STREAMS
    for at in range(len(requests)):
        # Around the commit both; before it one after the other.
        both = ("lost", "unanswered")
        for fate in both if at >= len(requests) - 3 else both[at % 2 :][:1]:
            path = f"s3://{BUCKET}/killed-{fate}-{at}"

            def kill(number: int, _m: str, _p: str, at: int = at, fate: str = fate) -> str:
                if number < at:
                    return "fine"
                if number == at and fate == "unanswered":
                    return "unanswered"
                return "lost"

            with Line(endpoint, kill) as line:
                # The child is killed when the store has, or has not, what it sent last.
                serve = line._server.RequestHandlerClass._serve  # type: ignore[attr-defined]

                def killing(self: Any, line: Line = line, serve: Any = serve, at: int = at) -> None:
                    while not hasattr(line, "child"):
                        time.sleep(0.001)
                    serve(self)
                    if line._count > at:
                        os.kill(line.child, signal.SIGKILL)  # type: ignore[attr-defined]

                for verb in ("do_GET", "do_PUT", "do_POST", "do_DELETE", "do_HEAD"):
                    setattr(line._server.RequestHandlerClass, verb, killing)
                status = save_and_die(line, path)
                sent = of_rows(line.requests)
            assert status in (-signal.SIGKILL, 0)
            found = loaded(path)
            assert found is None or equal(found, expected), (fate, at)
            if found is not None:
                continue
            with Line(endpoint, fine) as line:
                assert save_and_die(line, path) == 0
                again = of_rows(line.requests)
            # What the store had is not sent again.
            assert not set(again) & set(sent), (fate, at)
            assert {*again, *sent} == set(names)
            result = loaded(path)
            assert result is not None
            assert equal(result, expected)


@pytest.mark.usefixtures("_small_files")
@pytest.mark.parametrize("saved", ["row-wise", "column-wise", "mixed"])
def test_a_bucket_is_loaded_on_another_number_of_ranks(
    saved: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(endpoint, monkeypatch)
    optimizer: Any = tb.Adam(lr=0.05)
    expected, whole = one_process(optimizer)
    path: Any = f"s3://{BUCKET}/ranks/{saved}"
    run(2, saved, optimizer, range(2), None, path)
    for count in (1, 4):
        check_loaded("mixed", count, optimizer, path, expected, whole)


@pytest.mark.usefixtures("_small_files")
def test_a_rank_reads_the_files_of_its_rows_alone(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Any = f"s3://{BUCKET}/ranges"
    optimizer = tb.Adagrad(lr=0.05)
    lead_to(endpoint, monkeypatch)
    run(1, "row-wise", optimizer, range(2), None, path)
    plan = tbd.ShardingPlan(4, {name: tbd.RowWise() for name in "abc"})
    with Line(endpoint, fine) as line:
        lead_to(line.endpoint, monkeypatch)
        run(4, "row-wise", optimizer, range(2, 2), path, None)
        reads = sorted(r.name for r in line.requests if r.name.startswith("rank"))
    lead_to(endpoint, monkeypatch)
    manifest = json.loads(NativeObjects(path).get("manifest.json", 1 << 20) or b"")
    needed = []
    for config in TABLES:
        bounds = plan.sharding(config)["bounds"]
        for file in manifest["files"]:
            of = [
                low
                for low, high in itertools.pairwise(bounds)
                if file["rows"][0] < high and low < file["rows"][1]
            ]
            needed += [file["name"]] * (len(of) if file["table"] == config.name else 0)
    assert reads == sorted(needed)
    assert len(manifest["files"]) < len(needed) < 3 * len(manifest["files"])


def test_a_store_that_does_not_compare_is_refused(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(_: int, method: str, path: str) -> str | int:
        return 200 if method == "PUT" and "/probe-" in path else "fine"

    with Line(endpoint, careless) as line:
        lead_to(line.endpoint, monkeypatch)
        with trained() as one, pytest.raises(tb.UnsupportedError, match="conditional writes"):
            one.save(f"s3://{BUCKET}/careless", extra={"step": 2})
        assert not of_rows(line.requests)


def test_a_store_that_is_busy_is_asked_again(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, str]] = set()

    def busy(_: int, method: str, path: str) -> str | int:
        is_first = (method, path) not in seen
        seen.add((method, path))
        return 503 if is_first else "fine"

    path = f"s3://{BUCKET}/busy"
    with Line(endpoint, busy) as line:
        lead_to(line.endpoint, monkeypatch)
        with trained() as one:
            one.save(path, extra={"step": 2})
            expected = rows_of(one)
        found = loaded(path)
        assert found is not None
        assert equal(found, expected)


def test_of_two_who_save_one_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to(endpoint, monkeypatch)
    path = f"s3://{BUCKET}/two"
    commit = checkpoint_places.ObjectsPlace.commit
    with trained() as one, alone(optimizer=tb.Adagrad(lr=0.05)) as other:
        expected = rows_of(one)

        def late(self: Any, manifest: bytes, names: Any) -> None:
            monkeypatch.setattr(checkpoint_places.ObjectsPlace, "commit", commit)
            one.save(path, extra={"step": 2})
            commit(self, manifest, names)

        monkeypatch.setattr(checkpoint_places.ObjectsPlace, "commit", late)
        train(other, [draw(3, 40, False)])
        with pytest.raises(tb.InvalidError, match="give each another name"):
            other.save(path, extra={"step": 1})
        with pytest.raises(tb.InvalidError, match="give it another name"):
            other.save(path, extra={"step": 1})
        other.save(f"{path}-another", extra={"step": 2})
        others = rows_of(other)
    found = loaded(f"{path}-another")
    assert found is not None
    assert equal(found, others)
    found = loaded(path)
    assert found is not None
    assert equal(found, expected)


def test_a_folder_of_objects_is_one_of_both(tmp_path: Path) -> None:
    """A shared folder may be used as a bucket; it is loaded by either name."""
    folder = tmp_path / "objects"
    with trained() as one:
        expected = rows_of(one)
        (tmp_path / "objects").mkdir()
        (folder / "rank0-left.safetensors").write_bytes(b"another's")
        left = folder / f"rank7-{0:032x}.safetensors"
        left.write_bytes(b"of a save that was interrupted")
        one.save(f"file://{folder}", extra={"step": 2})
    assert not left.exists()
    assert (folder / "rank0-left.safetensors").exists(), "only what a save left is removed"
    for name in (f"file://{folder}", str(folder)):
        found = loaded(name)
        assert found is not None
        assert equal(found, expected)
    with alone() as one, pytest.raises(tb.InvalidError, match="give the address as a string"):
        one.load(Path(f"file://{folder}"))


def test_a_changed_object_is_noticed(tmp_path: Path) -> None:
    with trained() as one:
        one.save(f"file://{tmp_path}", extra={"step": 2})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for name in (manifest["files"][0]["name"], manifest["extra"]["name"]):
        raw = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(tb.CorruptionError, match=name):
            loaded(str(tmp_path))
        (tmp_path / name).write_bytes(raw)
    assert loaded(str(tmp_path)) is not None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_replaced_goes_before_the_new_one_comes(scheme: str, tmp_path: Path) -> None:
    path = f"{scheme}{tmp_path}/step-8"
    with trained() as one:
        save_rows(path, one._held(), {"step": 1}, replaces=True)
        train(one, [draw(5, 40, False)])
        expected = rows_of(one)
        place = checkpoint_places.place_of(path)
        place.begin(replaces=True)
        assert place.get("manifest.json", 1 << 20) is None
        save_rows(path, one._held(), {"step": 2}, replaces=True)
    found = loaded(path)
    assert found is not None
    assert equal(found, expected)
    again = "file://" if not scheme else ""
    assert tbd.find_checkpoints(f"{again}{tmp_path}") == [f"{again}{tmp_path}/step-8"]


def test_checkpoints_are_found_in_the_order_of_their_numbers(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(endpoint, monkeypatch)
    for start in (f"s3://{BUCKET}/found", str(tmp_path), f"file://{tmp_path}-objects"):
        assert tbd.find_checkpoints(start) == []
        with trained() as one:
            for step in (10, 9, 100):
                one.save(f"{start}/step-{step}")
        found = tbd.find_checkpoints(start)
        assert found == [f"{start}/step-{step}" for step in (9, 10, 100)]
