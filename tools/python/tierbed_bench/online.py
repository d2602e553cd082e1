"""Online learning end to end: a trainer on a drifting stream, servers that follow, a client.

The trainer publishes a version every few seconds. Two servers follow its channel, a third one that
stays at the first version. The client asks all three about the newest samples, which no model has
seen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tierbed.config.words import ModelKind, Range
from tierbed.errors import TierbedError
from tierbed_bench.online_report import Answer, Asked, Published, report
from tierbed_bench.online_stream import BLOCK, Stream
from tierbed_bench.online_trainer import (
    FIRST,
    NEWEST,
    PROBE,
    TrainerOptions,
    batch_request,
    trainer_command,
)

__all__ = ["OnlineOptions", "run_online"]

FRESH = ("fresh_1", "fresh_2")
STALE = "first_snapshot"
STOP_S = 120
LAST_DELTA_S = 60
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class OnlineOptions:
    """What to show.

    Args:
        out: Folder of store, versions, servers and report.
        seconds: How long the servers are asked.
        publish_s: Seconds from one publication to the next.
        samples_per_s: Samples of the stream that come in a second.
        first_samples: Samples trained before the first version.
        users: Rows of the users' table.
        items: Rows of the items' table.
        item_life: Samples until an item is replaced by one that is new.
        embedding_dim: Elements of a row.
        model: What is on top of the tables.
        dram_budget_bytes: Of the store, and of each server.
        seed: Of everything random.
    """

    out: Path = Path("demo-out/online")
    seconds: Annotated[float, Range(5)] = 60.0
    publish_s: Annotated[float, Range(1)] = 3.0
    samples_per_s: Annotated[int, Range(100)] = 2_000
    first_samples: Annotated[int, Range(1_000)] = 100_000
    users: Annotated[int, Range(1_000)] = 500_000
    items: Annotated[int, Range(1_000)] = 500_000
    item_life: Annotated[int, Range(1_000)] = 60_000
    embedding_dim: int = 16
    model: ModelKind = "dlrm"
    dram_budget_bytes: int = 16 << 20
    seed: int = 1


class _Trainer:
    """The trainer's process; a thread reads what it says."""

    def __init__(self, options: OnlineOptions, stream: Stream) -> None:
        given = TrainerOptions(
            out=str(options.out),
            stream=stream,
            model=options.model,
            embedding_dim=options.embedding_dim,
            dram_budget_bytes=options.dram_budget_bytes,
            first_samples=options.first_samples,
            samples_per_s=options.samples_per_s,
            publish_s=options.publish_s,
        )
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(trainer_command(given), stdin=pipe, stdout=pipe, text=True)
        self.published: dict[str, Published] = {}
        self.probe: dict[str, Any] | None = None
        self.behind = 0
        self.has_first = self.ended = False
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self.changed:
                if "published" in line:
                    one = Published(**line)
                    self.published[one.identity] = one
                elif "first" in line:
                    self.has_first = True
                elif "probe" in line:
                    self.probe = line
                elif "behind" in line:
                    self.behind = max(self.behind, line["behind"])
                else:
                    print(f"   trained on {line['trained']:,} samples", flush=True)
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait_for_first(self) -> None:
        """Waits for the first version."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_first or self.ended)
        if not self.has_first:
            raise TierbedError(f"the trainer ended with code {self.process.wait()}")

    def go(self) -> None:
        """Lets it train on what comes."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Lets it publish once more and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(STOP_S)
        self.reader.join()
        if code != 0:
            raise TierbedError(f"the trainer ended with code {code}")


@dataclass
class _Server:
    name: str
    url: str
    asked: Asked = field(default_factory=Asked)


class _Online:
    def __init__(self, options: OnlineOptions, stack: ExitStack) -> None:
        self.options = options
        self.stream = Stream(
            users=options.users,
            items=options.items,
            item_life=options.item_life,
            seed=options.seed,
        )
        for name in ("store", "store.published", "models", *FRESH, STALE):
            shutil.rmtree(options.out / name, ignore_errors=True)
        options.out.mkdir(parents=True, exist_ok=True)
        self.trainer = _Trainer(options, self.stream)
        stack.callback(self.end_trainer)
        self.trainer.wait_for_first()
        self.servers = [self.start(name, stack) for name in (*FRESH, STALE)]

    def end_trainer(self) -> None:
        """Ends the trainer's process, should it still run."""
        if self.trainer.process.poll() is None:
            self.trainer.process.kill()
        self.trainer.process.wait()
        self.trainer.reader.join()
        for pipe in (self.trainer.process.stdin, self.trainer.process.stdout):
            assert pipe is not None
            pipe.close()

    def start(self, name: str, stack: ExitStack) -> _Server:
        """Starts a server in a process of its own."""
        out = self.options.out
        place = f"{out / 'models'}@{FIRST if name == STALE else NEWEST}"
        words = ["serve", place, "--local", str(out / name), "--poll", "200ms"]
        words += ["--sync-bandwidth", "1GiB", "--address", "127.0.0.1:0", "--drain-delay", "0"]
        words += ["--dram-budget", str(self.options.dram_budget_bytes)]
        print("   $ tierbed " + " ".join(words), flush=True)
        log = stack.enter_context((out / f"{name}.log").open("w"))
        command = [sys.executable, "-m", "tierbed.cli", *words]
        pipe = subprocess.PIPE
        process = stack.enter_context(subprocess.Popen(command, stdout=pipe, stderr=log, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http://" not in line:
            raise TierbedError(f"the server did not start; see {out / f'{name}.log'}")
        return _Server(name, line.split()[-1])

    def run(self) -> dict[str, Any]:
        """Asks about the newest samples until the time is over, then compares and reports."""
        options = self.options
        begun_s, begun_at = time.time(), options.first_samples // BLOCK * BLOCK
        self.trainer.go()
        told_s = 0.0
        while (now_s := time.time() - begun_s) < options.seconds:
            # Samples that come now: the trainer sees them later, if at all before its next delta.
            come = begun_at + int(now_s * options.samples_per_s)
            batch = self.stream.batch(come // BLOCK * BLOCK, PROBE)
            body = json.dumps(batch_request(batch)).encode()
            labels = batch.label.tolist()
            for server in self.servers:
                server.asked.add(labels, self.ask(server, body))
            if now_s - told_s >= 10:
                told_s = now_s
                print(f"   {now_s:.0f} s of {options.seconds:.0f}", flush=True)
            time.sleep(0.05)
        self.trainer.stop()
        error = self.compare()
        asked = {server.name: server.asked for server in self.servers}
        published = self.trainer.published
        more = {"logit_error_max": error, "samples_behind_max": self.trainer.behind}
        return report(options.out, asked, published, begun_s, more)

    def ask(self, server: _Server, body: bytes) -> Answer | None:
        """Returns a server's answer, or None where the request failed."""
        url = f"{server.url}/v2/models/tierbed/infer"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
        begun_s = time.time()
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
                answer = json.loads(reply.read())
        except OSError as error:
            print(f"   {server.name}: {error}", flush=True)
            return None
        outputs = {one["name"]: one["data"] for one in answer["outputs"]}
        return Answer(
            at_s=time.time(),
            seconds=time.time() - begun_s,
            identity=answer["parameters"]["generation"],
            logit=outputs["logit"],
        )

    def compare(self) -> float:
        """Compares what both followers answer from the last delta with what its trainer says."""
        probe = self.trainer.probe
        assert probe is not None, "the trainer ends with a probe"
        *_, last = self.trainer.published.values()
        batch = self.stream.batch(int(probe["probe"]), PROBE)
        body = json.dumps(batch_request(batch)).encode()
        error = 0.0
        for server in self.servers[: len(FRESH)]:
            until_s = time.time() + LAST_DELTA_S
            while (answer := self.ask(server, body)) is None or answer.identity != last.identity:
                if time.time() > until_s:
                    raise TierbedError(f"{server.name} does not follow to {last.published}")
                time.sleep(0.2)
            pairs = zip(answer.logit, probe["logit"], strict=True)
            error = max(error, *(abs(found - wanted) for found, wanted in pairs))
        if error > TOLERANCE:
            raise TierbedError(f"the servers answer other numbers than the trainer: {error}")
        return error


def run_online(options: OnlineOptions) -> dict[str, Any]:
    """Runs the loop and returns its facts."""
    with ExitStack() as stack:
        print("1. train, publish a first version, start three servers", flush=True)
        online = _Online(options, stack)
        print("2. train on the stream, publish versions, ask about the newest samples", flush=True)
        return online.run()
