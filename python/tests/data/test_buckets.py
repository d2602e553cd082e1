"""Columns in a bucket: streamed from a store that speaks S3, or skipped where there is none."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.placement import LogOptions, read_columns
from tierbed.serve.recorded_upload import RecordUpload

pyarrow = pytest.importorskip("pyarrow")
fs = pytest.importorskip("pyarrow.fs")
parquet = pytest.importorskip("pyarrow.parquet")

WEED = Path(__file__).resolve().parents[3] / ".tools" / "s3" / "bin" / "weed"
KEYS = {"accessKey": "writer", "secretKey": "secret-of-writer"}
ROWS, FILES, GROUP = 40_000, 4, 1_000


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def made(filer: int) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", filer, timeout=2)
    try:
        asked.request("POST", "/buckets/logs/", headers={"Content-Length": "0"})
        return asked.getresponse().status in (201, 409)  # 409 when it was made already
    except OSError:
        return False
    finally:
        asked.close()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A filesystem of pyarrow with the bucket ``logs``."""
    weed = str(WEED) if WEED.exists() else shutil.which("weed")
    if weed is None:
        pytest.skip("no SeaweedFS; call scripts/s3-server")
    folder = tmp_path_factory.mktemp("s3")
    users = [{"name": "writer", "actions": ["Admin", "Read", "Write"], "credentials": [KEYS]}]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    ports = free_ports(8)
    names = ["master", "volume", "filer", "s3"]
    given = [f"-{name}.port={port}" for name, port in zip(names, ports[::2], strict=True)]
    given += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[1::2], strict=True)]
    given += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-volume.max=16"]
    given += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64"]
    given += [f"-dir={folder}", f"-s3.config={folder}/users.json"]
    given += [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([weed, "server", "-filer", "-s3", *given], **quiet)
    try:
        ends = time.monotonic() + 60
        while not made(ports[4]):
            assert time.monotonic() < ends, "SeaweedFS does not start"
            assert server.poll() is None
            time.sleep(0.2)
        yield f"127.0.0.1:{ports[6]}"
    finally:
        server.kill()
        server.wait()


def opened(endpoint: str) -> Any:
    return fs.S3FileSystem(
        access_key=KEYS["accessKey"],
        secret_key=KEYS["secretKey"],
        endpoint_override=endpoint,
        scheme="http",
        region="us-east-1",
        request_timeout=20,
        connect_timeout=5,
    )


@pytest.fixture(scope="module")
def files(bucket: str) -> str:
    """Four files of ten row groups each; returns the endpoint."""
    table = pyarrow.table({"number": list(range(ROWS)), "user": [at % 997 for at in range(ROWS)]})
    store = opened(bucket)
    ends = time.monotonic() + 30
    for at in range(FILES):
        part = table.slice(at * ROWS // FILES, ROWS // FILES)
        while True:
            try:
                with store.open_output_stream(f"logs/day={at}/part.parquet") as file:
                    parquet.write_table(part, file, row_group_size=GROUP)
                break
            except OSError:
                # The filer answers before S3 does.
                assert time.monotonic() < ends
                time.sleep(0.5)
    return bucket


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch.label.tolist()]


def read(source: Any, **more: Any) -> tb.data.ColumnData:
    return tb.data.columns(source, label="number", ids={"user": 997}, batch_size=256, **more)


def test_a_bucket_is_streamed_resumed_and_shared(files: str) -> None:
    data = read("logs/day=*/part.parquet", filesystem=opened(files), shuffle=3000, seed=1)
    assert data.count() == ROWS
    order = numbers(data)
    assert sorted(order) == list(range(ROWS))
    walk = iter(data)
    done = numbers([next(walk) for _ in range(70)])
    again = read("logs/day=*/part.parquet", filesystem=opened(files), shuffle=3000, seed=1)
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert done + numbers(again) == order
    shares = [number for at in range(3) for number in numbers(data.part(0, ROWS).shard(at, 3))]
    assert sorted(shares) == list(range(ROWS))


def test_an_address_is_enough(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    query = f"?scheme=http&endpoint_override={files}&region=us-east-1"
    data = read(f"s3://logs/day=*/part.parquet{query}")
    assert numbers(data) == list(range(ROWS))
    with pytest.raises(tb.InvalidError, match="no file matches"):
        read(f"s3://logs/night=*/part.parquet{query}")


@pytest.mark.parametrize("by", ["polars", "pyarrow"])
def test_a_log_is_read_from_a_bucket(
    files: str, by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {
        "AWS_ENDPOINT_URL": f"http://{files}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
        "AWS_REGION": "us-east-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    address = "s3://logs/day=*/part.parquet"
    if by == "polars":
        pytest.importorskip("polars")
    else:
        address += f"?endpoint_override={files}&scheme=http&region=us-east-1"
    log = read_columns(address, {"user": 997}, LogOptions(sample=0.5))
    assert log.row_count == 997
    assert 0.45 < len(log) / ROWS < 0.55
    whole = read_columns(address, {"user": None})
    assert [whole[at] for at in (0, 996, 997, ROWS - 1)] == [[0], [996], [0], [(ROWS - 1) % 997]]
    placed = ["--rows-per-page", "8", "--method", "by_frequency", "--ratio", "0", "-q"]
    asked = ["place", "--log", address, "--columns", "user", "--out", str(tmp_path / "out")]
    assert main([*asked, *placed]) == 0
    with pytest.raises(tb.InvalidError, match="name files that there are"):
        read_columns("s3://logs/night=*/part.parquet".replace("logs", "no-such-bucket"), {"a": 1})


def test_recorded_queries_come_to_a_bucket_whole(
    files: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["accessKey"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secretKey"])
    address = f"s3://logs/queries?endpoint_override={files}&scheme=http&region=us-east-1"
    tables = {"a": torch.rand(40, 4), "b": torch.rand(30, 4)}
    tb.placement.import_tables(tables, tmp_path / "snapshot")
    bags = tb.KeyedJaggedTensor(["a"], torch.arange(200) % 40, lengths=torch.ones(200).long())
    upload = RecordUpload(address, interval_s=0.05)
    with upload, tb.Snapshot.open(tmp_path / "snapshot") as snapshot:
        snapshot.record(upload.folder, tables=["a"], file_bytes="512B")
        until = time.monotonic() + 60
        for lookups in range(1, 6):
            snapshot.lookup(bags)
            # A lookup does not wait for the disk: what is too much is dropped.
            while upload.uploaded_count < lookups:
                assert time.monotonic() < until
                time.sleep(0.02)
    store = opened(files)
    found = store.get_file_info(fs.FileSelector(f"logs/queries/a/{upload.name}"))
    assert len(found) == upload.uploaded_count > 3
    assert upload.lost_count == 0
    assert upload.place("a") == f"s3://logs/queries/a/{upload.name}"
    (tmp_path / "log").mkdir()
    for info in found:
        with store.open_input_stream(info.path) as stream:
            (tmp_path / "log" / info.base_name).write_bytes(stream.readall())
    log = tb.QueryLog.read(tmp_path / "log", "text", LogOptions(row_count=40))
    assert [log[at] for at in range(len(log))] == [[at % 40] for at in range(200)] * 5
