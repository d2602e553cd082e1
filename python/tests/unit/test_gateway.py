"""A gateway over two shards of a published model, beside a server of all of it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from oip_kit import SIZES, bags

import tierbed as tb
from tierbed.nn import MODELS
from tierbed.serve import ServeOptions, Server
from tierbed.testing import random_bags

SHARDS = 2


@dataclass
class Running:
    """Servers of one model: of all of it, and of its shards behind a gateway."""

    folder: Path
    one: Server
    gateway: Server
    route: tb.Route
    snapshot: tb.Snapshot


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gateway")
    with tb.Store.open(folder / "store", dram_budget="8MiB") as store:
        model = MODELS["dlrm"](
            3, SIZES, store=store, embedding_dim=8, optimizer=tb.RowWiseAdagrad(lr=0.1)
        )
        model(torch.rand(64, 3), random_bags(SIZES, 64, seed=0, bag_max=1)).sum().backward()
        store.publish(folder / "whole", model)
        store.publish(folder / "shards", model, shards=tb.Shards(count=SHARDS))
    options = ServeOptions(model_name="ads", log_level="off", grpc_address="127.0.0.1:0")
    opened = [
        tb.Snapshot.open(folder / "shards" / shard.folder, dram_budget="8MiB")
        for shard in tb.ShardMap.open(folder / "shards").shards
    ]
    servers = [Server(one, "127.0.0.1:0", with_model=False, options=options) for one in opened]
    members = folder / "members.json"
    members.write_text(json.dumps({"shard": [{"replicas": [it.grpc_address]} for it in servers]}))
    route = tb.Route(folder / "shards", members, wait="20s")
    snapshot = tb.Snapshot.open(folder / "whole", dram_budget="8MiB")
    one = Server(snapshot, "127.0.0.1:0", options=options)
    gateway = Server(route, "127.0.0.1:0", options=options)
    yield Running(folder, one, gateway, route, snapshot)
    for server in (gateway, one, *servers):
        server.stop()
    for each in (snapshot, *opened):
        each.close()


def _post(server: Server, path: str, body: object) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://{server.address}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def test_predictions_of_a_gateway_are_those_of_one_server(running: Running) -> None:
    assert running.gateway.predicts
    body = {"dense": [[0.1, 0.2, 0.3], [1, 2, 3]], "values": [1, 29, 7, 39]}
    found = _post(running.gateway, "/v1/predict", body)
    assert found == _post(running.one, "/v1/predict", body)


def test_clients_of_others_get_the_same_from_a_gateway(running: Running) -> None:
    http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    asked = bags()

    def answer(kind: object, url: str | None) -> np.ndarray:
        assert url is not None
        inputs = []
        for name, tensor in (("values", asked.values()), ("lengths", asked.lengths())):
            given = kind.InferInput(name, list(tensor.shape), "INT64")  # type: ignore[attr-defined]
            given.set_data_from_numpy(tensor.to(torch.int64).numpy())
            inputs.append(given)
        with kind.InferenceServerClient(url) as client:  # type: ignore[attr-defined]
            found: np.ndarray = client.infer("ads.rows", inputs).as_numpy("pooled")
        return found

    wanted = answer(http, running.one.address)
    assert np.abs(wanted).sum() > 0
    for kind, url in ((http, running.gateway.address), (grpc, running.gateway.grpc_address)):
        assert answer(kind, url).tobytes() == wanted.tobytes()


def test_a_shard_client_has_the_bits_of_the_snapshot(running: Running) -> None:
    with tb.ShardClient(running.route) as client:
        assert set(client.features) == set(SIZES)
        asked = bags()
        found = client.lookup(asked, pooling="sum")
        wanted = running.snapshot.lookup(asked, "sum")
        for name in SIZES:
            assert torch.equal(found[name], wanted[name])
        assert client.generation.endswith(".0")
        weights = torch.linspace(-1, 1, len(asked.values()))
        weighted = tb.KeyedJaggedTensor(
            list(SIZES), asked.values(), lengths=asked.lengths(), weights=weights
        )
        found = client.lookup(weighted, pooling="mean")
        wanted = running.snapshot.lookup(weighted, "mean")
        assert all(torch.equal(found[name], wanted[name]) for name in SIZES)
        bare = client.lookup(asked, pooling="none")
        assert {name: rows.shape[0] for name, rows in bare.items()} == {"c1": 4, "c2": 3}
        bad = tb.KeyedJaggedTensor(["c1"], torch.tensor([30]), lengths=torch.tensor([1]))
        with pytest.raises(tb.InvalidError, match="out of range"):
            client.lookup(bad)
    with pytest.raises(tb.ClosedError, match="make another one"):
        client.lookup(bags())
    with tb.ShardClient(running.route) as again:
        assert set(again.lookup(bags())) == set(SIZES)


def test_a_route_is_taken_once_and_its_words_are_checked(running: Running) -> None:
    routing = running.route.begin()
    client = routing.client()
    with pytest.raises(tb.ClosedError, match="make another Route"):
        routing.client()
    assert client.features
    with pytest.raises(tb.InvalidError, match="missing_shard"):
        tb.Route(running.folder, "m", missing_shard="zeros").begin()  # type: ignore[arg-type]
