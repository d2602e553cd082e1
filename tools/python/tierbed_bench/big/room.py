"""How much disk do the phases of ``bench big`` need?

Ratios are upper bounds of what the phases were seen to take; the result tells what each took.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tierbed.codec import Codec
from tierbed_bench.big.data import Shape

__all__ = [
    "codec_that_fits",
    "default_size",
    "filled_bytes",
    "forward_bytes",
    "free_bytes",
    "publish_bytes",
]

#: Times the RAM that tables have by default.
RAM_RATIO = 2.5
#: Disk of a store by the bytes of its records, checkpoints included: of one in forward order
#: without its plan, and of those whose rows are read by number.
FORWARD_RATIO = 1.2
FILLED_RATIOS = {"file": 1.05, "cold": 1.16}
#: Beside every ratio: files of small stores are mostly fixed parts.
FIXED_BYTES = 256 << 20
#: Left free on the disk, for everybody.
SPARE_BYTES = 2 << 30
#: Bytes of an id in plans and while they are made.
PLANNED_ID_BYTES = 16
#: Codecs of a published snapshot, the most exact first; narrower ones take long to encode.
CODECS = ("f32", "bf16", "int8")
#: What a short training by window adds, as pages that a checkpoint has not freed yet.
WINDOW_BYTES = 2 << 30
_PAGE_RATIO = 1.06
_KEY_BYTES = 16
_INDEX_BYTES = 20  # of a row while the index is sorted
_STATE_BYTES = 8


def free_bytes(folder: Path) -> int:
    """Returns the bytes that may be used on the disk of a folder."""
    return max(0, shutil.disk_usage(folder).free - SPARE_BYTES)


def record_bytes(shape: Shape) -> int:
    """Returns the bytes of all rows with optimizer state and use counts."""
    return shape.row_count * (4 * shape.dim + _STATE_BYTES)


def forward_bytes(shape: Shape) -> int:
    """Returns the disk of a store in forward order with its plan."""
    ids = shape.batch_count * shape.batch_ids
    return round(FORWARD_RATIO * record_bytes(shape)) + PLANNED_ID_BYTES * ids + FIXED_BYTES


def filled_bytes(shape: Shape, store: str) -> int:
    """Returns the disk of a store whose rows are read by number, after it has trained a while.

    Args:
        shape: Of the tables.
        store: ``"file"`` or ``"cold"``.
    """
    records = record_bytes(shape)
    filled = round(FILLED_RATIOS[store] * records)
    return filled + min(2 * records, WINDOW_BYTES) + FIXED_BYTES


def snapshot_bytes(shape: Shape, codec: str) -> int:
    """Returns the disk of a snapshot with all rows."""
    row = 4 + Codec(codec, shape.dim).code_bytes
    return round(_PAGE_RATIO * shape.row_count * row) + FIXED_BYTES


def publish_bytes(shape: Shape, codec: str, *, is_forward: bool) -> int:
    """Returns the disk that a publish needs beside the store.

    Rows are sorted outside memory: of one table after the other, or of all tables at once in
    forward order. There they wait as they are in the snapshot, and give their space back while it
    is written.
    """
    snapshot = snapshot_bytes(shape, codec)
    if is_forward:
        scratch = shape.row_count * (_KEY_BYTES + Codec(codec, shape.dim).code_bytes)
        return max(scratch, snapshot) + _INDEX_BYTES * shape.row_count
    return shape.rows * (_KEY_BYTES + 4 * shape.dim) + snapshot


def codec_that_fits(shape: Shape, folder: Path, *, is_forward: bool) -> str | None:
    """Returns the most exact codec whose snapshot fits the disk; None when none does."""
    free = free_bytes(folder)
    for codec in CODECS:
        if publish_bytes(shape, codec, is_forward=is_forward) <= free:
            return codec
    return None


def default_size(folder: Path, shape: Shape, *, serves: bool) -> tuple[int, str]:
    """Returns the bytes of rows to measure, and which of RAM and disk says so.

    Args:
        folder: On the disk that is used.
        shape: Tables like those that are measured, of any size.
        serves: Whether a snapshot must fit beside a store.
    """
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = int(RAM_RATIO * ram)
    needs = [forward_bytes(shape)]
    if serves:
        snapshot = publish_bytes(shape, CODECS[-1], is_forward=False)
        needs.append(filled_bytes(shape, "file") + snapshot)
    fixed = 2 * FIXED_BYTES + WINDOW_BYTES
    fits = int((free_bytes(folder) - fixed) * shape.table_bytes / max(needs))
    if wanted <= fits:
        return wanted, f"{RAM_RATIO} times the RAM"
    return max(0, fits), "what the disk holds, with less than 2.5 times the RAM"
