"""Reports of a training store, and the record of lookups that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tierbed.errors import UnsupportedError
from tierbed.report.observer import Observer
from tierbed.train.stats import StoreStats
from tierbed.train.store_optimizers import StoreOptimizers

if TYPE_CHECKING:
    from tierbed.report import Report

__all__ = ["StoreReports"]


class StoreReports(StoreOptimizers):
    """What is seen of a :class:`tierbed.Store` at work."""

    _path: str | None
    _observer: Observer | None
    """What sees lookups; None for a store that was opened to be looked at."""

    @property
    def path(self) -> str | None:
        """The folder, or None in memory."""
        return self._path

    def stats(self) -> StoreStats:
        """Returns counters of the store, its buffer, its budget and the disk."""
        stats: Any = self._native.stats()
        return cast("StoreStats", stats)

    def record(self, *, sampled_rows: int = 8192) -> None:
        """Records a sample of the rows that are looked up from now on, for :meth:`report`.

        The report then says what half and double the budget would bring to training by window.
        Memory is bounded, and not of the budget: some hundred bytes per row of the sample. A
        lookup takes a few microseconds more per sampled id. Called again, it begins anew.

        Args:
            sampled_rows: Most rows in the sample; more are more exact.

        Raises:
            InvalidError: No rows.
            UnsupportedError: The store was opened read-only, so nothing trains on it.
        """
        if self._observer is None:
            raise UnsupportedError(
                "a store opened read-only has no lookups to record; call record() in the program "
                "that trains"
            )
        self._observer.begin_sample(sampled_rows)

    def report(self) -> Report:
        """Returns what the store does, to be shown in a notebook or saved as a page.

        Memory by part against the budget, where rows came from, reads and writes over time, what
        half and double the budget would bring (after :meth:`record`), and the tables. A store
        that was opened read-only shows what its last training told.

        Examples:
            >>> store = tb.Store.open("run/store", dram_budget="16MiB")
            >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=99, embedding_dim=16)]
            >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
            >>> store.record()
            >>> batch = tb.KeyedJaggedTensor(
            ...     ["item"], torch.arange(8), lengths=torch.ones(8, dtype=torch.int64)
            ... )
            >>> for _ in range(3):
            ...     emb(batch).values().sum().backward()
            >>> report = store.report()
            >>> report.numbers["counts"]["ids"]
            24
            >>> report.save("report.html")
            >>> store.close()
        """
        # Few programs make reports.
        from tierbed.report.history import read_progress
        from tierbed.report.of_store import report_of_store

        told = None
        if self._observer is None and self._path is not None:
            told = read_progress(self._path)
        return report_of_store(self, self._observer, told)
