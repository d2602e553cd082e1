"""Copies between host and device: right in every order that streams may run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from streams_kit import Broken, SimulatedStreams, any_of

from tierbed.ops.links import Link, as_device, link_of


def round_trip(seed: int, broken: Broken = None) -> bool:
    """Whether a vector goes up, is computed with, and its result comes down whole."""
    streams = SimulatedStreams(seed, broken=broken)
    link = Link(streams)
    host = link.host_floats(2, 3)
    host.copy_(torch.arange(6.0).view(2, 3))
    up = link.to_device(host)
    result = torch.full_like(up, torch.nan)
    given = up.clone()
    streams.compute(lambda: result.copy_(given * 2))
    arriving = link.to_host(result)
    return torch.equal(arriving.wait(), torch.arange(6.0).view(2, 3) * 2)


def test_tensors_arrive_whole_in_any_order_of_streams() -> None:
    assert not any_of(lambda seed: not round_trip(seed), seeds=200)


@pytest.mark.parametrize("broken", ["wait", "finish"])
def test_without_an_order_of_streams_they_do_not(broken: Broken) -> None:
    assert any_of(lambda seed: not round_trip(seed, broken))


def given_up(seed: int, broken: Broken = None) -> bool:
    """Whether memory that the program gives up is copied before it is used anew."""
    link = Link(SimulatedStreams(seed, broken=broken))
    gradient = torch.ones(4)
    arriving = link.to_host(gradient)
    del gradient
    return torch.equal(arriving.wait(), torch.ones(4))


def test_memory_is_kept_until_it_is_copied() -> None:
    assert not any_of(lambda seed: not given_up(seed))
    assert any_of(lambda seed: not given_up(seed, "keep"))


class Places:
    """The order of a store's calls, as it is told."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, BaseException | None]] = []
        self._tickets: Iterator[int] = iter(range(1, 10))

    def reserve_update(self) -> int:
        return next(self._tickets)

    def end_update(self, ticket: int, failure: BaseException | None = None) -> None:
        self.ended.append((ticket, failure))


def test_every_update_ends_whatever_it_raises() -> None:
    link = Link(SimulatedStreams())
    places = Places()
    failure = KeyboardInterrupt()

    def fail(_: int) -> None:
        raise failure

    made: list[int] = []
    link.update_later(places, made.append).result()
    link.update_later(places, fail).result()
    link.update_later(places, made.append).result()
    assert made == [1, 3]
    assert places.ended == [(1, None), (2, failure), (3, None)]


def test_a_cpu_needs_no_link() -> None:
    assert link_of(torch.device("cpu")) is None


def test_a_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    # To torch, "cuda" and "cuda:0" are two devices.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert as_device("cuda") == torch.device("cuda:2")
    assert as_device("cuda:1") == torch.device("cuda:1")
    assert as_device("cpu") == torch.device("cpu")


def test_a_worker_that_cannot_begin_leaves_no_call_waiting() -> None:
    link = Link(SimulatedStreams())
    places = Places()
    link._worker.shutdown()
    with pytest.raises(RuntimeError, match="shutdown") as raised:
        link.update_later(places, lambda _: None)
    assert places.ended == [(1, raised.value)]
