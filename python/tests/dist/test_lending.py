"""Outputs that are lent: who still has one, and which stream reads it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from test_ranks import draw, small

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist.lending import Lender

CPU = torch.device("cpu")


@dataclass
class Streams:
    """Streams of a GPU, by name, and what they were told."""

    current: str = "lookups"
    told: list[str] = field(default_factory=list)

    def record_event(self) -> str:
        self.told.append(f"{self.current} marked")
        return self.current

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.current} waits for {event}")


def test_a_lookup_waits_for_the_stream_that_read_its_memory_last() -> None:
    streams = Streams()
    memory = (ctypes.c_float * 6)()
    lender = Lender(2, torch.float32, memory, stream=lambda: streams)

    def lend(samples: int) -> torch.Tensor:
        lender.begin()
        (out,) = lender.lend(ctypes.addressof(memory), [(0, samples)], CPU)
        return out

    first = lend(3)
    lend(0)
    assert streams.told == []
    with pytest.raises(tb.InvalidError, match="still in use"):
        lend(3)
    streams.current = "readers"
    del first
    assert streams.told == ["readers marked"]
    streams.current = "lookups"
    second = lend(3)
    assert streams.told == ["readers marked", "lookups waits for readers"]
    # Nobody read the empty one, and nothing is waited for.
    lend(3)
    assert streams.told[2:] == ["lookups marked"]
    with pytest.raises(tb.InvalidError, match="still in use"):
        lend(3)
    # The error does not make the memory free.
    with pytest.raises(tb.InvalidError, match="still in use"):
        lend(3)
    del second


@pytest.mark.parametrize("samples", [3, 0])
def test_an_output_is_kept_whatever_the_one_behind_it_has(samples: int) -> None:
    (rank,) = tbd.local_ranks(1)
    with small(rank) as rows:
        first = rows(draw(1, 3, is_weighted=False)).values()
        rows(draw(2, samples, is_weighted=False))
        with pytest.raises(tb.InvalidError, match="still in use"):
            rows(draw(3, 3, is_weighted=False))
        del first
