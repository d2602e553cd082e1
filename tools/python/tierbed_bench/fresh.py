"""How soon do trained rows answer, and what does publishing them cost the trainer?

A store with one table whose rows are all written; every part changes a share of them at a time.

- ``publish``: a whole version, then a delta of what changed since, by the rows that were noted
  while training (``tracked``) and by comparing all rows with the base (``compared``); a checkpoint
  comes first, with a row of its own. ``read_s`` is the time until rows are read and handed to the
  sorter, ``write_s`` from there until they are sorted and on pages, ``finish_s`` the index and
  making all durable. Below 131,072 rows of a version a publish tells no progress in between;
- ``tracking``: processor time of a training step of a store that notes changed rows, beside one
  that does not because nothing was published from it; rounds interleaved, same batches;
- ``pauses``: how long training stands still for a version: until it is written (``foreground``),
  or until it can be written while training goes on (``beside``), with the steps meanwhile by those
  before;
- ``freshness``: from the end of a training step until a server that follows the channel first
  answers with it: the version is cut (``cut_s``), pushed to the location (``push_s``), and found,
  pulled, checked and applied (``pull_s``).
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tierbed import Publisher
from tierbed._util.report import print_table, write_json
from tierbed.errors import InvalidError
from tierbed.results import SnapshotReport
from tierbed_bench.common import percentile, ratio, zipf_batches
from tierbed_bench.fresh_pauses import measure_pauses
from tierbed_bench.fresh_trainer import MIB, PARTS, STEP_IDS, FreshOptions, Row, Spent, Trainer
from tierbed_bench.serving_systems import served
from tierbed_bench.suite import write_suite

__all__ = ["FreshOptions", "run_fresh"]

PHASES = ("read_s", "write_s", "finish_s")
STAGES = ("cut_s", "push_s", "pull_s")
COLUMNS = (
    *("part", "system", "changed", "seconds", "cpu_s", "mib", "cpu_us_per_step", "age_s"),
    *(*PHASES, *STAGES),
    *("pause_s", "step_s_max", "steps_slower"),
)
CHANNEL = "stable"
# Steps of a round of ``tracking``.
STEPS = 32
# How often a server is asked which version answers, and how long at most.
ASK_S, ANSWER_S_MAX = 0.02, 120.0


class _Phases:
    """The progress of one publish after the other: when rows were read, and when written.

    Progress counts half of the rows while they are read, the other half while they are written.
    """

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {name: [] for name in PHASES}
        # When progress was last told of each.
        self._told: dict[Literal["read", "written"], float] = {}

    def __call__(self, done: int, total: int) -> None:
        self._told["read" if 2 * done <= total else "written"] = time.perf_counter()

    def publish(self, publish: Callable[..., SnapshotReport]) -> SnapshotReport:
        """Publishes, and notes the phases where progress was told of each."""
        self._told.clear()
        begun_s = time.perf_counter()
        report = publish(progress=self)
        ended_s = time.perf_counter()
        if len(self._told) == 2:
            marks = (begun_s, self._told["read"], self._told["written"], ended_s)
            for name, (since, until) in zip(PHASES, pairwise(marks), strict=True):
                self.spent[name].append(until - since)
        return report

    def medians(self) -> dict[str, float | None]:
        """Returns seconds by phase; None where a publish told nothing."""
        return {name: median(spent) if spent else None for name, spent in self.spent.items()}


def _publish(folder: Path, options: FreshOptions) -> list[Row]:
    """Times a whole version, and deltas of the same changes by both ways."""
    trainer = Trainer(folder / "published", options)
    spent = {name: Spent() for name in ("checkpoint", "full", "tracked", "compared")}
    phases = {name: _Phases() for name in spent}
    written: dict[str, int] = {}
    changed = 0
    with trainer.store as store:
        trainer.train_all()
        for number in range(options.rounds):
            base, *deltas = (
                folder / f"{name}-{number}" for name in ("base", "tracked", "compared")
            )
            store.checkpoint("bench")
            publish = partial(store.publish, base)
            report = spent["full"].call(partial(phases["full"].publish, publish))
            written["full"] = report.pages_bytes
            changed = trainer.train_share()
            # What is only in memory is written first, whoever asks for it.
            spent["checkpoint"].call(partial(store.checkpoint, "bench"))
            row_counts = {}
            ways: tuple[Literal["tracked", "compared"], ...] = ("tracked", "compared")
            for name, out in zip(ways, deltas, strict=True):
                publish = partial(store.publish, out, base=base, changes=name)
                report = spent[name].call(partial(phases[name].publish, publish))
                written[name] = report.pages_bytes
                row_counts[name] = report.row_count
            # Rows that came out as they were are noted too; here every step changes its rows.
            assert row_counts["compared"] == changed, f"{row_counts} rows, {changed} changed"
            assert row_counts["tracked"] >= changed, f"{row_counts} rows, {changed} changed"
    return [
        {
            "part": "publish",
            "system": name,
            "changed": options.rows if name == "full" else changed,
            "seconds": median(one.seconds),
            "cpu_s": median(one.cpu_s),
            "mib": written[name] / MIB if name in written else None,
            **phases[name].medians(),
        }
        for name, one in spent.items()
    ]


def _tracking(folder: Path, options: FreshOptions) -> list[Row]:
    """Steps of a store that notes changed rows, and of one that has no reason to.

    Rows are noted where they leave the row buffer, so a round ends with a checkpoint. A publish
    empties the buffer: both stores are opened anew, so that they read the same rows.
    """
    systems = {name: Trainer(folder / name, options) for name in ("tracked", "untracked")}
    spent = {name: Spent() for name in systems}
    noted = 0
    try:
        for trainer in systems.values():
            trainer.train_all()
        systems["tracked"].store.publish(folder / "tracked-base")
        for trainer in systems.values():
            trainer.store.checkpoint("bench")
            trainer.store.close()
            trainer.open()
        for number in range(options.rounds + 1):
            batches = zipf_batches(
                {"item": options.rows}, STEP_IDS, STEPS, seed=options.seed + number
            )
            names = list(systems) if number % 2 else list(systems)[::-1]
            for name in names:
                spent[name].call(partial(systems[name].round, batches))
        noted = systems["tracked"].store.stats()["changes"]["row_count"]
        assert noted, "a store from which a base was published notes what changes"
        idle = systems["untracked"].store.stats()["changes"]["row_count"]
        assert not idle, f"a store from which nothing was published notes {idle} rows"
    finally:
        for trainer in systems.values():
            trainer.store.close()
    # The first round warms the stores.
    return [
        {
            "part": "tracking",
            "system": name,
            "changed": noted if name == "tracked" else 0,
            "cpu_us_per_step": 1e6 * median(one.cpu_s[1:]) / STEPS,
            "seconds": median(one.seconds[1:]),
        }
        for name, one in spent.items()
    ]


def _freshness(folder: Path, options: FreshOptions) -> list[Row]:
    """Steps until they answer."""
    location = options.location or str(folder / "models")
    trainer = Trainer(folder / "fresh", options)
    ages, publish_s = [], []
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    changed = 0
    with ExitStack() as stack:
        store = stack.enter_context(trainer.store)
        trainer.train_all()
        publisher = stack.enter_context(
            Publisher(
                store, None, location, channel=CHANNEL, delta_every="365d", local=folder / "cut"
            )
        )
        publisher.publish_now()
        words = ["--local", str(folder / "here"), "--poll", options.poll]
        words += ["--sync-bandwidth", "1GiB"]
        place, log = f"{location}@{CHANNEL}", folder / "server.log"
        url = stack.enter_context(served(place, log, options.dram_budget, words)).http
        for _ in range(options.rounds):
            changed = trainer.train_share()
            committed_s = time.monotonic()
            publisher.publish_now()
            publish_s.append(time.monotonic() - committed_s)
            stats = publisher.stats()
            assert stats.report is not None, "something was published"
            _wait_answered(url, stats.report.identity)
            ages.append(time.monotonic() - committed_s)
            told = (stats.pause_s, stats.upload_s, ages[-1] - publish_s[-1])
            for name, seconds in zip(STAGES, told, strict=True):
                stages[name].append(seconds)
    return [
        {
            "part": "freshness",
            "system": "bucket" if "://" in location else "folder",
            "changed": changed,
            "seconds": median(publish_s),
            "age_s": median(ages),
            "age_p99_s": percentile(ages, 0.99),
            "age_max_s": max(ages),
            "versions": len(ages),
            **{name: median(seconds) for name, seconds in stages.items()},
        }
    ]


def _wait_answered(url: str, identity: str) -> None:
    """Asks for a row until the answer is of the version."""
    ends_s = time.monotonic() + ANSWER_S_MAX
    asked = {"name": "ids", "datatype": "INT64", "shape": [1, 1], "data": [0]}
    body = json.dumps({"inputs": [asked]}).encode()
    request = urllib.request.Request(
        f"http://{url}/v2/models/tierbed.rows/infer", body, {"Content-Type": "application/json"}
    )
    while True:
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
            if json.loads(reply.read())["parameters"]["generation"] == identity:
                return
        if time.monotonic() > ends_s:
            raise RuntimeError(f"version {identity} does not answer after {ANSWER_S_MAX} s")
        time.sleep(ASK_S)


def run_fresh(out: Path, options: FreshOptions, json_path: Path | None = None) -> Path:
    """Runs the suite; writes ``fresh.json`` and ``fresh.png`` to ``out``."""
    unknown = set(options.parts) - set(PARTS)
    if unknown or not options.parts:
        raise InvalidError(f"--parts must be of {', '.join(PARTS)}; found {sorted(unknown)}")
    if options.quick:
        small = {"rows": 20_000, "rounds": 2, "poll": "100ms"}
        options = FreshOptions(**{**vars(options), **small, "quick": False})
    out.mkdir(parents=True, exist_ok=True)
    told: list[Row] = []
    for part, measure in [
        ("publish", _publish),
        ("tracking", _tracking),
        ("pauses", measure_pauses),
        ("freshness", _freshness),
    ]:
        if part in options.parts:
            with TemporaryDirectory(dir=options.scratch or out) as folder:
                told += measure(Path(folder), options)
    shown = [{name: row.get(name) for name in COLUMNS} for row in told]
    print_table("from training to serving", shown, COLUMNS)
    shape = {"row_count": options.rows, "dim": options.dim, "poll": options.poll}
    path = write_suite(out, "fresh", told, _ratios(told), _bars(told), {"shape": shape})
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _ratios(told: list[Row]) -> dict[str, float | None]:
    """What costs how much of what it stands beside; a ratio above 1 is better."""
    by_name = {(row["part"], row["system"]): row for row in told}
    found: dict[str, float | None] = {}
    for name in ("tracked", "compared"):
        if (row := by_name.get(("publish", name))) is not None:
            full = by_name["publish", "full"]
            for which in ("seconds", "cpu_s"):
                found[f"publish_{name}_{which}_vs_full"] = ratio(full[which], row[which])
    if (row := by_name.get(("pauses", "delta beside"))) is not None:
        still = by_name["pauses", "delta foreground"]
        found["pause_beside_vs_foreground"] = ratio(still["pause_s"], row["pause_s"])
    if (row := by_name.get(("tracking", "tracked"))) is not None:
        bare = by_name["tracking", "untracked"]
        which = "cpu_us_per_step"
        found["step_tracked_vs_untracked"] = ratio(bare[which], row[which])
    return found


def _bars(told: list[Row]) -> Callable[[Any], None]:
    """Draws what a version takes, and how old an answer is."""

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        written = [row for row in told if row["part"] == "publish"]
        left.barh([row["system"] for row in written], [row["seconds"] for row in written])
        left.set(xlabel="seconds to publish")
        left.invert_yaxis()
        fresh = [row for row in told if row["part"] == "freshness"]
        for name in ("seconds", "age_s", "age_max_s"):
            right.barh([f"{row['system']} {name}" for row in fresh], [row[name] for row in fresh])
        right.set(xlabel="seconds from a step until published, until answered")
        right.invert_yaxis()

    return draw
