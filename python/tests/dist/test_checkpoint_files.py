"""Files of checkpoints: written as safetensors writes them, and refused by name."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tierbed as tb
from tierbed.dist.checkpoint_files import STREAMS, Writer, encode, fetched
from tierbed.dist.checkpoint_places import FolderPlace


def parts_of(rows: int, state_words: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(rows),
        "weights": torch.randn(rows, 5),
        "state": torch.randn(rows, state_words),
        "codes": torch.randint(0, 256, (rows, 3), dtype=torch.uint8),
    }


def file_of(header: Any, numbers: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("state_words", [0, 2])
def test_tensors_are_those_that_were_written(rows: int, state_words: int) -> None:
    parts = parts_of(rows, state_words)
    assert same(safetensors.torch.load(encode(parts)), parts)


def test_columns_of_wider_rows_are_written_as_tensors_of_their_own() -> None:
    records = torch.randn(9, 11)
    for rows in (0, 1, 9):
        columns = {"weights": records[:rows, :4], "state": records[:rows, 4:-1]}
        own = {name: tensor.clone() for name, tensor in columns.items()}
        assert encode(columns) == encode(own)
        assert same(safetensors.torch.load(encode(columns)), own)
    # One element has any strides.
    odd = torch.randn(20).as_strided((1, 1), (7, 3))
    assert same(safetensors.torch.load(encode({"state": odd})), {"state": odd})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x04\0\0",
        b"\xff" * 40,
        file_of([], b""),
        file_of({"rows": 1}, b""),
        file_of({"rows": {"dtype": "I64", "shape": [1]}}, bytes(8)),
        file_of({"rows": {"dtype": "F8", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"rows": {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"rows": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}, bytes(8)),
        file_of({"rows": {"dtype": "I64", "shape": [1], "data_offsets": [-8, 0]}}, bytes(8)),
        file_of({"rows": {"dtype": "I64", "shape": [-1, -1], "data_offsets": [0, 8]}}, bytes(8)),
    ],
)
def test_what_is_no_such_file_is_corrupt(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank0-x").write_bytes(raw)
    about = {"name": "rank0-x", "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    with pytest.raises(tb.CorruptionError, match="rank0-x cannot be read"):
        list(fetched(FolderPlace(tmp_path), [about]))


class Recorded(FolderPlace):
    """Takes files, and calls ``on_put`` with each before it has it."""

    def __init__(self, folder: Path, on_put: Any) -> None:
        super().__init__(folder)
        self._on_put = on_put
        self.begin(replaces=False)

    def put(self, name: str, raw: bytes) -> bool:
        self._on_put(raw)
        return super().put(name, raw)


def test_a_slow_file_holds_no_other_one_up_and_stays_the_first(tmp_path: Path) -> None:
    others_there = threading.Semaphore(0)
    most_at_once, at_once, lock = 0, 0, threading.Lock()

    def on_put(raw: bytes) -> None:
        nonlocal most_at_once, at_once
        with lock:
            at_once += 1
            most_at_once = max(most_at_once, at_once)
        if raw == b"0":
            for _ in range(20):
                assert others_there.acquire(timeout=60)
        else:
            others_there.release()
        with lock:
            at_once -= 1

    with Writer(Recorded(tmp_path / "there", on_put), "rank0") as writer:
        for at in range(21):
            writer.write(b"%d" % at, ".x", at=at)
        entries = writer.finish()
    assert [entry["at"] for entry in entries] == list(range(21))
    assert [entry["sha256"] for entry in entries] == [
        hashlib.sha256(b"%d" % at).hexdigest() for at in range(21)
    ]
    assert most_at_once <= STREAMS


def test_a_file_that_fails_ends_the_writing_soon(tmp_path: Path) -> None:
    def on_put(raw: bytes) -> None:
        if raw == b"1":
            raise tb.IoError("no")

    written = []

    def write_all(writer: Writer) -> None:
        for at in range(1000):
            writer.write(b"%d" % at, ".x")
            written.append(at)

    with Writer(Recorded(tmp_path / "there", on_put), "rank0") as writer:
        with pytest.raises(tb.IoError, match="no"):
            write_all(writer)
        with pytest.raises(tb.IoError, match="no"):
            writer.finish()
    assert len(written) < 1000
