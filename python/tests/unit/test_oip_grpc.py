"""gRPC of the Open Inference Protocol, asked by unmodified clients where they are installed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from oip_kit import SIZES, bags, expected, publish

import tierbed as tb
from tierbed.serve import ServeOptions, Server

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
grpc = pytest.importorskip("grpc")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.Snapshot]:
    with tb.Snapshot.open(publish(tmp_path_factory.mktemp("grpc"))) as snapshot:
        yield snapshot


@pytest.fixture
def server(snapshot: tb.Snapshot) -> Iterator[Server]:
    options = ServeOptions(model_name="ads", log_level="off", grpc_address="127.0.0.1:0")
    with Server(snapshot, "127.0.0.1:0", options=options) as server:
        yield server


def _url(server: Server) -> str:
    assert server.grpc_address is not None
    return server.grpc_address


def _input(name: str, array: np.ndarray, datatype: str = "INT64") -> Any:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def _inputs() -> list[Any]:
    asked = bags()
    return [
        _input("values", asked.values().numpy()),
        _input("lengths", asked.lengths().numpy()),
    ]


def test_a_server_without_the_address_speaks_no_grpc(snapshot: tb.Snapshot) -> None:
    with Server(snapshot, "127.0.0.1:0", options=ServeOptions(log_level="off")) as server:
        assert server.grpc_address is None


def test_a_client_is_told_what_is_served(server: Server) -> None:
    with triton.InferenceServerClient(_url(server)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ads.rows")
        with pytest.raises(triton.InferenceServerException, match="unknown model") as unknown:
            client.is_model_ready("nobody")
        assert "NOT_FOUND" in unknown.value.status()
        assert "binary_tensor_data" in client.get_server_metadata().extensions
        model = client.get_model_metadata("ads.rows", "1", as_json=True)
        assert model["inputs"][0] == {"name": "ids", "datatype": "INT64", "shape": ["-1", "2"]}
        config = client.get_model_config("ads").config
        assert (config.backend, config.max_batch_size) == ("tierbed", 0)
        assert [field.name for field in config.input] == ["dense", "ids", "values", "lengths"]
        assert config.version_policy.latest.num_versions == 1
        assert [model.name for model in client.get_model_repository_index().models] == [
            "ads.rows",
            "ads",
        ]


def test_a_client_gets_the_bits_of_the_snapshot(snapshot: tb.Snapshot, server: Server) -> None:
    wanted, pooled = expected(snapshot), snapshot.lookup(bags(), "sum")
    with triton.InferenceServerClient(_url(server)) as client:
        answer = client.infer("ads.rows", _inputs(), request_id="a", timeout=10_000_000)
        assert answer.get_response().id == "a"
        np.testing.assert_array_equal(answer.as_numpy("pooled"), wanted)
        outputs = [triton.InferRequestedOutput(name) for name in ("c2", "c1")]
        answer = client.infer("ads.rows", _inputs(), outputs=outputs)
        for name in SIZES:
            np.testing.assert_array_equal(answer.as_numpy(name), pooled[name].numpy())
        halves = client.infer("ads.rows", _inputs(), parameters={"output_dtype": "FP16"})
        np.testing.assert_array_equal(halves.as_numpy("pooled"), wanted.astype(np.float16))
        for name in ("gzip", "deflate"):
            answer = client.infer("ads.rows", _inputs(), compression_algorithm=name)
            np.testing.assert_array_equal(answer.as_numpy("pooled"), wanted)
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

        def taken(result: Any, error: Any) -> None:
            answers.put((result, error))

        for _ in range(8):
            client.async_infer("ads.rows", _inputs(), taken)
        for _ in range(8):
            result, error = answers.get(timeout=60)
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("pooled"), wanted)
        stats = client.get_inference_statistics("ads.rows").model_stats[0]
        assert stats.inference_stats.success.count == 13
        assert stats.inference_count == 39


def test_tensors_may_come_in_typed_fields(snapshot: tb.Snapshot, server: Server) -> None:
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    asked = bags()
    request = service_pb2.ModelInferRequest(model_name="ads.rows")
    for name, values in (("values", asked.values()), ("lengths", asked.lengths())):
        field = request.inputs.add(name=name, datatype="INT64", shape=list(values.shape))
        field.contents.int64_contents.extend(values.tolist())
    with grpc.insecure_channel(_url(server)) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    got = np.frombuffer(answer.raw_output_contents[0], dtype=np.float32).reshape(3, 16)
    np.testing.assert_array_equal(got, expected(snapshot))


def test_predictions_are_those_of_http(server: Server) -> None:
    http = pytest.importorskip("tritonclient.http")
    dense, ids = np.random.rand(4, 3).astype(np.float32), np.array([[1, 2], [3, 4], [29, 39]] * 2)
    ids = ids[:4]
    with triton.InferenceServerClient(_url(server)) as client:
        answer = client.infer("ads", [_input("dense", dense, "FP32"), _input("ids", ids)])
    asked = [http.InferInput("dense", [4, 3], "FP32"), http.InferInput("ids", [4, 2], "INT64")]
    for given, array in zip(asked, (dense, ids), strict=True):
        given.set_data_from_numpy(array)
    with http.InferenceServerClient(server.address) as client:
        same = client.infer("ads", asked)
    for name in ("probability", "logit"):
        np.testing.assert_array_equal(answer.as_numpy(name), same.as_numpy(name))


def test_refusals_have_the_status_of_triton(server: Server) -> None:
    with triton.InferenceServerClient(_url(server)) as client:

        def refused(status: str, match: str, model: str, ids: list[list[int]], **how: Any) -> None:
            with pytest.raises(triton.InferenceServerException, match=match) as error:
                client.infer(model, [_input("ids", np.array(ids))], **how)
            assert error.value.status() == f"StatusCode.{status}"

        refused("INVALID_ARGUMENT", "row id out of range", "ads.rows", [[1, 400]])
        refused("INVALID_ARGUMENT", "another shape", "ads.rows", [[1, 2, 3]])
        refused("NOT_FOUND", "unknown model", "nobody", [[1, 2]])
        refused("NOT_FOUND", "version 7", "ads.rows", [[1, 2]], model_version="7")
        with pytest.raises(triton.InferenceServerException) as unknown:
            client.get_trace_settings()
        assert unknown.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_stream_is_answered_in_order(snapshot: tb.Snapshot, server: Server) -> None:
    wanted = expected(snapshot)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(_url(server)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for at in range(60):
            asked = _inputs() if at % 6 else [_input("ids", np.array([[1, 400]]))]
            client.async_stream_infer("ads.rows", asked, request_id=str(at))
        for at in range(60):
            result, error = answers.get(timeout=60)
            if at % 6:
                assert (error, result.get_response().id) == (None, str(at))
                np.testing.assert_array_equal(result.as_numpy("pooled"), wanted)
            else:
                assert "row id out of range" in error.message()
        client.stop_stream()


def test_an_asynchronous_client_gets_the_same(snapshot: tb.Snapshot, server: Server) -> None:
    aio = pytest.importorskip("tritonclient.grpc.aio")
    wanted = expected(snapshot)

    async def ask() -> list[Any]:
        async with aio.InferenceServerClient(_url(server)) as client:
            assert await client.is_server_ready()
            asked = [client.infer("ads.rows", _inputs()) for _ in range(16)]
            return list(await asyncio.gather(*asked))

    for answer in asyncio.run(ask()):
        np.testing.assert_array_equal(answer.as_numpy("pooled"), wanted)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_the_service(server: Server, version: str) -> None:
    reflection = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2")
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    request, response = reflection.ServerReflectionRequest, reflection.ServerReflectionResponse
    questions = [
        request(list_services=""),
        request(file_containing_symbol="inference.GRPCInferenceService"),
    ]
    with grpc.insecure_channel(_url(server)) as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        services, described = list(ask(iter(questions), timeout=60))
    names = {service.name for service in services.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    [file] = described.file_descriptor_response.file_descriptor_proto
    ours = FileDescriptorProto.FromString(file)
    assert "ModelInfer" in [method.name for method in ours.service[0].method]
    _assert_known(ours.message_type)


def _assert_known(ours: Any, within: Any = None) -> None:
    """Asserts that messages are those of the client, with some of their fields."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    files = [service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR]
    for message in ours:
        tops = [file.message_types_by_name for file in files]
        known = [within.nested_types_by_name] if within else tops
        [theirs] = [names[message.name] for names in known if message.name in names]
        for field in message.field:
            same = theirs.fields_by_name[field.name]
            assert (field.number, field.type) == (same.number, same.type), field.name
        _assert_known(message.nested_type, theirs)
