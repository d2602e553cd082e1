"""`tierbed place`, `inspect` of a placement and `bench placement`, as a user types them."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.cli.place import PLACEMENT_FILE, UNFINISHED
from tierbed_bench.placement_report import by_log, geometric_mean, ratios_of


def tierbed(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def result_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def write_log(path: Path, query_count: int, rows: Callable[[], list[int]]) -> Path:
    path.write_text("".join(" ".join(map(str, rows())) + "\n" for _ in range(query_count)))
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    luck = random.Random(1)
    path = tmp_path_factory.mktemp("log") / "circles.txt"

    def rows() -> list[int]:
        circle = luck.randrange(80)
        return [circle + 80 * at for at in luck.sample(range(6), luck.randint(2, 5))]

    return write_log(path, 1500, rows)


@pytest.fixture(scope="module")
def larger_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for seconds of growth."""
    luck = random.Random(2)
    path = tmp_path_factory.mktemp("log") / "larger.txt"

    def rows() -> list[int]:
        circle = luck.randrange(700)
        return [(circle * 8 + luck.randrange(14)) % 6000 for _ in range(8)]

    return write_log(path, 20_000, rows)


def test_a_placement_is_made_inspected_and_judged(log: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "placed", tmp_path / "told.json"
    code = tierbed(
        *("place", "--log", log, "--rows-per-page", 6, "--method", "maxembed", "--ratio", 0.2),
        *("--cache-share", 0.05, "--split", 0.8, "--out", out, "--json", told),
        *("--mapping", tmp_path / "p.map"),
    )
    assert code == 0
    result = result_of(told)
    assert result["judged_on"] == "later queries"
    assert result["queries_judged"] == 300
    assert 0 < result["pages_per_query"] <= result["pages_per_query_without_replicas"]
    assert result["replica_count"] <= 0.2 * result["row_count"]
    assert (tmp_path / "p.map").stat().st_size > 0
    assert tierbed("inspect", out, "--log", log, "--json", told) == 0
    inspected = result_of(told)
    assert inspected["connectivity_after"] <= inspected["connectivity_before"]
    pages = sum(inspected["reads_by_useful_rows"])
    assert pages == pytest.approx(1500 * inspected["connectivity_after"])
    assert sum(inspected["pages_by_rows"]) == inspected["page_count"]


@pytest.mark.parametrize(("method", "done"), [("grown", "homes-0"), ("maxembed", "levels")])
def test_a_killed_build_goes_on_from_what_is_done(
    larger_log: Path, tmp_path: Path, capfd: Any, method: str, done: str
) -> None:
    given = ("place", "--log", larger_log, "--rows-per-page", 8, "--method", method, "--ratio", 0.8)
    whole, out = tmp_path / "whole", tmp_path / "placed"
    assert tierbed(*given, "--out", whole) == 0
    assert not (whole / UNFINISHED).exists()
    command = [sys.executable, "-m", "tierbed.cli", *map(str, given), "--out", str(out)]
    build = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    kept = out / UNFINISHED / done
    while not kept.exists() and build.poll() is None:
        time.sleep(0.001)
    build.send_signal(signal.SIGKILL)
    assert build.wait() == -signal.SIGKILL, "the build was over before it was killed"
    assert not (out / PLACEMENT_FILE).exists()
    # What is damaged is neither used nor passed over.
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capfd.readouterr()
    assert tierbed(*given, "--out", out) != 0
    told = capfd.readouterr().err
    assert "damaged" in told
    assert done in told
    kept.write_bytes(content)
    assert tierbed(*given, "--out", out) == 0
    assert "goes on" in capfd.readouterr().err
    assert (out / PLACEMENT_FILE).read_bytes() == (whole / PLACEMENT_FILE).read_bytes()
    assert not (out / UNFINISHED).exists()


def test_progress_is_told_while_pages_grow_and_what_it_raises_ends_the_build(
    larger_log: Path,
) -> None:
    log = tb.QueryLog.read(larger_log)
    told: list[tuple[int, int]] = []
    tb.place(log, rows_per_page=8, progress=lambda done, total: told.append((done, total)))
    dones = [done for done, _ in told]
    assert dones == sorted(set(dones))
    assert told[-1] == (1000, 1000)
    # Within one block, too: trial, growth, refinement and replicas.
    assert len(told) > 20

    def stop(done: int, total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tb.place(log, rows_per_page=8, progress=stop)


def test_the_drift_report_says_when_to_rebuild(log: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "placed", tmp_path / "told.json"
    frequency = ("--rows-per-page", 6, "--method", "by_frequency", "--ratio", 0)
    assert tierbed("place", "--log", log, *frequency, "--out", out) == 0
    drift = ("--drift", out, "--method", "shp", "--slices", 3, "--json", told)
    assert tierbed("place", "--log", log, *drift) == 0
    result = result_of(told)
    assert len(result["slices"]) == 3
    # Frequency knows nothing of circles: a fresh placement reads less, at once.
    assert result["rebuild_at"] == 1


def test_samples_of_a_click_log_are_placed(tmp_path: Path) -> None:
    from tierbed_bench.generator import write_criteo_tsv

    samples = tmp_path / "clicks.tsv"
    write_criteo_tsv(samples, 300, scale=0.0001, seed=1)
    told = tmp_path / "told.json"
    given = ("--log", samples, "--log-format", "criteo", "--dim", 64, "--ratio", 0)
    out = ("--out", tmp_path / "placed", "--json", told)
    assert tierbed("place", *given, "--method", "by_frequency", *out) == 0
    result = result_of(told)
    assert (result["queries_built_from"], result["rows_per_page"]) == (300, 15)
    assert 2 < result["useful_rows_per_page"] <= 15


def test_wrong_calls_say_what_to_do(log: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, said in [
        (["--out", tmp_path], "either --rows-per-page or --dim"),
        (["--rows-per-page", 4], "--out"),
        (["--out", tmp_path, "--dim", 64, "--method", "metis"], "is not one of"),
        (["--out", tmp_path, "--dim", 64, "--method", "shp", "--ratio", 0.1], "no replicas"),
        (["--drift", tmp_path], "holds no placement"),
    ]:
        assert tierbed("place", "--log", log, *arguments) == 2
        told = capsys.readouterr().err
        assert said in told, told
        assert "Traceback" not in told


def test_the_bench_reports_every_promised_row(log: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    code = tierbed(
        *("bench", "placement", "--log", log, "--rows-per-page", 6, "--ratios", "0.2"),
        *("--cache", "0,0.1", "--out", tmp_path / "bench", "--json", told),
    )
    assert code == 0
    result = result_of(told)
    assert (tmp_path / "bench" / "placement.png").stat().st_size > 1000
    rows = result["rows"]
    promised = (
        "method ratio cache_share batch select k pages_per_query useful_rows_per_page build_s"
    )
    assert all(list(row) == promised.split() for row in rows)
    assert result["logs"][0]["queries"] == 1500
    for method, replicates in (("random", False), ("shp", False), ("rpp", True), ("fpr", True)):
        ratios = {row["ratio"] for row in rows if row["method"] == method}
        assert ratios == ({0.0, 0.2} if replicates else {0.0}), method
    selections = {(row["select"], row["k"]) for row in rows}
    assert selections == {("one_pass", k) for k in (1, 3, 5, 10, "all")} | {("greedy", "all")}
    assert {row["batch"] for row in rows} == {1, 32}
    assert {row["cache_share"] for row in rows} == {0.0, 0.1}
    assert result["ratios"]["maxembed_vs_shp_cache_0_batch_1_ratio_0.2"] <= 1.0


def test_the_bench_takes_click_logs_and_several_logs(log: Path, tmp_path: Path) -> None:
    luck = random.Random(2)
    clicks, told = tmp_path / "clicks.tsv", tmp_path / "told.json"
    with clicks.open("w") as file:
        for _ in range(400):
            tokens = [f"{luck.randrange(4) * luck.randrange(9):08x}" for _ in range(26)]
            print(1, *[""] * 13, *tokens, sep="\t", file=file)
    arguments = ("bench", "placement", "--log", clicks, "--log", log, "--quick")
    assert tierbed(*arguments, "--out", tmp_path / "bench", "--json", told) == 0
    result = result_of(told)
    assert [(found["log"], found["queries"]) for found in result["logs"]] == [
        ("clicks", 400),
        ("circles", 1500),
    ]
    for name in ("clicks", "circles"):
        rows = [row for row in result["rows"] if row["log"] == name]
        assert {row["method"] for row in rows} == {
            *("random", "by_frequency", "shp_published", "shp"),
            *("maxembed_published", "maxembed", "grown"),
        }
        ours = {(row["ratio"], row["cache_share"]) for row in rows if row["method"] == "grown"}
        assert ours == {(ratio, cache) for ratio in (0.0, 0.1, 0.8) for cache in (0.0, 0.1)}
    table = (tmp_path / "bench" / "placement.md").read_text()
    assert "| cache 10 %, r 0.8 |" in table
    assert "| geometric mean of 2 |" in table
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| c")] == [
        *("| circles", "| clicks") * 3
    ]


def test_ratios_are_geometric_means_over_logs() -> None:
    def row(log: str, method: str, pages: float) -> dict[str, Any]:
        usual = {"batch": 1, "cache_share": 0.0, "ratio": 0.0, "select": "one_pass", "k": 10}
        return {**usual, "log": log, "method": method, "pages_per_query": pages}

    rows = [row("a", "grown", 1.0), row("a", "maxembed", 2.0)]
    rows += [row("b", "grown", 4.0), row("b", "maxembed", 2.0), row("c", "grown", 9.0)]
    rows += [row("a", "maxembed_published", 4.0)]
    ratios = ratios_of(rows)
    assert ratios["grown_vs_maxembed_cache_0_batch_1_ratio_0"] == pytest.approx(1.0)
    assert ratios["worst_grown_vs_maxembed_cache_0_batch_1_ratio_0"] == 2.0
    beside = by_log(rows)["grown by maxembed"]
    assert [line["log"] for line in beside] == ["a", "b", "geometric mean of 2", "largest"]
    assert [line["cache 0 %, r 0"] for line in beside] == pytest.approx([0.5, 2.0, 1.0, 2.0])
    published = by_log(rows)["grown by maxembed_published"]
    assert [line["cache 0 %, r 0"] for line in published] == [0.25, 0.25, 0.25]
    assert ratios["grown_vs_maxembed_published_cache_0_batch_1_ratio_0"] == pytest.approx(0.25)
    assert geometric_mean([]) is None
    assert math.isclose(geometric_mean([1.0, 4.0]) or 0.0, 2.0)


PLACED = """
import ctypes
import gc
import sys
from pathlib import Path
from tierbed.cli import main

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

def place(log):
    options = ["--log", log, "--out", log + "-out", "--method", "by_frequency", "--ratio", "0"]
    assert main(["place", *options, "--rows-per-page", "8", "--json", log + ".json"]) == 0

place(sys.argv[1])
# What the small build left free would hold a part of the large log.
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
place(sys.argv[2])
print(memory("VmHWM") - before)
"""


def test_a_build_holds_its_log_once(tmp_path: Path) -> None:
    for name, count in (("small", 1000), ("large", 1_000_000)):
        ids = torch.arange(4 * count) * 7 % 4000
        queries = ids, torch.arange(0, 4 * count + 1, 4)
        tb.QueryLog.from_batches(4000, [queries]).write(tmp_path / f"{name}.bin")
    logs = [str(tmp_path / f"{name}.bin") for name in ("small", "large")]
    found = subprocess.run(
        [sys.executable, "-c", PLACED, *logs],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    log_bytes = 4 * 4_000_000 + 8 * 1_000_000
    # Beside it the list of its queries, for judging; copies of it would be two or three times more.
    assert log_bytes < int(found.stdout.split()[-1]) < 1.8 * log_bytes
