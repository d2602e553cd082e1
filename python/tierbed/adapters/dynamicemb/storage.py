"""Reading and writing what dynamicemb asks of a storage: rows by key, and files of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tierbed.adapters.dynamicemb import files
from tierbed.adapters.dynamicemb.shapes import StorageShapes
from tierbed.config.admission import EvictionPolicy
from tierbed.errors import InvalidError
from tierbed.train.store import Store

__all__ = ["TierbedStorage", "external_storage"]

Found = tuple[int, Tensor, Tensor, Tensor, "Tensor | None", Tensor, Tensor, Tensor]


def external_storage(
    store: Store, tables: Sequence[str], *, eviction_policy: EvictionPolicy | None = None
) -> Callable[[Sequence[Any], Any], TierbedStorage]:
    """Returns what ``DynamicEmbTableOptions(external_storage=...)`` takes.

    dynamicemb puts tables with the same ``external_storage`` into one group and calls it once, with
    the options of the group. Make one for each group, and name its tables in dynamicemb's order.

    Args:
        store: Keeps the rows; of this rank alone.
        tables: Names of the tables in the store, one for each table of the group. New ones are
            made.
        eviction_policy: Which keys ``store.evict()`` takes; a use is an insert. By default none.
    """
    names = tuple(tables)

    def make(options: Sequence[Any], optimizer: Any) -> TierbedStorage:
        return TierbedStorage(
            options, optimizer, store=store, tables=names, eviction_policy=eviction_policy
        )

    return make


class TierbedStorage(StorageShapes):
    """Tables of a store as dynamicemb's ``Storage``. Made by :func:`external_storage`.

    Tensors may be on any device; what is returned is on that of the keys. Calls may come from
    several threads. In a forked child all are a ClosedError, as of the store.

    Args:
        options: dynamicemb's options of each table: ``dim``, ``embedding_dtype``, ....
        optimizer: dynamicemb's optimizer, which tells how wide its state is.
        store: Keeps the rows.
        tables: Names of the tables in the store, one for each of ``options``.
        eviction_policy: Which keys ``store.evict()`` takes; a use is an insert. By default none.

    Raises:
        InvalidError: Not one name for each table, or a table of that name with another shape or
            policy.
        UnsupportedError: Rows of another dtype than float32, float16 and bfloat16, rows that are
            too wide, or two scores for each id.

    Examples:
        >>> from types import SimpleNamespace
        >>> from tierbed.adapters.dynamicemb import TierbedStorage
        >>> options = SimpleNamespace(dim=2, embedding_dtype=torch.float32)  # dynamicemb's
        >>> adagrad = SimpleNamespace(  # dynamicemb's
        ...     get_state_dim=lambda dim: dim, get_initial_optim_states=lambda: 0.0
        ... )
        >>> store = tb.Store.open("dynamic", dram_budget="16MiB")
        >>> storage = TierbedStorage([options], adagrad, store=store, tables=["item"])
        >>> keys, table_ids = torch.tensor([-7, 1 << 60]), torch.tensor([0, 0])
        >>> storage.insert(keys, table_ids, torch.arange(8.0).view(2, 4))
        >>> asked = torch.tensor([1 << 60, 5])
        >>> count, missing, *_, values = storage.find(
        ...     asked, table_ids, SimpleNamespace(name="VALUE")
        ... )
        >>> count, missing.tolist(), values[0].tolist()
        (1, [5], [4.0, 5.0, 6.0, 7.0])
        >>> report = store.checkpoint("day-1")
        >>> store.close()
    """

    #: The state of dynamicemb's own tables, which its callers look for in any storage.
    _state = None

    def __init__(
        self,
        options: Sequence[Any],
        optimizer: Any,
        *,
        store: Store,
        tables: Sequence[str],
        eviction_policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(options, optimizer, store, tables, eviction_policy)
        self._options = list(options)
        self._store = store
        self._lock = threading.Lock()

    # ------------------------------------------------------------ rows

    def find(
        self,
        unique_keys: Tensor,
        table_ids: Tensor,
        copy_mode: Any,
        lfu_accumulated_frequency: Tensor | None = None,
    ) -> Found:
        """Reads the rows of keys; changes nothing.

        Args:
            unique_keys: Keys ``[N]`` i64, none twice in a table.
            table_ids: The table of each, ``[N]`` i64.
            copy_mode: dynamicemb's ``CopyMode``: ``EMBEDDING``, or ``VALUE`` with state.
            lfu_accumulated_frequency: How often each was just used, ``[N]``; added to the scores
                that are returned.

        Returns:
            How many are missing; their keys ``[M]``, places ``[M]``, tables ``[M]`` and uses
            ``[M]`` or None; which were found, ``[N]`` bool; scores ``[N]`` i64, 0 where missing;
            and values ``[N, width]``, zeros where missing. Weights begin at column 0, state at
            column ``max_embedding_dim()``.

        Raises:
            InvalidError: Keys of tables that are not there.
        """
        self._check_open()
        keys, owners = _ids(unique_keys), self._owners(table_ids)
        with_state = copy_mode.name != "EMBEDDING"
        values = _zeros(len(keys), self._width if with_state else self._dim_max)
        founds = torch.zeros(len(keys), dtype=torch.bool, device="cpu")
        scores = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
        with self._lock:
            for at, table in enumerate(self._tables):
                places = torch.nonzero(owners == at)[:, 0]
                if not len(places):
                    continue
                known, records = table.read(keys[places])
                places = places[known]
                founds[places] = True
                scores[places] = table.scores(records)
                values[places, : table.dim] = records[:, : table.dim]
                if with_state:
                    end = self._dim_max + table.state_dim
                    values[places, self._dim_max : end] = table.state(records)
        missing = torch.nonzero(~founds)[:, 0].to(unique_keys.device)
        uses = lfu_accumulated_frequency
        if uses is not None:
            scores += torch.where(founds, _ids(uses), 0)
        return (
            len(missing),
            unique_keys[missing],
            missing,
            table_ids[missing],
            None if uses is None else uses[missing],
            founds.to(unique_keys.device),
            scores.to(unique_keys.device),
            values.to(self._dtype).to(unique_keys.device),
        )

    def insert(
        self,
        keys: Tensor,
        table_ids: Tensor,
        values: Tensor,
        scores: Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Writes the rows of keys, new ones and those that are there.

        Args:
            keys: Keys ``[N]`` i64, none twice in a table.
            table_ids: The table of each, ``[N]`` i64.
            values: ``[N, max_value_dim()]``, as of :meth:`find`.
            scores: Score of each, ``[N]`` i64; without them keys keep theirs, and new ones have 0.
            preserve_existing: Does as if there were no scores.

        Raises:
            InvalidError: Values of another width, or of tables that are not there.
        """
        self._check_open()
        if values.dim() != 2 or values.shape[1] != self._width:
            raise InvalidError(
                f"values must be [N, {self._width}], weights and state, not {tuple(values.shape)}",
                {"width": str(self._width)},
            )
        ids, owners = _ids(keys), self._owners(table_ids)
        rows = values.detach().to("cpu", torch.float32)
        given = None if scores is None or preserve_existing else _ids(scores)
        with self._lock:
            for at, table in enumerate(self._tables):
                places = torch.nonzero(owners == at)[:, 0]
                state = rows[places, self._dim_max : self._dim_max + table.state_dim]
                packed = torch.cat([rows[places, : table.dim], state], 1)
                table.write(ids[places], packed, None if given is None else given[places])

    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Visits all rows of a table, in the order they came in.

        Takes 16 bytes of memory per key beside the budget.

        Args:
            device: Where the tensors are to be.
            batch_size: Most rows at a time.
            table_id: The table.

        Yields:
            Keys ``[N]`` i64, weights ``[N, D]`` f32, state ``[N, S]`` f32 or None, scores ``[N]``
            i64.
        """
        self._check_open()
        table = self._tables[table_id]
        with self._lock:
            every = table.keys()
        for keys in torch.split(every, batch_size):
            with self._lock:
                known, records = table.read(keys)
            if len(records):
                state = table.state(records).contiguous().to(device) if table.state_dim else None
                weights = records[:, : table.dim].contiguous().to(device)
                yield keys[known].to(device), weights, state, table.scores(records).to(device)

    # ------------------------------------------------------------ files

    def dump(
        self,
        table_id: int,
        meta_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        timestamp: int = 0,
        *,
        include_optim: bool = True,
        include_meta: bool = True,
        current_score: int | None = None,
    ) -> None:
        """Writes a table into dynamicemb's files, which ``tierbed import`` reads as well.

        Args:
            table_id: The table.
            meta_file_path: File of the optimizer's numbers, JSON.
            emb_key_path: File of keys, i64.
            embedding_file_path: File of weights, f32.
            score_file_path: File of scores, i64; ages, where the least recently used is evicted.
            opt_file_path: File of optimizer state, f32.
            timestamp: The time of the device's clock, from which ages are counted.
            include_optim: Whether to write the state.
            include_meta: Whether to write the optimizer's numbers.
            current_score: Score of the running step, kept beside the numbers.
        """
        paths = files.Paths(emb_key_path, embedding_file_path, score_file_path, opt_file_path)
        form = self._form(table_id)
        if include_meta:
            files.write_numbers(meta_file_path, form, self._optimizer.get_opt_args(), current_score)
        paths = paths if include_optim else paths.without_state()
        files.write_rows(
            paths, form, self.export_keys_values(torch.device("cpu"), 65536, table_id), timestamp
        )

    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        include_optim: bool = True,
        timestamp: int = 0,
    ) -> int | None:
        """Reads rows of dynamicemb's files into a table; of several ranks, those of this rank.

        State that is missing, or another optimizer's, starts anew with a warning.

        Args:
            table_id: The table.
            meta_file_path: File of the optimizer's numbers.
            emb_file_path: File of keys.
            embedding_file_path: File of weights.
            score_file_path: File of scores, or None.
            opt_file_path: File of optimizer state, or None.
            include_optim: Whether to read the state and the optimizer's numbers.
            timestamp: The time of the device's clock, from which ages are counted.

        Returns:
            The score of the step that wrote them, or None.

        Raises:
            CorruptionError: A file is missing, or has no whole rows.
            InvalidError: Files of another eviction or distribution of keys.
        """
        paths = files.Paths(emb_file_path, embedding_file_path, score_file_path, opt_file_path)
        form = self._form(table_id)
        told = files.read_numbers(meta_file_path, form)
        paths = paths.present()
        kind = self._optimizer.get_opt_args().get("opt_type")
        if include_optim and files.has_state(paths, told, kind, form):
            self._optimizer.set_opt_args(told)
        else:
            paths = paths.without_state()
        for batch in files.read_rows(paths, form, timestamp):
            table_ids = torch.full_like(batch.keys, table_id)
            values = _zeros(len(batch.keys), self._width)
            values[:, self._dim_max :] = self.init_optimizer_state()
            values[:, : form.dim] = batch.weights
            if batch.state is not None:
                values[:, self._dim_max : self._dim_max + form.kept_state_dim] = batch.state
            self.insert(batch.keys, table_ids, values, batch.scores)
        score: int | None = told.get("step_score")
        return score

    def _form(self, table_id: int) -> files.Form:
        options, table = self._options[table_id], self._tables[table_id]
        # Row-wise Adagrad keeps one number in files, and is wider in memory.
        kept = getattr(self._optimizer, "get_ckpt_state_dim", self._optimizer.get_state_dim)
        strategy = getattr(options, "evict_strategy", None)
        return files.Form(
            dim=table.dim,
            kept_state_dim=int(kept(table.dim)),
            evict_strategy=None if strategy is None else str(strategy.value),
            has_ages=getattr(strategy, "name", None) == "LRU",
            dist_type=getattr(options, "dist_type", "roundrobin"),
        )

    def _owners(self, table_ids: Tensor) -> Tensor:
        owners = _ids(table_ids)
        if bool(((owners < 0) | (owners >= len(self._tables))).any()):
            raise InvalidError(f"table_ids must be from 0 to {len(self._tables) - 1}")
        return owners

    def _check_open(self) -> None:
        """Asks the store before the lock, which another thread may have held when it was forked."""
        self._store.tables()


def _ids(tensor: Tensor) -> Tensor:
    """Returns keys, tables or scores as i64 of the host; u64 by its bits."""
    host = tensor.detach().cpu().contiguous()
    return host.view(torch.int64) if host.dtype == torch.uint64 else host.to(torch.int64)


def _zeros(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.float32, device="cpu")
