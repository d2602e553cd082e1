"""Exchange of vectors and gradients between ranks.

Straight to where they are needed, in memory that the ranks of a node share; between nodes by
messages (``over_nodes.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tierbed._native import (
    FeaturePlan,
    NativeArrivals,
    NativeCodedTables,
    NativeExchange,
    NativeExchangePlan,
    NativeHeap,
    NativeStore,
)
from tierbed.config.words import ExchangeKind, check_word
from tierbed.dist.lending import Lender
from tierbed.dist.open_tables import OpenTables
from tierbed.errors import InvalidError, TierbedError, UnsupportedError

__all__ = ["PRECISIONS", "Exchange", "ExchangeOptions", "OneSided", "RankBatch", "Serving"]

CPU = torch.device("cpu")
# Ids [E], offsets [F*B+1] and weights [E] of a rank's samples.
RankBatch = tuple[Tensor, Tensor, Tensor | None]
# What numbers may travel in, as the engine calls it.
PRECISIONS = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How vectors and gradients travel between ranks; equal on all of them.

    Args:
        kind: ``"auto"``: over shared memory where ranks share it, and over ``torch.distributed``
            between those that do not. ``"one_sided"`` insists on shared memory of all ranks;
            ``"collective"`` uses none. So it is with memory of devices, where ``"auto"`` shares
            that of all ranks or of none.
        samples_max: Most samples of a rank's batch. Memory is taken only for what comes; but with a
            DeviceStore at once, for the largest batch.
        indices_max: Most ids of a rank's batch. A one-sided DeviceStore with row-wise tables takes
            memory for as many of their rows, twice.
        timeout_s: How long another rank may be silent before this one gives up, naming it.
        copies_outputs: Whether outputs are copied out of the shared memory. Without, an output is
            valid until the lookup after the next, which fails if it is still in use.
        output_dtype: What outputs and their gradients are: ``torch.float32``, ``float16`` or
            ``bfloat16``. Sums are made in float32 and rounded once.
        row_dtype: What single rows of row-wise tables travel in: those, or ``torch.int8`` with a
            scale and an offset for each row.

    Raises:
        InvalidError: An unknown kind, or a type that nothing travels in.

    Examples:
        >>> tierbed.dist.ExchangeOptions(row_dtype=torch.int8).output_dtype
        torch.float32
    """

    kind: ExchangeKind = "auto"
    samples_max: int = 65536
    indices_max: int = 8 << 20
    timeout_s: float = 60.0
    copies_outputs: bool = False
    output_dtype: torch.dtype = torch.float32
    row_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_word("exchange", self.kind, ExchangeKind)
        check_word("output_dtype", self.output_dtype, PRECISIONS)
        check_word("row_dtype", self.row_dtype, PRECISIONS)


class Exchange(Protocol):
    """One rank's part; all ranks make the same calls in the same order."""

    @property
    def is_trainable(self) -> bool:
        """Whether a backward may step the rows."""

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """Looks up a batch; ``wants`` a backward, and gradients of weights.

        Returns:
            The step's number and the output ``[B, D]``.
        """

    def forward_parts(
        self,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        wants: tuple[bool, bool],
        parts: int,
    ) -> tuple[int, list[Tensor], Serving]:
        """Begins a lookup that completes in parts.

        Returns:
            The step's number, the output of each part ``[b, D]``, and who says when it is complete.
        """

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """Steps the rows of ``step``; fills ``weights_grad`` ``[E]``."""

    def sent_bytes(self) -> dict[str, int]:
        """Returns what this rank sent to other nodes, by kind of message."""

    def close(self) -> None:
        """Leaves together with all other ranks."""


class OneSided:
    """Over shared memory.

    Args:
        native: This rank's store, or its tables of codes.
        plan: Who holds what.
        heap: The shared memory.
        rank: This rank.
        groups: What this rank looks up together.
        options: What outputs are, and how long another rank may be silent.
    """

    #: How much longer than the time-out a rank waits for those of its node.
    _patience_ms = 0

    def __init__(
        self,
        native: NativeStore | NativeCodedTables,
        plan: NativeExchangePlan,
        heap: NativeHeap,
        rank: int,
        groups: list[FeaturePlan],
        options: ExchangeOptions,
    ) -> None:
        self._native = native
        self._open: OpenTables | None = None
        self._feature_count = 0
        self._copies = options.copies_outputs
        timeout_ms = int(options.timeout_s * 1000) + self._patience_ms
        self._exchange = NativeExchange(plan, heap, rank, timeout_ms, groups)
        self._lender = Lender(plan.output_dim, options.output_dtype, heap)
        self._serving: Serving | None = None
        self.steps_done = 0

    @property
    def is_trainable(self) -> bool:
        """As :attr:`Exchange.is_trainable`."""
        return isinstance(self._native, NativeStore)

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """As :meth:`Exchange.forward`; the output is valid until the forward after the next."""
        self._begin()
        batch = self._with_rows((indices, offsets, weights), trains=wants[0])
        step, address, samples = self._look_up(*batch, wants)
        (out,) = self._lender.lend(address, [(0, samples)], CPU)
        return step, out.clone() if self._copies else out

    def forward_parts(
        self,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        wants: tuple[bool, bool],
        parts: int,
    ) -> tuple[int, list[Tensor], Serving]:
        """As :meth:`Exchange.forward_parts`; outputs are never copied."""
        if self._copies:
            raise UnsupportedError("copies_outputs=True copies whole outputs; copy parts yourself")
        self._begin()
        batch = self._with_rows((indices, offsets, weights), trains=wants[0])
        arrivals, serve = self._begin_parts(*batch, wants, parts)
        samples = [arrivals.samples(part) for part in range(parts)]
        outputs = self._lender.lend(arrivals.address, samples, CPU)
        self._serving = Serving(arrivals, serve)
        return arrivals.step, outputs, self._serving

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """As :meth:`Exchange.backward`."""
        self._finish()
        self._step(step, grad, weights_grad)
        self.steps_done += 1

    def push_planned(self, batch: RankBatch, *, is_wanted: bool) -> None:
        """Tells the holders of rows the next batch of the order, together with all ranks.

        Args:
            batch: Ids, offsets and weights.
            is_wanted: Whether the store of this rank makes a plan of such batches.
        """
        self._announce(batch)
        if is_wanted and isinstance(self._native, NativeStore):
            self._exchange.push_planned(self._native)
        else:
            self._exchange.pass_announced()

    def pass_planned(self, batch: RankBatch) -> None:
        """Passes the next batch of the plan without a step, together with all ranks.

        Args:
            batch: Ids, offsets and weights.
        """
        self._finish()
        self._announce(batch)
        if isinstance(self._native, NativeStore):
            self._exchange.pass_planned(self._native)
        else:
            self._exchange.pass_announced()

    def prefetch(self, batches: Sequence[RankBatch], *, brings: bool = True) -> int:
        """Tells the holders of rows what comes, and brings the rows held here.

        All ranks call this together, with batches of their own, nearest first. Batches that did not
        fit the last time come first again.

        Args:
            batches: Ids, offsets and weights.
            brings: Whether rows held here need to be brought.

        Returns:
            How many fit, on all ranks.

        Raises:
            InvalidError: Ranks announce unequal numbers of batches.
        """
        self._finish()
        known = self._known(batches)
        new = batches[known:]
        least, most = self._agree(len(new))
        if least != most:
            raise InvalidError(
                f"ranks look ahead over unequal batches: {least} to {most}, here {len(new)}; give "
                "all ranks an equal window and equally many batches, as a DistributedSampler or "
                "drop_last=True does"
            )
        for batch in new:
            self._announce(self._with_known_rows(batch))
        if not isinstance(self._native, NativeStore):
            return len(batches)
        fit = self._exchange.bring(self._native, len(batches)) if brings else len(batches)
        agreed, _ = self._agree(fit)
        self._exchange.keep_brought(self._native, fit if brings else agreed, agreed)
        return agreed

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""
        self._forget_announced(0)
        if isinstance(self._native, NativeStore):
            self._native.end_lookahead()

    def sent_bytes(self) -> dict[str, int]:
        """As :meth:`Exchange.sent_bytes`: nothing but what indexes are asked leaves the node."""
        return {} if self._open is None else {"indexes": self._open.sent_bytes}

    def close(self) -> None:
        """As :meth:`Exchange.close`."""
        self._finish()
        self._exchange.close()
        if self._open is not None:
            self._open.close()

    def open_with(self, tables: OpenTables, feature_count: int) -> None:
        """Finds the rows of ids of open vocabularies before they are looked up.

        Args:
            tables: The tables.
            feature_count: Features of a batch.
        """
        self._open, self._feature_count = tables, feature_count

    @property
    def has_open_tables(self) -> bool:
        """Whether some table has an open vocabulary."""
        return self._open is not None

    def evict(self, now: int) -> dict[str, tuple[int, int]]:
        """Takes rows from ids of open vocabularies, together with all ranks.

        Args:
            now: The time, in minutes.

        Returns:
            By table, ids that lost their row, and ids forgotten before they had one.
        """
        self._finish()
        self.end_lookahead()
        return {} if self._open is None else self._open.evict(now)

    def fail(self, cause: str) -> None:
        """Lets all other ranks know that this one cannot go on.

        Args:
            cause: Why.
        """
        self._exchange.fail(cause)

    def _with_rows(self, batch: RankBatch, *, trains: bool) -> RankBatch:
        """Returns the batch that is looked up next, with rows instead of ids."""
        tables = self._open
        if tables is None:
            return batch
        # A bad batch is refused before anything is sent, so that it may be mended.
        self._exchange.check_batch(*tables.without_ids(batch, self._feature_count))
        number = tables.number_of(batch)
        found, agreed = tables.translate(batch, self._feature_count, trains=trains, number=number)
        # Its new ids have other rows now than when it was announced: they are sent again.
        self._exchange.skip_announced(agreed)
        tables.pass_announced(agreed)
        return found

    def _with_known_rows(self, batch: RankBatch) -> RankBatch:
        """Returns a batch that comes later; ids without a row have the shared one."""
        if self._open is None:
            return batch
        self._exchange.check_batch(*self._open.without_ids(batch, self._feature_count))
        found, _ = self._open.translate(batch, self._feature_count, trains=False)
        self._open.note_announced(batch)
        return found

    def _known(self, batches: Sequence[RankBatch]) -> int:
        """Returns how many of ``batches`` were announced already, and did not fit then."""
        count, brought = self._exchange.announced()
        if count > brought and batches:
            is_known = (self._exchange if self._open is None else self._open).is_announced
            if is_known(brought, *batches[0]):
                return min(count - brought, len(batches))
        self._forget_announced(brought)
        return 0

    def _forget_announced(self, kept: int) -> None:
        self._exchange.forget_announced(kept)
        if self._open is not None:
            self._open.forget_announced(kept)

    def _look_up(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, int, int]:
        """Looks up a batch; returns step, address and samples of the output."""
        return self._exchange.forward(self._native, indices, offsets, weights, *wants)

    def _begin_parts(
        self,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        wants: tuple[bool, bool],
        parts: int,
    ) -> tuple[NativeArrivals, Callable[[], None]]:
        """Begins a lookup in parts; returns what looks them up."""
        arrivals = self._exchange.forward_parts(indices, offsets, weights, *wants, parts)
        return arrivals, lambda: self._exchange.serve(self._native, wants[0])

    def _step(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        self._exchange.backward(self._native, step, grad, weights_grad)

    def _announce(self, batch: RankBatch) -> None:
        self._exchange.announce(*batch)

    def _agree(self, number: int) -> tuple[int, int]:
        """Tells all ranks a number; returns the smallest and the largest one."""
        return self._exchange.agree(number)

    def _begin(self) -> None:
        self._finish()
        self._lender.begin()

    def _finish(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.join()


class Serving:
    """Looks up the parts of a batch for all ranks, in a thread of its own.

    Args:
        arrivals: When parts are complete.
        look_up: Looks up all parts; the rows are busy until then.
    """

    def __init__(self, arrivals: NativeArrivals, look_up: Callable[[], None]) -> None:
        self._arrivals = arrivals
        self._failure: BaseException | None = None

        def serve() -> None:
            try:
                look_up()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=serve, name="tierbed-parts", daemon=True)
        self._thread.start()

    def wait(self, part: int) -> None:
        """Waits until ``part`` is complete.

        Raises:
            TierbedError: This rank failed, or another one, which the message names.
        """
        try:
            self._arrivals.wait(part)
        except TierbedError:
            # What happened here is worth more than that others noticed.
            self.join()
            raise

    def join(self) -> None:
        """Waits until this rank has looked up all parts; raises what kept it from that."""
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
