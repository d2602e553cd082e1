"""Files of options: what they set, what is wrong in them, and what is printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import config_file, main
from tierbed.cli.toml_lines import key_lines
from tierbed.config import words
from tierbed.errors import InvalidError

RUN = """\
# A run.
[data]
format = "synthetic"
samples = 500

[store]
path = "run"
dram-budget = "32MiB"

[train]
dim = 8
epochs = 2
lr = 1e-1

[publish]
codec = "int8"

[serve]
queue-ms-max = 20
"""


def file(folder: Path, text: str, name: str = "run.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def printed(capsys: Any, *arguments: str) -> dict[str, str]:
    """Returns each key that is printed, set or not, with its value and where it comes from."""
    assert main([*arguments, "--print-config"]) == 0
    section, found = "", {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := re.fullmatch(r"(?:# )?([a-z-]+) = (.*)", line):
            found[f"{section}.{match[1]}"] = match[2]
    return found


def refused(capsys: Any, *arguments: str) -> list[str]:
    assert main(list(arguments)) == 2
    return str(capsys.readouterr().err).splitlines()


def test_a_file_sets_what_the_command_line_does_not(tmp_path: Path, capsys: Any) -> None:
    path = file(tmp_path, RUN)
    found = printed(capsys, "train", "--config", path, "--epochs", "5")
    assert found["train.epochs"] == "5  # --epochs"
    assert found["train.dim"] == f"8  # {path}:11"
    assert found["train.lr"] == f"0.1  # {path}:13"
    assert found["train.dense-lr"] == "0.002  # default"
    assert found["store.path"] == f'"run"  # {path}:7'
    assert found["store.disk-quota"] == " # not set"


def test_each_command_takes_the_keys_of_its_own(tmp_path: Path, capsys: Any) -> None:
    path = file(tmp_path, RUN)
    published = printed(capsys, "publish", "--config", path)
    assert published["publish.codec"] == f'"int8"  # {path}:16'
    assert published["store.dram-budget"] == f'"32MiB"  # {path}:8'
    assert printed(capsys, "plan", "--config", path)["plan.samples"] == "50000  # default"
    assert printed(capsys, "eval", "--config", path)["eval.samples"] == " # not set"
    served = printed(capsys, "serve", "--config", path)
    assert served["serve.queue-ms-max"] == f"20  # {path}:19"
    assert served["serve.dram-budget"] == '"256MiB"  # default', "that of the run is another"


@pytest.mark.parametrize("command", ["train", "eval", "publish", "plan", "serve"])
def test_what_is_printed_is_read_again(tmp_path: Path, capsys: Any, command: str) -> None:
    given = {
        "train": ["--store", 'a "b"\\c', "--data", "x", "--data", "y,z", "--dense", "d, e"],
        "eval": ["--store", "s", "--data", "x", "--format", "avazu"],
        "publish": ["--store", "s", "--delta", "--to", "s3://b/p", "--head-rows", "5%"],
        "plan": ["--scratch", "ähm", "--disk-quota", "1000", "--lr", "0.5"][:4],
        "serve": ["NAME=x", "--access-log", "--refresh", "a,b", "--record-tables", "a,b"],
    }[command]
    assert main([command, *given, "--print-config"]) == 0
    first = capsys.readouterr().out
    path = file(tmp_path, first)
    assert main([command, "--config", path, "--print-config"]) == 0
    again = capsys.readouterr().out

    def plain(text: str) -> list[str]:
        return [line.rpartition("  # ")[0] for line in text.splitlines()]

    assert plain(again) == plain(first)
    assert f"# {path}:" in again
    assert "  # --" in first


def test_an_option_takes_back_what_a_file_says(tmp_path: Path, capsys: Any) -> None:
    path = file(tmp_path, "[publish]\ndelta = true\n[serve]\naccess-log = true\n")
    assert printed(capsys, "publish", "--config", path)["publish.delta"] == f"true  # {path}:2"
    found = printed(capsys, "publish", "--config", path, "--no-delta")
    assert found["publish.delta"] == "false  # --delta"
    found = printed(capsys, "serve", "--config", path, "--no-access-log")
    assert found["serve.access-log"] == "false  # --access-log"


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, capsys: Any) -> None:
    text = """\
epochs = 3
[data]
eval-last = 0.95
samples = "many"

[train]
epoch = 2
batch_size = 5
dim = 0
model = "dlmr"
queue-ms-max = 20

[sotre]
path = "x"

[store]
dram-budget = "lots"
shards = true
order = 3

[serve]
access-log = "yes"
poll = "soon"
qeue-ms-max = 1
something = 1
refresh = ["a,b"]
"""
    path = file(tmp_path, text)
    told = refused(capsys, "train", "--config", path)
    assert told[0] == f"tierbed: {path}: 17 errors"
    found = {int(line.split(":")[1]): line.split(": ", 1)[1] for line in told[1:]}
    assert [line.split(":")[0] for line in told[1:]] == [path] * 17
    assert found == {
        1: "epochs: no such key; write epochs below [train]",
        3: "data.eval-last: must be at least 0, and at most 0.9, not 0.95",
        4: "data.samples: takes a whole number, not 'many'",
        7: "train.epoch: no such key; did you mean epochs?",
        8: "train.batch_size: no such key; did you mean batch-size?",
        9: "train.dim: must be at least 1, not 0",
        10: "train.model: must be one of dlrm, deepfm, pnn, not 'dlmr'; did you mean dlrm?",
        11: "train.queue-ms-max: no such key; write queue-ms-max below [serve]",
        13: "[sotre]: no such section; did you mean store?",
        17: "store.dram-budget: is not a size: 'lots'; write for example 16MiB, 4GiB or 4000000000",
        18: "store.shards: takes a whole number, not true",
        19: "store.order: takes a text, not 3",
        22: "serve.access-log: takes true or false, not 'yes'",
        23: "serve.poll: is not a duration: 'soon'; write for example 60s, 24h or 7d",
        24: "serve.qeue-ms-max: no such key; did you mean queue-ms-max?",
        25: "serve.something: no such key; `tierbed serve --print-config` lists those that there "
        "are",
        26: "serve.refresh: a comma divides the words of a list: 'a,b'",
    }


def test_one_error_is_one_line(tmp_path: Path, capsys: Any) -> None:
    path = file(tmp_path, "[eval]\nthings = 1\n")
    [told] = refused(capsys, "serve", "--config", path)
    assert told == (
        f"tierbed: {path}:2: eval.things: no such key; there are paths, format, samples, threads"
    )


def test_numbers_may_stand_for_sizes_and_times(tmp_path: Path, capsys: Any) -> None:
    text = "[serve]\ndram-budget = 1000000\npoll = 0.5\nswap-share = 1\n[publish]\nhead-rows = 10\n"
    path = file(tmp_path, text)
    found = printed(capsys, "serve", "--config", path)
    assert found["serve.dram-budget"] == f'"1000000"  # {path}:2'
    assert found["serve.poll"] == f'"0.5"  # {path}:3'
    assert found["serve.swap-share"] == f"1.0  # {path}:4"
    assert printed(capsys, "publish", "--config", path)["publish.head-rows"].startswith('"10"')


def test_the_file_of_a_server_is_read_by_serve(tmp_path: Path, capsys: Any) -> None:
    folder = Path(__file__).parents[3] / "deploy" / "systemd"
    found = printed(capsys, "serve", "--config", str(folder / "server.toml"))
    assert found["serve.snapshot"].startswith('"ads=/var/lib/tierbed/ads"  # ')
    assert found["serve.dram-budget"].startswith('"4GiB"')
    path = file(tmp_path, 'cache = ["int8:lru", "int4:lru"]\ndrain-delay = "500ms"\n')
    found = printed(capsys, "serve", "--config", path)
    assert found["serve.cache"] == f'["int8:lru", "int4:lru"]  # {path}:1'
    assert found["serve.drain-delay"] == f'"500ms"  # {path}:2'
    path = file(tmp_path, "queue-ms-max = 1\n[serve]\nqueue-ms-max = 2\n")
    [told] = refused(capsys, "serve", "--config", path)
    assert told == f"tierbed: {path}:3: queue-ms-max stands in line 1; leave one out"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("[train]\nepochs = \n", 2, "no TOML: invalid value"),
        ("[train]\n[train]\n", 2, "no TOML: cannot declare ('train',) twice"),
        ("[[train]]\nepochs = 2\n", 1, "train: no key but a section"),
        ("train = 3\n", 1, "train: no key but a section"),
        ("[train]\nepochs.most = 2\n", 2, "train.epochs: takes a whole number, not a table"),
        ("[train]\nepochs = [2]\n", 2, "train.epochs: takes a whole number, not a list"),
        ("[data]\npaths = [1979-05-27]\n", 2, "data.paths: takes a text, or a list of"),
    ],
)
def test_what_is_no_key_is_told_by_its_line(
    tmp_path: Path, capsys: Any, text: str, line: int, told: str
) -> None:
    path = file(tmp_path, text)
    assert refused(capsys, "train", "--config", path)[0].startswith(
        f"tierbed: {path}:{line}: {told}"
    )


def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        [told] = refused(capsys, "train", "--config", str(path))
        assert told.startswith(f"tierbed: --config: cannot read {path}: ")
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[store]\npath = "\xe4"\n')
    assert "latin.toml:2: no text in UTF-8" in refused(capsys, "train", "--config", str(path))[0]
    given = file(tmp_path, "[store]\npath = 'x'\n")
    assert printed(capsys, "train", "--config", given)["store.path"].startswith('"x"')
    monkeypatch.setattr(config_file, "_BYTES_MAX", 3)
    assert "more than 1 MiB" in refused(capsys, "train", "--config", given)[0]


def test_yaml_says_the_same(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("yaml")
    text = """\
data:
  paths: [a.tsv, "b.tsv"]
store:
  path: run
  disk-quota:
serve:
  log-level: off
  poll: 3
train:
  lr: 1e-3
  epochs: 2
"""
    path = file(tmp_path, text, "run.yaml")
    found = printed(capsys, "train", "--config", path)
    assert found["data.paths"] == f'["a.tsv", "b.tsv"]  # {path}:2'
    assert found["train.lr"] == f"0.001  # {path}:10"
    assert found["store.disk-quota"] == " # not set"
    assert printed(capsys, "serve", "--config", path)["serve.log-level"] == f'"off"  # {path}:7'


def test_without_pyyaml_a_file_is_written_in_toml(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = file(tmp_path, "store:\n  path: x\n", "run.yaml")
    [told] = refused(capsys, "train", "--config", path)
    assert told.endswith("; pip install pyyaml, or write the file in TOML")
    path = file(tmp_path, "[store]\npath = 'x'\n")
    assert printed(capsys, "train", "--config", path)["store.path"].startswith('"x"')


def test_the_files_of_the_guide_are_right(tmp_path: Path, capsys: Any) -> None:
    guide = Path(__file__).parents[3] / "docs" / "how-to" / "configure-a-run.md"
    [text] = re.findall(r"^```toml\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    path = file(tmp_path, text)
    for command in ("plan", "train", "publish", "serve"):
        found = printed(capsys, command, "--config", path)
        assert any(f"# {path}:" in value for value in found.values())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train:\n  epochs: 2\n  epochs: 3\n", "3: epochs stands in line 2; leave one out"),
        ("train:\n  epochs: 2\ntrain:\n  dim: 3\n", "3: train stands in line 1; leave one out"),
        ("train:\n  epochs: '2'\n", "2: train.epochs: takes a whole number, not '2'"),
        ("train:\n  epochs: {a: 1}\n", "2: train.epochs: takes a whole number, not a table"),
        ("train:\n\tepochs: 1\n", "2: no YAML: found character '\\t' that cannot start any token"),
        ("- 1\n", "1: no keys; write sections, and keys below them"),
        ("train:\n  epochs: 2\n---\nx: 1\n", "3: no YAML: but found another document"),
    ],
)
def test_what_is_wrong_in_yaml_has_its_line(
    tmp_path: Path, capsys: Any, text: str, told: str
) -> None:
    pytest.importorskip("yaml")
    path = file(tmp_path, text, "run.yml")
    assert refused(capsys, "train", "--config", path) == [f"tierbed: {path}:{told}"]


def test_the_lines_of_keys_are_found_behind_texts_and_lists_of_several_lines() -> None:
    text = '''a = """
b = 1 # no key
\\"""" # "
b.c = [ # [
  "]", 'x = "', {d = 1},
]
["e.f".g] # h = 1
"i = j" = 'k = l'
'm' = """n""""" # o
p = { q = 1, r = [2,
3] }
[[s]]
t=1
'''
    assert key_lines(text) == {
        ("a",): 1,
        ("b",): 4,
        ("b", "c"): 4,
        ("e.f",): 7,
        ("e.f", "g"): 7,
        ("e.f", "g", "i = j"): 8,
        ("e.f", "g", "m"): 9,
        ("e.f", "g", "p"): 10,
        ("s",): 12,
        ("s", "t"): 13,
    }


def test_a_key_is_of_one_kind_in_all_commands() -> None:
    import typer.main

    from tierbed.cli import _register, app
    from tierbed.cli.configuration import settings_of

    _register()
    group: Any = typer.main.get_command(app)
    kinds: dict[tuple[str, str], set[str]] = {}
    for command in group.commands.values():
        keys = [(setting.section, setting.key) for setting in settings_of(command)]
        assert len(keys) == len(set(keys)), "two options of one command are one key"
        for setting in settings_of(command):
            kinds.setdefault((setting.section, setting.key), set()).add(setting.kind)
            assert setting.text, setting.flag
    assert all(len(kind) == 1 for kind in kinds.values()), kinds
    assert len(kinds) > 70


def test_a_word_that_is_no_unit_is_refused_on_the_command_line_too(capsys: Any) -> None:
    [told] = refused(capsys, "train", "--store", "x", "--dram-budget", "lots")
    assert told.startswith("tierbed: --dram-budget is not a size: 'lots'")
    assert words.Unit("size").name == "size"


def test_a_run_keeps_what_was_set(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tierbed_bench")
    store = tmp_path / "run"
    text = RUN.replace('"run"', json.dumps(str(store))).replace("epochs = 2", "epochs = 1")
    path = file(tmp_path, text)
    assert main(["train", "--config", path, "--json", "-", "--window", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["embedding_dim"] == 8
    kept = str(store / "config.toml")
    assert f"dim = 8  # {path}:11" in Path(kept).read_text()
    assert "window = 4  # --window" in Path(kept).read_text()
    # It is finished, so the same again trains nothing.
    assert main(["train", "--config", kept, "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["resumed_from_step"], again["train_loss"]) == (result["steps"], None)
    # It is published by the same file.
    published = str(tmp_path / "snapshot")
    assert main(["publish", "--config", path, "--out", published, "--json", "-"]) == 0
    capsys.readouterr()
    assert main(["inspect", published, "--json", "-"]) == 0
    tables = json.loads(capsys.readouterr().out)["stats"]["contents"]["tables"]
    assert {table["codec"] for table in tables} == {"int8"}
    # What does not fit the run leaves what was kept.
    assert main(["train", "--config", kept, "--dim", "4"]) == 2
    assert f"dim = 8  # {kept}" in Path(kept).read_text()


def test_faults_are_told_by_their_line() -> None:
    faults = [config_file.Fault(3, "b"), config_file.Fault(1, "c"), config_file.Fault(1, "a")]
    assert [fault.text for fault in sorted(faults)] == ["a", "c", "b"]
    with pytest.raises(InvalidError, match="cannot read"):
        config_file.read_file(Path("/nowhere/x.toml"))
