"""Compiled models: a server asks the dense part without Python."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import tierbed as tb
from tierbed.nn import DLRM
from tierbed.serve import Limits, ServeOptions, Server, load_model
from tierbed.serve.compiled import ABOUT, CODE
from tierbed.testing import random_bags

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling takes g++")

FEATURES = {"user": 50, "seen": 60, "bought": 60}
# A busy machine refuses nobody.
PATIENT = Limits(queue_ms_max=60_000)
AOTI = ServeOptions(log_level="off", predict="aoti", limits=PATIENT)
PYTHON = ServeOptions(log_level="off", limits=PATIENT)
#: Vector code rounds in another order.
NEAR = {"rtol": 1e-5, "atol": 1e-6}


class Ranker(nn.Module):
    """Parameters of one value each, one element, of no training, and an index that may fail."""

    dense_count = 2

    def __init__(self, store: Any, dim: int = 4) -> None:
        super().__init__()
        tables = [
            tb.EmbeddingBagConfig(name="user", num_embeddings=50, embedding_dim=dim),
            tb.EmbeddingBagConfig(
                name="item",
                num_embeddings=60,
                embedding_dim=8,
                feature_names=["seen", "bought"],
                pooling=tb.PoolingType.MEAN,
            ),
        ]
        self.embeddings = tb.EmbeddingBagCollection(tables, store=store)
        self.norm = nn.LayerNorm(dim + 18)
        self.hidden, self.out = nn.Linear(dim + 18, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.zeros(1))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("kinds", torch.arange(3.0))
        self.register_buffer("fixed", torch.tensor([0.25]), persistent=False)

    def head(self, dense: Tensor, rows: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.hidden(self.norm(torch.cat([dense, rows], dim=1))))
        kind = self.kinds[dense[:, 0].long()] + self.fixed
        score = self.out(self.drop(hidden)).squeeze(1) * self.scale.exp() + kind
        return {"score": torch.sigmoid(score), "hidden": hidden}

    def forward(self, dense: Tensor, sparse: Any) -> dict[str, Tensor]:
        return self.head(dense, self.embeddings(sparse).values())


class Ranked:
    """A module in training, and where it is published."""

    def __init__(self, folder: Path, dim: int = 4) -> None:
        self.folder = folder
        self.store = tb.Store.open(folder / "store", dram_budget="8MiB")
        self.module = Ranker(self.store, dim)
        self.step()

    def step(self) -> None:
        given = samples(40, seed=1)
        self.module.train()
        self.module(given["dense"], bags(given))["score"].sum().backward()
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.add_(0.1)

    def publish(self, name: str, code: dict[str, bytes] | None, base: str | None = None) -> Path:
        path = self.folder / name
        based = None if base is None else self.folder / base
        self.store.publish(path, self.module, base=based, attachments=code)
        return path

    def expected(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            return self.module.eval()(given["dense"], bags(given))


def samples(count: int, seed: int, kind: int | None = None) -> dict[str, Tensor]:
    batch = random_bags(FEATURES, count, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    dense = 3 * torch.rand(count, 2, generator=generator)
    if kind is not None:
        dense[0, 0] = kind
    return {"dense": dense, "values": batch.values(), "lengths": batch.lengths()}


def bags(given: dict[str, Tensor]) -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor(list(FEATURES), given["values"], lengths=given["lengths"])


def post(server: Server, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    request = urllib.request.Request(f"http://{server.address}/v1/predict", save(tensors))
    request.add_header("Content-Type", "application/x-safetensors")
    with urllib.request.urlopen(request) as answer:
        told: dict[str, Tensor] = load(answer.read())
        return told


def near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], value, **NEAR) for name, value in expected.items())


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The compiled head of a :class:`Ranker` whose parameters are at their first values."""
    torch.manual_seed(5)
    with tb.Store.open(tmp_path_factory.mktemp("compiled") / "s", dram_budget="8MiB") as store:
        module = Ranker(store)
        module.norm.eval()
        before = torch.get_rng_state()
        code = tb.compile_dense(module, store)
        assert torch.equal(torch.get_rng_state(), before)
        assert module.training
        assert module.drop.training
        assert not module.norm.training
    return code


@pytest.fixture
def ranked(tmp_path: Path) -> Iterator[Ranked]:
    ranked = Ranked(tmp_path)
    yield ranked
    ranked.store.close()


def test_a_compiled_model_answers_as_the_module(ranked: Ranked, code: dict[str, bytes]) -> None:
    base = ranked.publish("base", code)
    with tb.Snapshot.open(base) as snapshot:
        module = load_model(snapshot, into=Ranker(snapshot))
        with (
            Server(snapshot, "127.0.0.1:0", model=module, options=PYTHON) as python,
            Server(snapshot, "127.0.0.1:0", options=AOTI) as server,
        ):
            assert server.predicts
            for count in (1, 2, 17, 128):
                given = samples(count, seed=count)
                found, told = post(server, given), post(python, given)
                assert found.keys() == told.keys()
                for name, value in ranked.expected(given).items():
                    assert torch.equal(told[name], value)
                    torch.testing.assert_close(found[name], value, **NEAR)


def test_a_click_model_is_compiled_as_it_is_published(tmp_path: Path) -> None:
    # No numbers: the module makes a constant of the number of rows.
    dense_count = 0
    sizes = {"c1": 30, "c2": 40, "c3": 50}
    store = tb.Store.open(tmp_path / "store", dram_budget="8MiB")
    model = DLRM(dense_count, sizes, store=store, embedding_dim=8)
    batch, dense = random_bags(sizes, 17, seed=2), torch.rand(17, dense_count)
    model(dense, batch).sum().backward()
    store.publish(tmp_path / "snapshot", model, compiled=True)
    with torch.no_grad():
        expected = model(dense, batch)
    store.close()
    with (
        tb.Snapshot.open(tmp_path / "snapshot") as snapshot,
        Server(snapshot, "127.0.0.1:0", options=AOTI) as server,
    ):
        given = {"dense": dense, "values": batch.values(), "lengths": batch.lengths()}
        found = post(server, given)
        torch.testing.assert_close(found["logit"], expected, **NEAR)
        torch.testing.assert_close(found["probability"], torch.sigmoid(expected), **NEAR)


def test_an_answer_has_parameters_of_one_generation(ranked: Ranked, code: dict[str, bytes]) -> None:
    given = samples(5, seed=3)
    wanted = [ranked.expected(given)]
    base = ranked.publish("base", code)
    deltas = []
    for at in range(3):
        ranked.step()
        wanted.append(ranked.expected(given))
        deltas.append(ranked.publish(f"delta-{at}", code, base="base"))
    assert not near(wanted[0], wanted[1])
    with (
        tb.Snapshot.open(base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=AOTI) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        stop = threading.Event()

        def ask_on() -> int:
            count = 0
            while not stop.is_set() or not count:
                found = post(server, given)
                assert any(near(found, one) for one in wanted)
                count += 1
            return count

        asking = [pool.submit(ask_on) for _ in range(4)]
        try:
            for delta, after in zip(deltas, wanted[1:], strict=True):
                server.apply(delta)
                assert near(post(server, given), after)
        finally:
            stop.set()
        assert all(one.result() for one in asking)


def test_a_channel_that_is_followed_brings_compiled_models(
    ranked: Ranked, code: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierbed.serve.compiled.compile_dense", lambda model, store: code)
    place = ranked.folder / "models" / "ads"
    given = samples(3, seed=4)
    with tb.Publisher(ranked.store, ranked.module, place, compiled=True) as publisher:
        publisher.publish_now()
        follow = tb.Follow(
            place, local=ranked.folder / "here", channel="canary", poll=0.05, sync_bandwidth="1GiB"
        )
        with Server(follow, "127.0.0.1:0", options=AOTI) as server:
            assert near(post(server, given), ranked.expected(given))
            for full in (False, True):
                ranked.step()
                publisher.publish_now(full=full)
                after = ranked.expected(given)
                until_s = time.monotonic() + 20
                while not near(post(server, given), after):
                    assert time.monotonic() < until_s, f"no newer version, full: {full}"
                    time.sleep(0.05)


ASK = """
import http.client, sys, time
host, body = sys.argv[1], open(sys.argv[2], "rb").read()
client = http.client.HTTPConnection(host)
headers = {"Content-Type": "application/x-safetensors"}
client.request("POST", "/v1/predict", body, headers)
assert client.getresponse().status == 200
print(time.monotonic())
"""


def test_a_compiled_model_answers_while_python_is_held(
    ranked: Ranked, code: dict[str, bytes]
) -> None:
    base = ranked.publish("base", code)
    body = ranked.folder / "body"
    body.write_bytes(save(samples(2, seed=1)))
    with (
        tb.Snapshot.open(base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=AOTI) as server,
    ):
        argv = [sys.executable, "-S", "-c", ASK, server.address, str(body)]
        client = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        # No thread gets the lock of the interpreter meanwhile.
        ctypes.PyDLL(None).usleep(3_000_000)
        held_until_s = time.monotonic()
        told, _ = client.communicate(timeout=30)
    assert float(told) < held_until_s


def test_threads_ask_a_compiled_model_at_once(ranked: Ranked, code: dict[str, bytes]) -> None:
    base = ranked.publish("base", code)
    asked = [samples(1 + at % 7, seed=at) for at in range(60)]
    wanted = [ranked.expected(given) for given in asked]
    options = ServeOptions(log_level="off", predict="aoti", lookup_threads=2, limits=PATIENT)
    with (
        tb.Snapshot.open(base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=options) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        for _ in range(3):
            told = pool.map(lambda given: post(server, given), asked)
            assert all(map(near, told, wanted))


def test_what_compiled_code_refuses_is_the_servers_fault(
    ranked: Ranked, code: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    base = ranked.publish("base", code)
    bad, good = samples(2, seed=1, kind=7), samples(2, seed=1, kind=1)
    with tb.Snapshot.open(base) as snapshot:
        with Server(snapshot, "127.0.0.1:0", options=AOTI) as server:
            with pytest.raises(urllib.error.HTTPError) as raised:
                post(server, bad)
            assert raised.value.code == 500
            told = raised.value.read().decode()
            assert "the compiled model failed" in told
            assert "read the line before on the server's standard error" in told
            assert "index out of bounds" in capfd.readouterr().err
            assert near(post(server, good), ranked.expected(good))
        module = load_model(snapshot, into=Ranker(snapshot))
        with (
            Server(snapshot, "127.0.0.1:0", model=module, options=PYTHON) as server,
            pytest.raises(urllib.error.HTTPError) as raised,
        ):
            post(server, bad)
        assert "out of bounds" in raised.value.read().decode()


def changed(code: dict[str, bytes], **more: Any) -> dict[str, bytes]:
    return {CODE: code[CODE], ABOUT: json.dumps({**json.loads(code[ABOUT]), **more}).encode()}


def test_compiled_models_of_something_else_are_refused(
    ranked: Ranked, code: dict[str, bytes], tmp_path: Path
) -> None:
    parameters = json.loads(code[ABOUT])["parameters"]
    longer = {name: {**told, "shape": [9, *told["shape"]]} for name, told in parameters.items()}
    cases = {
        "no compiled model was published": None,
        "compiled by another torch": changed(code, torch="1.13.0"),
        "missing: avx9000": changed(code, cpu_flags=["avx9000"]),
        "another processor": changed(code, machine="vax"),
        "another config": changed(code, config={"model": "other"}),
        "takes or answers something else": changed(code, outputs=[{"name": "a", "width": None}]),
        "not that of the compiled model": changed(code, parameters=longer),
        "a parameter of no name": changed(code, parameters={}),
        "cannot be loaded": {**code, CODE: b"no library"},
    }
    for at, (named, attachments) in enumerate(cases.items()):
        with tb.Snapshot.open(ranked.publish(f"case-{at}", attachments)) as snapshot:
            with pytest.raises(tb.InvalidError, match=named) as refused:
                Server(snapshot, "127.0.0.1:0", options=AOTI)
            assert "publish with compiled, by such a torch on such a pro" in str(refused.value)
    # What a server answers is as shaped as it was told.
    outputs = [{"name": "score", "width": None}, {"name": "hidden", "width": 9}]
    path = ranked.publish("shapes", changed(code, outputs=outputs))
    with (
        tb.Snapshot.open(path) as snapshot,
        pytest.raises(tb.IoError, match="output of the compiled model is another one"),
    ):
        Server(snapshot, "127.0.0.1:0", options=AOTI)
    other = Ranked(tmp_path / "other", dim=6)
    path = other.publish("base", code)
    other.store.close()
    with (
        tb.Snapshot.open(path) as snapshot,
        pytest.raises(tb.InvalidError, match="rows of another width"),
    ):
        Server(snapshot, "127.0.0.1:0", options=AOTI)
    # As the remedy says.
    for options, path in ((PYTHON, "case-1"), (AOTI, "good")):
        folder = ranked.folder / path
        if options is AOTI:
            ranked.publish(path, code)
        with tb.Snapshot.open(folder) as snapshot:
            module = None if options is AOTI else load_model(snapshot, into=Ranker(snapshot))
            with Server(snapshot, "127.0.0.1:0", model=module, options=options) as server:
                given = samples(2, seed=9)
                assert near(post(server, given), ranked.expected(given))


def test_a_delta_without_the_code_is_refused(ranked: Ranked, code: dict[str, bytes]) -> None:
    base = ranked.publish("base", code)
    given = samples(2, seed=9)
    before = ranked.expected(given)
    ranked.step()
    delta = ranked.publish("delta", None, base="base")
    rows = ranked.folder / "rows"
    ranked.store.publish(rows, base=ranked.folder / "base")
    with (
        tb.Snapshot.open(base) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=AOTI) as server,
    ):
        with pytest.raises(tb.InvalidError, match="no compiled model was published"):
            server.apply(delta)
        assert near(post(server, given), before)
        # One without a model leaves that which answers.
        server.apply(rows)
        assert not near(post(server, given), ranked.expected(given))


def test_code_is_unpacked_where_there_is_room(
    ranked: Ranked, code: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bytes behind its end make it another library, which was never loaded.
    base = ranked.publish("base", {**code, CODE: code[CODE] + b"\0"})
    room = ranked.folder / "room"
    monkeypatch.setenv("TMPDIR", str(room))
    with tb.Snapshot.open(base) as snapshot:
        with pytest.raises(tb.IoError, match="TMPDIR name a folder with room"):
            Server(snapshot, "127.0.0.1:0", options=AOTI)
        room.mkdir()
        with Server(snapshot, "127.0.0.1:0", options=AOTI) as server:
            given = samples(2, seed=9)
            assert near(post(server, given), ranked.expected(given))
    assert not os.listdir(room)


def test_a_compiled_model_is_not_given_twice(ranked: Ranked, code: dict[str, bytes]) -> None:
    base = ranked.publish("base", code)
    with tb.Snapshot.open(base) as snapshot:
        module = load_model(snapshot, into=Ranker(snapshot))
        with pytest.raises(tb.InvalidError, match="leave out model, or predict by python"):
            Server(snapshot, "127.0.0.1:0", model=module, options=AOTI)
        with Server(snapshot, "127.0.0.1:0", options=AOTI) as server:
            assert server.predicts
        with Server(snapshot, "127.0.0.1:0", with_model=False, options=AOTI) as server:
            assert not server.predicts


def test_there_is_a_model_to_compile(ranked: Ranked) -> None:
    with pytest.raises(tb.InvalidError, match="give it, or leave out compiled"):
        ranked.store.publish(ranked.folder / "none", compiled=True)
    with pytest.raises(tb.InvalidError, match="give it, or leave out compiled"):
        tb.Publisher(ranked.store, None, ranked.folder / "models", compiled=True)
    ranked.store.publish(ranked.folder / "none")


def test_compiling_takes_a_compiler(ranked: Ranked) -> None:
    from torch._inductor import config

    told = r"install g\+\+, or name a compiler in the env"
    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(tb.UnsupportedError, match=told),
    ):
        tb.compile_dense(ranked.module, ranked.store)


class Branching(Ranker):
    """A head whose way depends on what it is given."""

    def head(self, dense: Tensor, rows: Tensor) -> dict[str, Tensor]:
        if dense.sum() > 100:
            return {"score": dense.sum(1)}
        return super().head(dense, rows)


def test_a_head_that_cannot_be_traced_is_told_at_once(ranked: Ranked) -> None:
    module = Branching(ranked.store)
    with pytest.raises(tb.UnsupportedError, match="publish it without compiled, and predict by"):
        ranked.store.publish(ranked.folder / "base", module, compiled=True)
    ranked.store.publish(ranked.folder / "base", module)
    with tb.Snapshot.open(ranked.folder / "base") as snapshot:
        module = load_model(snapshot, into=Branching(snapshot))
        with Server(snapshot, "127.0.0.1:0", model=module, options=PYTHON) as server:
            assert post(server, samples(2, seed=1)).keys() == {"score", "hidden"}
