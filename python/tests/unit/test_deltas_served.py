"""Deltas that a server answers from while requests go on."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.cli.serving import ask
from tierbed.nn import MODELS
from tierbed.serve import ServeOptions, Server, load_model
from tierbed.testing import random_bags

SIZES = {"c1": 30, "c2": 40}
ROWS = {
    "features": {
        name: {"values": list(range(size)), "offsets": list(range(size + 1))}
        for name, size in (("c1", 30), ("c2", 30))
    }
}
DENSE = [[0.5, -1.0, 2.0]] * 3
IDS = [[1, 2], [3, 4], [29, 29]]
PREDICT = {"dense": DENSE, "values": [1, 3, 29, 2, 4, 29]}


def _f32(told: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(told[name]).tolist() for name in sorted(told)}


def _is(kind: int, found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Rows have their bits; scores of samples that were asked for together, nearly."""
    if kind == 0:
        return found == wanted
    near = {"rtol": 1e-5, "atol": 1e-6}
    return all(np.allclose(found[name], wanted[name], **near) for name in wanted)


class Training:
    """A model that is trained and published, and what its generations answer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.store = tb.Store.open(folder / "store", dram_budget="8MiB")
        self.model = MODELS["dlrm"](
            3, SIZES, store=self.store, embedding_dim=8, optimizer=tb.RowWiseAdagrad(lr=0.1)
        )
        self._train()
        self.store.publish(self.base, self.model)
        self.wanted = [self._answers(self.base)]

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def whole(self, number: int) -> Path:
        """The snapshot that generation ``number`` is."""
        return self.base if number == 0 else self.folder / f"whole-{number}"

    def _train(self) -> None:
        bags = random_bags(SIZES, 64, seed=self.count, bag_max=1)
        self.model(torch.rand(64, 3), bags).sum().backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(0.01)

    def delta(self, path: Path, *, is_chained: bool = False) -> Path:
        """Trains, and publishes a delta against the base or the generation before."""
        base = self.whole(self.count if is_chained else 0)
        self.count += 1
        self._train()
        self.store.publish(path, self.model, base=base)
        tb.Snapshot.apply(base, path, self.whole(self.count))
        self.wanted.append(self._answers(self.whole(self.count)))
        return path

    def _answers(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        with tb.Snapshot.open(folder) as snapshot:
            bags = [torch.arange(30), torch.arange(30)]
            lengths = torch.ones(60, dtype=torch.int64)
            asked = tb.KeyedJaggedTensor(list(SIZES), torch.cat(bags), lengths=lengths)
            rows = snapshot.lookup(asked)
            model = load_model(snapshot)
            assert model is not None
            ids = torch.tensor(PREDICT["values"])
            asked = tb.KeyedJaggedTensor(
                list(SIZES), ids, lengths=torch.ones(len(ids), dtype=torch.int64)
            )
            with torch.inference_mode():
                logit = model(torch.tensor(DENSE), asked)
            told = {"logit": logit.tolist(), "probability": torch.sigmoid(logit).tolist()}
            return {name: rows[name].tolist() for name in SIZES}, told


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.store.close()


def _rows_by_http(server: Server) -> Any:
    return _f32(ask(f"http://{server.address}", "/v1/lookup", ROWS)["features"])


def _predictions_by_http(server: Server) -> Any:
    return _f32(ask(f"http://{server.address}", "/v1/predict", PREDICT))


def _by_grpc(server: Server, model: str, given: dict[str, Any], outputs: list[str]) -> Any:
    triton = pytest.importorskip("tritonclient.grpc")
    inputs = []
    for name, array in given.items():
        kind = "FP32" if array.dtype == np.float32 else "INT64"
        inputs.append(triton.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    wanted = [triton.InferRequestedOutput(name) for name in outputs]
    with triton.InferenceServerClient(server.grpc_address) as client:
        answer = client.infer(model, inputs, outputs=wanted)
    return {name: answer.as_numpy(name).tolist() for name in outputs}


def _rows_by_grpc(server: Server) -> Any:
    ids = np.stack([np.arange(30), np.arange(30)], axis=1)
    return _by_grpc(server, "tierbed.rows", {"ids": ids}, list(SIZES))


def _predictions_by_grpc(server: Server) -> Any:
    given = {"dense": np.array(DENSE, dtype=np.float32), "ids": np.array(IDS)}
    return _by_grpc(server, "tierbed", given, ["logit", "probability"])


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_an_answer_is_of_one_generation(training: Training, tmp_path: Path, way: str) -> None:
    if way == "grpc":
        pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    asked: list[Callable[[Server], Any]] = {
        "http": [_rows_by_http, _predictions_by_http],
        "grpc": [_rows_by_grpc, _predictions_by_grpc],
    }[way]
    deltas = [training.delta(tmp_path / f"delta-{n}", is_chained=n % 3 != 0) for n in range(7)]
    for of_kind in zip(*training.wanted, strict=True):
        assert all(a != b for a, b in itertools.pairwise(of_kind))
    options = ServeOptions(grpc_address="127.0.0.1:0", log_level="off")
    stop = threading.Event()

    def ask_on(kind: int) -> int:
        newest, wanted = 0, [pair[kind] for pair in training.wanted]
        while not stop.is_set():
            answer = asked[kind](server)
            [found] = [at for at, one in enumerate(wanted) if _is(kind, answer, one)]
            assert found >= newest
            newest = found
        return newest

    with (
        tb.Snapshot.open(training.base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=options) as server,
        ThreadPoolExecutor() as pool,
    ):
        try:
            going = [pool.submit(ask_on, kind) for kind in (0, 1, 0, 1)]
            for number, delta in enumerate(deltas, 1):
                told = server.apply(delta)
                assert told.number == number
                for kind in (0, 1):
                    assert _is(kind, asked[kind](server), training.wanted[number][kind])
        finally:
            stop.set()
        for one in going:
            one.result()


def _until(what: Callable[[], bool], seconds: float = 60) -> None:
    latest_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < latest_s
        time.sleep(0.02)


def test_a_bad_delta_leaves_the_one_before(training: Training, tmp_path: Path) -> None:
    deltas = tmp_path / "deltas"
    deltas.mkdir()
    options = ServeOptions(deltas=deltas, log_level="off")
    with (
        tb.Snapshot.open(training.base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=options) as server,
    ):
        url = f"http://{server.address}"

        def is_at(number: int) -> bool:
            return bool(ask(url, "/health")["generation"] == number)

        training.delta(deltas / "delta-9", is_chained=True)
        _until(lambda: is_at(1))
        bad = training.delta(tmp_path / "bad", is_chained=True)
        shutil.copytree(bad, tmp_path / "good")
        with (bad / "rows.pages").open("r+b") as file:
            file.seek(100)
            file.write(b"damage")
        bad.rename(deltas / "delta-10")
        # What lies upon it waits.
        training.delta(deltas / "delta-11", is_chained=True)
        _until(lambda: "tierbed_deltas_waiting 1" in ask(url, "/metrics"))
        assert "tierbed_deltas_refused_total 1" in ask(url, "/metrics")
        health = ask(url, "/health")
        assert (health["status"], health["reasons"][0]["kind"]) == ("degraded", "delta")
        assert health["generation"] == 1
        assert _rows_by_http(server) == training.wanted[1][0]
        assert _predictions_by_http(server) == training.wanted[1][1]
        with pytest.raises(tb.CorruptionError):
            server.apply(deltas / "delta-10")
        shutil.rmtree(deltas / "delta-10")
        (tmp_path / "good").rename(deltas / "delta-10")
        _until(lambda: is_at(3))
        assert _rows_by_http(server) == training.wanted[3][0]
        assert _predictions_by_http(server) == training.wanted[3][1]
        assert "tierbed_deltas_waiting 0" in ask(url, "/metrics")


def test_a_model_that_does_not_fit_is_refused(training: Training, tmp_path: Path) -> None:
    other = {"model.json": b"{}", "dense.safetensors": b"nothing"}
    training.store.publish(tmp_path / "delta", base=training.base, attachments=other)
    quiet = ServeOptions(log_level="off")
    with (
        tb.Snapshot.open(training.base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=quiet) as server,
    ):
        with pytest.raises(tb.InvalidError, match="the delta's model cannot be used"):
            server.apply(tmp_path / "delta")
        assert _predictions_by_http(server) == training.wanted[0][1]
        assert server.apply(training.delta(tmp_path / "next")).number == 1
        assert _predictions_by_http(server) == training.wanted[1][1]


def test_the_ninth_delta_is_made_against_the_snapshot(training: Training, tmp_path: Path) -> None:
    deltas = [training.delta(tmp_path / f"delta-{n}", is_chained=True) for n in range(9)]
    quiet = ServeOptions(log_level="off")
    with (
        tb.Snapshot.open(training.base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=quiet) as server,
    ):
        for delta in deltas[:8]:
            server.apply(delta)
        remedy = "publish a delta against the snapshot itself, or publish in full"
        with pytest.raises(tb.InvalidError, match=remedy):
            server.apply(deltas[8])
        assert _rows_by_http(server) == training.wanted[8][0]
        told = server.apply(training.delta(tmp_path / "delta-9"))
        assert (told.number, told.delta_count) == (9, 1)
        assert _rows_by_http(server) == training.wanted[10][0]


@contextmanager
def _serving(base: Path, deltas: Path) -> Iterator[str]:
    """Serves by the command line and kills the process at the end."""
    command = [sys.executable, "-m", "tierbed.cli", "serve", str(base), "--deltas", str(deltas)]
    command += ["--address", "127.0.0.1:0", "--log-level", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_killed_server_answers_from_the_newest_whole_delta(
    training: Training, tmp_path: Path
) -> None:
    deltas = tmp_path / "deltas"
    deltas.mkdir()
    for number in range(4):
        with _serving(training.base, deltas) as url:
            # The first answer is of what was there before it started.
            assert _f32(ask(url, "/v1/predict", PREDICT)) == training.wanted[number][1]
            training.delta(deltas / f".{number}", is_chained=number % 2 == 1)
            os.rename(deltas / f".{number}", deltas / f"delta-{number}")
            # Killed before it looks, while it applies, or behind that.
            time.sleep(0.25 * number)
        half = deltas / f"delta-{number}-half"
        shutil.copytree(deltas / f"delta-{number}", half, dirs_exist_ok=True)
        (half / "snapshot.json").unlink()
