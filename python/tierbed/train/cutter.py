"""Versions of a training step, written to a local folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tierbed._util.state import COMMITTED, committed_now
from tierbed.errors import CorruptionError, InvalidError, UnsupportedError
from tierbed.placement.files import PlacementFiles, TableCodecs
from tierbed.results import SnapshotReport
from tierbed.train.channel import ChannelView, Cut
from tierbed.train.publishing import (
    DELTAS_MAX,
    Against,
    Full,
    Link,
    LocalFolder,
    Rules,
    choose,
)
from tierbed.train.store import Store

__all__ = ["Attachments", "Cutter", "Source"]

Attachments = Mapping[str, bytes] | Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is published.

    Attributes:
        store: The tables.
        model: Its dense parameters go along.
        checkpoint: Called before each version; None for nothing.
        placement: As of :meth:`tierbed.Store.publish`.
        codec: As of :meth:`tierbed.Store.publish`.
        attachments: Further named bytes, or what returns them.
        compiled: Those of the compiled model, if it was compiled.
    """

    store: Store
    model: torch.nn.Module | None
    checkpoint: Callable[[], object] | None
    placement: PlacementFiles | None
    codec: TableCodecs | None
    attachments: Attachments | None
    compiled: Mapping[str, bytes]


class Cutter:
    """Writes the versions of a publisher.

    Args:
        source: What is published.
        rules: When it is published in full.
        local: Where versions are written, and what deltas are made against lies.
        view: The channel.
    """

    def __init__(self, source: Source, rules: Rules, local: LocalFolder, view: ChannelView) -> None:
        self._source, self._rules, self._local, self._view = source, rules, local, view

    def cut(self, full: bool | None, *, at_s: float, steps: int) -> Cut:
        """Writes a version of this very step.

        Args:
            full: True for a whole one, False for a delta, None as the rules say.
            at_s: When that is.
            steps: Steps so far.

        Raises:
            InvalidError: A delta was asked for, and there is nothing to make it against.
            TierbedError: What failed; nothing is left of it.
        """
        if self._source.checkpoint is not None:
            self._source.checkpoint()
        plan = Full(reason="it was asked for") if full else self._plan(insists=full is False)
        try:
            report = self._write(plan, "auto" if full is False else "tracked")
        except (InvalidError, UnsupportedError, CorruptionError) as error:
            if isinstance(plan, Full) or full is False:
                raise
            # A damaged base, or one of other tables: a whole version needs none.
            plan = Full(reason=f"no delta could be made: {error}")
            report = self._write(plan, "auto")
        return Cut(
            folder=self._local.keep(report.identity),
            report=report,
            full_reason=plan.reason if isinstance(plan, Full) else None,
            at_s=at_s,
            steps=steps,
        )

    def _plan(self, *, insists: bool) -> Full | Against:
        """Decides by the rules, or for a delta where one is insisted on."""
        noted = set(self._source.store.stats()["changes"]["bases"])
        chain = [
            Link(
                identity=identity,
                file_bytes=file_bytes,
                folder=self._local.find(identity),
                is_noted=identity in noted,
            )
            for identity, file_bytes in self._view.chain
        ]
        plan = choose(self._rules, chain, self._view.full_age_s)
        if not insists or isinstance(plan, Against):
            return plan
        if not chain:
            raise InvalidError(
                "the channel has nothing that a delta could be made against; publish a whole "
                "version first"
            )
        at = len(chain) - 1 if len(chain) <= DELTAS_MAX else 0
        for link in chain[: at + 1]:
            if link.folder is None:
                self._view.bring(link.identity, self._local)
        return Against(at=at)

    def _write(self, plan: Full | Against, changes: Literal["auto", "tracked"]) -> SnapshotReport:
        """Publishes into the local folder; what fails leaves nothing there."""
        given, store, model = self._source.attachments, self._source.store, self._source.model
        attachments = dict((given() if callable(given) else given) or {})
        # Training stands still from the step to here, so this is when the step committed.
        attachments.update(self._source.compiled)
        attachments.setdefault(COMMITTED, committed_now())
        out = self._local.writing
        self._local.drop(out)
        try:
            if isinstance(plan, Full):
                how = self._source
                return store.publish(
                    out,
                    model,
                    placement=how.placement,
                    codec=how.codec,
                    attachments=attachments,
                )
            names = [identity for identity, _ in self._view.chain[: plan.at + 1]]
            base = [self._local.path / name for name in names]
            return store.publish(out, model, base=base, changes=changes, attachments=attachments)
        except BaseException:
            self._local.drop(out)
            raise
