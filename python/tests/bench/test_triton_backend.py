"""Tierbed behind a real Triton: an unmodified client gets what our own server answers."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.serve import ServeOptions, Server
from tierbed.testing import random_bags
from tierbed_bench.serving_process import AbsentError
from tierbed_bench.serving_triton import Triton, own_backends, triton

http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
from tritonclient.utils import InferenceServerException  # noqa: E402

SIZES = {"c1": 30, "c2": 40}
DIM, ROWS = 8, 50
# Our server waits this long for a swap, and Triton for what it is asked.
WAIT_S = 60.0


def _write_model(folder: Path, *lines: str, **parameters: object) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    told = [f'{{ key: "{k}" value: {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
    head = ['backend: "tierbed"', *lines, *(f"parameters {one}" for one in told)]
    (folder / "config.pbtxt").write_text("\n".join(head) + "\n")


def _publish(path: Path) -> Path:
    with tb.Store.open(path / "store", dram_budget="8MiB") as store:
        tables = [
            tb.EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=DIM)
            for name, size in SIZES.items()
        ]
        bags = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        bags(random_bags(SIZES, 64, seed=0, bag_max=1)).values().sum().backward()
        store.publish(path / "snapshot")
    return path / "snapshot"


@dataclass(frozen=True)
class Both:
    """Two servers that have the same rows, and the folder of Triton's models."""

    tierbed: str
    triton: Triton
    models: Path

    def clients(self) -> list[Any]:
        return [http.InferenceServerClient(url) for url in (self.tierbed, self.triton.http)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    path = tmp_path_factory.mktemp("backend")
    snapshot, models = _publish(path), path / "models"
    _write_model(models / "ads.rows", snapshot=snapshot, dram_budget="8MiB")
    one = "instance_group [ { kind: KIND_CPU count: 1 } ]"
    waits = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
    _write_model(models / "joined", "max_batch_size: 64", one, waits, snapshot=snapshot)
    _write_model(models / "inside")
    shutil.copytree(snapshot, models / "inside" / "1", dirs_exist_ok=True)
    _write_model(models / "absent", snapshot=path / "nowhere")
    options = ServeOptions(model_name="ads", log_level="off")
    with contextlib.ExitStack() as running:
        opened = running.enter_context(tb.Snapshot.open(snapshot, dram_budget="8MiB"))
        server = running.enter_context(Server(opened, "127.0.0.1:0", options=options))
        try:
            loads = ("ads.rows", "joined", "inside")
            peer = running.enter_context(triton(models, loads=loads, backends=own_backends()))
        except AbsentError as reason:
            pytest.skip(str(reason))
        yield Both(server.address, peer, models)


def _input(name: str, data: Any, kind: str = "INT64") -> Any:
    types = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
    array = np.array(data, dtype=types[kind])
    given = http.InferInput(name, list(array.shape), kind)
    given.set_data_from_numpy(array)
    return given


def _asked(
    client: Any, inputs: list[Any], *names: str, model: str = "ads.rows", **parameters: Any
) -> dict[str, bytes] | str:
    """Asks; returns the bytes of each output, and ``generation``, or the status."""
    outputs = [http.InferRequestedOutput(name) for name in names] or None
    try:
        answer = client.infer(model, inputs, outputs=outputs, parameters=parameters or None)
    except InferenceServerException as refused:
        return str(refused.status())
    told = answer.get_response()
    found = {one["name"]: answer.as_numpy(one["name"]) for one in told["outputs"]}
    shapes = {one["name"]: tuple(one["shape"]) for one in told["outputs"]}
    assert {name: array.shape for name, array in found.items()} == shapes
    generation = told["parameters"]["generation"].encode()
    return {"generation": generation, **{name: one.tobytes() for name, one in found.items()}}


IDS = [[1, 2], [29, 39], [0, 7]]
BAGS = {"values": [1, 5, 29, 0, 7, 39, 38], "lengths": [2, 0, 2, 1, 1, 1]}
GOOD: dict[str, tuple[list[tuple[Any, ...]], tuple[str, ...], dict[str, Any]]] = {
    "one id each": ([("ids", IDS)], ("pooled",), {}),
    "32 bits": ([("ids", IDS, "INT32")], ("pooled",), {}),
    "features by name": ([("ids", IDS)], ("c2", "c1"), {}),
    "bags": ([*BAGS.items()], ("pooled",), {}),
    "weights": ([*BAGS.items(), ("weights", [0.5] * 7, "FP32")], ("pooled", "c1"), {}),
    "some features": ([("c2.values", [3, 4]), ("c2.lengths", [0, 2])], ("c2",), {}),
    "mean": ([*BAGS.items()], ("pooled",), {"pooling": "mean"}),
    "unpooled": ([*BAGS.items()], ("c1", "c2"), {"pooling": "none"}),
    "half": ([("ids", IDS)], ("pooled",), {"output_dtype": "FP16"}),
    "unknown parameter": ([("ids", IDS)], ("pooled",), {"nobody": True}),
    "no samples": ([("ids", np.zeros((0, 2)))], ("pooled",), {}),
}
# Triton looks at types of tensors before the backend does: INT64 is what it was told.
ONLY_OURS = {"32 bits"}


@pytest.mark.parametrize("name", GOOD)
def test_bytes_are_those_of_our_server(both: Both, name: str) -> None:
    given, names, parameters = GOOD[name]
    answers = [
        _asked(client, [_input(*one) for one in given], *names, **parameters)
        for client in both.clients()
    ]
    assert isinstance(answers[0], dict)
    assert set(answers[0]) == {"generation", *names}
    if name in ONLY_OURS:
        assert answers[1] == "400"
    else:
        assert answers[0] == answers[1]


WRONG: dict[str, tuple[list[tuple[Any, ...]], tuple[str, ...], dict[str, Any]]] = {
    "id out of range": ([("ids", [[30, 0]])], ("pooled",), {}),
    "negative id": ([("ids", [[-1, 0]])], (), {}),
    "other width": ([("ids", [[1, 2, 3]])], (), {}),
    "other dimensions": ([("ids", [1, 2])], (), {}),
    "other type": ([("ids", [[1, 2]], "FP32")], (), {}),
    "unknown input": ([("idx", [[1, 2]])], (), {}),
    "unknown output": ([("ids", [[1, 2]])], ("nope",), {}),
    "no lengths": ([("values", [1, 2])], ("pooled",), {}),
    "lengths of too many": ([("values", [1, 2]), ("lengths", [1, 2])], ("pooled",), {}),
    "uneven lengths": ([("values", [1, 2]), ("lengths", [1, 1, 0])], ("pooled",), {}),
    "two forms": ([("ids", [[1, 2]]), ("values", [1]), ("lengths", [1, 0])], ("pooled",), {}),
    "output without input": ([("c2.values", [3]), ("c2.lengths", [1])], ("c1",), {}),
    "unknown pooling": ([("ids", [[1, 2]])], ("pooled",), {"pooling": "median"}),
    "pooling of no text": ([("ids", [[1, 2]])], ("pooled",), {"pooling": 3}),
    "unknown type of answers": ([("ids", [[1, 2]])], ("pooled",), {"output_dtype": "FP8"}),
    "weight that is infinite": (
        [("values", [1, 2]), ("lengths", [1, 1]), ("weights", [1.0, np.inf], "FP32")],
        ("pooled",),
        {},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_have_the_status_of_our_server(both: Both, name: str) -> None:
    given, names, parameters = WRONG[name]
    for client in both.clients():
        inputs = [_input(*one) for one in given]
        assert _asked(client, inputs, *names, **parameters) == "400"


def test_tensors_are_told_as_our_server_tells_them(both: Both) -> None:
    ours, theirs = (client.get_model_metadata("ads.rows") for client in both.clients())
    assert (ours["inputs"], ours["outputs"]) == (theirs["inputs"], theirs["outputs"])
    _, client = both.clients()
    config = client.get_model_config("joined")
    assert [(one["name"], one["dims"]) for one in config["input"]] == [("ids", [2])]
    assert (config["output"][0]["dims"], config["max_batch_size"]) == ([16], 64)
    assert client.get_model_config("ads.rows")["instance_group"][0]["kind"] == "KIND_CPU"


def test_who_names_no_output_gets_all_that_there_are(both: Both) -> None:
    _, client = both.clients()
    answers = [
        _asked(client, [_input("ids", IDS)]),
        _asked(client, [_input("ids", IDS)], "pooled"),
        _asked(client, [_input("c2.values", [3]), _input("c2.lengths", [1])]),
    ]
    all_of_them, named, some = (dict(one) for one in answers if isinstance(one, dict))
    assert set(all_of_them) == {"generation", "pooled", "c1", "c2"}
    assert all_of_them["pooled"] == named["pooled"]
    assert set(some) == {"generation", "pooled", "c2"}


def test_a_client_of_grpc_gets_the_same_bytes_and_statuses(both: Both) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

    def ask(client: Any, ids: Any) -> bytes:
        given = grpc.InferInput("ids", [len(ids), 2], "INT64")
        given.set_data_from_numpy(np.array(ids, dtype=np.int64))
        outputs = [grpc.InferRequestedOutput("pooled")]
        pooled = client.infer("ads.rows", [given], outputs=outputs).as_numpy("pooled")
        assert isinstance(pooled, np.ndarray)
        return pooled.tobytes()

    by_http = _asked(both.clients()[0], [_input("ids", IDS)], "pooled")
    assert isinstance(by_http, dict)
    with grpc.InferenceServerClient(both.triton.grpc) as client:
        assert ask(client, IDS) == by_http["pooled"]
        with pytest.raises(InferenceServerException) as refused:
            ask(client, [[30, 0]])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_model_may_have_its_snapshot_in_its_folder(both: Both) -> None:
    _, client = both.clients()
    inside = _asked(client, [_input("ids", IDS)], "pooled", model="inside")
    assert inside == _asked(client, [_input("ids", IDS)], "pooled")


def test_joined_requests_get_their_own_rows_and_mistakes(both: Both) -> None:
    ours, _ = both.clients()
    asked = [[[at % 30, at], [7, 39 - at]] for at in range(15)]
    asked.insert(4, [[30, 0]])
    client = http.InferenceServerClient(both.triton.http, concurrency=16)
    waiting = [client.async_infer("joined", [_input("ids", ids)]) for ids in asked]
    for ids, one in zip(asked, waiting, strict=True):
        wanted = _asked(ours, [_input("ids", ids)], "pooled")
        if isinstance(wanted, str):
            with pytest.raises(InferenceServerException, match="row"):
                one.get_result()
        else:
            assert one.get_result().as_numpy("pooled").tobytes() == wanted["pooled"]
    [told] = client.get_inference_statistics("joined")["model_stats"]
    # Samples of those that were answered, and calls: fewer than requests.
    assert told["inference_count"] == 30
    assert 0 < told["execution_count"] < 15
    assert told["inference_stats"]["success"]["count"] == 15
    assert told["inference_stats"]["fail"]["count"] == 1
    assert told["inference_stats"]["compute_infer"]["ns"] > 0


def test_a_model_without_its_snapshot_says_what_to_do(both: Both) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        both.triton.load("absent")
    told = refused.value.read().decode()
    assert "nowhere" in told, told
    assert "remedy: give the folder that publish wrote" in told
    _write_model(both.models / "absent", snapshot=both.models / "inside" / "1", port="8000")
    with pytest.raises(urllib.error.HTTPError) as refused:
        both.triton.load("absent")
    assert "leave it out of config.pbtxt" in refused.value.read().decode()
    _write_model(both.models / "absent", snapshot=both.models / "inside" / "1")
    both.triton.load("absent")
    _, client = both.clients()
    loaded = _asked(client, [_input("ids", IDS)], "pooled", model="absent")
    assert loaded == _asked(client, [_input("ids", IDS)], "pooled")
    client.unload_model("absent")
    assert client.is_model_ready("ads.rows")


def test_the_last_model_is_unloaded_and_comes_again(both: Both, tmp_path: Path) -> None:
    # Triton closes the backend in between.
    _write_model(tmp_path / "models" / "one", snapshot=both.models / "inside" / "1")
    wanted = _asked(both.clients()[0], [_input("ids", IDS)], "pooled")
    with (
        triton(tmp_path / "models", loads=("one",), backends=own_backends()) as peer,
        # Triton waits for connections before it ends.
        http.InferenceServerClient(peer.http) as client,
    ):
        for _ in range(3):
            assert _asked(client, [_input("ids", IDS)], "pooled", model="one") == wanted
            client.unload_model("one")
            peer.load("one")
        assert client.is_server_live()


def test_answers_are_of_one_version_while_versions_come(tmp_path: Path) -> None:
    store = tb.Store.open(tmp_path / "store", dram_budget="16MiB", order="window")
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM)
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
    every = tb.KeyedJaggedTensor(["item"], torch.arange(ROWS), lengths=torch.ones(ROWS).int())
    ids = [[row] for row in range(ROWS)]
    followed = {"follow": f"{tmp_path / 'location'}@stable", "local": tmp_path / "here"}
    _write_model(tmp_path / "models" / "fresh", poll="20ms", sync_bandwidth="1GiB", **followed)
    seen: list[tuple[str, bytes]] = []
    stop = threading.Event()

    def ask_on(url: str) -> int:
        count = 0
        with http.InferenceServerClient(url) as client:
            while not stop.is_set():
                told = _asked(client, [_input("ids", ids)], "pooled", model="fresh")
                assert isinstance(told, dict), told
                seen.append((told["generation"].decode(), told["pooled"]))
                count += 1
        return count

    def published(publisher: tb.Publisher, *, full: bool) -> bytes:
        emb(every).values().square().sum().backward()
        publisher.step()
        publisher.publish_now(full=full or None)
        versions.append(store.read_rows("item", 0, ROWS).numpy().tobytes())
        return versions[-1]

    def wait_for(version: bytes) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not any(rows == version for _, rows in seen[-8:]):
            assert time.monotonic() < ends_s, "the version does not answer"
            time.sleep(0.01)

    versions: list[bytes] = []
    with (
        store,
        tb.Publisher(store, None, tmp_path / "location", channel="stable") as publisher,
        contextlib.ExitStack() as running,
    ):
        published(publisher, full=True)
        try:
            peer = running.enter_context(triton(tmp_path / "models", backends=own_backends()))
        except AbsentError as reason:
            pytest.skip(str(reason))
        with ThreadPoolExecutor() as pool:
            try:
                going = [pool.submit(ask_on, peer.http) for _ in range(3)]
                for full in (False, False, True, False):
                    wait_for(published(publisher, full=full))
            finally:
                stop.set()
            assert all(one.result() > 0 for one in going)
    assert {rows for _, rows in seen} == set(versions)
    # A generation has one version's rows.
    assert len(set(seen)) == len({generation for generation, _ in seen}) == len(set(versions)) == 5
