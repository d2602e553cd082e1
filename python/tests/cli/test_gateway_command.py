"""``tierbed serve --route``: the words of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--route", "shards"], "give --route and --members"),
        (["--members", "members.toml"], "give --route and --members"),
        (
            ["snapshot", "--route", "shards", "--members", "members.toml"],
            "leave out one of SNAPSHOT and --route",
        ),
        ([], "give the folder that publish wrote, or --route"),
        (["--route", "shards", "--members", "members.toml"], "publish with --shards"),
    ],
)
def test_words_of_a_gateway_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    assert main(["serve", *words]) != 0
    assert remedy in capsys.readouterr().err
