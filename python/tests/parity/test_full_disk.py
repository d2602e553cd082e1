"""Does a disk that fills up in the middle of training lose nothing that was checkpointed?

On a real file system of a few megabytes: a tmpfs, and an ext4 image on a loop device. Both need
the right to mount; without it the test skips with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_bit_identity import OPTIMIZERS, Training, assert_same

import tierbed as tb

STEPS = 60
CHECKPOINT_STEPS = 5


def run(*command: str) -> None:
    """Runs a command of the system, or skips with what it said."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(params=["tmpfs", pytest.param("ext4", marks=pytest.mark.slow)])
def small_disk(request: Any, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of some megabytes."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if request.param == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", "size=24m", "tierbed-test", str(mount))
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        run("mkfs.ext4", "-q", str(image))
        run("mount", "-o", "loop", str(image), str(mount))
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def train(training: Training, last: int) -> None:
    while training.step < last:
        training.run(min(last, training.step + CHECKPOINT_STEPS), window=0)
        training.save()


def test_training_stops_with_a_clear_error_and_goes_on_when_there_is_room(
    small_disk: Path, open_store: Any
) -> None:
    optimizer = OPTIMIZERS["adagrad"]
    folder = small_disk / "store"
    # Files need some room; what is left is taken by something else, as on any shared disk.
    ballast = small_disk / "ballast"
    store = tb.Store.open(folder, dram_budget="2MiB", seed=5)
    training = Training(store, optimizer)
    train(training, 2 * CHECKPOINT_STEPS)
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * max(0, free - (1 << 20)))
    with pytest.raises(tb.NoSpaceError) as caught:
        train(training, STEPS)
    assert caught.value.errno == 28
    assert "free disk space" in str(caught.value)
    store.close()

    ballast.unlink()
    with tb.Store.open(folder, dram_budget="2MiB", seed=5) as store:
        store.verify()
        resumed = Training(store, optimizer)
        resumed.load()
        assert resumed.step >= 2 * CHECKPOINT_STEPS
        oracle = Training(open_store("memory", seed=5), optimizer)
        oracle.run(resumed.step, window=0)
        assert_same(resumed, oracle)
        resumed.run(resumed.step + CHECKPOINT_STEPS, window=0)
        oracle.run(oracle.step + CHECKPOINT_STEPS, window=0)
        assert_same(resumed, oracle)
