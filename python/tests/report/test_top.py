"""Does `tierbed top` show a run and a server, at any width, and end cleanly?"""

from __future__ import annotations

import io
import itertools
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from report_kit import ROWS, batches, store_in, train
from rich.console import Console, RenderableType

import tierbed as tb
from tierbed.cli import main
from tierbed.cli.serving import ask
from tierbed.report.frames import server_frame, training_frame
from tierbed.report.history import read_progress
from tierbed.serve import ServeOptions, Server

TOLD: dict[str, Any] = {
    "state": "running",
    "pid": 4711,
    "start_s": 1000.0,
    "written_s": 1020.0,
    "counts": {
        "steps": 500,
        "ids": 50_000,
        "read_count": 0,
        "read_bytes": 50 << 20,
        "write_bytes": 0,
        "used_bytes": 0,
        "tier:memory": 40_000,
        "tier:storage": 10_000,
    },
    "budget": {
        "limit_bytes": 1 << 20,
        "parts": {"row_buffer": {"used_bytes": 768 << 10, "peak_bytes": 1 << 20}},
    },
    "order": {"kind": "window", "reason": None},
    "disk_bytes": 3 << 20,
    "tables": [],
    "points": {
        "at_s": [1000.0, 1010.0, 1018.0],
        "steps": [0, 100, 480],
        "ids": [0, 10_000, 48_000],
        "read_bytes": [0, 30 << 20, 48 << 20],
        "write_bytes": [0, 0, 0],
        "tier:memory": [0, 10_000, 39_000],
        "tier:storage": [0, 0, 9_000],
    },
}


def text_of(frame: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def figures(text: str) -> dict[str, str]:
    """Returns the numbers above their names, where columns are far apart."""
    lines = text.splitlines()
    found = {}
    for values, names in itertools.pairwise(lines):
        cells = [[cell for cell in line.split("  ") if cell.strip()] for line in (values, names)]
        if len(cells[0]) == len(cells[1]):
            found |= {
                name.strip(): value.strip() for value, name in zip(cells[0], cells[1], strict=True)
            }
    return found


def test_rates_are_of_the_last_seconds() -> None:
    text = text_of(training_frame(TOLD, "run", 1020.5, True, 100), 100)
    found = figures(text)
    assert found["steps/s"] == "40"  # 400 in the ten seconds since the point at 1010
    assert found["rows/s"] == "4,000"
    assert found["read/s"] == "2.0 MiB"
    assert (found["steps"], found["rows looked up"]) == ("500", "50,000")
    assert "training for 20 s, process 4711, rates are of the last 10 s" in text
    assert "75.0 %" in text  # 30,000 of the 40,000 rows since then, and of the budget


@pytest.mark.parametrize(
    ("told", "now_s", "is_alive", "state"),
    [
        ({}, 1021.0, True, "training"),
        ({}, 1050.0, True, "no step for 30 s"),
        ({}, 1050.0, None, "no step for 30 s"),
        ({}, 1021.0, False, "its process has ended"),
        ({"state": "closed"}, 9000.0, False, "closed"),
    ],
)
def test_the_state_is_told(
    told: dict[str, Any], now_s: float, is_alive: bool | None, state: str
) -> None:
    text = text_of(training_frame({**TOLD, **told}, "run", now_s, is_alive, 100), 100)
    assert text.splitlines()[0].endswith(state)
    is_over = state in ("closed", "its process has ended")
    assert ("rates are means of the run" in text) == is_over
    assert figures(text)["steps/s"] == ("25" if is_over else "40")


@pytest.mark.parametrize("width", [30, 45, 60, 80, 200])
def test_a_frame_fits_its_terminal(width: int) -> None:
    text = text_of(training_frame(TOLD, "run", 1021.0, True, width), width)
    for shown in ("row buffer", "75.0 %", "40", "steps/s"):
        assert shown in text
    if width >= 40:
        assert "memory of 1.0 MiB" in text
        assert "rows came from" in text


def test_one_frame_of_a_run_that_trained(tmp_path: Path, capsys: Any) -> None:
    with store_in(tmp_path / "run" / "tables") as (_, emb):
        train(emb, batches(12))
    for place in (tmp_path / "run", tmp_path / "run" / "tables"):
        assert main(["top", str(place), "--once"]) == 0
        text = capsys.readouterr().out
        assert f"tierbed {place}" in text.replace("\n", "")
        assert "closed" in text
        told = read_progress(tmp_path / "run" / "tables")
        assert told is not None
        assert told["counts"]["ids"] == 12 * 64
        for shown in ("768", "initial values", "row buffer", "of the budget"):
            assert shown in text


def test_one_frame_of_a_server(tmp_path: Path, capsys: Any) -> None:
    tables = {name: torch.rand(rows, 16) for name, rows in ROWS.items()}
    tb.placement.import_tables(tables, tmp_path / "snapshot")
    how = ServeOptions(admin_address="127.0.0.1:0", log_level="off", model_name="ads")
    wanted = {"features": {"item": {"values": [1, 2, 3], "offsets": [0, 3]}}}
    with (
        tb.Snapshot.open(tmp_path / "snapshot", dram_budget="4MiB") as snapshot,
        Server(snapshot, "127.0.0.1:0", options=how) as server,
    ):
        time.sleep(0.2)
        for _ in range(5):
            ask(f"http://{server.address}", "/v1/lookup", wanted)
        admin = f"http://{server.admin_address}"
        assert main(["top", admin, "--once"]) == 0
        text = capsys.readouterr().out
        stats = ask(admin, "/stats")
        assert main(["top", f"http://{server.address}", "--once"]) == 2
        assert "start the server with --admin-address" in capsys.readouterr().err
    for shown in ("ready", "cache f32, lru", "storage", "row cache", "12", "latency p99.9"):
        assert shown in text
    found = figures(text_of(server_frame(stats, admin, 100), 100))
    assert found["in flight"] == "0 of 2,048"
    assert found["requests/s"] == f"{stats['recent']['requests_per_s']:.3g}"
    assert found["latency p50"].startswith(f"{stats['recent']['latency']['p50_us'] / 1:.0f}"[:1])
    assert main(["top", admin, "--once"]) == 1
    assert "is the server running" in capsys.readouterr().err


def test_a_server_that_has_not_answered_yet_has_no_latency() -> None:
    stats = {
        "state": "starting",
        "model": "ads",
        "snapshot": "day",
        "uptime_s": 1.0,
        "recent": None,
        "queue": {"requests": 0, "wait_us": 0, "in_flight": 0, "in_flight_max": 8},
        "connections": {"open": 0, "open_max": 8},
        "tiers": [{"name": "storage", "rows": 0, "recent_ratio": None}],
        "memory": {"budget_bytes": 100, "parts_bytes": {"row_cache": 50}},
        "faults": [{"kind": "io", "count": 2, "message": "[bold]page 7"}],
    }
    text = text_of(server_frame(stats, "http://a", 80), 80)
    assert figures(text)["latency p99"] == "n/a"
    assert "io: 2 times, [bold]page 7" in text


@pytest.mark.parametrize("what", ["nothing", "empty", "snapshot"])
def test_where_nothing_trains_it_says_what_to_do(what: str, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / what
    if what == "empty":
        place.mkdir()
    if what == "snapshot":
        tb.placement.import_tables({"item": torch.zeros(10, 8)}, place)
    assert main(["top", str(place), "--once"]) == 2
    told = capsys.readouterr().err
    assert "http://127.0.0.1:8082" in told
    assert ("--admin-address" in told) == (what == "snapshot")


def test_ctrl_c_ends_a_live_view(tmp_path: Path) -> None:
    with store_in(tmp_path / "store") as (_, emb):
        train(emb, batches(3))
    view, screen = pty.fork()
    if view == 0:  # a child with a terminal of its own
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        os.environ["TERM"] = "xterm"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(main(["top", str(tmp_path / "store"), "--interval", "0.1"]))
    shown = b""
    while shown.count(b"row buffer") < 3:
        assert select.select([screen], [], [], 60)[0], shown.decode(errors="replace")
        shown += os.read(screen, 1 << 16)
    os.kill(view, signal.SIGINT)
    rest = b""
    while piece := _read(screen):
        rest += piece
    assert os.waitstatus_to_exitcode(os.waitpid(view, 0)[1]) == 0
    os.close(screen)
    assert b"Traceback" not in rest
    assert b"\x1b[?1049l" in rest, "the terminal is as it was before"
    assert b"\x1b[?25h" in rest, "with its cursor"


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 1 << 16)
    except OSError:  # the other end is closed
        return b""
