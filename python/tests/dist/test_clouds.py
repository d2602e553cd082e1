"""Checkpoints in buckets of Google and containers of Azure, before a stand-in for both.

It knows what the client asks: objects by name, conditions of writes, lists. The stores
themselves never ran here.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from test_checkpoints import alone
from test_ranks import TABLES, all_rows, draw, train

import tierbed as tb
from tierbed import dist as tbd
from tierbed._native import NativeObjects

ACCOUNT = "account"
DATE = "Fri, 27 Nov 2026 08:00:00 GMT"
SERVICE_ACCOUNT = {
    **dict.fromkeys(("client_email", "private_key", "private_key_id"), ""),
    "disable_oauth": True,
}
GOOGLE_OBJECT = (
    "<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-11-27T08:00:00Z</LastModified>"
    '<ETag>"{}"</ETag></Contents>'
)
AZURE_OBJECT = (
    "<Blob><Name>{}</Name><Properties><Content-Length>{}</Content-Length>"
    f"<Last-Modified>{DATE}</Last-Modified><Content-Type>x</Content-Type><Etag>{{}}</Etag>"
    "</Properties></Blob>"
)


class StandIn(ThreadingHTTPServer):
    """A bucket ``runs``, in memory, of Google (``/runs``) and of Azure (``/account/runs``)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.lock = threading.Lock()
        self.refuses = False
        self.generation = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Last-Modified", DATE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        is_azure = path.startswith(f"{ACCOUNT}/")
        bucket, _, name = path.removeprefix(f"{ACCOUNT}/").partition("/")
        asked = parse_qs(url.query)
        with self.server.lock:
            if self.server.refuses:
                self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            elif bucket != "runs":
                code = "ContainerNotFound" if is_azure else "NoSuchBucket"
                self.answer(404, f"<Error><Code>{code}</Code></Error>".encode())
            elif self.command == "POST":
                self.remove_some(body.decode())
            elif self.command == "PUT":
                self.put(name, body, is_azure)
            elif self.command == "DELETE":
                self.answer(202 if self.server.objects.pop(name, None) else 404)
            elif not name:
                self.list(asked.get("prefix", [""])[0], is_azure)
            else:
                self.get(name)

    def put(self, name: str, body: bytes, is_azure: bool) -> None:
        found = self.server.objects.get(name)
        tag = None if found is None else f'"{found[1]}"'
        generation = self.headers.get("x-goog-if-generation-match")
        if self.headers.get("If-None-Match") == "*" and found:
            self.answer(409, b"<Error><Code>BlobAlreadyExists</Code></Error>")
        elif self.headers.get("If-Match", tag) != tag or (
            generation is not None and generation != str(found[1] if found else 0)
        ):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self.server.generation += 1
            self.server.objects[name] = body, self.server.generation
            self.answer(201 if is_azure else 200, **self.tags(self.server.generation))

    def remove_some(self, body: str) -> None:
        """Azure removes several objects by a request, and answers for each."""
        answers = ""
        for at, path in enumerate(re.findall(r"^DELETE (\S+)", body, re.MULTILINE)):
            name = unquote(urlsplit(path).path).partition("/runs/")[2]
            status = "202 Accepted" if self.server.objects.pop(name, None) else "404 Not Found"
            answers += "--batch\r\nContent-Type: application/http\r\n"
            answers += f"Content-ID: {at}\r\n\r\nHTTP/1.1 {status}\r\n\r\n"
        answers += "--batch--\r\n"
        self.answer(202, answers.encode(), Content_Type="multipart/mixed; boundary=batch")

    def get(self, name: str) -> None:
        found = self.server.objects.get(name)
        if found is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        body, generation = found
        asked = self.headers.get("Range") or self.headers.get("x-ms-range")
        if asked is None:
            self.answer(200, body, **self.tags(generation))
            return
        first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        told = f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
        self.answer(206, body[first : last + 1], Content_Range=told, **self.tags(generation))

    def list(self, prefix: str, is_azure: bool) -> None:
        one = AZURE_OBJECT if is_azure else GOOGLE_OBJECT
        objects = "".join(
            one.format(name, len(body), hashlib.md5(body).hexdigest())
            for name, (body, _) in sorted(self.server.objects.items())
            if name.startswith(prefix)
        )
        found = f"<ListBucketResult>{objects}</ListBucketResult>"
        if is_azure:
            found = f"<Blobs>{objects}</Blobs><NextMarker/>"
            found = f"<EnumerationResults>{found}</EnumerationResults>"
        self.answer(200, found.encode())

    @staticmethod
    def tags(generation: int) -> dict[str, str]:
        return {"ETag": f'"{generation}"', "x_goog_generation": str(generation)}


for verb in ("GET", "PUT", "POST", "DELETE", "HEAD"):
    setattr(Handler, f"do_{verb}", Handler.serve)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    place = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**SERVICE_ACCOUNT, "gcs_base_url": place}),
        "GOOGLE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ENDPOINT": f"{place}/{ACCOUNT}",
        "AZURE_SKIP_SIGNATURE": "true",
        "AZURE_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_rows_go_to_buckets_of_google_and_containers_of_azure(scheme: str, cloud: StandIn) -> None:
    path = f"{scheme}://runs/ads/step-1"
    with alone() as rows:
        train(rows, [draw(1, 20, False)])
        rows.save(path, {"step": 1})
        with pytest.raises(tb.InvalidError, match="give it another name"):
            rows.save(path)
        expected = all_rows(rows.store, TABLES[0])[0]
    assert tbd.find_checkpoints(f"{scheme}://runs/ads") == [path]
    with alone() as rows:
        assert rows.load(path) == {"step": 1}
        assert torch.equal(all_rows(rows.store, TABLES[0])[0], expected)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_errors_of_other_clouds_say_what_helps(scheme: str, cloud: StandIn) -> None:
    with pytest.raises(tb.InvalidError, match="create the bucket or container, or name another"):
        NativeObjects(f"{scheme}://nowhere/ads").put("a", b"1", True)
    objects = NativeObjects(f"{scheme}://runs/ads")
    assert objects.put("a", b"1", True)
    assert not objects.put("a", b"2", True)
    cloud.refuses = True
    with pytest.raises(tb.InvalidError, match="check the credentials, and that they may get"):
        objects.get("a", 9)
    cloud.refuses = False
    assert objects.get("a", 9) == b"1"


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_versions_move_by_comparison_in_other_clouds(
    scheme: str, cloud: StandIn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("published")
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        tb.EmbeddingBagCollection([tb.EmbeddingBagConfig(50, 4, "a")], store=store)
        versions = tb.Versions(f"{scheme}://runs/models/ads")
        for number in range(2):
            store.publish(folder / str(number))
            versions.push(folder / str(number), channel="stable")
    assert versions.channel("stable").chain[-1] == 2


def test_an_address_of_no_store_says_which_there_are() -> None:
    told = "name a folder, or a bucket: s3://, gs://"
    with alone() as rows, pytest.raises(tb.UnsupportedError, match=told):
        rows.save("ftp://runs/ads")


@pytest.mark.usefixtures("cloud")
def test_who_has_no_credentials_is_told_to_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "set GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and its key"
    with monkeypatch.context() as bare:
        bare.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
        bare.delenv("AZURE_SKIP_SIGNATURE")
        # Nobody listens where a machine of these clouds would be asked.
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            bare.setenv(name, "127.0.0.1:1")
        bare.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/metadata/identity/oauth2/token")
        for scheme in ("gs", "az"):
            with pytest.raises(tb.InvalidError, match=remedy):
                NativeObjects(f"{scheme}://runs/ads").put("a", b"1", True)
    for scheme in ("gs", "az"):
        assert NativeObjects(f"{scheme}://runs/{scheme}").put("a", b"1", True)
