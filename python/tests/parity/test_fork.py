"""What a forked child may do with what its parent has open, and that the parent loses nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.processes import call

import tierbed as tb

ROWS, DIM, STEPS = 6000, 16, 6
CHILD_S = 60
BACKENDS = ["file", "cold", "lsm", "lsm_plain", "memory", "hashdb", "mmap", "rocksdb"]


def in_child(work: Callable[[], Any]) -> Any:
    """Forks and returns what ``work`` gives or raises there; a signal or a hang fails."""
    ended = call(work)
    assert not ended.came, ended
    return f"{ended.kind}: {ended.error}" if ended.kind else ended.value


def open_store(path: Path, backend: str | None, **options: Any) -> tb.Store:
    try:
        return tb.Store.open(path, backend=backend, dram_budget="24MiB", **options)
    except tb.UnsupportedError as error:
        pytest.skip(f"{backend} is not here: {error}")


def bags_of(store: Any, name: str = "t") -> tb.EmbeddingBagCollection:
    table = tb.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM)
    return tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))


def batch(seed: int) -> tb.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (400,), generator=generator)
    return tb.KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.full((100,), 4))


def step(emb: tb.EmbeddingBagCollection, seed: int) -> None:
    emb(batch(seed)).values().square().sum().backward()


def ways_to_touch(store: tb.Store, emb: tb.EmbeddingBagCollection) -> dict[str, Callable[[], Any]]:
    new = tb.EmbeddingBagConfig(name="new", num_embeddings=3, embedding_dim=2)
    return {
        "read": lambda: store.read_rows("t", 0, ROWS),
        "gather": lambda: store.gather_rows("t", torch.tensor([1, 2])),
        "lookup": lambda: emb(batch(90)),
        "step": lambda: step(emb, 91),
        "prefetch": lambda: emb._step_session().prefetch([batch(92)]),
        "look ahead": lambda: next(tb.lookahead([batch(93)], emb, key=lambda bags: bags)),
        "write": lambda: store.write_rows("t", 0, torch.zeros(1, DIM)),
        "checkpoint": lambda: store.checkpoint("child"),
        "add a table": lambda: store.add_table(new, tb.SGD()),
        "learning rate": lambda: store.set_learning_rate(0.5),
        "scan": lambda: store.scan(lambda *_: None),
        "publish": lambda: store.publish("child-publishes"),
        "verify": store.verify,
        "stats": store.stats,
        "order": store.order,
        "last checkpoint": store.last_checkpoint,
        "extra": store.load_extra,
        "tables": store.tables,
    }


def answers_in_child(store: tb.Store, emb: tb.EmbeddingBagCollection) -> dict[str, str]:
    found = {}
    for name, touch in ways_to_touch(store, emb).items():
        try:
            touch()
            found[name] = "went through"
        except tb.ClosedError as error:
            found[name] = error.context.get("owner_pid", "no owner")
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    # Closing is what a `with` does at its end: nothing is open here, so there is nothing to do.
    store.close()
    return found


def state_of(store: tb.Store) -> list[torch.Tensor]:
    return [*store.read_rows_and_state("t", 0, ROWS), store.use_counts("t", 0, ROWS)]


def run(path: Path, backend: str | None, work: Callable[..., None] | None, **options: Any) -> Any:
    """Trains, with ``work`` on store and collection in a child half-way; returns the end."""
    store = open_store(path, backend, **options)
    emb = bags_of(store)
    for at in range(STEPS):
        step(emb, at)
    store.checkpoint("before")
    step(emb, STEPS)
    if work is not None:
        work(store, emb)
    for at in range(STEPS + 1, 2 * STEPS):
        step(emb, at)
    store.checkpoint("after")
    alive = state_of(store)
    store.close()
    again = open_store(path, backend, **options)
    bags_of(again)
    again.verify()
    assert again.last_checkpoint() == (2, "after")
    found = [alive, state_of(again)]
    again.close()
    return found


@pytest.mark.parametrize("io_engine", ["auto", "pread"])
@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_a_child_is_refused_and_its_parent_loses_nothing(
    tmp_path: Path, backend: str | None, io_engine: str
) -> None:
    def child(store: tb.Store, emb: tb.EmbeddingBagCollection) -> None:
        found = in_child(lambda: answers_in_child(store, emb))
        assert found == dict.fromkeys(found, str(os.getpid()))

    wanted = run(tmp_path / "alone", backend, None, io=tb.IoOptions(engine=io_engine))
    found = run(tmp_path / "forked", backend, child, io=tb.IoOptions(engine=io_engine))
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


LEFT = """
import os, sys
import torch
import tierbed as tb

store = tb.Store.open({path!r}, dram_budget="8MiB", backend={backend!r})
table = tb.EmbeddingBagConfig(name="t", num_embeddings=500, embedding_dim=8)
emb = tb.EmbeddingBagCollection([table], store=store)
bags = tb.KeyedJaggedTensor(keys=["t"], values=torch.arange(40), lengths=torch.full((10,), 4))
emb(bags).values().sum().backward()
store.checkpoint("mine")
emb(bags).values().sum().backward()
pid = os.fork()
if pid == 0:
    {how}
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
emb(bags).values().sum().backward()
store.checkpoint("mine too")
"""


@pytest.mark.parametrize("how", ["sys.exit(3)", "del store, emb, bags; sys.exit(3)", "os._exit(3)"])
@pytest.mark.parametrize("backend", ["file", "lsm", "mmap", "hashdb"])
def test_however_a_child_ends_it_ends(tmp_path: Path, backend: str, how: str) -> None:
    code = LEFT.format(path=str(tmp_path), backend=backend, how=how)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=CHILD_S, check=True
    )
    assert done.stdout.split() == ["3"], done.stderr
    store = tb.Store.open(tmp_path, dram_budget="8MiB")
    assert store.last_checkpoint() == (2, "mine too")
    assert store.verify() > 0
    store.close()


def test_a_child_in_the_middle_of_the_parents_threads(tmp_path: Path) -> None:
    """Mutexes that other threads hold at the fork are never waited for in the child."""
    store = open_store(tmp_path / "store", "file", io=tb.IoOptions(engine="pread"))
    emb = bags_of(store).eval()
    coded = tb.CodedStore()
    coded.add_table(tb.EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
    stop = threading.Event()

    def ask() -> None:
        with torch.no_grad():
            while not stop.is_set():
                emb(batch(1))
                coded.read_rows("t", 0, ROWS)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()

    def child() -> str:
        for touch in (store.stats, lambda: coded.read_rows("t", 0, 1)):
            try:
                touch()
            except tb.ClosedError:
                continue
        return "told"

    try:
        for _ in range(20):
            assert in_child(child) == "told"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    store.close()


# ---------------------------------------------------------------- the lock


def test_a_folder_is_free_while_a_child_lives(tmp_path: Path) -> None:
    """Closing and opening again, and choosing the engine, with children of before and after."""
    waits, ends = os.pipe()
    store = tb.Store.open(tmp_path / "store", dram_budget="8MiB")
    children = []

    def start() -> None:
        pid = os.fork()
        if pid == 0:
            os.close(ends)
            os.read(waits, 1)
            os._exit(0)
        children.append(pid)

    start()
    step(bags_of(store), 1)
    start()
    store.checkpoint("one")
    store.close()
    again = tb.Store.open(tmp_path / "store", dram_budget="8MiB")
    assert again.last_checkpoint() == (1, "one")
    with pytest.raises(tb.ClosedError, match="in this process already"):
        tb.Store.open(tmp_path / "store", dram_budget="8MiB")
    assert in_child(lambda: _refusal(tmp_path / "store")) == str(os.getpid())
    again.close()
    for pid in children:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the child was to live"
    os.close(ends)
    for pid in children:
        os.waitpid(pid, 0)
    os.close(waits)


def _refusal(path: Path) -> str:
    try:
        tb.Store.open(path, dram_budget="8MiB")
    except tb.ClosedError as error:
        return str(error.context["holder_pid"])
    return "opened"


TRAINER = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import tierbed as tb

class Samples(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, at):
        if at == 640:
            print("worker", os.getpid(), flush=True)
            time.sleep(1000)
        return at % 500

store = tb.Store.open({path!r}, dram_budget="8MiB", backend={backend!r})
table = tb.EmbeddingBagConfig(name="t", num_embeddings=500, embedding_dim=8)
emb = tb.EmbeddingBagCollection([table], store=store)
emb.eval()
for at, ids in enumerate(DataLoader(Samples(), batch_size=64, num_workers=2)):
    bags = tb.KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.ones_like(ids))
    emb.train()
    emb(bags).values().sum().backward()
    if at == 3:
        store.checkpoint("saved")
        print("saved", flush=True)
"""


@pytest.mark.parametrize("backend", [None, "cold"])
def test_a_killed_trainer_with_workers_is_reopened_at_once(
    tmp_path: Path, backend: str | None
) -> None:
    code = TRAINER.format(path=str(tmp_path / "store"), backend=backend)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        assert trainer.stdout is not None
        told = [trainer.stdout.readline().split() for _ in range(2)]
        worker = next(int(words[1]) for words in told if words[0] == "worker")
        trainer.send_signal(signal.SIGKILL)
        assert trainer.wait() == -signal.SIGKILL
        os.kill(worker, 0)  # it lives, and holds nothing
        store = tb.Store.open(tmp_path / "store", dram_budget="8MiB")
        assert store.last_checkpoint() == (1, "saved")
        store.close()
        os.kill(worker, signal.SIGKILL)


# ---------------------------------------------------------------- snapshots


@pytest.fixture
def published(tmp_path: Path) -> Path:
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        emb = bags_of(store)
        for at in range(4):
            step(emb, at)
        store.publish(tmp_path / "snapshot")
    return tmp_path / "snapshot"


def looked_up(snapshot: tb.Snapshot, seed: int) -> list[float]:
    found: list[float] = snapshot.lookup(batch(seed)).values().flatten().tolist()
    return found


@pytest.mark.parametrize("io_engine", ["auto", "pread"])
@pytest.mark.parametrize("backend", ["direct", "mmap", "memory"])
def test_a_child_reads_the_snapshot_of_its_parent(
    published: Path, backend: str, io_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published.parent)
    snapshot = tb.Snapshot.open(published.name, backend=backend, io=tb.IoOptions(engine=io_engine))
    emb = bags_of(snapshot).eval()
    wanted = {seed: looked_up(snapshot, seed) for seed in range(5)}
    monkeypatch.chdir("/")

    def child() -> Any:
        same = [looked_up(snapshot, seed) == wanted[seed] for seed in wanted]
        same.append(emb(batch(0)).values().flatten().tolist() == wanted[0])
        # The grandchild, too.
        same.append(in_child(lambda: looked_up(snapshot, 1) == wanted[1]))
        counted = snapshot.stats()["snapshot"]["lookup_count"]
        assert snapshot.verify() > 0
        snapshot.close()
        try:
            looked_up(snapshot, 0)
        except tb.ClosedError as error:
            return [all(same), counted, "snapshot is closed" in str(error)]
        return "it was not closed"

    # Counters, tiers and memory begin anew: six lookups were the child's own.
    assert in_child(child) == [True, 6, True]
    assert {seed: looked_up(snapshot, seed) for seed in wanted} == wanted
    snapshot.close()
    assert "snapshot is closed" in in_child(lambda: looked_up(snapshot, 0))


def test_a_child_reads_while_threads_of_the_parent_look_up(published: Path) -> None:
    snapshot = tb.Snapshot.open(published, io=tb.IoOptions(engine="pread"))
    wanted = looked_up(snapshot, 3)
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            looked_up(snapshot, 2)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_child(lambda: looked_up(snapshot, 3) == wanted)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    snapshot.close()


def test_a_child_never_reads_another_snapshot_for_its_parents(
    published: Path, tmp_path: Path
) -> None:
    snapshot = tb.Snapshot.open(published)
    wanted = looked_up(snapshot, 1)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        step(bags_of(store), 50)
        store.publish(tmp_path / "newer")
    published.rename(tmp_path / "older")
    (tmp_path / "newer").rename(published)
    told = in_child(lambda: looked_up(snapshot, 1))
    assert told.startswith("ClosedError: folder holds another snapshot")
    assert looked_up(snapshot, 1) == wanted, "the parent's files are open"
    snapshot.close()


def test_a_shared_budget_is_each_processs_own(published: Path) -> None:
    budget = tb.TierBudget("4MiB")
    snapshot = tb.Snapshot.open(published, cache=tb.CacheOptions(budget=budget))
    wanted = looked_up(snapshot, 1)
    used = budget.stats().used_bytes
    assert used > 0

    def child() -> Any:
        before = budget.stats().used_bytes
        same = looked_up(snapshot, 1) == wanted
        return [before, same, budget.stats().used_bytes == used, budget.stats().limit_bytes]

    assert in_child(child) == [0, True, True, 4 << 20]
    snapshot.close()


def looked_up_elsewhere(snapshot: tb.Snapshot, seed: int) -> list[float]:
    with snapshot:
        return looked_up(snapshot, seed)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_snapshot_is_sent_to_other_processes(published: Path, method: str) -> None:
    snapshot = tb.Snapshot.open(published, dram_budget="8MiB", cache="s3_fifo")
    wanted = [looked_up(snapshot, seed) for seed in range(2)]
    with get_context(method).Pool(2) as pool:
        asked = [(snapshot, seed) for seed in range(2)]
        assert pool.starmap(looked_up_elsewhere, asked) == wanted
    snapshot.close()


# ---------------------------------------------------------------- others


def test_a_coded_store_is_copied_into_a_child() -> None:
    coded = tb.CodedStore()
    coded.add_table(tb.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=2))
    coded.write_rows("t", 0, torch.ones(9, 2))

    def child() -> Any:
        coded.write_rows("t", 0, torch.full((1, 2), 5.0))
        return coded.read_rows("t", 0, 2).tolist()

    assert in_child(child) == [[5.0, 5.0], [1.0, 1.0]]
    assert coded.read_rows("t", 0, 1).tolist() == [[1.0, 1.0]]


def test_a_reader_that_is_open_is_not_shared(tmp_path: Path) -> None:
    """Two processes would take lines from one place of one open file."""
    from tierbed import _native

    log = tmp_path / "log.tsv"
    line = "\t".join(["1", *["3"] * 13, *["ab"] * 26])
    log.write_text(f"{line}\n" * 50)
    options = {"format": "criteo", "bad_lines": "fail"}
    reader = _native.CriteoReader([str(log)], options)
    assert reader.skip(10) == 10
    told = in_child(lambda: reader.skip(10))
    assert told.startswith("ClosedError: the reader of a log belongs to the process")
    assert reader.skip(100) == 40


def test_a_child_that_ends_is_no_rank_that_failed(tmp_path: Path) -> None:
    from tierbed import dist as tbd

    store = tb.Store.open(backend="memory", dram_budget="16MiB")
    table = tb.EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM)
    plan = tbd.ShardingPlan(1, {"t": tbd.TableWise(0)})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    how = tbd.ExchangeOptions(timeout_s=5.0)
    held: list[Any] = [
        tbd.ShardedEmbeddingBagCollection([table], store=store, plan=plan, exchange=how)
    ]
    held[0](batch(1)).values().sum().backward()

    def child() -> str:
        try:
            held[0](batch(2))
            told = "looked up"
        except tb.ClosedError as error:
            told = str(error)
        held.clear()
        gc.collect()
        return told

    assert "belongs to the process this one was forked from" in in_child(child)
    held[0](batch(3)).values().sum().backward()
    store.close()
    torch.distributed.destroy_process_group()
