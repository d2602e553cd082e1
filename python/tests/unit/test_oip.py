"""The Open Inference Protocol, asked by an unmodified client of Triton where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from oip_kit import SIZES, bags, expected, publish
from typer.main import get_command

import tierbed as tb
from tierbed.cli.serving import ask, register
from tierbed.serve import ServeOptions, Server, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("oip"))


@pytest.fixture
def snapshot(folder: Path) -> Iterator[tb.Snapshot]:
    with tb.Snapshot.open(folder) as snapshot:
        yield snapshot


@pytest.fixture
def server(snapshot: tb.Snapshot) -> Iterator[Server]:
    options = ServeOptions(model_name="ads", log_level="off")
    with Server(snapshot, "127.0.0.1:0", options=options) as server:
        yield server


def test_both_models_are_described(server: Server) -> None:
    url = f"http://{server.address}"
    rows, model = ask(url, "/v2/models/ads.rows"), ask(url, "/v2/models/ads")
    assert rows["inputs"][0] == {"name": "ids", "datatype": "INT64", "shape": [-1, 2]}
    assert rows["outputs"][0] == {"name": "pooled", "datatype": "FP32", "shape": [-1, 16]}
    assert model["inputs"][0] == {"name": "dense", "datatype": "FP32", "shape": [-1, 3]}
    assert [output["name"] for output in model["outputs"]] == ["probability", "logit"]
    with pytest.raises(tb.InvalidError, match=r'404.*"error".*unknown model'):
        ask(url, "/v2/models/tierbed")


def test_a_prediction_over_the_protocol_has_the_bits_of_the_model(
    snapshot: tb.Snapshot, server: Server
) -> None:
    dense, ids = torch.rand(4, 3), torch.tensor([[1, 2], [3, 4], [29, 39], [1, 2]])
    request = {
        "inputs": [
            {"name": "dense", "shape": [4, 3], "datatype": "FP32", "data": dense.tolist()},
            {"name": "ids", "shape": [4, 2], "datatype": "INT64", "data": ids.tolist()},
        ]
    }
    answer = ask(f"http://{server.address}", "/v2/models/ads/infer", request)
    model = load_model(snapshot)
    assert model is not None
    same = tb.KeyedJaggedTensor(
        list(SIZES), ids.T.reshape(-1), lengths=torch.ones(8, dtype=torch.int64)
    )
    with torch.inference_mode():
        logit = model(dense, same)
    told = {output["name"]: output["data"] for output in answer["outputs"]}
    assert torch.equal(torch.tensor(told["logit"]), logit)
    assert torch.equal(torch.tensor(told["probability"]), torch.sigmoid(logit))


def test_an_unmodified_client_gets_the_bits_of_the_snapshot(
    snapshot: tb.Snapshot, server: Server
) -> None:
    http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    from tritonclient.utils import InferenceServerException

    pooled, wanted = snapshot.lookup(bags(), "sum"), expected(snapshot)
    with http.InferenceServerClient(server.address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ads.rows")
        assert not client.is_model_ready("nobody")
        assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
        assert client.get_model_metadata("ads.rows", "1")["platform"] == "tierbed"
        assert client.get_model_config("ads")["input"][0]["name"] == "dense"
        index = client.get_model_repository_index()
        assert [entry["name"] for entry in index] == ["ads.rows", "ads"]

        def tensor(name: str, array: np.ndarray, datatype: str, binary: bool) -> object:
            given = http.InferInput(name, list(array.shape), datatype)
            given.set_data_from_numpy(array, binary_data=binary)
            return given

        values, lengths = bags().values().numpy(), bags().lengths().numpy()
        for binary in (True, False):
            inputs = [
                tensor("values", values, "INT64", binary),
                tensor("lengths", lengths, "INT64", binary),
            ]
            answer = client.infer("ads.rows", inputs, request_id="a", timeout=10_000_000)
            assert answer.get_response()["id"] == "a"
            np.testing.assert_array_equal(answer.as_numpy("pooled"), wanted)
            outputs = [
                http.InferRequestedOutput("c2", binary_data=binary),
                http.InferRequestedOutput("c1", binary_data=not binary),
            ]
            answer = client.infer("ads.rows", inputs, outputs=outputs)
            for name in SIZES:
                np.testing.assert_array_equal(answer.as_numpy(name), pooled[name].numpy())
        halves = client.infer("ads.rows", inputs, parameters={"output_dtype": "FP16"})
        np.testing.assert_array_equal(halves.as_numpy("pooled"), wanted.astype(np.float16))
        pending = client.async_infer("ads.rows", inputs)
        np.testing.assert_array_equal(pending.get_result().as_numpy("pooled"), wanted)
        ids = tensor("ids", np.array([[1, 400]]), "INT64", True)
        with pytest.raises(InferenceServerException, match="row id out of range") as refused:
            client.infer("ads.rows", [ids])
        assert refused.value.status() == "400"
        with pytest.raises(InferenceServerException, match="unknown model") as unknown:
            client.infer("nobody", [ids])
        assert unknown.value.status() == "404"
        for name in ("gzip", "deflate"):
            answer = client.infer(
                "ads.rows",
                inputs,
                request_compression_algorithm=name,
                response_compression_algorithm=name,
            )
            np.testing.assert_array_equal(answer.as_numpy("pooled"), wanted)
        stats = client.get_inference_statistics("ads.rows")["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == 8
        assert stats["inference_stats"]["fail"]["count"] == 1


def test_the_command_line_has_the_same_name() -> None:
    commands = typer.Typer()
    register(commands)
    [serve] = [one for name, one in get_command(commands).commands.items() if name == "serve"]
    defaults = {param.name: param.default for param in serve.params}
    assert defaults["model_name"] == ServeOptions().model_name
