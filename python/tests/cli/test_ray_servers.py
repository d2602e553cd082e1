"""Servers that a Ray cluster keeps: each comes back, whatever was killed, and ends when told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tierbed as tb
from tierbed.cli import main
from tierbed.serve.ray_servers import ServerOptions

HAS_RAY = importlib.util.find_spec("ray") is not None
with_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed (extra `ray`)")


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    """What the cases found on one cluster."""
    script = Path(__file__).with_name("ray_server_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [told] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(told)
    return found


@with_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_node_has_a_server_that_answers_without_ray(cases: dict[str, Any]) -> None:
    assert cases["rows"] == [100, 100]
    assert (cases["addresses"], cases["nodes"]) == (2, 2)
    assert cases["stays"], "servers that run are not started again"
    assert (cases["status"], cases["members"]) == (0, True)


@with_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_server_and_a_killed_actors_server_come_back(cases: dict[str, Any]) -> None:
    killed = cases["server_killed"]
    assert killed == {"starts": 2, "exit": -9, "rows": 100, "other_stays": True}
    killed = cases["actor_killed"]
    assert killed == {"rows": 100, "starts": 1, "old_lives": False, "other_stays": True}


@with_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_end_and_what_cannot_start_is_told(cases: dict[str, Any]) -> None:
    assert "give fewer --servers or --cpus" in cases["more"]
    assert "and 0 are there" in cases["larger"]
    assert "tierbed ray down --name rows" in cases["other"]
    assert cases["ended"] == 2
    assert cases["left"] == [False, False]
    assert cases["status_after"] == 1
    assert "not ready after 4 s: rows-0; read what they say" in cases["absent"]
    tries, code = cases["tries"]
    assert tries > 1, "it is tried again"
    assert code == 1


def test_options_of_no_server_are_refused() -> None:
    with pytest.raises(tb.InvalidError, match="at least 1"):
        ServerOptions(servers=0)
    with pytest.raises(tb.InvalidError, match="write ads"):
        ServerOptions(name="Ads 2")
    given = ServerOptions(name="ads", port=81, program="my-server --fast")
    assert given.command(["rows", "--log-level", "warn"]) == [
        *("my-server", "--fast", "rows", "--log-level", "warn"),
        *("--address", "0.0.0.0:81"),
    ]


@with_ray
def test_without_a_cluster_the_call_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import ray

    # Another cluster may run on this machine.
    def absent(**_: object) -> None:
        raise ConnectionError("no cluster was found")

    monkeypatch.setattr(ray, "init", absent)
    assert main(["ray", "status"]) == 2
    assert "start one by `ray start --head`, and name it with --ray" in capsys.readouterr().err


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_call_says_what_to_install(capsys: Any) -> None:
    assert main(["ray", "status"]) == 2
    assert "tierbed[ray]" in capsys.readouterr().err
