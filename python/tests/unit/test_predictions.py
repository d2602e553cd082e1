"""Predictions of a server: the published click models, and modules of one's own."""

from __future__ import annotations

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
from tierbed.cli.serving import ask
from tierbed.nn import MODELS
from tierbed.serve import Limits, ModelFeature, ServedModel, ServeOptions, Server, load_model
from tierbed.testing import random_bags

SIZES = {"c1": 30, "c2": 40, "c3": 50}
QUIET = ServeOptions(log_level="off")


def _post(server: Server, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    request = urllib.request.Request(f"http://{server.address}/v1/predict", save(tensors))
    request.add_header("Content-Type", "application/x-safetensors")
    with urllib.request.urlopen(request) as answer:
        told: dict[str, Tensor] = load(answer.read())
        return told


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dense_count", [0, 3])
def test_a_published_model_predicts_the_same(tmp_path: Path, kind: str, dense_count: int) -> None:
    store = tb.Store.open(tmp_path / "store", dram_budget="8MiB")
    model = MODELS[kind](dense_count, SIZES, store=store, embedding_dim=8)
    batch, dense = random_bags(SIZES, 5, seed=2), torch.rand(5, dense_count)
    model(dense, batch).sum().backward()
    store.publish(tmp_path / "snapshot", model)
    with torch.no_grad():
        expected = model(dense, batch)
    store.close()
    request = {"dense": dense, "values": batch.values(), "lengths": batch.lengths()}
    with (
        tb.Snapshot.open(tmp_path / "snapshot") as snapshot,
        Server(snapshot, "127.0.0.1:0", options=QUIET) as server,
    ):
        answer = _post(server, request)
        assert torch.equal(answer["logit"], expected)
        assert torch.equal(answer["probability"], torch.sigmoid(expected))
        text = {name: value.tolist() for name, value in request.items()}
        told = ask(f"http://{server.address}", "/v1/predict", text)
        assert torch.equal(torch.tensor(told["logit"]), expected)


class Tasks(nn.Module):
    """Two tasks and a vector over rows of two poolings."""

    dense_count = 2

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.embeddings = tb.EmbeddingBagCollection(
            [
                tb.EmbeddingBagConfig(name="user", num_embeddings=50, embedding_dim=4),
                tb.EmbeddingBagConfig(
                    name="item",
                    num_embeddings=60,
                    embedding_dim=8,
                    feature_names=["seen", "bought"],
                    pooling=tb.PoolingType.MEAN,
                ),
            ],
            store=store,
        )
        self.shared = nn.Linear(2 + 20, 8)
        self.click, self.buy = nn.Linear(8, 1), nn.Linear(8, 1)

    def head(self, dense: Tensor, rows: Tensor) -> dict[str, Tensor]:
        shared = torch.relu(self.shared(torch.cat([dense, rows], dim=1)))
        return {
            "click": torch.sigmoid(self.click(shared)).squeeze(1),
            "buy": torch.sigmoid(self.buy(shared)).squeeze(1),
            "shared": shared,
        }

    def forward(self, dense: Tensor, sparse: Any) -> dict[str, Tensor]:
        return self.head(dense, self.embeddings(sparse).values())


class Tasked:
    """The module in training, and where it is published."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = tb.Store.open(folder / "store", dram_budget="8MiB")
        self.module = Tasks(self.store)
        self.step()
        self.store.publish(folder / "base", self.module)

    def step(self) -> None:
        batch = self.bags(40, seed=1)
        sum(out.sum() for out in self.module(torch.rand(40, 2), batch).values()).backward()
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.add_(0.1)

    def bags(self, samples: int, seed: int) -> tb.KeyedJaggedTensor:
        return random_bags({"user": 50, "seen": 60, "bought": 60}, samples, seed=seed)

    def expected(self, dense: Tensor, batch: tb.KeyedJaggedTensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            return self.module.eval()(dense, batch)


@pytest.fixture
def tasked(tmp_path: Path) -> Iterator[Tasked]:
    tasked = Tasked(tmp_path)
    yield tasked
    tasked.store.close()


def _samples(batch: tb.KeyedJaggedTensor, dense: Tensor) -> dict[str, Tensor]:
    return {"dense": dense, "values": batch.values(), "lengths": batch.lengths()}


def test_a_module_of_ones_own_is_served_with_all_its_outputs(tasked: Tasked) -> None:
    batch, dense = tasked.bags(5, seed=3), torch.rand(5, 2)
    expected = tasked.expected(dense, batch)
    with tb.Snapshot.open(tasked.folder / "base") as snapshot:
        module = load_model(snapshot, into=Tasks(snapshot))
        with Server(snapshot, "127.0.0.1:0", model=module, options=QUIET) as server:
            url = f"http://{server.address}"
            told = ask(url, "/v2/models/tierbed")
            assert told["inputs"][1] == {"name": "ids", "datatype": "INT64", "shape": [-1, 3]}
            shapes = {output["name"]: output["shape"] for output in told["outputs"]}
            assert shapes == {"click": [-1], "buy": [-1], "shared": [-1, 8]}
            answer = _post(server, _samples(batch, dense))
            assert answer.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(answer[name], value)
            text = {name: value.tolist() for name, value in _samples(batch, dense).items()}
            told = ask(url, "/v1/predict", text)
            assert torch.equal(torch.tensor(told["shared"]), expected["shared"])


def test_a_delta_brings_parameters_of_a_module_of_ones_own(tasked: Tasked) -> None:
    batch, dense = tasked.bags(5, seed=3), torch.rand(5, 2)
    before = tasked.expected(dense, batch)
    tasked.step()
    after = tasked.expected(dense, batch)
    tasked.store.publish(tasked.folder / "delta", tasked.module, base=tasked.folder / "base")
    with tb.Snapshot.open(tasked.folder / "base") as snapshot:
        module = load_model(snapshot, into=Tasks(snapshot))
        with Server(snapshot, "127.0.0.1:0", model=module, options=QUIET) as server:
            assert torch.equal(_post(server, _samples(batch, dense))["buy"], before["buy"])
            server.apply(tasked.folder / "delta")
            assert torch.equal(_post(server, _samples(batch, dense))["buy"], after["buy"])
        # The module that was given is as it was.
        with torch.inference_mode():
            rows = torch.zeros(1, 20)
            assert not torch.equal(
                module.head(dense[:1], rows)["buy"], tasked.module.head(dense[:1], rows)["buy"]
            )


def test_predictions_of_many_clients_are_near_those_alone(tasked: Tasked) -> None:
    # A busy machine refuses nobody.
    one = ServeOptions(log_level="off", lookup_threads=1, limits=Limits(queue_ms_max=60_000))
    requests = [
        _samples(tasked.bags(1 + at % 7, seed=at), torch.rand(1 + at % 7, 2)) for at in range(40)
    ]
    with tb.Snapshot.open(tasked.folder / "base") as snapshot:
        module = load_model(snapshot, into=Tasks(snapshot))
        with (
            Server(snapshot, "127.0.0.1:0", model=module, options=one) as server,
            ThreadPoolExecutor(8) as pool,
        ):
            alone = [_post(server, request) for request in requests]
            for _ in range(5):
                together = list(pool.map(lambda request: _post(server, request), requests))
                for found, expected in zip(together, alone, strict=True):
                    for name, value in expected.items():
                        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """A head that a test gives."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head


@pytest.mark.parametrize(
    ("module", "given", "named"),
    [
        (nn.Linear(2, 1), {}, "no method head"),
        (Odd(lambda dense, rows: rows), {"features": []}, "how many numbers"),
        (Odd(lambda dense, rows: rows), {"dense_count": 1}, "0 EmbeddingBagCollections"),
        (Odd(lambda dense, rows: rows.sum(1).squeeze()), {}, "are .B. or .B, K."),
        (Odd(lambda dense, rows: rows.sum()), {}, "are .B. or .B, K."),
        (Odd(lambda dense, rows: rows.sum(1).double()), {}, "float64"),
        (Odd(lambda dense, rows: {"a": 1}), {}, "'a' is int"),
        (Odd(lambda dense, rows: rows @ rows.T), {}, "change with its samples"),
    ],
)
def test_a_module_that_cannot_be_served_is_refused(
    tasked: Tasked, module: nn.Module, given: dict[str, Any], named: str
) -> None:
    features = [ModelFeature(name="user", table="user")]
    given = given or {"features": features, "dense_count": 1}
    with (
        tb.Snapshot.open(tasked.folder / "base") as snapshot,
        pytest.raises(tb.InvalidError, match=named),
    ):
        Server(snapshot, "127.0.0.1:0", model=ServedModel(module, **given), options=QUIET)


def test_a_module_without_tables_says_what_it_takes(tasked: Tasked) -> None:
    head = Odd(lambda dense, rows: rows.sum(1))
    features = [ModelFeature(name="user", table="user")]
    with tb.Snapshot.open(tasked.folder / "base") as snapshot:
        with pytest.raises(tb.InvalidError, match=r"give ServedModel\(..., features=...\)"):
            Server(snapshot, "127.0.0.1:0", model=ServedModel(head, dense_count=0))
        with pytest.raises(tb.InvalidError, match=r"give ServedModel\(..., dense_count=...\)"):
            Server(snapshot, "127.0.0.1:0", model=ServedModel(head, features))
        model = ServedModel(head, features, dense_count=0)
        with Server(snapshot, "127.0.0.1:0", model=model, options=QUIET) as server:
            told = ask(f"http://{server.address}", "/v1/predict", {"values": [1, 2]})
            assert len(told["logit"]) == 2


def test_parameters_come_with_the_model_that_is_published(tasked: Tasked) -> None:
    tasked.store.publish(tasked.folder / "bare")
    with (
        tb.Snapshot.open(tasked.folder / "bare") as snapshot,
        pytest.raises(tb.InvalidError, match=r"publish\(path, model\) adds its parameters"),
    ):
        load_model(snapshot, into=Tasks(snapshot))
    tasked.store.publish(tasked.folder / "whole", tasked.module)
    with tb.Snapshot.open(tasked.folder / "whole") as snapshot:
        loaded = load_model(snapshot, into=Tasks(snapshot))
        assert torch.equal(loaded.buy.weight, tasked.module.buy.weight)


def test_parameters_of_another_module_are_refused(tasked: Tasked) -> None:
    with tb.Snapshot.open(tasked.folder / "base") as snapshot:
        with pytest.raises(tb.InvalidError, match="are not those of the module"):
            load_model(snapshot, into=nn.Linear(2, 1))
        assert load_model(snapshot) is None
        none = [ModelFeature(name="a", table="b")]
        unknown = ServedModel(Odd(lambda dense, rows: dense), none, dense_count=1)
        with pytest.raises(tb.InvalidError, match="no tables"):
            Server(snapshot, "127.0.0.1:0", model=unknown)


def test_what_a_module_raises_is_the_servers_fault_or_the_clients(tasked: Tasked) -> None:
    def head(dense: Tensor, rows: Tensor) -> Tensor:
        if (dense == 1).any():
            raise ValueError("a number that is no age")
        if (dense == 2).any():
            raise KeyError("a bug")
        return rows.sum(1)

    model = ServedModel(Odd(head), [ModelFeature(name="user", table="user")], dense_count=1)
    with (
        tb.Snapshot.open(tasked.folder / "base") as snapshot,
        Server(snapshot, "127.0.0.1:0", model=model, options=QUIET) as server,
    ):
        url = f"http://{server.address}"
        with pytest.raises(tb.InvalidError, match=r"400.*no age"):
            ask(url, "/v1/predict", {"dense": [[1]], "values": [1]})
        with pytest.raises(tb.InvalidError, match=r"500.*a bug"):
            ask(url, "/v1/predict", {"dense": [[2]], "values": [1]})
        assert len(ask(url, "/v1/predict", {"dense": [[3]], "values": [1]})["logit"]) == 1
