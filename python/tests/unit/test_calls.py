"""The order of a store's calls: reserved updates, functions that a call calls, pinned tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.errors import InvalidError

OpenStore = Callable[..., tb.Store]


@pytest.fixture
def store(open_store: OpenStore) -> tb.Store:
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(name="a", num_embeddings=20, embedding_dim=4), tb.SGD())
    store.write_rows("a", 0, torch.zeros(20, 4))
    return store


class Step:
    """A step of row 3 by a gradient of ones."""

    def __init__(self, store: tb.Store) -> None:
        self.native = store.native
        self.plan = store.native.plan([store.table_id("a")], ["sum"])

    def make(self, ticket: int | None = None, tensor: Callable[[Any], Any] = lambda it: it) -> None:
        ids, offsets = torch.tensor([3]), torch.tensor([0, 1])
        grad = torch.ones(1, 4)
        tensors = (tensor(ids), tensor(offsets), None, tensor(grad))
        self.native.update(self.plan, *tensors, None, None, ticket)


def value(store: tb.Store) -> float:
    return float(store.read_rows("a", 3, 1)[0, 0])


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_call_waits_for_the_update_reserved_before_it(store: tb.Store) -> None:
    step = Step(store)
    ticket = store.native.reserve_update()
    reader, found = in_thread(lambda: value(store))
    other, tickets = in_thread(store.native.reserve_update)
    reader.join(0.1)
    other.join(0.1)
    assert not found
    assert not tickets
    step.make(ticket)
    store.native.end_update(ticket)
    other.join(30)
    store.native.end_update(tickets[0])
    reader.join(30)
    assert found == [value(store)]
    assert found[0] < 0


def test_a_failure_is_raised_once_by_the_next_call(store: tb.Store) -> None:
    ticket = store.native.reserve_update()
    store.native.end_update(ticket, ZeroDivisionError("no gradient came"))
    with pytest.raises(ZeroDivisionError, match="no gradient came"):
        value(store)
    assert value(store) == 0.0


@pytest.mark.parametrize("ticket", [1, 7])
def test_a_ticket_of_no_reservation_is_refused(store: tb.Store, ticket: int) -> None:
    reserved = store.native.reserve_update()
    store.native.end_update(reserved)
    with pytest.raises(InvalidError, match="ticket"):
        Step(store).make(ticket)
    with pytest.raises(InvalidError, match="ticket"):
        store.native.end_update(ticket)
    assert value(store) == 0.0


def test_a_function_that_a_scan_calls_may_not_call_the_store(store: tb.Store) -> None:
    def visit(*_: Any) -> None:
        store.read_rows("a", 0, 1)

    thread, found = in_thread(lambda: store.scan(visit))
    thread.join(30)
    assert not thread.is_alive(), "the call waits for itself"
    assert isinstance(found[0], InvalidError)
    assert "after the scan" in str(found[0])
    # The store goes on, and another thread may call it while a scan runs.
    seen: list[float] = []

    def ask(*_: Any) -> None:
        asking, answers = in_thread(lambda: value(store))
        asking.join(0.05)
        seen.append(len(answers))

    store.scan(ask)
    assert seen == [0]
    # What the error says to do: collect, and call the store after the scan.
    collected: list[torch.Tensor] = []
    store.scan(lambda name, rows, *_: collected.append(rows))
    assert len(store.gather_rows("a", torch.cat(collected))) == 20
    assert value(store) == 0.0


class Pinned:
    """A pinned tensor as torch 2.8 exports it: a device of CUDA, a capsule of the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 3, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


def test_pinned_tensors_are_memory_of_the_host(store: tb.Store) -> None:
    step = Step(store)
    step.make(tensor=Pinned)
    assert value(store) < 0.0
    out = torch.zeros(1, 4)
    ids, offsets = torch.tensor([3]), torch.tensor([0, 1])
    store.native.lookup(step.plan, Pinned(ids), Pinned(offsets), None, Pinned(out))
    assert float(out[0, 0]) == value(store)


class OnGpu(Pinned):
    """A tensor in memory of a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_tensors_of_a_gpu_are_refused(store: tb.Store) -> None:
    with pytest.raises(InvalidError, match="tensor"):
        Step(store).make(tensor=OnGpu)
