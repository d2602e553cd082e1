"""What does Python add to a lookup of one request, and are its answers those of any other?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tierbed as tb
from tierbed.jagged import single as sparse

FEATURES = [f"f{at}" for at in range(26)]
ROWS, DIM = 50, 8


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.Snapshot]:
    folder: Path = tmp_path_factory.mktemp("small")
    with tb.Store.open(folder / "store", dram_budget="64MiB") as store:
        unpooled(store, FEATURES)
        for at, name in enumerate(FEATURES):
            rows = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
            store.write_rows(name, 0, rows + 1000 * at)
        store.publish(folder / "snapshot")
    with tb.Snapshot.open(folder / "snapshot", dram_budget="64MiB") as opened:
        yield opened


def unpooled(store: Any, names: list[str]) -> tb.EmbeddingCollection:
    tables = [
        tb.EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM) for name in names
    ]
    return tb.EmbeddingCollection(tables, store=store).eval()


def pooled(store: Any, names: list[str]) -> tb.EmbeddingBagCollection:
    tables = [
        tb.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM) for name in names
    ]
    return tb.EmbeddingBagCollection(tables, store=store).eval()


def of_lengths(names: list[str], lengths: list[int], **dtype: torch.dtype) -> tb.KeyedJaggedTensor:
    ids = torch.arange(sum(lengths)) % ROWS
    return tb.KeyedJaggedTensor(names, ids, lengths=torch.tensor(lengths, **dtype))


def of_offsets(names: list[str], lengths: list[int], **dtype: torch.dtype) -> tb.KeyedJaggedTensor:
    given = of_lengths(names, lengths)
    offsets = given.offsets().to(**dtype) if dtype else given.offsets()
    return tb.KeyedJaggedTensor(names, given.values(), offsets=offsets)


@pytest.mark.parametrize("make", [of_lengths, of_offsets])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("lengths", [[26], [0], [1, 2], [1, 0, 2, 3, 0, 0], [0] * 6])
def test_an_answer_taken_apart_late_is_one_taken_apart_at_once(
    snapshot: tb.Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    dtype: torch.dtype,
    lengths: list[int],
) -> None:
    names = FEATURES[: 3 if len(lengths) == 6 else len(lengths)]
    collection = unpooled(snapshot, names)
    late = collection(make(names, lengths, dtype=dtype))
    monkeypatch.setattr(sparse, "_BOUNDS_MAX", 0)
    at_once = collection(make(names, lengths, dtype=dtype))
    assert list(late) == list(at_once) == names
    for name, expected in at_once.items():
        found = late[name]
        assert type(expected) is tb.JaggedTensor
        assert isinstance(found, tb.JaggedTensor)
        assert repr(found) == repr(expected)
        for what in ("values", "lengths", "offsets"):
            left, right = getattr(found, what)(), getattr(expected, what)()
            assert (left.dtype, left.shape) == (right.dtype, right.shape), what
            assert torch.equal(left, right), what
        assert found.weights_or_none() is None
        dense = zip(found.to_dense(), expected.to_dense(), strict=True)
        assert all(torch.equal(left, right) for left, right in dense)


def test_a_caller_may_use_its_tensors_again(snapshot: tb.Snapshot) -> None:
    names = FEATURES[:2]
    bags = of_offsets(names, [1, 2])
    answer = unpooled(snapshot, names)(bags)
    bags.values().zero_()
    bags.offsets().zero_()
    assert [part.lengths().tolist() for part in answer.values()] == [[1], [2]]
    assert [part.offsets().tolist() for part in answer.values()] == [[0, 1], [0, 2]]
    assert answer["f0"].values()[:, 0].tolist() == [0.0]
    assert answer["f1"].values()[:, 0].tolist() == [1000.0 + DIM, 1000.0 + 2 * DIM]


def test_whoever_looks_on_sees_the_same_bits(snapshot: tb.Snapshot) -> None:
    bags = of_lengths(FEATURES, [1] * 26)
    one = pooled(snapshot, FEATURES)
    plain = one(bags).values()
    with FlopCounterMode(display=False):
        assert torch.equal(one(bags).values(), plain)
        assert torch.equal(snapshot.lookup(bags).values(), plain)
    with torch.inference_mode():
        answer = unpooled(snapshot, FEATURES)(bags)
    # Taken apart outside of the mode.
    assert torch.equal(torch.cat([part.values() for part in answer.values()], dim=1), plain)


def test_rows_in_training_are_taken_apart_at_once(open_store: Any) -> None:
    store = open_store()
    collection = unpooled(store, FEATURES[:2]).train()
    with torch.no_grad():
        still = collection(of_lengths(FEATURES[:2], [1, 2]))
    answer = collection(of_lengths(FEATURES[:2], [1, 2]))
    with torch.no_grad():
        assert all(part.values().requires_grad for part in answer.values())
    assert not any(part.values().requires_grad for part in still.values())


def native_call(collection: Any, bags: tb.KeyedJaggedTensor) -> Callable[[], Any]:
    binding = collection._binding
    ids, offsets = bags.values(), bags.offsets()
    rows = bags.stride() if binding.is_pooled else ids.numel()

    def call() -> None:
        out = torch.empty(rows, binding.output_dim)
        binding.native.lookup(binding.plan, ids, offsets, None, out)

    return call


def least_cpu_ns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """CPU time of this thread per call: the least of many rounds in turns, so load is no noise."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(150):
        for name, call in calls.items():
            start = time.thread_time_ns()
            for _ in range(20):
                call()
            least[name] = min(least[name], (time.thread_time_ns() - start) / 20)
    return least


# The most CPU time that a module may add to the call of the engine, in times of what it takes
# to make one tensor for each of the features; about twice what it adds.
MOST_ADDED = {"one bag": 1.0, "pooled": 0.8, "unpooled": 1.6, "snapshot": 0.8}


def test_a_module_adds_little_to_the_call_of_the_engine(snapshot: tb.Snapshot) -> None:
    bag, bags = of_offsets(FEATURES[:1], [26]), of_offsets(FEATURES, [1] * 26)
    one, many, sums = (
        unpooled(snapshot, FEATURES[:1]),
        unpooled(snapshot, FEATURES),
        pooled(snapshot, FEATURES),
    )

    def again(given: tb.KeyedJaggedTensor) -> tb.KeyedJaggedTensor:
        return tb.KeyedJaggedTensor(given.keys(), given.values(), offsets=given.offsets())

    rows = torch.zeros(26, DIM)
    modules: dict[str, Callable[[], Any]] = {
        "one bag": lambda: [part.values() for part in one(again(bag)).values()],
        "pooled": lambda: sums(again(bags)).values(),
        "unpooled": lambda: many(again(bags)),
        "snapshot": lambda: snapshot.lookup(bags).values(),
    }
    natives = {
        "one bag": native_call(one, bag),
        "pooled": native_call(sums, bags),
        "unpooled": native_call(many, bags),
        "snapshot": native_call(sums, bags),
    }
    calls = dict(modules)
    calls |= {f"native {name}": call for name, call in natives.items()}
    calls["tensors"] = lambda: torch.split(rows, [1] * 26)
    with torch.no_grad():
        least = least_cpu_ns(calls)
    added = {name: (least[name] - least[f"native {name}"]) / least["tensors"] for name in modules}
    over = {name: value for name, value in added.items() if value > MOST_ADDED[name]}
    assert not over, f"{over} of {added}, most {MOST_ADDED}; ns: {least}"
