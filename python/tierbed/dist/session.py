"""Control of the look-ahead over ranks: which batches they will look up together, in which order.

A holder of rows reads and steps those of all ranks' samples. So the plan of its store is of all
ranks' batches: ranks tell each other their ids once, while the plans are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tierbed._native import FeaturePlan
from tierbed.data.order import BatchOrder, fingerprint, known_order
from tierbed.dist.checkpoint import together
from tierbed.dist.exchange import OneSided, RankBatch
from tierbed.dist.ranks import Rank
from tierbed.errors import InvalidError
from tierbed.train.store import Store

__all__ = ["RankSession", "RankTraining"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTraining:
    """What of a collection its look-ahead needs.

    Args:
        store: This rank's rows.
        ranks: This rank among the others.
        exchange: This rank's part in lookups of all.
        joined: The features whose rows this rank holds, as one batch; None where it holds none.
        trains: Whether lookups are stepped now.
        identity: What says which rows a rank holds of a batch, equal on all ranks.
        feature_names: The input features, in the order of the output.
    """

    store: Store
    ranks: Rank
    exchange: OneSided
    joined: FeaturePlan | None
    trains: Callable[[], bool]
    identity: Any
    feature_names: Sequence[str]


class RankSession:
    """The look-ahead of one rank; all ranks look ahead together, over equally many batches.

    Args:
        training: What trains.
        prepare: Takes a batch, returns what of it is looked up.
    """

    def __init__(self, training: RankTraining, prepare: Callable[[Any], RankBatch]) -> None:
        self.store = training.store
        self._training = training
        self._exchange = training.exchange
        self._prepare = prepare
        self._needs_plan = False

    # ------------------------------------------------------------ window order

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Brings the rows of coming batches of all ranks; returns how many batches fit."""
        # Rows of a plan come by themselves; beside it, those that are only looked up.
        brings = not self._training.trains() or self.store.native.position() is None
        return self._exchange.prefetch([self._prepare(batch) for batch in batches], brings=brings)

    def note_used(self) -> None:
        """Does nothing: the exchange sees the lookups themselves."""

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""
        self._exchange.end_lookahead()

    # ------------------------------------------------------------ forward order

    @property
    def may_follow(self) -> bool:
        """Whether plans may be made and followed; what keeps a rank from it, all ranks tell."""
        return self._training.trains()

    def tell_why_not(self) -> None:
        """Says why no plan is followed, where the caller may have expected one."""
        self.store.note_scans(is_coming=True)

    def find_order(self, loader: Iterable[Any], key: Callable[[Any], Any]) -> BatchOrder | str:
        """Returns the order of all ranks' batches, or why it is not known.

        Args:
            loader: This rank's batches.
            key: Takes a batch, returns its KeyedJaggedTensor.

        Raises:
            InvalidError: Ranks have unequal numbers of batches, or begin at other ones.
            TierbedError: Another rank failed; the message names it.
        """
        if self._exchange.has_open_tables:
            return "a table has an open vocabulary: which rows its ids get is not known before"
        own: BatchOrder | str = 'the store was opened with order="window"'

        def find() -> Any:
            nonlocal own
            if self.store.asks_for_plan:
                own = self.store.plan_obstacle or known_order(loader, key)
            return own if isinstance(own, str) else (own.fingerprint, own.start, own.batch_count)

        all_told = together(self._training.ranks, find)
        for rank, one in enumerate(all_told):
            if isinstance(one, str):
                return one if rank == self._training.ranks.rank else f"rank {rank}: {one}"
        assert isinstance(own, BatchOrder)
        places = [(start, count) for _, start, count in all_told]
        if len(set(places)) > 1:
            raise InvalidError(
                f"ranks look ahead over unequal batches: first batch and number of batches are "
                f"{places} by rank; give all ranks equally many batches, as a DistributedSampler "
                "or drop_last=True does"
            )
        whole = fingerprint([[one[0] for one in all_told], self._training.identity])
        return dataclasses.replace(own, fingerprint=whole)

    def stands_in_plan(self) -> bool:
        """Whether all ranks follow a plan, whose batches are checked one by one."""
        joined = self._training.joined
        stands = joined is None or self.store.native.position() is not None
        return all(self._training.ranks.gather(stands))

    def is_collecting(self) -> bool:
        """Returns False: the gradients of a batch are stepped at once."""
        return False

    @property
    def position(self) -> int:
        """Steps done. A rank whose rows left the plan goes on with the others, by window."""
        return self._exchange.steps_done

    def find_position(self) -> int:
        """Returns the :attr:`position`, where an epoch begins."""
        return self.position

    def feature_names(self) -> list[str]:
        """Returns the input features of the collection, in the order of its output."""
        return list(self._training.feature_names)

    def follow(self, source: str, window: int) -> dict[str, Any]:
        """Follows the plan of ``source`` if all ranks can; returns the answer of all engines.

        Args:
            source: Identifies the batches of all ranks.
            window: Most batches of a window.

        Raises:
            InvalidError: Ranks stand at different batches; or what an engine refuses.
            TierbedError: Another rank failed; the message names it.
        """
        joined = self._training.joined

        def ask() -> dict[str, Any]:
            if joined is None:
                return {"answer": "nothing"}
            return self.store.native.follow(joined, source, window)

        answers: list[dict[str, Any]] = together(self._training.ranks, ask)
        own = answers[self._training.ranks.rank]
        self._needs_plan = own["answer"] == "plan_needed"
        for rank, answer in enumerate(answers):
            if answer["answer"] == "refused":
                return {"answer": "refused", "reason": f"rank {rank}: {answer['reason']}"}
        if any(answer["answer"] == "plan_needed" for answer in answers):
            return {"answer": "plan_needed"}
        places = [answer for answer in answers if answer["answer"] == "following"]
        if any(place != places[0] for place in places):
            stand = [(place["epoch"], place["batch"]) for place in places]
            raise InvalidError(
                f"the stores of ranks stand at different epochs and batches: {stand}; open all at "
                "checkpoints of one step"
            )
        return places[0]

    def start_plan(self, source: str, window: int) -> None:
        """Starts making the plan of ``source`` where this rank needs one.

        Args:
            source: Identifies the batches of all ranks.
            window: Most batches of a window.
        """
        joined = self._training.joined

        def start() -> None:
            if self._needs_plan and joined is not None:
                self.store.native.start_plan(joined, source, window)

        together(self._training.ranks, start)

    def push_planned(self, batch: Any, *, is_stepped: bool) -> None:
        """Adds the next batch of all ranks to the plans that are made, stepped or not."""
        # Which one it is matters to open tables, which have no plan over ranks.
        del is_stepped
        self._exchange.push_planned(self._prepare(batch), is_wanted=self._needs_plan)

    def finish_plan(self) -> None:
        """Finishes the plans, which are durable then."""

        def finish() -> None:
            if self._needs_plan and self._training.joined is not None:
                self.store.native.finish_plan()

        together(self._training.ranks, finish)

    def pass_planned(self, batch: Any) -> None:
        """Passes the next batch of the plan without a step, together with all ranks."""
        self._exchange.pass_planned(self._prepare(batch))

    def pass_planned_to(self, batch: int) -> None:
        """Passes the batches of the plan up to ``batch``, of this epoch or of the next one.

        Args:
            batch: Number in its epoch.
        """
        self.store.native.pass_planned_to(batch)
