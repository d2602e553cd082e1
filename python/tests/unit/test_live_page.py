"""The live page of a server in a real browser, where ``scripts/browser-deps`` has brought one."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli.serving import ask
from tierbed.serve import ServeOptions, Server

ROWS = {"features": {"item": {"values": [1, 2], "offsets": [0, 2]}}}
# The page is told of changes once a second.
SOON_MS = 2_000


def _train(emb: tb.EmbeddingBagCollection) -> None:
    batch = tb.KeyedJaggedTensor(["item"], torch.arange(50), lengths=torch.ones(50).long())
    emb(batch).values().sum().backward()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    with tb.Store.open(folder / "store", dram_budget="8MiB") as store:
        table = tb.EmbeddingBagConfig(name="item", num_embeddings=500, embedding_dim=8)
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))
        _train(emb)
        store.publish(folder / "base")
        _train(emb)
        store.publish(folder / "delta", base=folder / "base")
        store.publish(folder / "second")
    return folder


@pytest.fixture
def snapshot(published: Path) -> Iterator[tb.Snapshot]:
    with tb.Snapshot.open(published / "base", dram_budget="4MiB") as snapshot:
        yield snapshot


def _serve(snapshot: tb.Snapshot, **options: Any) -> Server:
    given = {"admin_address": "127.0.0.1:0", "log_level": "off", **options}
    return Server(snapshot, "127.0.0.1:0", options=ServeOptions(**given))


def _post(url: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, b""), timeout=30) as answer:
        return json.load(answer)


class Page:
    """A page, and what the browser complained about."""

    def __init__(self, browser: Any, server: Server, width: int = 1280, scheme: str = "light"):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(f"http://{server.admin_address}/")

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def until(self, holds: str, given: Any = None, timeout_ms: int = SOON_MS) -> None:
        """Waits until a function of the page's script says true."""
        self.page.wait_for_function(holds, arg=given, timeout=timeout_ms, polling=20)

    def until_text(self, css: str, text: str, timeout_ms: int = SOON_MS) -> None:
        holds = "([css, text]) => document.querySelector(css).textContent.includes(text)"
        self.until(holds, [css, text], timeout_ms)

    def shoot(self, name: str) -> None:
        """Keeps a picture where the environment says so, for people to look at."""
        if folder := os.environ.get("TIERBED_SCREENSHOTS"):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def test_a_page_shows_requests_a_delta_and_draining_as_they_happen(
    browser: Any, snapshot: tb.Snapshot, published: Path
) -> None:
    with _serve(snapshot, model_name="ads", snapshot_name="<b>day</b>") as server:
        page = Page(browser, server)
        page.until_text("#state", "ready")
        page.until_text("#link", "live")
        page.until_text("#model", "ads")
        page.until_text("#outcomes dd", "0")
        for _ in range(7):
            ask(f"http://{server.address}", "/v1/lookup", ROWS)
        page.until_text("#outcomes dd", "7")
        page.until_text("#tiers", "cache")
        page.until("() => document.querySelectorAll('#requests-line polyline').length == 1")
        assert page.page.title() == "ready: ads"
        page.until_text("#generation dd", "0")
        identity = server.apply(published / "delta").identity
        page.until_text("#generation dd", "1")
        page.until_text("#generation code", identity)
        assert _post(f"http://{server.admin_address}/drain") == {"state": "draining"}
        page.until_text("#state", "draining")
        # Names of others are text.
        page.until_text("#footer", "<b>day</b>")
        assert page.page.locator("b").count() == 0
        assert page.complaints == []


def test_a_page_shows_a_whole_version_that_takes_over(
    browser: Any, published: Path, tmp_path: Path
) -> None:
    versions = tb.Versions(tmp_path / "models" / "ads")
    versions.push(published / "base", channel="stable")
    follow = tb.Follow(
        tmp_path / "models" / "ads",
        channel="stable",
        local=tmp_path / "local",
        poll="50ms",
        dram_budget="8MiB",
    )
    options = ServeOptions(admin_address="127.0.0.1:0", log_level="off", model_name="ads")
    with Server(follow, "127.0.0.1:0", options=options) as server:
        page = Page(browser, server)
        page.until_text("#state", "ready")
        first = page.page.inner_text("#generation code")
        ask(f"http://{server.address}", "/v1/lookup", ROWS)
        page.until_text("#outcomes dd", "1")
        page.shoot("before-a-whole-version")
        versions.push(published / "second", channel="stable")
        page.until(
            "(first) => document.querySelector('#generation code').textContent != first",
            first,
            10_000,
        )
        page.until_text("#state", "ready")
        page.until_text("#generation dd", "0")
        ask(f"http://{server.address}", "/v1/lookup", ROWS)
        page.until_text("#outcomes dd", "2")
        page.shoot("after-a-whole-version")
        assert page.complaints == []


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_its_window(
    browser: Any, snapshot: tb.Snapshot, width: int, scheme: str
) -> None:
    with _serve(snapshot) as server:
        page = Page(browser, server, width, scheme)
        for _ in range(5):
            ask(f"http://{server.address}", "/v1/lookup", ROWS)
        page.until_text("#outcomes dd", "5")
        page.until_text("#latency", "s")
        wide = "() => [...document.querySelectorAll('body *')].filter((of) => "
        wide += "of.getBoundingClientRect().right > innerWidth + 0.5).map((of) => of.outerHTML)"
        assert page.page.evaluate(wide) == []
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        page.shoot(f"{width}-{scheme}")
        assert page.complaints == []


def test_a_page_tells_of_a_lost_server_and_finds_the_next(
    browser: Any, snapshot: tb.Snapshot
) -> None:
    with _serve(snapshot) as server:
        page = Page(browser, server)
        page.until_text("#link", "live")
        address = server.admin_address
    page.until_text("#link", "connection lost")
    assert page.page.inner_text("#state") == "unknown"
    page.shoot("lost")
    with _serve(snapshot, admin_address=address, model_name="next"):
        page.until_text("#link", "live", timeout_ms=10_000)
        page.until_text("#model", "next")
        page.until_text("#state", "ready")


def test_a_page_asks_for_a_token_where_the_server_does(
    browser: Any, snapshot: tb.Snapshot, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "tokens").write_text(f"operator {digest} metrics\n")
    with _serve(snapshot, tokens=tmp_path / "tokens") as server:
        page = Page(browser, server)
        page.until("() => !document.getElementById('token').hidden")
        assert page.page.locator("#state").is_hidden()
        page.shoot("token")
        for token, told in (("wrong", "#refused"), ("secret", "#state")):
            page.page.fill("#secret", token)
            page.page.click("#form button")
            page.until_text(told, "does not take" if token == "wrong" else "ready")
        page.until("() => document.getElementById('token').hidden")
        page.until_text("#link", "live")
