"""How a look-ahead makes a store follow the order of a loader: plans are found, or made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tierbed._util.progress import Progress
from tierbed.data.order import BatchOrder, fingerprint
from tierbed.errors import CorruptionError, InvalidError
from tierbed.train.epochs import Epochs
from tierbed.train.session import StepSession
from tierbed.train.several import SeveralSessions

__all__ = ["follow"]

_LOG = logging.getLogger("tierbed")
Session = StepSession | SeveralSessions


def follow(
    loader: Iterable[Any] | Epochs,
    session: Session,
    window: int,
    key: Callable[[Any], Any],
    start: int,
) -> bool:
    """Makes the store follow the loader's order, if it may; tells why not otherwise."""
    if not session.may_follow:
        session.tell_why_not()
        return False
    session.store.note_scans()
    order = session.find_order(loader, key)
    if isinstance(order, str):
        if session.stands_in_plan():
            return True  # the batches are checked against the plan one by one
        session.store.note_unknown_order(order)
        return False
    source = fingerprint([order.fingerprint, session.feature_names()])
    answer = _follow(session, source, window)
    if answer["answer"] == "plan_needed":
        damage = session.store.order().get("plan_damage")
        if damage is not None:
            _LOG.warning("the plan of the store is made again: %s", damage)
        _make_plan(order, session, source, window, key)
        answer = _follow(session, source, window)
        if answer["answer"] == "plan_needed":
            raise CorruptionError(
                "the plan that was just made is damaged: the disk does not keep what it is given"
            )
    if answer["answer"] == "refused":
        _LOG.warning("training by window, not in forward order: %s", answer["reason"])
        return False
    begins = order.start + start
    if begins != answer["batch"]:
        # What the loader leaves out by itself is counted by it.
        own = order.start - (loader.passed if isinstance(loader, Epochs) else 0)
        _go_to(begins, answer, session, start, own)
    return True


def _follow(session: Session, source: str, window: int) -> dict[str, Any]:
    # Rows that lie otherwise move to where the plan needs them first: minutes of a large store.
    with Progress("moving rows to the plan", None, "moves", after_s=1.0) as bar:
        answer = session.follow(source, window)
        bar.advance()
    return answer


def _go_to(begins: int, answer: dict[str, Any], session: Session, start: int, own: int) -> None:
    """Passes over the batches that nobody trained on: an epoch before may have ended early."""
    stands, epoch = answer["batch"], answer["epoch"]
    # Rows that came from elsewhere stand where the plan begins, whatever was trained before.
    is_new = (epoch, stands) == (0, 0) and session.store.last_checkpoint() is not None
    there = f"start={stands - own}" if stands >= own else f"a loader that begins at batch {stands}"
    if start > 0 and not is_new:
        raise InvalidError(
            f"the store stands at batch {stands} of epoch {epoch}, the loader begins at batch "
            f"{begins}; continue where the store stands with {there}, begin an epoch "
            "without start, or open the store's folder of another run",
            {"store_batch": str(stands), "loader_batch": str(begins)},
        )
    _LOG.warning(
        "the store stands at batch %d of epoch %d and the loader begins at batch %d: passing over "
        "the batches between, without training; to go on where the store stands give %s",
        stands,
        epoch,
        begins,
        there,
    )
    session.pass_planned_to(begins)


def _make_plan(
    order: BatchOrder, session: Session, source: str, window: int, key: Callable[[Any], Any]
) -> None:
    session.start_plan(source, window)
    with Progress("planning the order", order.batch_count, "batches") as bar:
        for at, batch in enumerate(order.batches()):
            is_stepped = order.is_stepped is None or order.is_stepped(at)
            session.push_planned(key(batch), is_stepped=is_stepped)
            bar.advance()
    # Next uses are found backwards, and with raw ids the last rows of ids: seconds of a long plan.
    with Progress("finishing the plan", None, "plans") as bar:
        session.finish_plan()
        bar.advance()
