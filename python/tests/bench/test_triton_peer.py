"""A real Triton server answers the same requests: the same numbers, and statuses of one class."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tierbed as tb
from tierbed.serve import ServeOptions, Server
from tierbed.testing import random_bags
from tierbed_bench.serving_process import AbsentError
from tierbed_bench.serving_triton import triton, triton_packages, write_table
from tierbed_bench.serving_triton_models import write_rows_model

SIZES = {"c1": 30, "c2": 40}
DIM = 8


@dataclass(frozen=True)
class Both:
    """Addresses of two servers that have the same rows."""

    tierbed: str
    triton: str


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    head_bytes: int

    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body[: self.head_bytes or None])
        return told


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    path = tmp_path_factory.mktemp("triton")
    with tb.Store.open(path / "store", dram_budget="8MiB") as store:
        tables = [
            tb.EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=DIM)
            for name, size in SIZES.items()
        ]
        bags = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        bags(random_bags(SIZES, 64, seed=0, bag_max=1)).values().sum().backward()
        store.publish(path / "snapshot")
    with contextlib.ExitStack() as running:
        snapshot = running.enter_context(tb.Snapshot.open(path / "snapshot"))
        files = [path / f"{name}.npy" for name in SIZES]
        for name, file in zip(SIZES, files, strict=True):
            write_table(snapshot, name, file)
        try:
            packages = [triton_packages()]
            write_rows_model(
                path / "models", "ads.rows", files, dim=DIM, packages=packages, batches=False
            )
            peer = running.enter_context(triton(path / "models"))
        except AbsentError as reason:
            pytest.skip(str(reason))
        options = ServeOptions(model_name="ads", log_level="off")
        server = running.enter_context(Server(snapshot, "127.0.0.1:0", options=options))
        yield Both(tierbed=server.address, triton=peer.http)


def _asked(address: str, path: str, body: bytes | None, head_bytes: int | None = None) -> Answer:
    headers = {"Content-Type": "application/json"}
    if head_bytes is not None:
        headers = {"Inference-Header-Content-Length": str(head_bytes)}
    request = urllib.request.Request(f"http://{address}{path}", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            length = answer.headers.get("Inference-Header-Content-Length")
            return Answer(answer.status, answer.read(), int(length or 0))
    except urllib.error.HTTPError as refused:
        return Answer(refused.code, refused.read(), 0)


def _ids(data: Any, *, shape: list[int], name: str = "ids", kind: str = "INT64") -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape, "data": data}


INFER = "/v2/models/ads.rows/infer"
IDS = [1, 2, 29, 39, 0, 7]


def test_numbers_are_those_of_triton(both: Both) -> None:
    body = json.dumps({"id": "a7", "inputs": [_ids(IDS, shape=[3, 2])]}).encode()
    answers = [_asked(address, INFER, body) for address in (both.tierbed, both.triton)]
    assert [answer.status for answer in answers] == [200, 200]
    ours, theirs = (answer.json() for answer in answers)
    assert ours["id"] == theirs["id"] == "a7"
    assert ours["model_name"] == theirs["model_name"]
    for name in ("name", "datatype", "shape"):
        assert ours["outputs"][0][name] == theirs["outputs"][0][name]
    found = [np.float32(told["outputs"][0]["data"]) for told in (ours, theirs)]
    assert np.abs(found[1]).max() > 0
    np.testing.assert_array_equal(found[0], found[1])


def test_binary_tensors_are_those_of_triton(both: Both) -> None:
    ids = np.array(IDS, dtype=np.int64).tobytes()
    given = {"name": "ids", "datatype": "INT64", "shape": [3, 2]}
    given["parameters"] = {"binary_data_size": len(ids)}
    outputs = [{"name": "pooled", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [given], "outputs": outputs}).encode()
    answers = [
        _asked(address, INFER, head + ids, len(head)) for address in (both.tierbed, both.triton)
    ]
    assert [answer.status for answer in answers] == [200, 200]
    tails = [answer.body[answer.head_bytes :] for answer in answers]
    assert len(tails[0]) == 4 * DIM * 2 * 3
    assert tails[0] == tails[1]


def _body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


GOOD = _ids([9, 0], shape=[1, 2])
REQUESTS: dict[str, tuple[str, bytes | None]] = {
    "no samples": (INFER, _body(_ids([], shape=[0, 2]))),
    "unknown parameter": (INFER, _body(GOOD, parameters={"nobody": True})),
    "id out of range": (INFER, _body(_ids([99, 0], shape=[1, 2]))),
    "negative id": (INFER, _body(_ids([-1, 0], shape=[1, 2]))),
    "other width": (INFER, _body(_ids([9, 0, 1], shape=[1, 3]))),
    "other dtype": (INFER, _body(_ids([9, 0], shape=[1, 2], kind="FP32"))),
    "no dtype": (INFER, _body(_ids([9, 0], shape=[1, 2], kind="NOPE"))),
    "unknown input": (INFER, _body(_ids([9, 0], shape=[1, 2], name="idx"))),
    "no input": (INFER, _body()),
    "unknown output": (INFER, _body(GOOD, outputs=[{"name": "nope"}])),
    "unknown model": ("/v2/models/none/infer", _body(GOOD)),
    "unknown version": ("/v2/models/ads.rows/versions/77/infer", _body(GOOD)),
    "metadata of an unknown model": ("/v2/models/none", None),
    "metadata": ("/v2/models/ads.rows", None),
    "config": ("/v2/models/ads.rows/config", None),
    "statistics": ("/v2/models/ads.rows/stats", None),
    "ready": ("/v2/models/ads.rows/ready", None),
    "live": ("/v2/health/live", None),
    "server": ("/v2", None),
    "unknown path": ("/nowhere", None),
    "unknown method": (INFER, None),
    # Triton answers these mistakes of a client as its own, with 500.
    "fewer ids than told": (INFER, _body(_ids([9, 0, 1], shape=[2, 2]))),
    "text for an id": (INFER, _body(_ids(["a", 0], shape=[1, 2]))),
    "negative shape": (INFER, _body(_ids([9, 0], shape=[-1, 2]))),
    "no JSON": (INFER, b"{"),
}
TRITONS_OWN = {"fewer ids than told", "text for an id", "negative shape", "no JSON"}


@pytest.mark.parametrize("name", REQUESTS)
def test_statuses_are_of_the_class_of_tritons(both: Both, name: str) -> None:
    path, body = REQUESTS[name]
    ours, theirs = (_asked(address, path, body) for address in (both.tierbed, both.triton))
    if name in TRITONS_OWN:
        assert (ours.status, theirs.status) == (400, 500)
    else:
        assert ours.status // 100 == theirs.status // 100, (ours, theirs)
    if theirs.status in (400, 404, 500) and body is not None:
        assert set(ours.json()) == set(theirs.json()) == {"error"}
