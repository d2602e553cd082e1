"""Remedies of the Open Inference Protocol: the refused request, then what it advises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

import tierbed as tb
from tierbed.serve import ServeOptions, Server

from .kit import collection, opened, snapshot_of, step

IDS = {"name": "ids", "shape": [2, 1], "datatype": "INT64", "data": [1, 2]}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    with opened(folder / "store") as store:
        step(collection(store))
        store.publish(folder / "snapshot")
    with snapshot_of(folder / "snapshot") as snapshot, Server(snapshot, "127.0.0.1:0") as server:
        yield server.address


def infer(address: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = Request(
        f"http://{address}/v2/models/tierbed.rows/infer", json.dumps(body).encode(), method="POST"
    )
    try:
        with urlopen(request, timeout=60) as answer:
            return int(answer.status), answer.read()
    except HTTPError as error:
        return error.code, error.read()


def refused(address: str, remedy: str, body: dict[str, Any]) -> None:
    status, raw = infer(address, body)
    assert status == 400
    assert remedy in json.loads(raw)["error"]


def answered(address: str, body: dict[str, Any]) -> bytes:
    status, raw = infer(address, body)
    assert status == 200, raw
    return raw


def output(name: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": parameters}]


def test_a_class_is_not_answered_but_the_tensor_is(address: str) -> None:
    classes = {"inputs": [IDS], "outputs": output("pooled", classification=3)}
    refused(address, "ask for the tensor itself", classes)
    answered(address, {"inputs": [IDS], "outputs": output("pooled")})


def test_inputs_bring_their_data(address: str) -> None:
    region = {"shared_memory_region": "a", "shared_memory_byte_size": 16}
    shared = {**IDS, "parameters": region}
    del shared["data"]
    refused(
        address, "send the data in the body; shared memory is not supported", {"inputs": [shared]}
    )
    answered(address, {"inputs": [IDS]})


def test_half_precision_is_asked_for_as_binary_data(address: str) -> None:
    halves = {"inputs": [IDS], "parameters": {"output_dtype": "FP16"}}
    refused(address, "ask for binary data", halves)
    raw = answered(address, {**halves, "outputs": output("pooled", binary_data=True)})
    rows = torch.frombuffer(bytearray(raw[-32:]), dtype=torch.float16)
    assert bool(rows.isfinite().all())


def test_rows_that_are_not_pooled_are_asked_for_by_feature(address: str) -> None:
    rows = {"inputs": [IDS], "parameters": {"pooling": "none"}}
    remedy = "ask for features by name, or for pooling sum or mean"
    refused(address, remedy, {**rows, "outputs": output("pooled")})
    answered(address, {**rows, "outputs": output("item")})
    summed = {"inputs": [IDS], "parameters": {"pooling": "sum"}}
    answered(address, {**summed, "outputs": output("pooled")})


def test_a_model_has_a_name_that_fits_into_an_address(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        collection(store)
        store.publish(tmp_path / "snapshot")
    with snapshot_of(tmp_path / "snapshot") as snapshot:
        for name in ("ads/1", "", "a" * 129, "ads"):
            options = ServeOptions(model_name=name)
            if name == "ads":
                Server(snapshot, "127.0.0.1:0", options=options).stop()
                continue
            with pytest.raises(tb.InvalidError, match="use letters, digits, points, hyphens"):
                Server(snapshot, "127.0.0.1:0", options=options)
