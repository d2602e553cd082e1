"""Signal pads: how far each rank is, one word each.

A word holds an epoch, a number that only grows, so that nothing is ever reset and a late reader
misses nothing. Kernels write and read the words (``tierbed.dist.kernels.signals``); the host looks
at its clock between two looks of a kernel, and names the ranks that did not come.
"""

from __future__ import annotations

import enum
import time

import torch

from tierbed.dist.device.heap import LINE_BYTES, DeviceHeap
from tierbed.dist.kernels.signals import signal_ranks, wait_for_ranks
from tierbed.errors import IoError

__all__ = ["Channel", "SignalPad"]

WORDS = LINE_BYTES // 4
# How long the host sleeps between looks: none at first, then little by little more.
SLEEP_S_MAX = 0.002


class Channel(enum.IntEnum):
    """What a signal says."""

    IDS = 0
    OUTPUTS = 1
    GRADS = 2
    WEIGHT_GRADS = 3


class SignalPad:
    """The signals of all ranks, one line of memory for each channel and sender.

    Args:
        heap: Where they lie; all ranks make their pads together.
        timeout_s: How long another rank may be silent.
    """

    def __init__(self, heap: DeviceHeap, timeout_s: float) -> None:
        self._heap = heap
        self._timeout_s = timeout_s
        count = heap.count
        # Signals have no turns: epochs only grow. The first buffer holds them all.
        self._words = heap.alloc((len(Channel), count, WORDS), torch.int32)
        begins = self._words.peer_ptrs(0)
        lines = [channel * count + heap.rank for channel in Channel]
        self._own = [begins + line * LINE_BYTES for line in lines]

    def signal(self, channel: Channel, epoch: int) -> None:
        """Tells all ranks, after all that this rank launched so far."""
        signal_ranks(self._own[channel], epoch)

    def wait(self, channel: Channel, epoch: int) -> None:
        """Returns when all ranks signalled ``epoch``; what they wrote before may be read then.

        Raises:
            IoError: A rank, named, was silent for too long.
        """
        words = self._words.local(0)[channel]
        end = time.monotonic() + self._timeout_s
        sleep_s = 0.0
        while True:
            late = wait_for_ranks(words, epoch, self._heap.spins, self._heap.device).tolist()
            if not any(late):
                return
            if time.monotonic() > end:
                rank = late.index(1)
                raise IoError(
                    f"rank {rank} did not answer in time ({self._timeout_s:g} s, waiting for "
                    f"{channel.name.lower()} of step {epoch}); start all ranks again",
                    {"rank": str(rank), "step": str(epoch)},
                )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s + 0.00005, SLEEP_S_MAX)
