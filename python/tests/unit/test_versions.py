"""Versions of a model at a location, from Python and from the command line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed._util.durations import parse_seconds
from tierbed.cli import main

OpenStore = Any


def snapshot(folder: Path, seed: int) -> Path:
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(seed))
    tb.placement.import_tables({"item": rows}, folder)
    return folder


@pytest.fixture
def versions(tmp_path: Path) -> tb.Versions:
    """Two whole versions: canary is at the second, stable at the first."""
    versions = tb.Versions(tmp_path / "models" / "ads")
    versions.push(snapshot(tmp_path / "one", 1), channel="canary")
    versions.promote("canary", to="stable")
    versions.push(snapshot(tmp_path / "two", 2), channel="canary")
    return versions


def told(capsys: Any, *arguments: str) -> Any:
    assert main([*arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_location_lists_its_versions_and_channels(versions: tb.Versions) -> None:
    found = versions.list()
    assert [(one.version, one.state, one.channels) for one in found.versions] == [
        (1, "whole", ("stable",)),
        (2, "whole", ("canary",)),
    ]
    assert [(one.name, one.version, one.chain) for one in found.channels] == [
        ("canary", 2, (2,)),
        ("stable", 1, (1,)),
    ]
    assert all(one.file_bytes > 4096 and one.written_at_s > 1e9 for one in found.versions)
    stable = versions.channel("stable")
    assert stable is not None
    assert stable.version == 1
    assert versions.channel("nobody") is None


def test_what_is_pulled_is_what_was_pushed(versions: tb.Versions, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    here = tmp_path / "here"
    pulled = versions.pull(here, channel="canary", progress=lambda *now: heard.append(now))
    assert pulled.folders == (str(here / "000002"),)
    assert heard
    assert heard[-1] == (pulled.bytes_fetched, pulled.bytes_fetched)
    for file in (tmp_path / "two").iterdir():
        assert (
            file.name == "LOCK"
            or (Path(pulled.folders[0]) / file.name).read_bytes() == file.read_bytes()
        )
    assert versions.pull(here, version=2, bandwidth="1GiB").parts_fetched == 0
    tb.Snapshot.open(pulled.folders[0]).close()


def test_a_channel_goes_back_and_forth(versions: tb.Versions) -> None:
    assert versions.promote("canary", to="stable").version == 2
    assert versions.rollback("stable", to=1).chain == (1,)
    with pytest.raises(tb.InvalidError, match="tierbed models list"):
        versions.rollback("stable", to=9)
    with pytest.raises(tb.InvalidError, match="a number from 1"):
        versions.rollback("stable", to=0)


def test_only_what_nobody_needs_is_pruned(versions: tb.Versions, tmp_path: Path) -> None:
    versions.push(snapshot(tmp_path / "three", 3), channel="canary")
    versions.pin(2)
    # Version 2 was left a moment ago, and is pinned besides.
    assert versions.prune("1h").removed == ()
    assert versions.prune(0).removed == ()
    assert versions.unpin(2)
    assert not versions.unpin(2)
    pruned = versions.prune(0)
    assert (pruned.removed, pruned.kept) == ((2,), (1, 3))
    assert pruned.bytes_removed > 4096
    assert [one.version for one in versions.list().versions] == [1, 3]


def test_a_channel_that_cannot_be_read_says_why_and_is_mended(versions: tb.Versions) -> None:
    Path(versions.location, "HEAD.stable.json").write_bytes(b"tierbed-head 1 00000000\n{}")
    damaged = versions.list().channels[1]
    assert (damaged.version, damaged.chain) == (None, ())
    assert damaged.damage
    with pytest.raises(tb.CorruptionError, match="tierbed models rollback"):
        versions.channel("stable")
    assert versions.rollback("stable", to=2).version == 2


def test_a_push_that_is_stopped_leaves_the_channel(versions: tb.Versions, tmp_path: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        versions.push(snapshot(tmp_path / "three", 3), channel="canary", progress=stop)
    found = versions.channel("canary")
    assert found is not None
    assert found.version == 2


def test_a_pull_says_what_it_wants(versions: tb.Versions, tmp_path: Path) -> None:
    for wrong in ({}, {"channel": "canary", "version": 1}):
        with pytest.raises(tb.InvalidError, match="give one of both"):
            versions.pull(tmp_path / "here", **wrong)
    with pytest.raises(tb.InvalidError, match="push a version to it"):
        versions.pull(tmp_path / "here", channel="beta")


def test_two_who_push_at_the_same_time_both_have_a_version(
    versions: tb.Versions, tmp_path: Path
) -> None:
    # To channels of their own: nobody loses.
    folders = [snapshot(tmp_path / f"at-{at}", at) for at in range(4)]
    threads = [
        threading.Thread(target=versions.push, args=(folder,), kwargs={"channel": folder.name})
        for folder in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {one.name: one.version for one in versions.list().channels}
    assert sorted(found[folder.name] for folder in folders) == [3, 4, 5, 6]


def test_the_command_line_does_the_same(capsys: Any, tmp_path: Path) -> None:
    place = str(tmp_path / "models" / "ads")
    one, two = snapshot(tmp_path / "one", 1), snapshot(tmp_path / "two", 2)
    assert told(capsys, "models", "push", place, str(one), "--channel", "canary")["version"] == 1
    assert told(capsys, "models", "promote", place, "canary", "stable")["chain"] == [1]
    assert told(capsys, "models", "push", place, str(two), "--channel", "canary")["chain"] == [2]
    listed = told(capsys, "models", "list", place)
    assert [one["version"] for one in listed["versions"]] == [1, 2]
    assert [one["name"] for one in listed["channels"]] == ["canary", "stable"]
    here = str(tmp_path / "here")
    pulled = told(capsys, "models", "pull", place, "--channel", "stable", "--to", here)
    assert pulled["folders"] == [f"{here}/000001"]
    assert told(capsys, "models", "rollback", place, "canary", "--to", "1")["version"] == 1
    assert told(capsys, "models", "pin", place, "2")["pinned"] is True
    assert told(capsys, "models", "prune", place, "--keep", "0s")["removed"] == []
    assert told(capsys, "models", "unpin", place, "2")["was_pinned"] is True
    assert told(capsys, "models", "prune", place, "--keep", "0s")["removed"] == [2]


def test_tables_show_what_lies_where(versions: tb.Versions, capsys: Any) -> None:
    versions.pin(1)
    assert main(["models", "list", versions.location]) == 0
    shown = capsys.readouterr().out
    for text in ("versions at", "channels at", "whole", "canary", "stable", "yes"):
        assert text in shown, text
    assert main(["models", "promote", versions.location, "beta", "stable"]) == 2
    assert main(["models", "prune", versions.location, "--keep", "soon"]) == 2
    assert "write for example 60s, 24h or 7d" in capsys.readouterr().err


def test_a_location_that_cannot_be_reached_is_named(capsys: Any) -> None:
    assert main(["models", "list", "ftp://models/ads"]) == 2
    assert "ftp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60.0), ("24h", 86400.0), ("2d", 172800.0), ("1.5m", 90.0), ("250ms", 0.25), (3, 3.0)],
)
def test_durations_are_read(text: float | str, seconds: float) -> None:
    assert parse_seconds(text, "every") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1y", -1, float("nan"), True, "1 h 2 m"])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(tb.InvalidError, match="every"):
        parse_seconds(text, "every")
