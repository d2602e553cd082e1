"""Clients that others made, asked where ``scripts/client-deps`` has brought them."""

from __future__ import annotations

import base64
import csv
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from oip_kit import SIZES, publish

import tierbed as tb
from tierbed.serve import ServeOptions, Server

CLIENTS = Path(__file__).resolve().parents[3] / ".tools" / "clients" / "bin"

# Asks for rows as KServe's client does, in both forms, and prints them.
KSERVE = """
import asyncio, json, sys
import numpy as np
from kserve import InferInput, InferRequest
from kserve.inference_client import InferenceRESTClient, RESTConfig

async def main():
    url, ids = sys.argv[1], np.array(json.loads(sys.argv[2]))
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "ads.rows")
    for binary in (False, True):
        given = InferInput("ids", list(ids.shape), "INT64")
        given.set_data_from_numpy(ids, binary_data=binary)
        asked = InferRequest(model_name="ads.rows", infer_inputs=[given], request_id="k1")
        answer = await client.infer(url, asked, model_name="ads.rows")
        assert answer.id == "k1", answer.id
        print(json.dumps(answer.outputs[0].as_numpy().ravel().tolist()))

asyncio.run(main())
"""


def _client(name: str) -> str:
    found = shutil.which(name, path=str(CLIENTS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; see scripts/client-deps")
    return found


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.Snapshot]:
    with tb.Snapshot.open(publish(tmp_path_factory.mktemp("clients"))) as snapshot:
        yield snapshot


@pytest.fixture
def server(snapshot: tb.Snapshot) -> Iterator[Server]:
    options = ServeOptions(model_name="ads", log_level="off", grpc_address="127.0.0.1:0")
    with Server(snapshot, "127.0.0.1:0", options=options) as server:
        yield server


def _ran(command: list[str], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)


IDS = [[1, 2], [29, 39], [0, 7]]


def _rows(snapshot: tb.Snapshot) -> np.ndarray:
    """Returns what ``ads.rows`` answers for ``IDS``, ``[3, 16]``."""
    asked = torch.tensor(IDS)
    lengths = torch.ones(asked.numel(), dtype=torch.int64)
    given = tb.KeyedJaggedTensor(list(SIZES), asked.T.reshape(-1), lengths=lengths)
    pooled = snapshot.lookup(given, "sum")
    return np.concatenate([pooled[name].numpy() for name in SIZES], axis=1)


def test_promtool_finds_no_fault_with_the_metrics(server: Server) -> None:
    promtool = _client("promtool")
    url = f"http://{server.address}"
    # A metric without samples is checked, too, but not what its labels look like.
    urllib.request.urlopen(f"{url}/health", timeout=60).close()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/nowhere", timeout=60)
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read()
    checked = _ran([promtool, "check", "metrics"], text)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_kserve_reads_the_bits_of_the_snapshot(snapshot: tb.Snapshot, server: Server) -> None:
    if not any(CLIENTS.parent.glob("lib/*/site-packages/kserve")):
        pytest.skip("kserve is not installed; see scripts/client-deps")
    command = [str(CLIENTS / "python"), "-c", KSERVE, f"http://{server.address}", json.dumps(IDS)]
    asked = _ran(command)
    assert asked.returncode == 0, asked.stderr.decode()
    answers = [json.loads(line) for line in asked.stdout.splitlines()]
    assert answers == [_rows(snapshot).ravel().tolist()] * 2


def test_grpcurl_lists_the_methods_and_asks_for_rows(snapshot: tb.Snapshot, server: Server) -> None:
    grpcurl, address = _client("grpcurl"), server.grpc_address
    assert address is not None
    listed = _ran([grpcurl, "-plaintext", address, "list", "inference.GRPCInferenceService"])
    assert b"inference.GRPCInferenceService.ModelInfer\n" in listed.stdout, listed.stderr
    ids = {"name": "ids", "datatype": "INT64", "shape": [3, 2]}
    given = ids | {"contents": {"int64_contents": np.ravel(IDS).tolist()}}
    request = json.dumps({"model_name": "ads.rows", "inputs": [given]})
    method = "inference.GRPCInferenceService/ModelInfer"
    asked = _ran([grpcurl, "-plaintext", "-d", request, address, method])
    assert asked.returncode == 0, asked.stderr.decode()
    [raw] = json.loads(asked.stdout)["rawOutputContents"]
    found = np.frombuffer(base64.b64decode(raw), dtype=np.float32)
    np.testing.assert_array_equal(found.reshape(3, 16), _rows(snapshot))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_measures_every_request_as_good(
    server: Server, tmp_path: Path, protocol: str
) -> None:
    # Its ids are random numbers of 64 bits unless they are given.
    given = {"data": [{"ids": {"content": np.ravel(IDS).tolist(), "shape": [3, 2]}}]}
    (tmp_path / "ids.json").write_text(json.dumps(given))
    address = server.address if protocol == "http" else server.grpc_address
    command = [_client("perf_analyzer"), "-m", "ads.rows", "-u", str(address), "-i", protocol]
    command += ["--input-data", str(tmp_path / "ids.json"), "--shape", "ids:3,2"]
    command += ["--request-rate-range", "200", "--request-distribution", "poisson"]
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "50"]
    command += ["--stability-percentage", "999", "-f", str(tmp_path / "told.csv")]
    libraries = os.environ | {"LD_LIBRARY_PATH": str(CLIENTS.parent / "lib" / "perf_analyzer")}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=libraries
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Failed" not in ran.stdout, ran.stdout
    [told] = csv.DictReader((tmp_path / "told.csv").read_text().splitlines())
    assert float(told["Inferences/Second"]) > 0
    assert float(told["p99 latency"]) > 0
