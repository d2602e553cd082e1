"""What the tests of rows on devices run in processes of their own.

TRITON_INTERPRET=1 python device_cases.py CASE,CASE/CASE cpu
python device_cases.py CASE cuda
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_cases import watched
from heap_kit import StandIn, check_heap, run_device_ranks
from test_ranks import ROWS, SAMPLES, SHARDINGS, STEPS, TABLES, check_rows, draw, join
from torch.nn import functional

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist.device import group_rows, pad
from tierbed.dist.device.host_heap import HostHeap
from tierbed.dist.device.torch_heap import TorchHeap, symmetric_memory
from tierbed.dist.kernels import pool_to_ranks, put_grads, step_rows, weight_grads
from tierbed.dist.lending import Lender

DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
# Optimizers, and on how many ranks.
OPTIMIZERS: dict[str, list[tuple[Any, list[int]]]] = {
    "table-wise": [
        (tb.SGD(lr=0.05, weight_decay=0.1), [1, 2, 4]),
        (tb.RowWiseAdagrad(lr=0.05), [1, 2, 4]),
        (tb.Adagrad(lr=0.05, initial_accumulator_value=0.1), [2]),
    ],
    "column-wise": [(tb.SGD(lr=0.05), [2]), (tb.Adagrad(lr=0.05, weight_decay=0.1), [4])],
    "mirrored": [(tb.SGD(lr=0.05), [1]), (tb.RowWiseAdagrad(lr=0.05, weight_decay=0.1), [2])],
    "row-wise": [(tb.SGD(lr=0.05), [1]), (tb.RowWiseAdagrad(lr=0.05), [2, 4])],
    "uneven rows": [(tb.Adagrad(lr=0.05), [3])],
    "together": [(tb.SGD(lr=0.05), [2, 4])],
}
WAYS = SHARDINGS | {
    "together": lambda ranks: {
        "a": tbd.ColumnWise(),
        "b": tbd.Mirrored(),
        "c": tbd.TableWise(ranks - 1),
    },
    # Of three ranks; some hold nothing of a table.
    "uneven rows": lambda _: {
        "a": tbd.RowWise((0, 0, 60, 60)),
        "b": tbd.RowWise((0, 9, 9, 9)),
        "c": tbd.TableWise(2),
    },
}


class HeldRows:
    """The rows that a rank holds, as `check_rows` reads them: in the place of whole tables."""

    def __init__(self, store: tbd.DeviceStore, plan: tbd.ShardingPlan, rank: int) -> None:
        self.store = store
        ways = {config.name: plan.sharding(config) for config in TABLES}
        by_rows = {name: way["bounds"] for name, way in ways.items() if way["kind"] == "rows"}
        self.held = {name: bounds[rank : rank + 2] for name, bounds in by_rows.items()}

    def read_rows_and_state(self, name: str, first: int, count: int) -> Any:
        begin, end = self.held.get(name, (first, first + count))
        found = self.store.read_rows_and_state(name, begin, end - begin)
        return [functional.pad(part, (0, 0, begin - first, first + count - end)) for part in found]


def check_held(store: tbd.DeviceStore, whole: tb.Store, plan: tbd.ShardingPlan, rank: int) -> None:
    """Compares what ``rank`` holds with the rows of one process."""
    check_rows(HeldRows(store, plan, rank), whole, plan, rank)  # type: ignore[arg-type]


def on_device(rank: Any, plan: tbd.ShardingPlan, **options: Any) -> Any:
    """Makes a rank's collection."""
    how = {"samples_max": 16, "indices_max": 256, "timeout_s": 60.0, **options.pop("how", {})}
    return tbd.ShardedEmbeddingBagCollection(
        options.pop("tables", TABLES),
        store=options.pop("store", None) or tbd.DeviceStore(DEVICE),
        plan=plan,
        ranks=rank,
        exchange=tbd.ExchangeOptions(**how),
        **options,
    )


def train(
    collection: Any, batches: list[tb.KeyedJaggedTensor], grads: list[Any] | None = None
) -> list[torch.Tensor]:
    """Looks up and steps; returns the outputs, and adds the gradients of weights to ``grads``."""
    outputs = []
    for step, batch in enumerate(batches):
        weights = batch.weights_or_none()
        if grads is not None:
            weights.requires_grad_()
        out = collection(batch).values()
        outputs.append(out.detach().cpu().clone())
        # A gradient that depends on the output: any difference spreads.
        (out * (out.detach() * 0.3 + 0.1 * step)).sum().backward()
        if grads is not None:
            counts = batch.lengths().view(len(ROWS), -1).sum(dim=1).tolist()
            grads.append(weights.grad.cpu().split(counts))
    return outputs


def ranks_and_one(
    plan: tbd.ShardingPlan, optimizer: Any, is_weighted: bool, **options: Any
) -> None:
    """Trains ranks on devices and one process on its CPU, and compares every bit."""
    count = plan.rank_count
    travel = options.pop("how", {})
    is_apart = travel.get("kind") == "collective" or options.get("nodes", 1) > 1
    expected_kind = "collective" if is_apart else "one_sided"
    batches = [
        [draw(100 * step + rank, SAMPLES[(rank + step) % 4], is_weighted) for step in range(STEPS)]
        for rank in range(count)
    ]
    joined = [join([own[step] for own in batches]) for step in range(STEPS)]
    with tb.Store.open(backend="memory", dram_budget="16MiB") as whole:
        one = tb.EmbeddingBagCollection(
            TABLES, store=whole, optimizer=optimizer, is_weighted=is_weighted
        )
        has_grads = is_weighted and all(
            not isinstance(way, tbd.ColumnWise) for way in plan.tables.values()
        )
        expected_grads: Any = [] if has_grads else None
        expected = train(one, joined, expected_grads)

        def work(rank: Any) -> Any:
            store = tbd.DeviceStore(DEVICE)
            how = {"store": store, "optimizer": optimizer, "is_weighted": is_weighted}
            with on_device(rank, plan, how=dict(travel), **how) as collection:
                assert collection.exchange == expected_kind or count == 1
                grads: Any = [] if has_grads else None
                return train(collection, batches[rank.rank], grads), store, grads

        found = run_device_ranks(count, work, **options)
        for step in range(STEPS):
            outputs = torch.cat([result[0][step] for result in found])
            assert torch.equal(outputs, expected[step]), (plan, optimizer, step)
            for feature in range(len(ROWS)) if has_grads else []:
                grads = torch.cat([result[2][step][feature] for result in found])
                assert torch.equal(grads, expected_grads[step][feature]), (plan, feature, step)
        for rank in range(count):
            store = found[rank][1]
            check_held(store, whole, plan, rank)
            for config in TABLES:
                way = plan.tables[config.name]
                if isinstance(way, tbd.TableWise) and way.rank == rank:
                    counts = store.use_counts(config.name, 0, config.num_embeddings)
                    every = whole.use_counts(config.name, 0, config.num_embeddings)
                    assert torch.equal(counts, every)


@contextlib.contextmanager
def compiling_before() -> Iterator[None]:
    """Checks that no step launches what was not compiled when its collection was made."""
    watching = watched() if DEVICE.type == "cpu" else contextlib.nullcontext((set(), set()))
    with watching as (compiled, launched):
        yield
    assert not launched - compiled, launched - compiled
    assert bool(launched) == (DEVICE.type == "cpu")


def train_ways(ways: Iterable[str]) -> None:
    """Compares ranks and one process for some ways to divide tables."""
    with compiling_before():
        for name in ways:
            # Rows of small batches have few uses; in one way of these they count as many.
            step_rows.MANY = 8 if name == "together" else 64
            for number, (optimizer, counts) in enumerate(OPTIMIZERS[name]):
                for count in counts:
                    plan = tbd.ShardingPlan(count, WAYS[name](count))
                    ranks_and_one(plan, optimizer, is_weighted=number % 2 == 1)
        plan = tbd.ShardingPlan(2, WAYS["together"](2))
        ranks_and_one(plan, tb.Adagrad(lr=0.05), False, device_heap="pinned")
    # Tiles are measured by a command only.
    assert "tierbed.dist.kernels.tune" not in sys.modules


def training_of_whole_tables() -> None:
    train_ways(["table-wise", "mirrored"])


def training_of_divided_tables() -> None:
    train_ways(sorted(OPTIMIZERS.keys() - {"table-wise", "mirrored"}))


def single_ids() -> None:
    """Bags of one id at most are pooled without a loop; the bits are the same."""
    told: list[bool] = []
    pool = group_rows.pool_to_ranks

    def note(*arguments: Any, **options: Any) -> None:
        told.append(options["is_single"])
        pool(*arguments, **options)

    plan = tbd.ShardingPlan(2, WAYS["together"](2))
    single = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]])
    many = single.clone()
    many[0, 0] = 2
    batches = []
    for lengths in (single, many):
        ids = torch.arange(int(lengths.sum())) % 5
        batches.append(tb.KeyedJaggedTensor(list(ROWS), ids, lengths=lengths.view(-1)))
    with tb.Store.open(backend="memory", dram_budget="16MiB") as whole:
        one = tb.EmbeddingBagCollection(TABLES, store=whole)
        expected = [one(batch).values().detach().clone() for batch in batches]

    def work(rank: Any) -> None:
        with on_device(rank, plan, optimizer=tb.SGD()) as rows:
            for last in (0, 1):
                # One long bag of one rank is enough.
                at = last if rank.rank == 1 else 0
                assert torch.equal(rows(batches[at]).values().cpu(), expected[at])

    group_rows.pool_to_ranks = note
    try:
        run_device_ranks(2, work)
    finally:
        group_rows.pool_to_ranks = pool
    assert told.count(True) > len(told) // 2
    assert told.count(False) >= 1


def training() -> None:
    training_of_whole_tables()
    training_of_divided_tables()


def heaps() -> None:
    for device_heap in ("auto", "pinned"):
        for count in (1, 3):
            run_device_ranks(
                count,
                lambda rank: check_heap(rank.share_device_heap(DEVICE)),
                device_heap=device_heap,
            )


def pinned_gradients() -> None:
    """Gradients in memory of the host come to the device once for a step, not for each use."""
    plan = tbd.ShardingPlan(1, WAYS["table-wise"](1))
    width = sum(config.embedding_dim * len(config.feature_names) for config in TABLES)
    counts = []

    def bring(_: HostHeap, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.to(DEVICE, copy=True)
        if tensor.numel() == 3 * width:
            counts.append(tensor.numel())
            # Whoever reads them over the link again gets these.
            tensor.fill_(float("nan"))
        return copy

    def work(rank: Any) -> None:
        store = tbd.DeviceStore(DEVICE)
        with on_device(rank, plan, store=store) as rows:
            train(rows, [draw(step, 3, is_weighted=False) for step in range(STEPS)])
        assert all(bool(store.read_rows(c.name, 0, 9).isfinite().all()) for c in TABLES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostHeap, "near", bring)
        run_device_ranks(1, work, device_heap="pinned")
    assert counts == [3 * width] * STEPS


def stand_in() -> None:
    """Torch's symmetric memory, as far as a machine without GPUs can tell."""
    made = []

    def work(rank: Any) -> None:
        module = StandIn(rank)
        made.append(module)
        check_heap(TorchHeap(rank, None, DEVICE, module))

    run_device_ranks(3, work)
    assert [module.backend for module in made] == ["CUDA"] * 3
    # Every mapping goes when nothing of it is held any more; what pytest caught is collected.
    gc.collect()
    assert all(module.freed >= 6 for module in made), [module.freed for module in made]
    made.clear()

    def work_with_outputs(rank: Any) -> None:
        module = StandIn(rank)
        heap = TorchHeap(rank, None, DEVICE, module)
        outputs = heap.alloc((4, 2), torch.float32)
        lender = Lender(2, torch.float32, outputs)
        (out,) = lender.lend(outputs.local(0).data_ptr(), [(0, 4)], DEVICE)
        del outputs, lender
        heap.close()
        gc.collect()
        assert module.freed == 0, "memory that an output lies in is unmapped"
        assert bool((out == 0).all())
        del out
        gc.collect()
        assert module.freed == 1

    run_device_ranks(1, work_with_outputs)

    def work_elsewhere(rank: Any) -> None:
        heap = TorchHeap(rank, None, DEVICE, StandIn(rank, shift=1))
        with pytest.raises(tb.UnsupportedError, match=r"otherwise than 2\.11"):
            heap.alloc((3,), torch.float32)

    run_device_ranks(2, work_elsewhere)

    # What the stand-in stands for.
    real = symmetric_memory()
    for name in ("empty", "rendezvous", "get_backend", "set_backend"):
        assert callable(getattr(real, name)), name
    assert list(inspect.signature(real.rendezvous).parameters) == ["tensor", "group"]
    assert "peer" in real._SymmetricMemory.get_remote_tensor.__doc__

    class Runtime:
        """CUDA's runtime that knows what is registered."""

        def __init__(self, status: int) -> None:
            self.status = status
            self.registered: dict[int, int] = {}

        def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
            assert flags == 3
            self.registered[address] = count
            return self.status

        def cudaHostUnregister(self, address: int) -> int:
            del self.registered[address]
            return 0

    def work_registered(rank: Any) -> None:
        runtime = Runtime(0)
        heap = HostHeap(rank, DEVICE, runtime)
        tensor = heap.alloc((1000, 10), torch.float32)
        (address,) = runtime.registered
        begins = tensor.peer_ptrs(0)
        assert address <= int(begins.min())
        assert int(begins.max()) + 2 * 40_000 <= address + runtime.registered[address]
        heap.close()
        assert runtime.registered == {}
        full = HostHeap(rank, DEVICE, Runtime(2))
        with pytest.raises(tb.UnsupportedError, match=r"cannot register .*error 2"):
            full.alloc((1,), torch.float32)

    run_device_ranks(2, work_registered)


def checkpoints() -> None:
    """Saved by two ranks on devices; loaded by one store, and back by four ranks on devices."""
    batches = [draw(step, 6, is_weighted=False) for step in range(4)]
    optimizer = tb.Adagrad(lr=0.05)
    saved_by = tbd.ShardingPlan(2, {"a": tbd.RowWise(), "b": tbd.Mirrored(), "c": tbd.ColumnWise()})
    ways = {"a": tbd.ColumnWise(), "b": tbd.RowWise(), "c": tbd.TableWise(3)}
    plan = tbd.ShardingPlan(4, ways)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"

        def begin(rank: Any) -> Any:
            with on_device(rank, saved_by, optimizer=optimizer) as collection:
                train(collection, [b if rank.rank == 0 else draw(9, 0, False) for b in batches[:2]])
                collection.save(first, extra={"at": 2})

        run_device_ranks(2, begin)

        def in_one_store(rank: Any) -> Any:
            store = tb.Store.open(backend="memory", dram_budget="16MiB")
            plan = tbd.ShardingPlan(1, {name: tbd.TableWise(0) for name in "abc"})
            with on_device(rank, plan, optimizer=optimizer, store=store) as collection:
                assert collection.load(first) == {"at": 2}
                collection.save(second)
                train(collection, batches[2:])
            return store

        (expected,) = run_device_ranks(1, in_one_store)
        whole = tb.Store.open(backend="memory", dram_budget="16MiB")
        one = tb.EmbeddingBagCollection(TABLES, store=whole, optimizer=optimizer)
        for part in (batches[:2], batches[2:]):
            train(one, part)
        check_rows(expected, whole, tbd.ShardingPlan(1, WAYS["table-wise"](1)), 0)

        def go_on(rank: Any) -> Any:
            store = tbd.DeviceStore(DEVICE)
            with on_device(rank, plan, optimizer=optimizer, store=store) as collection:
                collection.load(second)
                train(collection, [b if rank.rank == 0 else draw(9, 0, False) for b in batches[2:]])
            return store

        for rank, store in enumerate(run_device_ranks(4, go_on)):
            check_held(store, expected, plan, rank)
            if rank == 3:
                assert store.steps_done("c") == 4


def default_plan() -> None:
    """A table of nearly all bytes is divided by rows, as without devices."""
    large = [tb.EmbeddingBagConfig(4096, 8, "large"), tb.EmbeddingBagConfig(9, 8, "small")]

    def work(rank: Any) -> None:
        with tbd.ShardedEmbeddingBagCollection(
            large,
            store=tbd.DeviceStore(DEVICE),
            ranks=rank,
            exchange=tbd.ExchangeOptions(samples_max=16, indices_max=64),
        ) as rows:
            assert rows.plan.tables["large"] == tbd.RowWise()
            first = 2048 * rank.rank
            ids = torch.tensor([2048 - rank.rank, 7])
            batch = tb.KeyedJaggedTensor(["large", "small"], ids, lengths=torch.ones(2).long())
            rows(batch).values().sum().backward()
            assert rows.store.use_counts("large", first, 2048).sum() == 1
            with pytest.raises(tb.InvalidError, match=rf"rows {first}\.\.{first + 2048} are here"):
                rows.store.read_rows("large", 2047, 2)

    run_device_ranks(2, work)


def refusals() -> None:
    one = tbd.ShardingPlan(1, WAYS["table-wise"](1))

    def work(rank: Any) -> None:
        with pytest.raises(tb.UnsupportedError, match="not adam"):
            on_device(rank, one, optimizer=tb.Adam())
        with pytest.raises(tb.UnsupportedError, match="state of whole rows"):
            on_device(rank, tbd.ShardingPlan(1, WAYS["column-wise"](1)))
        with pytest.raises(tb.UnsupportedError, match="travel as float32"):
            on_device(rank, one, how={"output_dtype": torch.bfloat16})
        with on_device(rank, one, is_weighted=True) as rows:
            with pytest.raises(tb.InvalidError, match="samples_max=16"):
                rows(draw(1, 17, is_weighted=True))
            bad = draw(1, 3, is_weighted=True)
            bad.values()[-1] = 200
            with pytest.raises(tb.InvalidError, match="id 200 of feature 'w'"):
                rows(bad)
            with pytest.raises(tb.UnsupportedError, match="arrive together"):
                rows.forward_parts(draw(1, 3, is_weighted=True), 2)
            # Nothing was sent: the next batch is looked up.
            out = rows(draw(1, 3, is_weighted=True)).values()
            kept = out.detach().clone()
            rows(draw(2, 3, is_weighted=True))
            # An output stays while the next one is written.
            assert torch.equal(out, kept)
            with pytest.raises(tb.InvalidError, match="still in use"):
                rows(draw(3, 3, is_weighted=True))
        with pytest.raises(tb.InvalidError, match="already"):
            on_device(rank, one, store=rows.store)
        with on_device(rank, one, how={"copies_outputs": True}) as copying:
            outputs = [copying(draw(1, 3, is_weighted=False)).values() for _ in range(4)]
            assert all(torch.equal(outputs[0], output) for output in outputs)

        columns = tbd.ShardingPlan(1, WAYS["column-wise"](1))
        with on_device(rank, columns, is_weighted=True, optimizer=tb.SGD()) as rows:
            weighted = draw(1, 3, is_weighted=True)
            weighted.weights_or_none().requires_grad_()
            with pytest.raises(tb.UnsupportedError, match="no gradients of weights"):
                rows(weighted)

    run_device_ranks(1, work)
    with pytest.raises(tb.InvalidError, match="device_heap must be one of"):
        tbd.local_ranks(1, device_heap="nvshmem")

    def stay_away(rank: Any) -> str:
        plan = tbd.ShardingPlan(2, WAYS["table-wise"](2))
        collection = on_device(rank, plan, how={"timeout_s": 0.2})
        if rank.rank == 1:
            return ""
        with pytest.raises(tb.IoError, match="rank 1 did not answer in time"):
            collection(draw(1, 3, is_weighted=False))
        with pytest.raises(tb.ClosedError, match="start all ranks again"):
            collection(draw(1, 3, is_weighted=False))
        return "named"

    assert run_device_ranks(2, stay_away)[0] == "named"


def without_gpu() -> None:
    """What a machine without GPUs says, in a process where kernels are compiled."""
    assert not torch.cuda.is_available()
    with pytest.raises(tb.InvalidError, match="no CUDA device"):
        tbd.DeviceStore()
    with pytest.raises(tb.InvalidError, match="TRITON_INTERPRET=1"):
        tbd.DeviceStore("cpu")
    (rank,) = tbd.local_ranks(1)
    with pytest.raises(tb.InvalidError, match="no CUDA device"):
        HostHeap(rank, torch.device("cuda"))
    with pytest.raises(tb.InvalidError, match="lies on CUDA devices"):
        TorchHeap(rank, None, torch.device("cpu"))


def processes() -> None:
    """One of two processes: the bits of one, over the heap that processes share."""
    import torch.distributed as dist

    rank, folder, device_heap = int(sys.argv[3]), sys.argv[4], sys.argv[5]
    file = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    train_over_heap(tbd.ProcessRank(device_heap=device_heap))
    dist.barrier()
    dist.destroy_process_group()


def train_over_heap(ranks: tbd.ProcessRank) -> None:
    """Trains as one of two ranks, and compares every bit with one process."""
    check_heap(ranks.share_device_heap(DEVICE))
    rank = ranks.rank
    plan = tbd.ShardingPlan(2, WAYS["together"](2))
    batches = [[draw(10 * step + at, 5 - at, False) for step in range(STEPS)] for at in range(2)]
    with tb.Store.open(backend="memory", dram_budget="16MiB") as whole:
        one = tb.EmbeddingBagCollection(TABLES, store=whole, optimizer=tb.SGD(lr=0.05))
        expected = train(one, [join([own[step] for own in batches]) for step in range(STEPS)])
        store = tbd.DeviceStore(DEVICE)
        how = {"store": store, "optimizer": tb.SGD(lr=0.05)}
        with on_device(ranks, plan, **how) as collection:
            assert collection.exchange == "one_sided"
            found = train(collection, batches[rank])
        for out, of_all in zip(found, expected, strict=True):
            own = slice(0, 5) if rank == 0 else slice(5, 9)
            assert torch.equal(out, of_all[own])
        check_held(store, whole, plan, rank)


def run_cases(names: str, cases: dict[str, Any]) -> None:
    """Runs the cases of a file, as its command line has them."""
    torch.set_num_threads(1)
    if DEVICE.type == "cpu":
        # A program is what takes the interpreter's time.
        pool_to_ranks.BAGS_MAX = 32
        pool_to_ranks.LOAD_BYTES = 128
        put_grads.SAMPLES_MAX = 32
        step_rows.ROWS_MAX = 32
        weight_grads.USES_MAX = 32
        # So does a look at signals, which keeps others from their kernels.
        pad.SLEEP_S_MAX = 0.02
    together = names.split("/")
    if len(together) == 1:
        for case in names.split(","):
            cases[case]()
        return
    # Imports take longer than most cases: forks have made them.
    forks = {fork(lambda group=group: run_cases(group, cases)): group for group in together}
    failed = [group for child, group in forks.items() if os.waitpid(child, 0)[1] != 0]
    assert not failed, failed


def fork(work: Callable[[], None]) -> int:
    """Runs ``work`` in a process of its own; returns its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return child


if __name__ == "__main__":
    run_cases(sys.argv[1], globals())
