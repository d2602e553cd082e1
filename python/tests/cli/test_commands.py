"""The command line, as a user types it: what it writes, what it says, how it ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.cli.serving import ask
from tierbed.errors import InvalidError
from tierbed.serve import ServeOptions, Server
from tierbed.train import Store

SYNTHETIC = ["--format", "synthetic", "--samples", "4000", "--scale", "0.0005"]


def tierbed(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def result_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    code = tierbed(
        *("train", *SYNTHETIC, "--store", folder / "run", "--dim", 4, "--seed", 1),
        *("--dram-budget", "4MiB", "--json", folder / "out.json"),
    )
    assert code == 0
    assert tierbed("publish", "--store", folder / "run", "--out", folder / "snapshot") == 0
    return folder


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:99"])
def test_a_run_on_a_device_that_is_not_there_begins_on_another(
    device: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    arguments = ["train", *SYNTHETIC, "--store", str(tmp_path / "run")]
    assert tierbed(*arguments, "--device", device) == 2
    error = capsys.readouterr().err
    assert device in error
    assert "cpu" in error
    assert tierbed(*arguments, "--device", "cpu") == 0
    # A run is not bound to its device.
    assert tierbed(*arguments, "--device", "cpu:0") == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling takes g++")
@pytest.mark.slow
def test_a_model_is_published_compiled(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "compiled"
    assert tierbed("publish", "--store", run / "run", "--out", out, "--compiled") == 0
    assert (out / "att.dense.aoti.so").is_file()
    options = ServeOptions(log_level="off", predict="aoti")
    with (
        tb.Snapshot.open(out, dram_budget="8MiB") as snapshot,
        Server(snapshot, "127.0.0.1:0", options=options) as server,
    ):
        assert server.predicts  # "aoti" needs the compiled model


def test_training_reports_what_was_promised(run: Path) -> None:
    result = result_of(run / "out.json")
    promised = "auc pr_auc logloss samples_per_s dram_budget_bytes dram_peak_bytes disk_bytes steps"
    for name in promised.split():
        assert isinstance(result[name], (int, float)), name
    assert 0.5 < result["auc"] <= 1.0
    assert result["dram_peak_bytes"] <= result["dram_budget_bytes"] == 4 << 20
    assert result["steps"] == -(-result["train_samples"] // result["batch_size"])
    assert (run / "run" / "run.json").is_file()


def test_a_finished_run_is_not_trained_again(run: Path, capsys: Any) -> None:
    out = run / "again.json"
    code = tierbed(
        *("train", *SYNTHETIC, "--store", run / "run", "--dim", 4, "--seed", 1),
        *("--dram-budget", "4MiB", "--json", out),
    )
    assert code == 0
    again, first = result_of(out), result_of(run / "out.json")
    assert again["auc"] == first["auc"]
    assert again["resumed_from_step"] == again["steps"] == first["steps"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_stopped_before_its_first_step_says_so(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from tierbed.cli import training

    before = signal.getsignal(number)
    opened = training.open_source

    def stopped_while_reading(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), number)
        return opened(*given, **named)

    monkeypatch.setattr(training, "open_source", stopped_while_reading)
    command = ("train", *SYNTHETIC, "--store", tmp_path / "run", "--dim", 4)
    assert tierbed(*command, "--dram-budget", "4MiB") == 128 + number
    told = capsys.readouterr().err
    assert f"stopped by {number.name}: no step was trained" in told
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    assert tierbed(*command, "--dram-budget", "4MiB") == 0


@pytest.mark.parametrize(("number", "order"), [(signal.SIGINT, "auto"), (signal.SIGTERM, "window")])
def test_an_interrupted_training_keeps_its_steps_and_goes_on(
    tmp_path: Path, number: signal.Signals, order: str
) -> None:
    def command(name: str) -> list[str]:
        store, out = str(tmp_path / name), str(tmp_path / f"{name}.json")
        options = ["--store", store, "--json", out, "--dim", "4", "--dram-budget", "4MiB"]
        options += ["--order", order, "--batch-size", "32", "--checkpoint-steps", "10"]
        return ["train", *SYNTHETIC, *options]

    python = [sys.executable, "-m", "tierbed.cli"]
    with subprocess.Popen(
        [*python, *command("stopped")], stderr=subprocess.PIPE, text=True
    ) as stopped:
        assert stopped.stderr is not None
        told = ""
        for line in stopped.stderr:
            told += line
            if "checkpoint at step 10" in line:
                break
        stopped.send_signal(number)
        told += stopped.stderr.read()
    assert stopped.returncode == 128 + number, told
    at = re.search(r"the same command goes on at step (\d+)", told)
    assert at is not None, told
    assert f"checkpoint at step {at[1]}" in told
    assert f"stopped by {number.name}" in told
    assert "Traceback" not in told
    assert main(command("stopped")) == main(command("whole")) == 0
    ours, theirs = (result_of(tmp_path / f"{name}.json") for name in ("stopped", "whole"))
    assert ours["resumed_from_step"] == int(at[1])
    assert (ours["auc"], ours["logloss"]) == (theirs["auc"], theirs["logloss"])
    with (
        Store.open(tmp_path / "stopped" / "tables", dram_budget="16MiB") as one,
        Store.open(tmp_path / "whole" / "tables", dram_budget="16MiB") as other,
    ):
        for table in one.tables():
            rows = [
                s.read_rows_and_state(table["name"], 0, table["row_count"]) for s in (one, other)
            ]
            assert torch.equal(rows[0][0], rows[1][0])
            assert torch.equal(rows[0][1], rows[1][1])


def test_evaluation_is_planned_in_forward_order(tmp_path: Path) -> None:
    results = {}
    for order in ("forward", "window"):
        out = tmp_path / f"{order}.json"
        train = ("train", *SYNTHETIC, "--store", tmp_path / order, "--dim", 4, "--seed", 1)
        train = (*train, "--epochs", 2, "--order", order, "--dram-budget", "4MiB", "--json", out)
        assert tierbed(*train) == 0
        results[order] = result_of(out)
    ours, theirs = results["forward"], results["window"]
    assert (ours["auc"], ours["logloss"]) == (theirs["auc"], theirs["logloss"])
    assert ours["eval_samples"] == theirs["eval_samples"] > 0
    order = ours["stats"]["order"]
    assert (order["kind"], order["unplanned_scan_count"]) == ("forward", 0)
    assert (order["epoch"], order["batch"]) == (2, 0)


def test_a_run_that_ended_before_its_evaluation_catches_up(tmp_path: Path) -> None:
    # The last regular checkpoint is that of the last step: nothing is durable behind it.
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    train = ("train", *SYNTHETIC, "--store", tmp_path / "run", "--dim", 4, "--seed", 1)
    train = (*train, "--order", "forward", "--dram-budget", "4MiB", "--checkpoint-steps", 1)
    assert tierbed(*train, "--json", first) == 0
    assert tierbed(*train, "--json", again) == 0
    ours, theirs = result_of(again), result_of(first)
    assert ours["resumed_from_step"] == theirs["steps"] == ours["steps"]
    assert (ours["auc"], ours["logloss"]) == (theirs["auc"], theirs["logloss"])
    order = ours["stats"]["order"]
    assert (order["epoch"], order["batch"], order["unplanned_scan_count"]) == (1, 0, 0)


def test_other_options_do_not_continue_a_run(run: Path, capsys: Any) -> None:
    code = tierbed("train", *SYNTHETIC, "--store", run / "run", "--dim", 8, "--seed", 1)
    assert code == 2
    said = capsys.readouterr().err
    assert "embedding_dim: 4 -> 8" in said
    assert "another folder" in said
    assert "Traceback" not in said


def test_scoring_continues_behind_the_training_samples(run: Path) -> None:
    out = run / "eval.json"
    assert tierbed("eval", "--store", run / "run", "--samples", 2000, "--json", out) == 0
    result = result_of(out)
    assert result["eval_samples"] == 2000
    assert 0.5 < result["auc"] <= 1.0


def test_json_on_the_screen_is_only_json(run: Path, capsys: Any) -> None:
    assert tierbed("verify", run / "run", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True


def test_a_run_and_a_snapshot_are_shown_and_verified(run: Path, capsys: Any) -> None:
    for folder, kind in ((run / "run", "store"), (run / "snapshot", "snapshot")):
        assert tierbed("inspect", folder, "--json", run / "shown.json") == 0
        shown = result_of(run / "shown.json")
        assert shown["kind"] == kind
        assert shown["tables_count"] == 26
        assert "C26" in capsys.readouterr().out
        assert tierbed("verify", folder) == 0


def test_rows_are_looked_up_one_by_one_or_pooled(run: Path, capsys: Any) -> None:
    out = run / "rows.json"
    look = ("lookup", run / "snapshot", "--table", "C3", "--ids", "1,2,2", "--json", out)
    assert tierbed(*look) == 0
    rows = torch.tensor(result_of(out)["vectors"])
    assert rows.shape == (3, 4)
    assert tierbed(*look, "--pool", "mean") == 0
    torch.testing.assert_close(torch.tensor(result_of(out)["vectors"][0]), rows.mean(0))


def test_a_damaged_store_is_told_and_ends_with_1(run: Path, tmp_path: Path, capsys: Any) -> None:
    import shutil

    shutil.copytree(run / "snapshot", tmp_path / "snapshot")
    pages = tmp_path / "snapshot" / "rows.pages"
    data = bytearray(pages.read_bytes())
    data[len(data) // 2] ^= 1
    pages.write_bytes(data)
    assert tierbed("verify", tmp_path / "snapshot") == 1
    said = capsys.readouterr().err
    assert "checksum" in said
    assert "Traceback" not in said


def test_tables_go_out_and_into_another_store(run: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "c3.safetensors"
    assert tierbed("export", "--store", run / "run", "--table", "C3", "--file", file) == 0
    store = tmp_path / "other"
    make = ("import", "--store", store, "--table", "items=C3", "--file", file)
    assert tierbed(*make, "--create") == 2
    assert "--create needs --optimizer" in capsys.readouterr().err
    assert tierbed(*make, "--create", "--optimizer", "adagrad") == 0
    back = tmp_path / "back.npy"
    assert tierbed("export", "--store", store, "--table", "items", "--file", back) == 0
    import numpy as np
    from safetensors.numpy import load_file

    assert np.array_equal(np.load(back), load_file(file)["C3.weight"])


def test_all_tables_move_with_their_state(run: Path, tmp_path: Path) -> None:
    file, back, told = tmp_path / "all.safetensors", tmp_path / "back", tmp_path / "out.json"
    out = ("export", "--store", run / "run", "--all", "--state", "--file", file)
    assert tierbed(*out, "--shard-size", "20KB") == 0
    index = tmp_path / "all.safetensors.index.json"
    assert index.is_file()
    store = tmp_path / "other"
    make = ("import", "--store", store, "--all", "--create", "--optimizer", "adagrad")
    assert tierbed(*make, "--file", index, "--dry-run", "--json", told) == 0
    held = {table["table"]: table["rows"] for table in result_of(told)["tables"]}
    assert not store.exists()
    assert tierbed(*make, "--file", index, "--json", told) == 0
    result = result_of(told)
    assert result["checkpoint"] == 1
    assert {table["table"]: table["rows"] for table in result["tables"]} == held
    assert all(table["has_state"] and table["is_new"] for table in result["tables"])
    assert tierbed("export", "--store", store, "--all", "--file", back, "--format", "npy") == 0
    import numpy

    with Store.open(run / "run" / "tables", dram_budget="16MiB", read_only=True) as opened:
        for table, rows in held.items():
            expected = opened.read_rows(table, 0, rows).numpy()
            assert numpy.array_equal(numpy.load(back / f"{table}.npy"), expected)


def test_a_dry_run_lists_what_a_file_holds(tmp_path: Path, capsys: Any) -> None:
    state = {0: {"sum": torch.ones(7, 3), "step": torch.tensor(4.0)}}
    saved = {"model": {"item.weight": torch.ones(7, 3)}, "optim": {"state": state}, "epoch": 2}
    torch.save(saved, tmp_path / "m.pt")
    listed = ("import", "--file", tmp_path / "m.pt", "--dry-run")
    told = tmp_path / "out.json"
    assert tierbed(*listed, "--json", told) == 0
    assert result_of(told)["tables"] == [
        {
            "name": "model.item.weight",
            "rows": 7,
            "dim": 3,
            "kind": "float32",
            "ids": "row numbers",
            "state": "",
            "steps": None,
        }
    ]
    assert tierbed(*listed) == 0
    assert result_of(told)["state_keys"] == ["optim.state.0"]
    printed = capsys.readouterr().out
    assert "model.item.weight" in printed
    assert "optim.state.0" in printed
    assert tierbed("import", "--file", tmp_path / "m.pt") == 2
    assert "tables by --table, or --all of them" in capsys.readouterr().err


def test_a_damaged_import_leaves_the_store_as_it_was(tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import save_file

    rows = torch.rand(7, 3)
    save_file({"item.weight": rows}, tmp_path / "m.safetensors")
    store = ("import", "--store", tmp_path / "s", "--table", "item")
    make = ("--create", "--optimizer", "adam", "--init", "normal:0,0.1", "--seed", 3)
    assert tierbed(*store, "--file", tmp_path / "m.safetensors", *make) == 0
    numpy.save(tmp_path / "few.npy", numpy.ones((5, 3), dtype="f4"))
    few = (*store, "--file", tmp_path / "few.npy", "--seed", 3)
    assert tierbed(*few) == 2
    assert "--allow-fewer" in capsys.readouterr().err
    raw = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(raw[:-5])
    assert tierbed(*store, "--file", tmp_path / "cut.safetensors") == 1
    with Store.open(tmp_path / "s", dram_budget="16MiB", read_only=True) as opened:
        assert torch.equal(opened.read_rows("item", 0, 7), rows)
        assert opened.last_checkpoint() == (1, "import-m.safetensors")
        assert opened.table("item")["init"]["kind"] == "normal"
    assert tierbed(*few, "--allow-fewer") == 0
    with Store.open(tmp_path / "s", dram_budget="16MiB", read_only=True) as opened:
        assert torch.equal(opened.read_rows("item", 0, 7), torch.cat([torch.ones(5, 3), rows[5:]]))


def test_generated_files_train_like_real_ones(tmp_path: Path) -> None:
    file = tmp_path / "log.tsv.zst"
    assert tierbed("generate", "--out", file, "--samples", 3000, "--scale", 0.0005) == 0
    out = tmp_path / "out.json"
    train = ("train", "--data", file, "--store", tmp_path / "run", "--model", "pnn", "--dim", 4)
    assert tierbed(*train, "--dram-budget", "4MiB", "--json", out) == 0
    assert result_of(out)["auc"] > 0.5
    assert (tmp_path / "run" / "vocabulary").is_file()
    other = tmp_path / "other.tsv.gz"
    assert tierbed("generate", "--out", other, "--samples", 1000, "--scale", 0.0005) == 0
    scored = tmp_path / "scored.json"
    evaluate = ("eval", "--store", tmp_path / "run", "--data", other, "--json", scored)
    assert tierbed(*evaluate) == 0
    assert result_of(scored)["eval_samples"] == 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--store", "x"], "--data"),
        (["train", "--store", "x", "--data", "nothing.tsv"], "no such file: nothing.tsv"),
        (["train", "--store", "x", "--format", "tape", "--data", "y"], "--format"),
        (["train", *SYNTHETIC, "--store", "x", "--model", "oracle"], "dlrm"),
        (["train", *SYNTHETIC, "--store", "x", "--dram-budget", "1KiB"], "minimum_bytes"),
        (["train", *SYNTHETIC, "--store", "x", "--dram-budget", "lots"], "--dram-budget"),
        (["train", *SYNTHETIC], "--store"),
        (["eval", "--store", "nowhere", "--data", "y"], "no training run"),
        (["publish", "--store", "nowhere", "--out", "y"], "no such folder"),
        (["inspect", "nowhere"], "no such folder"),
        (["lookup", "--table", "a", "--ids", "1"], "--url"),
        (["lookup", "nowhere", "--table", "a", "--ids", "one"], "--ids"),
        (["lookup", "--url", "ftp://x", "--table", "a", "--ids", "1"], "http://"),
        (["snapshot", "--out", "y", "--table", "item"], "--table item=item.npy"),
        (["snapshot", "--out", "y", "--table", "a=x.npy", "--table", "a=y.npy"], "twice"),
        (["snapshot", "--out", "y", "--table", "a=x.npy"], "no such file: x.npy"),
        (["bench", "speed"], "bench --help"),
        (["dance"], "dance"),
    ],
)
def test_wrong_calls_end_with_2_and_a_remedy(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tierbed(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_tables_in_files_become_a_snapshot(tmp_path: Path, capsys: Any) -> None:
    rows = numpy.arange(12, dtype="float16").reshape(4, 3)
    numpy.save(tmp_path / "item.npy", rows)
    table = ("--table", f"item={tmp_path / 'item.npy'}")
    out = tmp_path / "result.json"
    assert tierbed("snapshot", *table, *table, "--out", tmp_path / "ads") == 2
    assert "give every table once" in capsys.readouterr().err
    assert tierbed("snapshot", *table, "--out", tmp_path / "ads", "--json", out) == 0
    assert result_of(out)["row_count"] == 4
    assert tierbed("verify", tmp_path / "ads") == 0
    asked = ("--table", "item", "--ids", "2", "--dram-budget", "4MiB", "--json", out)
    assert tierbed("lookup", tmp_path / "ads", *asked) == 0
    assert "6.0" in out.read_text()


def test_a_line_that_is_not_criteo_is_named(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "log.tsv"
    file.write_text("1\t2\t3\n" * 10)
    assert tierbed("train", "--data", file, "--store", tmp_path / "run") == 2
    assert "log.tsv" in capsys.readouterr().err


def test_nobody_answering_ends_with_1(capsys: Any) -> None:
    arguments = ("lookup", "--url", "http://127.0.0.1:9", "--table", "a", "--ids", "1")
    assert tierbed(*arguments) == 1
    assert "is the server running" in capsys.readouterr().err


def test_help_gets_one_going(capsys: Any) -> None:
    assert tierbed("--help") == 0
    said = capsys.readouterr().out
    verbs = "demo train eval publish serve lookup inspect verify plan import export snapshot"
    verbs += " bench generate"
    for verb in verbs.split():
        assert verb in said
        assert tierbed(verb, "--help") == 0
        assert "--" in capsys.readouterr().out


@contextmanager
def server(
    snapshot: Path, *options: str, end_by: int = signal.SIGINT, stderr: Any = None
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Serves until the end of the block; gives the line it greets with, its URL and process."""
    command = [sys.executable, "-m", "tierbed.cli", "serve", str(snapshot)]
    command += ["--address", "127.0.0.1:0", "--dram-budget", "4MiB", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line, line.split()[-1], process
        finally:
            process.send_signal(end_by)
            assert process.wait(timeout=20) == 0


def test_a_server_answers_lookups_predictions_and_metrics(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    with server(run / "snapshot") as (line, url, _):
        assert "lookups and predictions" in line
        out = tmp_path / "served.json"
        look = ("--table", "C3", "--ids", "1,2", "--json", out)
        assert tierbed("lookup", "--url", url, *look) == 0
        served = result_of(out)["vectors"]
        assert tierbed("lookup", run / "snapshot", *look) == 0
        torch.testing.assert_close(torch.tensor(served), torch.tensor(result_of(out)["vectors"]))
        request = {"dense": [[0.0] * 13] * 2, "values": [0] * 52}
        answer = ask(url, "/v1/predict", request)
        assert len(answer["probability"]) == 2
        assert 0 < answer["probability"][0] < 1
        assert ask(url, "/health")["status"] == "ok"
        assert "tierbed_lookups_total" in ask(url, "/metrics")
        assert tierbed("lookup", "--url", url, "--table", "nowhere", "--ids", "1") == 2
        assert "nowhere" in capsys.readouterr().err


def test_a_signal_ends_a_server_when_all_is_answered(run: Path) -> None:
    number = signal.SIGTERM
    with (
        server(run / "snapshot", "--drain-delay", "0", end_by=number) as (_, url, process),
        ExitStack() as open_,
    ):
        host, port = url.removeprefix("http://").split(":")
        connect = partial(socket.create_connection, (host, int(port)), timeout=20)
        waiting = [open_.enter_context(connect()) for _ in range(5)]
        process.send_signal(number)
        for connection in waiting:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_hangup_reads_the_tokens_again_and_ends_nothing(run: Path, tmp_path: Path) -> None:
    tokens, said = tmp_path / "tokens", tmp_path / "said"
    tokens.write_text(f"ranker {hashlib.sha256(b'abc').hexdigest()} infer\n")

    def reads() -> int:
        lines = said.read_text().splitlines()
        return sum('"event":"tokens_read"' in line for line in lines)

    options = ("--tokens", str(tokens))
    with (
        said.open("w") as stderr,
        server(run / "snapshot", *options, stderr=stderr) as (_, url, process),
    ):
        # The file has not changed: only the signal makes the server read it.
        for count in (1, 2):
            process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 20
            while reads() < count:
                assert time.monotonic() < until, said.read_text()
                time.sleep(0.05)
        assert ask(url, "/readyz") == {"ready": True}


def _is_ready(url: str) -> bool:
    try:
        return bool(ask(url, "/readyz")["ready"])
    except InvalidError as error:
        if "503" not in str(error):
            raise
        return False


def test_a_server_is_not_ready_for_a_while_before_it_stops(run: Path) -> None:
    body = {"features": {"C3": {"values": [1], "offsets": [0, 1]}}}
    # The second SIGTERM, at the end of the block, ends the delay.
    with server(run / "snapshot", "--drain-delay", "600", end_by=signal.SIGTERM) as told:
        _, url, process = told
        assert ask(url, "/readyz") == {"ready": True}
        process.send_signal(signal.SIGTERM)
        while _is_ready(url):
            time.sleep(0.01)
        assert ask(url, "/livez") == {"live": True}
        assert len(ask(url, "/v1/lookup", body)["features"]["C3"]) == 1
        assert process.poll() is None


def test_a_servers_failures_and_life_are_lines_of_json(run: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with (
        said.open("w") as stderr,
        server(run / "snapshot", "--access-log", stderr=stderr) as (
            _,
            url,
            _,
        ),
    ):
        ask(url, "/health")
    lines = [json.loads(line) for line in said.read_text().splitlines() if line[0] == "{"]
    life = ["serving", "request", "draining", "stopping", "stopped"]
    assert [line["event"] for line in lines] == life
    assert lines[1]["route"] == "/health"


def test_a_server_that_answers_approximately_is_exact_the_next_time(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "looked-up.json"
    look = ("--table", "C9", "--ids", "0,1", "--json", out)
    assert tierbed("lookup", run / "snapshot", *look) == 0
    exact = torch.tensor(result_of(out)["vectors"])
    with server(run / "snapshot", "--misses", "default", "--refresh", "C9") as (_, url, _):

        def is_exact() -> bool:
            assert tierbed("lookup", "--url", url, *look) == 0
            return torch.allclose(torch.tensor(result_of(out)["vectors"]), exact)

        assert not is_exact()
        until = time.monotonic() + 30
        while not is_exact():
            assert time.monotonic() < until, "the rows were never read"
        told = ask(url, "/metrics")
    assert re.search(r"^tierbed_rows_refreshed_total 2$", told, re.MULTILINE), told
