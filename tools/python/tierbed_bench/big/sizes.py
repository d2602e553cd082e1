"""All phases of ``bench big`` at one size, in an order that deletes what is no longer needed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierbed._util.progress import Progress
from tierbed.errors import TierbedError
from tierbed_bench.big import room
from tierbed_bench.big.data import Shape
from tierbed_bench.big.process import Kill, Outcome, run_phase

__all__ = ["PARTS", "OneSize", "Wanted"]

Row = dict[str, Any]
PARTS = ("training", "windows", "serving")
#: Times the memory of the run whose rows must be equal.
MORE_BUDGET = 10
HEAD_ROWS = "1%"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured at every size.

    Args:
        budget_bytes: Memory of a store.
        seconds: Of phases that are bounded by time.
        queries: Of the log to place by.
        checkpoint_batches: Batches between checkpoints, equally many at every size.
        parts: Which parts.
        kept: File that gets every row as it comes.
    """

    budget_bytes: int
    seconds: float
    queries: int
    checkpoint_batches: int
    parts: tuple[str, ...]
    kept: Path


@dataclass
class OneSize:
    """The phases at one size.

    Args:
        label: ``smaller`` or ``full``.
        shape: Of the tables.
        folder: For all files; removed at the end by the caller.
        wanted: What is measured.
    """

    label: str
    shape: Shape
    folder: Path
    wanted: Wanted
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    torch_bytes: int = 0

    def run(self) -> None:
        """Runs all parts that are wanted; one that fails is a row, and the others run."""
        self.torch_bytes = int(self._phase("torch", "", has_model=False)["peak_rss_bytes"])
        wanted = set(self.wanted.parts)
        parts: list[tuple[str, set[str], Callable[[], None]]] = [
            ("training", {"training"}, self._training),
            ("cold order", {"windows"}, self._cold),
            ("rows by number", {"windows", "serving"}, self._by_number),
            ("rows that come to a plan", {"windows"}, self._enter),
        ]
        for name, of_parts, run in parts:
            if wanted & of_parts:
                try:
                    run()
                except TierbedError as error:
                    self._note(name, "", failed=str(error))
                for path in self.folder.iterdir():
                    self._delete(path.name)

    # ------------------------------------------------------------ one phase

    def _phase(self, phase: str, variant: str, kill: Kill | None = None, **given: Any) -> Row:
        given.setdefault("budget_bytes", self.wanted.budget_bytes)
        name = f"{phase} {variant}".strip()
        begun_s = time.perf_counter()
        outcome = run_phase(
            phase, self.shape, self.folder, given, label=f"{self.label}, {name}", kill=kill
        )
        outcome.row["phase_s"] = phase_s = time.perf_counter() - begun_s
        if not Progress.is_quiet:
            print(f"bench big: {self.label}, {name}: {phase_s:.0f} s", flush=True)
        return self._kept(phase, variant, given, outcome)

    def _kept(self, phase: str, variant: str, given: Row, outcome: Outcome) -> Row:
        row: Row = {
            "size": self.label,
            "table_bytes": self.shape.table_bytes,
            "phase": phase,
            "variant": variant,
            **outcome.row,
            "disk_peak_bytes": outcome.disk_peak_bytes,
            "disk_peak_by_rows": outcome.disk_peak_bytes / self.shape.table_bytes,
        }
        if outcome.is_killed:
            row["is_killed"] = True
        elif phase not in ("torch", "place", "serve"):
            over = row["peak_rss_bytes"] - int(given["budget_bytes"]) - self.torch_bytes
            row["rss_over_budget_and_torch_bytes"] = over
        if phase == "place" and not outcome.is_killed:
            row["memory_bytes_per_row"] = (row["peak_rss_bytes"] - self.torch_bytes) / row["rows"]
        if outcome.curve:
            self.curves[f"{self.label} {phase} {variant}".strip()] = outcome.curve
        return self._add(row)

    def _add(self, row: Row) -> Row:
        self.rows.append(row)
        with self.wanted.kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def _note(self, phase: str, variant: str, **found: Any) -> None:
        """Adds a row that no process measured."""
        size = {"size": self.label, "table_bytes": self.shape.table_bytes}
        self._add({**size, "phase": phase, "variant": variant, **found})

    def _try(self, phase: str, variant: str, **given: Any) -> None:
        """Runs a phase that no later one needs; where it fails, that is its row."""
        try:
            self._phase(phase, variant, **given)
        except TierbedError as error:
            self._note(phase, variant, failed=str(error))

    def _has_room(self, phase: str, needed_bytes: int, variant: str = "") -> bool:
        free = room.free_bytes(self.folder)
        if needed_bytes <= free:
            return True
        reason = f"needs {needed_bytes:,} bytes of disk, and {free:,} are left"
        self._note(phase, variant, skipped=reason)
        return False

    def _delete(self, name: str) -> None:
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ training

    @property
    def _stretch(self) -> int:
        """Batches of the third epoch, in which processes are killed."""
        return max(6, min(self.shape.batch_count - 1, self.shape.batch_count // 20))

    def _training(self) -> None:
        if not self._has_room("training", room.forward_bytes(self.shape)):
            return
        every = self.wanted.checkpoint_batches
        saves = list(range(every, self.shape.batch_count, every))
        self._phase("plan", "forward")
        for epoch in ("epoch 1", "epoch 2"):
            last = self._phase("epoch", epoch, checkpoints=saves)
        self._kills(float(last["checkpoint_s"]))
        digest = self._phase("scan", "after kills")["digest"]
        self._try("few rows", "forward")
        dense = int(self._phase("torch", "model", has_model=True)["peak_rss_bytes"])
        plain, self.torch_bytes = self.torch_bytes, dense
        self._try("model", "forward", seconds=self.wanted.seconds)
        self.torch_bytes = plain
        self._try("verify", "forward")
        try:
            self._publish_forward(digest)
        except TierbedError as error:
            self._note("publish", "forward", failed=str(error))
        self._delete("forward")
        more: Row = {"store": "reference", "budget_bytes": MORE_BUDGET * self.wanted.budget_bytes}
        name = f"{MORE_BUDGET} times the budget"
        self._phase("plan", name, **more)
        for epoch in ("epoch 1", "epoch 2"):
            # More memory is more to write at a checkpoint, so there are fewer.
            self._phase("epoch", f"{epoch}, {name}", checkpoints=saves[1::2], **more)
        self._phase("epoch", f"epoch 3, {name}", until=self._stretch, **more)
        other = self._phase("scan", name, **more)["digest"]
        self._delete("reference")
        self._note("bits", f"killed twice, against {name}", is_equal=digest == other)

    def _kills(self, checkpoint_s: float) -> None:
        """Kills an epoch and a checkpoint, and goes on behind each."""
        # The killed checkpoint may be whole; even then there is something left to train.
        half, end = self._stretch // 2 - 1, self._stretch - 2
        self._phase(
            "epoch",
            "killed in an epoch",
            Kill("reached"),
            until=end,
            checkpoints=[half],
            kill_at=(half + end) // 2,
        )
        self._phase(
            "epoch",
            "resumed, killed in a checkpoint",
            Kill("checkpoint", checkpoint_s / 2),
            until=end,
        )
        self._phase("epoch", "resumed", until=self._stretch)

    def _publish_forward(self, digest: str) -> None:
        """Publishes from the forward order, killed on the way, and looks whether rows changed."""
        codec = room.codec_that_fits(self.shape, self.folder, is_forward=True)
        if codec is None:
            needed = room.publish_bytes(self.shape, room.CODECS[-1], is_forward=True)
            self._has_room("publish", needed, "forward")
            return
        given = {"store": "forward", "snapshot": "published", "codec": codec}
        self._killed_and_again("publish", "forward", lambda: self._delete("published"), given)
        self._delete("published")
        after = self._phase("scan", "after a killed publish")["digest"]
        self._note("bits", "store before and after a killed publish", is_equal=digest == after)

    def _killed_and_again(
        self, phase: str, variant: str, clean: Callable[[], None], given: Row
    ) -> Row:
        self._phase(phase, f"{variant}, killed on the way", Kill("under way"), **given)
        clean()
        return self._phase(phase, variant, **given)

    # ------------------------------------------------------------ rows by number

    def _cold(self) -> None:
        if self._fill("cold"):
            self._phase("window", "cold", store="cold", seconds=self.wanted.seconds)

    def _by_number(self) -> None:
        if not self._fill("file"):
            return
        if "windows" in self.wanted.parts:
            self._try("window", "file", store="file", seconds=self.wanted.seconds)
            self._export()
            self._try("verify", "file", store="file")
        if "serving" in self.wanted.parts:
            self._serving()

    def _enter(self) -> None:
        """Fills a store by number and moves its rows to a plan; every bit must stay."""
        needed = room.filled_bytes(self.shape, "file") + room.forward_bytes(self.shape)
        if not self._has_room("enter", needed, "from file") or not self._fill("file", "for a plan"):
            return
        before = self._phase("scan", "filled", store="file")["digest"]
        self._phase("enter", "from file")
        after = self._phase("scan", "behind a move to a plan")["digest"]
        self._note("bits", "before and after a move to a plan", is_equal=before == after)
        self._phase("epoch", "behind a move to a plan", until=self._stretch)

    def _fill(self, store: str, variant: str = "") -> bool:
        variant = variant or store
        if not self._has_room("fill", room.filled_bytes(self.shape, store), variant):
            return False
        self._phase("fill", variant, store=store)
        return True

    def _export(self) -> None:
        table_bytes = self.shape.table_bytes // self.shape.tables
        if self._has_room("export", table_bytes, "file"):
            self._try("export", "file, one table", store="file")

    def _serving(self) -> None:
        codec = room.codec_that_fits(self.shape, self.folder, is_forward=False)
        if codec is None:
            needed = room.publish_bytes(self.shape, room.CODECS[-1], is_forward=False)
            self._has_room("publish", needed, "file")
            return
        self._phase("place", "one table", queries=self.wanted.queries, codec=codec)
        given = {
            "store": "file",
            "snapshot": "snapshot",
            "codec": codec,
            "head_rows": HEAD_ROWS,
            "placement": str(self.folder / "placement"),
        }
        self._killed_and_again("publish", "file", lambda: self._delete("snapshot"), given)
        self._delete("file")
        self._try("serve", "1 % of the tables", seconds=self.wanted.seconds)
        self._try("verify_snapshot", "")
        self._delete("snapshot")
