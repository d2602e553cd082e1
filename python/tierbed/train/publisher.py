"""A publisher: versions of a model, cut while it trains and pushed to a location."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierbed._util.durations import parse_seconds
from tierbed.config.words import OnPublishError, check_word
from tierbed.errors import ClosedError, InvalidError, TierbedError, UnsupportedError
from tierbed.placement.files import HeadRows, PlacementFiles, TableCodecs
from tierbed.results import Channel, PublisherStats, PushedVersion
from tierbed.serve.versions import Versions
from tierbed.train.background import compiled_parts
from tierbed.train.channel import ChannelView, Cut, Target
from tierbed.train.cutter import Attachments, Cutter, Cutting, Source
from tierbed.train.published import Counts
from tierbed.train.publishing import LocalFolder, Rules
from tierbed.train.store import Store
from tierbed.train.upload import Upload

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Publisher"]

#: Seconds between two looks for old versions.
PRUNE_S = 3600.0


class Publisher:
    """Publishes a model while it trains: rows and dense weights of the same step.

    :meth:`step` behind each optimizer step returns at once, unless a version is due. Then training
    waits until changed rows in memory are copied, and goes on while the other rows of that step are
    copied to ``local`` and travel to ``location``. A delta is written against the
    newest version, and costs what changed since; :mod:`tierbed.train.publishing` says when a whole
    version comes in its place. What fails is told and done again when the next version is due.

    In forward order versions are cut at ends of epochs; there, and with several shards, training
    stands still until a version is written. After a restart it goes on with the chain
    of the channel.

    Args:
        store: The tables. It is closed after the publisher.
        model: Its dense parameters go along, and its ``config()`` where it has one.
        location: Where the versions of this model lie, as of :class:`tierbed.Versions`: a folder,
            or a bucket.
        channel: The channel that moves to each version.
        delta_every: From one version to the next, as a number of seconds or as ``"60s"``; None
            for whole versions only.
        full_every: From one whole version to the next; None leaves that to the size of deltas.
        keep: How long versions stay that no channel is at; None never prunes.
        local: A folder for what deltas are made against: a whole version and its deltas. By
            default beside the store, ``<store>.published/<channel>``.
        checkpoint: Called before each version, and behind each whole one: make a checkpoint there,
            and what is served can be trained on after a crash. By default the last checkpoint is
            what training goes back to, which may be older than what is served.
        placement: As of :meth:`tierbed.Store.publish`; there are no deltas then.
        codec: As of :meth:`tierbed.Store.publish`.
        head_rows: As of :meth:`tierbed.Store.publish`, of whole versions.
        attachments: Further named bytes, or a function that returns them for each version.
        compiled: Also compile ``model``, once and now, for servers that predict by ``aoti``.
        beside_training: Whether training may go on while a version is written; it takes an eighth
            of the store's memory. :meth:`publish_now` waits in any case.
        on_error: What :meth:`step` does about a version that failed: ``"warn"`` logs it, and
            :meth:`stats` tells it; ``"raise"`` raises it.

    Raises:
        InvalidError: A bad argument, or a store without a folder and no ``local``.
        ClosedError: Another publisher has the folder ``local``.

    Examples:
        >>> store = tb.Store.open("run/store", dram_budget="16MiB")
        >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=16)]
        >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        >>> ids = tb.KeyedJaggedTensor(["item"], torch.arange(8), lengths=torch.ones(8).int())
        >>> with tb.Publisher(store, None, "models/ads", delta_every="60s") as publisher:
        ...     for _ in range(3):
        ...         emb(ids).values().sum().backward()
        ...         publisher.step()
        ...     version = publisher.publish_now().version
        ...     stable = publisher.promote("stable")
        >>> (version, stable.version, publisher.stats().full_count)
        (1, 1, 1)
        >>> store.close()
    """

    def __init__(
        self,
        store: Store,
        model: torch.nn.Module | None,
        location: str | os.PathLike[str],
        *,
        channel: str = "canary",
        delta_every: float | str | None = "60s",
        full_every: float | str | None = "24h",
        keep: float | str | None = "72h",
        local: str | os.PathLike[str] | None = None,
        checkpoint: Callable[[], object] | None = None,
        placement: PlacementFiles | None = None,
        codec: TableCodecs | None = None,
        head_rows: HeadRows | None = None,
        attachments: Attachments | None = None,
        compiled: bool = False,
        beside_training: bool = True,
        on_error: OnPublishError = "warn",
    ) -> None:
        check_word("on_error", on_error, OnPublishError)
        self._rules = Rules(
            delta_every_s=_seconds(delta_every, "delta_every"),
            full_every_s=_seconds(full_every, "full_every"),
        )
        if placement is not None and delta_every is not None:
            raise InvalidError(
                "snapshots whose tables share pages by a placement have no deltas; give "
                "delta_every=None, and full_every as often as a version is wanted"
            )
        if local is None and store.path is None:
            raise InvalidError(
                "a store without a path has no place for what deltas are made against; give local"
            )
        code = compiled_parts(model, store) if compiled else {}
        place = Path(f"{store.path}.published", channel) if local is None else Path(local)
        place = place.absolute()
        keep_s = _seconds(keep, "keep")
        self._target = Target(versions=Versions(location), channel=channel, keep_s=keep_s)
        self._local = LocalFolder(place)
        self._store, self._checkpoint = store, checkpoint
        self._on_error, self._beside_training = on_error, beside_training
        self._pid = os.getpid()
        self._is_closed = False
        self._view = ChannelView(self._target)
        source = Source(
            store=store,
            model=model,
            checkpoint=checkpoint,
            placement=placement,
            codec=codec,
            head_rows=head_rows,
            attachments=attachments,
            compiled=code,
        )
        self._cutter = Cutter(source, self._rules, self._local, self._view)
        self._cutting: Cutting | None = None
        self._upload: Upload | None = None
        self._unsent: Cut | None = None
        self._served: Cut | None = None
        self._expected: str | dict[str, Any] = "nothing"
        self._steps = 0
        self._counts = Counts()
        self._pruned_s = -PRUNE_S
        self._due_s = self._next_due(time.monotonic())

    # ------------------------------------------------------------ while training

    def step(self) -> None:
        """Counts a step of training, and publishes when a version is due.

        To be called behind the optimizer's step, when rows and dense weights are of one step.

        Raises:
            ClosedError: After :meth:`close`, or in a forked process.
            TierbedError: With ``on_error="raise"``, what failed of a version.
        """
        self._check_owner()
        self._steps += 1
        if self._cutting is not None:
            if self._cutting.publish.done():
                self._guard(self._finish_cut)
            return
        if self._upload is not None:
            if self._upload.is_alive():
                return
            self._guard(self._finish_upload)
        if self._view.lost is None and time.monotonic() >= self._due_s and self._may_cut():
            self._guard(lambda: self._publish(beside_training=self._beside_training))

    def publish_now(self, full: bool | None = None) -> PushedVersion:
        """Publishes this very step, and waits until the channel is at it.

        Args:
            full: True for a whole version, which also takes over a channel that another publisher
                moved; False for a delta, at the price of comparing all rows where the store does
                not know which changed; None as the rules say.

        Raises:
            InvalidError: Another publisher moved the channel, or it has nothing that a delta could
                be made against.
            TierbedError: What failed, whatever ``on_error`` says.
        """
        self._check_owner()
        self._wait()
        if full:
            self._unsent = None
        elif self._unsent is not None:
            # An older version that has to come first: deltas are made against it.
            self._publish()
            self._wait()
        self._publish(full)
        version = self._wait()
        assert version is not None, "a push that failed raises"
        return version

    def promote(self, to: str) -> Channel:
        """Moves another channel where this publisher's one is, once nothing is on its way.

        Args:
            to: The channel that moves: ``"stable"``.

        Raises:
            InvalidError: There is no version yet, or another publisher moved ``to`` meanwhile.
        """
        self._check_owner()
        self._wait()
        return self._target.versions.promote(self._target.channel, to)

    def stats(self) -> PublisherStats:
        """Returns what was published, what training waited for it, and what failed."""
        counts, served = self._counts, self._served
        fresh_s = None if served is None else time.monotonic() - served.at_s
        return PublisherStats(
            version=counts.version,
            report=None if served is None else served.report,
            full_count=counts.fulls,
            delta_count=counts.deltas,
            failure_count=counts.failures,
            bytes_pushed=counts.bytes,
            pause_s=counts.pause_s,
            pause_s_max=counts.pause_s_max,
            pause_s_sum=counts.pause_s_sum,
            upload_s=counts.upload_s,
            freshness_s=fresh_s,
            steps_behind=self._steps_behind,
            is_writing=self._cutting is not None and not self._cutting.publish.done(),
            is_uploading=self._upload is not None and self._upload.is_alive(),
            full_reason=counts.full_reason,
            foreground_reason=self._cutter.foreground_reason,
            last_error=counts.last_error,
        )

    def close(self) -> None:
        """Publishes what was trained since the last version, and waits until it is pushed.

        A forked child, where the publisher is its parent's, closes nothing. A second call neither.

        Raises:
            TierbedError: With ``on_error="raise"``, what failed.
        """
        self._end(publishes=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Behind an error nobody knows what the last step left.
        self._end(publishes=kind is None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a Publisher cannot be copied or pickled, it has one trainer; make it where the store "
            "trains, and leave it out of what goes to other processes"
        )

    def __repr__(self) -> str:
        return f"Publisher({self._target.versions.location!r}, channel={self._target.channel!r})"

    # ------------------------------------------------------------ parts of it

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "a Publisher belongs to the process that made it; publish there, or make one where "
                "the store is opened"
            )
        if self._is_closed:
            raise ClosedError("the publisher is closed; make a new one, which goes on from here")

    def _end(self, *, publishes: bool) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        try:
            self._guard(self._wait)
            if publishes and self._unsent is not None:
                self._guard(self._publish)
                self._guard(self._wait)
            may_go_on = publishes and self._unsent is None and self._view.lost is None
            if may_go_on and self._steps_behind > 0:
                self._guard(self._publish)
                self._guard(self._wait)
        finally:
            self._is_closed = True
            self._local.close()

    @property
    def _steps_behind(self) -> int:
        """Steps since the one that the channel has."""
        return self._steps - (0 if self._served is None else self._served.steps)

    def _guard(self, work: Callable[[], object]) -> None:
        """Does ``work``; what fails of it is told, and raised only when that was asked for."""
        try:
            work()
        except (TierbedError, OSError) as error:
            logging.getLogger("tierbed").warning("%r: %s", self, error)
            if self._on_error == "raise":
                raise

    def _may_cut(self) -> bool:
        """Whether a version may be cut here: in forward order, where an epoch ends."""
        position = self._store.native.position()
        return position is None or position[1] == 0

    def _next_due(self, now_s: float) -> float:
        every_s = self._rules.every_s
        return float("inf") if every_s is None else now_s + every_s

    def _publish(self, full: bool | None = None, *, beside_training: bool = False) -> None:
        """Cuts a version, unless one waits to be pushed again, and sends it off."""
        assert self._upload is None, "one version at a time"
        assert self._cutting is None, "one version at a time"
        begun_s = time.monotonic()
        self._due_s = self._next_due(begun_s)
        try:
            self._expected = self._view.begin(takes_over=bool(full))
            cut: Cut | Cutting | None = self._unsent
            if cut is None:
                cut = self._cutter.cut(
                    full, at_s=begun_s, steps=self._steps, beside_training=beside_training
                )
        except BaseException as error:
            self._counts.fail(error)
            raise
        self._counts.pause(time.monotonic() - begun_s)
        if isinstance(cut, Cutting):
            self._cutting = cut
        else:
            self._send(cut)

    def _finish_cut(self) -> None:
        """Waits for the version that is being written, and sends it off."""
        cutting, self._cutting = self._cutting, None
        assert cutting is not None, "a version is being written"
        try:
            cut = self._cutter.finish(cutting)
        except BaseException as error:
            self._counts.fail(error)
            raise
        self._send(cut)

    def _send(self, cut: Cut) -> None:
        """Sends a version to where the channel was found to be before it was cut."""
        now_s = time.monotonic()
        prunes = now_s >= self._pruned_s + min(PRUNE_S, self._target.keep_s or 0.0)
        self._pruned_s = now_s if prunes else self._pruned_s
        self._view.pushing(cut)
        expected = self._expected
        self._upload = Upload(cut, self._target, self._local, expected=expected, prunes=prunes)
        self._upload.start()

    def _wait(self) -> PushedVersion | None:
        """Waits for what is on its way; None when nothing is."""
        if self._cutting is not None:
            self._finish_cut()
        return None if self._upload is None else self._finish_upload()

    def _finish_upload(self) -> PushedVersion:
        upload, counts = self._upload, self._counts
        assert upload is not None, "something is on its way"
        upload.join()
        self._upload, cut = None, upload.cut
        self._unsent = cut if cut.full_reason is not None else None
        try:
            is_done = upload.is_seen and self._view.see(upload.head)
            if not is_done and upload.error is not None:
                raise upload.error
        except BaseException as error:
            counts.fail(error)
            if self._unsent is None or self._view.lost is not None:
                self._unsent = None
                self._local.drop(cut.folder)
            raise
        assert upload.head is not None, "a channel that was moved is somewhere"
        self._unsent, self._served = None, cut
        version = _pushed(upload.head, cut)
        counts.push(version, cut.full_reason, upload.seconds)
        if upload.tidy_error is not None:
            counts.fail(upload.tidy_error)
            logging.getLogger("tierbed").warning("%r: %s", self, upload.tidy_error)
        elif cut.full_reason is not None and self._checkpoint is not None:
            # So that what is noted from here on outlives a crash.
            self._checkpoint()
        return version


def _pushed(head: dict[str, Any], cut: Cut) -> PushedVersion:
    chain = tuple(int(link["seq"]) for link in head["chain"])
    return PushedVersion(version=chain[-1], file_bytes=cut.file_bytes, chain=chain)


def _seconds(duration: float | str | None, name: str) -> float | None:
    return None if duration is None else parse_seconds(duration, name)
