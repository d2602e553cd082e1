"""Remedies of reports, of recorded lookups and of `tierbed top`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.report.history import progress_path
from tierbed.serve import ServeOptions, Server

from .kit import bags, collection, opened, refused, step, trained


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    tb.placement.import_tables({"item": torch.rand(500, 8)}, tmp_path / "snapshot")
    return tmp_path / "snapshot"


def told(capsys: Any, *arguments: object) -> str:
    """Calls a command that is refused; returns what it says."""
    assert main([str(argument) for argument in arguments]) == 2
    return " ".join(str(capsys.readouterr().err).split())


def done(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def recorded(snapshot: Path, folder: Path) -> None:
    with tb.Snapshot.open(snapshot, dram_budget="8MiB") as opened:
        opened.record(folder)
        for at in range(20):
            opened.lookup(bags(at, at + 1))


def test_recorded_queries_are_for_the_report_of_a_snapshot(
    snapshot: Path, tmp_path: Path, capsys: Any
) -> None:
    queries, page = tmp_path / "queries", tmp_path / "report.html"
    recorded(snapshot, queries)
    said = told(capsys, "inspect", snapshot, "--queries", queries)
    assert "add --html FILE" in said
    done("inspect", snapshot, "--queries", queries, "--html", page)
    assert "recorded queries replayed" in page.read_text()


def test_a_store_records_where_it_trains(tmp_path: Path, capsys: Any) -> None:
    trained(tmp_path / "store")
    page = tmp_path / "report.html"
    said = told(capsys, "inspect", tmp_path / "store", "--html", page, "--queries", tmp_path)
    assert "call store.record() in the program that trains" in said
    with (
        opened(tmp_path / "store", read_only=True) as store,
        refused(UnsupportedError, "call record() in the program that trains"),
    ):
        store.record()
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        store.record()
        step(emb)
        assert store.report().numbers["another_budget"]["use_count"] == 20


def test_a_placement_is_inspected_without_a_page(tmp_path: Path, capsys: Any) -> None:
    log = tb.QueryLog.from_batches(9, [(torch.arange(9), torch.tensor([0, 5, 9]))])
    tb.place(log, rows_per_page=3).write(tmp_path / "placement.tbp")
    page = tmp_path / "report.html"
    said = told(capsys, "inspect", tmp_path / "placement.tbp", "--html", page)
    assert "leave out --html" in said
    assert not page.exists()
    done("inspect", tmp_path / "placement.tbp")


def test_queries_are_of_the_folder_that_was_recorded_in(snapshot: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries"
    recorded(snapshot, queries)
    with tb.Snapshot.open(snapshot, dram_budget="8MiB") as opened:
        with refused(InvalidError, "name the folder that was given to record()"):
            opened.report(queries=queries / "item")
        assert opened.report(queries=queries).numbers["another_budget"]["use_count"] == 20


def test_progress_of_another_version_is_removed(tmp_path: Path, capsys: Any) -> None:
    told_file = progress_path(tmp_path / "store")
    trained(tmp_path / "store")
    rows = trained(tmp_path / "other")
    told_file.write_text('{"format": "of another version"}')
    said = told(capsys, "top", tmp_path / "store", "--once")
    assert "remove it, training writes it anew" in said
    told_file.unlink()
    with opened(tmp_path / "store") as store:
        assert torch.equal(store.read_rows("item", 0, len(rows)), rows), "no row is lost by it"
        step(collection(store))
    done("top", tmp_path / "store", "--once")


def test_top_is_given_what_trains_or_an_admin_address(
    snapshot: Path, tmp_path: Path, capsys: Any
) -> None:
    assert "name the folder of a store on disk that trains" in told(capsys, "top", tmp_path)
    trained(tmp_path / "store")
    done("top", tmp_path / "store", "--once")
    assert "name the admin address of a server instead" in told(capsys, "top", snapshot)
    how = ServeOptions(admin_address="127.0.0.1:0", log_level="off")
    with (
        tb.Snapshot.open(snapshot, dram_budget="8MiB") as opened,
        Server(opened, "127.0.0.1:0", options=how) as server,
    ):
        said = told(capsys, "top", f"http://{server.address}")
        assert "start the server with --admin-address and name that address" in said
        with another_server() as url:
            assert "name the --admin-address of one" in told(capsys, "top", url)
        done("top", f"http://{server.admin_address}", "--once")


@contextmanager
def another_server() -> Iterator[str]:
    """A server that answers everything with an empty object."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
