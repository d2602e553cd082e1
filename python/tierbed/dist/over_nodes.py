"""The exchange of several nodes.

Within a node vectors go straight to where they are needed. Between nodes each rank sends messages
along its rail: to the ranks with its number on the other nodes. Each message carries what all ranks
of a node want of a holder, so that a row crosses the network once for a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tierbed._native import (
    FeaturePlan,
    NativeArrivals,
    NativeCodedTables,
    NativeExchangePlan,
    NativeHeap,
    NativeStore,
)
from tierbed.dist.exchange import ExchangeOptions, OneSided, RankBatch
from tierbed.dist.nodes import Nodes
from tierbed.dist.wire import LostRankError, Wire, swap_numbers
from tierbed.errors import TierbedError

__all__ = ["OverNodes"]


class OverNodes(OneSided):
    """Over shared memory within nodes, and messages between them.

    Args:
        native: This rank's store, or its tables of codes.
        plan: Who holds what.
        heap: The shared memory of this node.
        nodes: Which ranks share memory.
        wire: To the other nodes.
        groups: What this rank looks up together.
        options: What outputs are, and how long another rank may be silent.
    """

    #: One of them may wait for another node, which it gives up first and names.
    _patience_ms = 1000

    def __init__(
        self,
        native: NativeStore | NativeCodedTables,
        plan: NativeExchangePlan,
        heap: NativeHeap,
        nodes: Nodes,
        wire: Wire,
        groups: list[FeaturePlan],
        options: ExchangeOptions,
    ) -> None:
        super().__init__(native, plan, heap, nodes.rank, groups, options)
        self._nodes = nodes
        self._wire = wire
        self._rail = self._exchange.rail()
        self._sent = dict.fromkeys(("ids", "vectors", "gradients", "weights", "numbers"), 0)

    def sent_bytes(self) -> dict[str, int]:
        """As :meth:`Exchange.sent_bytes`."""
        return {**self._sent, **super().sent_bytes()}

    def close(self) -> None:
        """As :meth:`Exchange.close`."""
        try:
            super().close()
            if not self._rail.is_broken():
                # Nobody leaves while a message to another node is under way.
                self._agree_between(0, 0)
        finally:
            self._wire.close()

    def _look_up(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, int, int]:
        arrivals, serve = self._begin_parts(indices, offsets, weights, wants, 1)
        serve()
        arrivals.wait(0)
        return arrivals.step, arrivals.address, arrivals.samples(0)[1]

    def _begin_parts(
        self,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        wants: tuple[bool, bool],
        parts: int,
    ) -> tuple[NativeArrivals, Callable[[], None]]:
        batch = (indices, offsets, weights)
        with self._telling():
            found = self._rail.find_announced(*batch, *wants, parts)
        number = 0
        if found is not None:
            least, most = self._agree_between(*found)
            number = least if least == most else 0
        if number > 0:
            arrivals = self._rail.look_up_announced(number, *wants)
        else:
            with self._telling():
                lengths = self._rail.ask(*batch, *wants, parts)
            with self._breaking():
                arrivals = self._rail.hear(*self._swap_questions(lengths))
        return arrivals, lambda: self._serve(parts, wants[0])

    def _serve(self, parts: int, is_training: bool) -> None:
        with self._breaking():
            for part in range(parts):
                sent_bytes, come_bytes = self._rail.answer_bytes(part)
                sent = _buffer(sent_bytes)
                self._rail.answer(self._native, part, sent, is_training)
                self._rail.deliver(part, self._swap("vectors", sent, sent_bytes, come_bytes))
            self._rail.finish_lookup()

    def _step(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        with self._telling():
            sent_bytes, come_bytes = self._rail.put_grads(step, grad)
        with self._breaking():
            sent = _buffer(sent_bytes)
            self._rail.write_grads(sent)
            came = self._swap("gradients", sent, sent_bytes, come_bytes)
            sent_bytes, come_bytes = self._rail.update(self._native, came)
            sent = _buffer(sent_bytes)
            self._rail.write_weight_grads(sent)
            came = self._swap("weights", sent, sent_bytes, come_bytes)
            self._rail.finish_backward(came, grad, weights_grad)

    def _announce(self, batch: RankBatch) -> None:
        with self._telling():
            lengths = self._rail.ask_ahead(*batch)
        with self._breaking():
            self._rail.hear_ahead(*self._swap_questions(lengths))

    def _agree(self, number: int) -> tuple[int, int]:
        with self._telling():
            least, most = super()._agree(number)
        return self._agree_between(least, most)

    def _agree_between(self, least: int, most: int) -> tuple[int, int]:
        """Returns the smallest and the largest of what the nodes agreed upon."""
        own = torch.tensor([least, most])
        with self._breaking():
            told = self._swap_numbers(own.expand(self._nodes.count, 2))
        return int(told[:, 0].min()), int(told[:, 1].max())

    def _swap_questions(self, sent_bytes: list[int]) -> tuple[Tensor, list[int]]:
        """Returns the questions that came, and their lengths by node."""
        sent = _buffer(sent_bytes)
        self._rail.write_questions(sent)
        lengths = torch.tensor(sent_bytes).view(-1, 1)
        come_bytes = self._swap_numbers(lengths).view(-1).tolist()
        come_bytes[self._nodes.own] = 0
        return self._swap("ids", sent, sent_bytes, come_bytes), come_bytes

    def _swap(
        self, kind: str, sent: Tensor, sent_bytes: list[int], come_bytes: list[int]
    ) -> Tensor:
        self._sent[kind] += sent.numel()
        return self._wire.swap(sent, sent_bytes, come_bytes)

    def _swap_numbers(self, numbers: Tensor) -> Tensor:
        self._sent["numbers"] += 8 * numbers.shape[1] * (self._nodes.count - 1)
        return swap_numbers(self._wire, self._nodes, numbers)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Lets the ranks of other nodes know when the exchange broke.

        An error before anything was sent, as of a bad batch, breaks nothing: it may be mended.
        """
        try:
            yield
        except TierbedError:
            if self._rail.is_broken():
                self._wire.abort()
            raise

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Lets all other ranks know at once when this one cannot go on."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, LostRankError):
                self._rail.lose(error.rank, str(error))
            else:
                self._rail.fail(str(error))
            self._wire.abort()
            raise


def _buffer(bytes_by_node: list[int]) -> Tensor:
    return torch.empty(sum(bytes_by_node), dtype=torch.uint8)
