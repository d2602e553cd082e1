"""Versions of a training step, written to a local folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tierbed._util.state import COMMITTED, committed_now
from tierbed.errors import CorruptionError, InvalidError, UnsupportedError
from tierbed.placement.files import HeadRows, PlacementFiles, TableCodecs
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

__all__ = ["Attachments", "Cutter", "Cutting", "Source"]

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
        head_rows: As of :meth:`tierbed.Store.publish`, of whole versions.
        attachments: Further named bytes, or what returns them.
        compiled: Those of the compiled model, if it was compiled.
    """

    store: Store
    model: torch.nn.Module | None
    checkpoint: Callable[[], object] | None
    placement: PlacementFiles | None
    codec: TableCodecs | None
    head_rows: HeadRows | None
    attachments: Attachments | None
    compiled: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The step that a version is of.

    Attributes:
        at_s: When, by a clock that only goes forward.
        steps: Steps of training before it.
    """

    at_s: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """A version that is being written while training goes on.

    Attributes:
        plan: What it is.
        moment: The step it is of.
        publish: What writes it.
    """

    plan: Full | Against
    moment: Moment
    publish: Future[SnapshotReport]


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
        #: Why training stood still for the last version; None where it did not, or was asked to.
        self.foreground_reason: str | None = None

    def cut(
        self, full: bool | None, *, at_s: float, steps: int, beside_training: bool
    ) -> Cut | Cutting:
        """Writes a version of this very step.

        Args:
            full: True for a whole one, False for a delta, None as the rules say.
            at_s: When that is.
            steps: Steps so far.
            beside_training: Whether training may go on meanwhile, where the store can do so.

        Returns:
            The version, or one that is being written, to be :meth:`finished <finish>`.

        Raises:
            InvalidError: A delta was asked for, and there is nothing to make it against.
            TierbedError: What failed; nothing is left of it.
        """
        if self._source.checkpoint is not None:
            self._source.checkpoint()
        plan = Full(reason="it was asked for") if full else self._plan(insists=full is False)
        moment = Moment(at_s=at_s, steps=steps)
        if beside_training:
            self.foreground_reason = None
            try:
                return Cutting(plan=plan, moment=moment, publish=self._begin(plan))
            except (InvalidError, UnsupportedError, CorruptionError) as error:
                # With training at rest it may work, or will tell what is wrong.
                self.foreground_reason = str(error)
        try:
            report = self._write(plan, "auto" if full is False else "tracked")
        except (InvalidError, UnsupportedError, CorruptionError) as error:
            if isinstance(plan, Full) or full is False:
                raise
            # A damaged base, or one of other tables: a whole version needs none.
            plan = Full(reason=f"no delta could be made: {error}")
            report = self._write(plan, "auto")
        return self._kept(plan, moment, report)

    def finish(self, cutting: Cutting) -> Cut:
        """Waits for a version that is being written.

        Raises:
            TierbedError: What failed; nothing is left of it.
        """
        try:
            report = cutting.publish.result()
        except BaseException:
            self._local.drop(self._local.writing)
            raise
        return self._kept(cutting.plan, cutting.moment, report)

    def _kept(self, plan: Full | Against, moment: Moment, report: SnapshotReport) -> Cut:
        return Cut(
            folder=self._local.keep(report.identity),
            report=report,
            full_reason=plan.reason if isinstance(plan, Full) else None,
            at_s=moment.at_s,
            steps=moment.steps,
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
        with self._writing() as (out, attachments):
            store, model = self._source.store, self._source.model
            base = self._base(plan)
            if base is not None:
                return store.publish(
                    out, model, base=base, changes=changes, attachments=attachments
                )
            return store.publish(out, model, attachments=attachments, **self._pages())

    def _begin(self, plan: Full | Against) -> Future[SnapshotReport]:
        """As :meth:`_write`, while training goes on."""
        with self._writing() as (out, attachments):
            store, model = self._source.store, self._source.model
            base = self._base(plan)
            if base is not None:
                return store.publish_async(out, model, base=base, attachments=attachments)
            return store.publish_async(out, model, attachments=attachments, **self._pages())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[Path, dict[str, bytes]]]:
        """Where a version of this step is written, and what goes along with its rows."""
        given = self._source.attachments
        attachments = dict((given() if callable(given) else given) or {})
        # Training stands still from the step to here, so this is when the step committed.
        attachments.update(self._source.compiled)
        attachments.setdefault(COMMITTED, committed_now())
        out = self._local.writing
        self._local.drop(out)
        try:
            yield out, attachments
        except BaseException:
            self._local.drop(out)
            raise

    def _base(self, plan: Full | Against) -> list[Path] | None:
        if isinstance(plan, Full):
            return None
        return [self._local.path / identity for identity, _ in self._view.chain[: plan.at + 1]]

    def _pages(self) -> dict[str, Any]:
        how = self._source
        return {"placement": how.placement, "codec": how.codec, "head_rows": how.head_rows}
