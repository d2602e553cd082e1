"""What a server in this process answers, and what its options are."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from typer.main import get_command

import tierbed as tb
from tierbed._native import NativeServer
from tierbed._util.bytes import parse_bytes
from tierbed.cli.serving import ask, register
from tierbed.nn import MODELS
from tierbed.placement import import_tables
from tierbed.serve import Limits, ServeOptions, Server
from tierbed.testing import random_bags


def _snapshot(path: Path, rows: torch.Tensor | None = None) -> Path:
    import_tables({"a": torch.rand(40, 4) if rows is None else rows}, path)
    return path


def _ended(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_limits_are_those_of_the_engine() -> None:
    assert asdict(Limits()) == NativeServer.default_limits()


def test_the_command_line_has_the_same_limits() -> None:
    commands = typer.Typer()
    register(commands)
    [serve] = [one for name, one in get_command(commands).commands.items() if name == "serve"]
    defaults = {param.name: param.default for param in serve.params}
    for name, value in asdict(Limits()).items():
        if name != "degraded_ms":
            assert parse_bytes(defaults[name]) == value, name


def test_options_reach_the_server_and_bad_ones_are_named(tmp_path: Path) -> None:
    with tb.Snapshot.open(_snapshot(tmp_path / "snapshot")) as snapshot:
        few = ServeOptions(limits=Limits(bags_max=3), snapshot_name="few", log_level="off")
        with Server(snapshot, "127.0.0.1:0", options=few) as server:
            url = f"http://{server.address}"
            assert ask(url, "/health")["snapshot"] == "few"
            request = {"features": {"a": {"values": [], "offsets": [0] * 5}}}
            with pytest.raises(tb.InvalidError, match="bags_max: 3"):
                ask(url, "/v1/lookup", request)
        for bad, match in [
            (ServeOptions(limits=Limits(head_ms_max=0)), "head_ms_max"),
            (ServeOptions(limits=Limits(queue_ms_max=0)), "queue_ms_max"),
            (ServeOptions(lookup_threads=0), "lookup_threads"),
            (ServeOptions(log_level="loud"), "off, error, warn or info"),
        ]:
            with pytest.raises(tb.InvalidError, match=match):
                Server(snapshot, "127.0.0.1:0", options=bad)


def test_a_server_that_drains_is_not_ready_and_answers(tmp_path: Path) -> None:
    with tb.Snapshot.open(_snapshot(tmp_path / "snapshot")) as snapshot:
        server = Server(snapshot, "127.0.0.1:0", options=ServeOptions(log_level="off"))
        url = f"http://{server.address}"
        assert ask(url, "/readyz") == {"ready": True}
        server.drain()
        server.drain()
        with pytest.raises(tb.InvalidError, match='"ready":false'):
            ask(url, "/readyz")
        assert ask(url, "/livez") == {"live": True}
        request = {"features": {"a": {"values": [1], "offsets": [0, 1]}}}
        assert len(ask(url, "/v1/lookup", request)["features"]["a"]) == 1
        assert server.stop()
        server.drain()


def test_a_server_with_tokens_answers_who_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens.write_text(f"ranker {digest} infer\n")
    options = ServeOptions(tokens=tokens, log_level="off")
    with (
        tb.Snapshot.open(_snapshot(tmp_path / "snapshot")) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=options) as server,
    ):
        url = f"http://{server.address}"
        request = {"features": {"a": {"values": [1], "offsets": [0, 1]}}}
        assert ask(url, "/readyz") == {"ready": True}
        monkeypatch.delenv("TIERBED_TOKEN", raising=False)
        with pytest.raises(tb.InvalidError, match=r"401.*Authorization: Bearer TOKEN"):
            ask(url, "/v1/lookup", request)
        monkeypatch.setenv("TIERBED_TOKEN", "secret")
        assert len(ask(url, "/v1/lookup", request)["features"]["a"]) == 1
        with pytest.raises(tb.InvalidError, match=r"403.*ranker.*lacks metrics"):
            ask(url, "/metrics")


def test_rows_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    rows = torch.tensor([[math.nan, math.inf, -math.inf, 1.5]])
    with (
        tb.Snapshot.open(_snapshot(tmp_path / "snapshot", rows)) as snapshot,
        Server(snapshot, "127.0.0.1:0") as server,
    ):
        request = {"features": {"a": {"values": [0], "offsets": [0, 1]}}}
        answer = ask(f"http://{server.address}", "/v1/lookup", request)
    assert answer == {"features": {"a": [[None, None, None, 1.5]]}}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB") as store:
        sizes = {"c1": 30, "c2": 40}
        optimizer = tb.RowWiseAdagrad(lr=0.1)
        model = MODELS["dlrm"](3, sizes, store=store, embedding_dim=8, optimizer=optimizer)
        model(torch.rand(64, 3), random_bags(sizes, 64, seed=0, bag_max=1)).sum().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1e30)
        store.publish(tmp_path / "snapshot", model)
    return tmp_path / "snapshot"


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def test_predictions_that_are_not_finite_are_null_in_json(model_folder: Path) -> None:
    with tb.Snapshot.open(model_folder) as snapshot, Server(snapshot, "127.0.0.1:0") as server:
        body = b'{"dense": [[1e30, -1e30, 1e30]], "values": [1, 2]}'
        request = urllib.request.Request(f"http://{server.address}/v1/predict", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            told = json.loads(answer.read(), parse_constant=_refuse)
    assert told["logit"] == [None]


def test_a_bad_page_beneath_a_model_is_told_as_such(model_folder: Path) -> None:
    with (model_folder / "rows.pages").open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    request = {"dense": [[0.0, 0.0, 0.0]] * 30, "values": list(range(30)) * 2}
    quiet = ServeOptions(log_level="off")
    with (
        tb.Snapshot.open(model_folder) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=quiet) as server,
    ):
        url = f"http://{server.address}"
        with pytest.raises(tb.InvalidError, match=r'answered 500.*"corruption".*page_id: 0'):
            ask(url, "/v1/predict", request)
        health = ask(url, "/health")
    assert health["status"] == "degraded"
    assert [reason["kind"] for reason in health["reasons"]] == ["corruption"]


def test_a_thread_in_the_engine_lets_the_process_end(tmp_path: Path) -> None:
    code = """
import sys, threading, time
import torch
import tierbed as tb
snapshot = tb.Snapshot.open(sys.argv[1])
bags = tb.KeyedJaggedTensor(["a"], torch.arange(40), lengths=torch.ones(40, dtype=torch.int64))
looked_up = threading.Event()
def look_up():
    while True:
        snapshot.lookup(bags)
        looked_up.set()
for _ in range(4):
    threading.Thread(target=look_up, daemon=True).start()
looked_up.wait()
time.sleep(0.05)
print("the work is safe")
"""
    folder = _snapshot(tmp_path / "snapshot")
    for _ in range(4):
        ended = _ended(code, folder)
        assert (ended.returncode, ended.stdout) == (0, "the work is safe\n"), ended.stderr


def test_a_server_that_nobody_stopped_lets_the_process_end(model_folder: Path) -> None:
    code = """
import sys, threading
import tierbed as tb
from tierbed.cli.serving import ask, register
from tierbed.serve import Server
snapshot = tb.Snapshot.open(sys.argv[1])
server = Server(snapshot, "127.0.0.1:0")
request = {"dense": [[0.0, 0.0, 0.0]] * 64, "values": [1] * 128}
answered = threading.Event()
def predict():
    while True:
        try:
            ask(f"http://{server.address}", "/v1/predict", request)
        finally:
            answered.set()
for _ in range(4):
    threading.Thread(target=predict, daemon=True).start()
answered.wait()
print("the work is safe")
"""
    ended = _ended(code, model_folder)
    assert (ended.returncode, ended.stdout) == (0, "the work is safe\n"), ended.stderr


def test_a_server_that_leaves_work_behind_ends_with_3(model_folder: Path) -> None:
    code = """
import os, signal, sys, threading, time
from tierbed.cli import serving
from tierbed.serve import Server
from tierbed.serve.models import Scorer
from tierbed.cli import main
def think(self, dense, rows):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
Scorer.score = think
class Asked(Server):
    def __enter__(self):
        url, request = f"http://{self.address}", {"dense": [[0.0] * 3], "values": [1, 2]}
        threading.Thread(
            target=serving.ask, args=(url, "/v1/predict", request), daemon=True
        ).start()
        return super().__enter__()
serving.Server = Asked
sys.argv = ["tierbed", "serve", sys.argv[1], "--address", "127.0.0.1:0", "--stop-ms-max", "200"]
main()
"""
    ended = _ended(code, model_folder)
    assert ended.returncode == 3, ended.stderr
    assert "stopped, but a request did not end" in ended.stderr


def test_work_at_exit_still_reaches_the_engine(tmp_path: Path) -> None:
    code = """
import atexit, sys
import torch
@atexit.register
def late():
    print(tuple(snapshot.lookup(bags)["a"].shape))
import tierbed as tb
@atexit.register
def early():
    print(tuple(snapshot.lookup(bags)["a"].shape))
snapshot = tb.Snapshot.open(sys.argv[1])
bags = tb.KeyedJaggedTensor(["a"], torch.arange(40), lengths=torch.ones(40, dtype=torch.int64))
"""
    ended = _ended(code, _snapshot(tmp_path / "snapshot"))
    assert (ended.returncode, ended.stdout) == (0, "(40, 4)\n(40, 4)\n"), ended.stderr


def test_a_request_without_json_is_refused_in_words(model_folder: Path) -> None:
    with tb.Snapshot.open(model_folder) as snapshot, Server(snapshot, "127.0.0.1:0") as server:
        body = b'{"dense": [[Infinity, 0, 0]], "values": [1, 2]}'
        headers = {"Content-Type": "application/json"}
        url = f"http://{server.address}/v1/predict"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, body, headers))
        assert refused.value.code == 400
        assert "body is not the expected JSON" in refused.value.read().decode()
        refused.value.close()
