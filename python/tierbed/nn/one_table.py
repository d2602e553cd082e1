"""What modules over one table of a store have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tierbed.config.words import GivenRows
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import Collection, RowSource
from tierbed.nn.pretrained import check_pretrained, copy_pretrained
from tierbed.nn.states import LoadReport, take_rows
from tierbed.train.session import Announcing
from tierbed.train.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OneTable"]


class OneTable(nn.Module, ABC):
    """A module over one table of a store, in the place of one of ``torch.nn``."""

    _rows: Collection

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        *,
        store: Store,
        name: str,
        rows: GivenRows = "copy",
        **options: Any,
    ) -> Self:
        """Makes a module of rows that exist, as that of ``torch.nn`` does.

        Rows are copied into the store, some at a time.

        Args:
            embeddings: ``[R, D]`` of any float type, in memory or mapped from a file.
            freeze: Whether the rows stay as they are.
            store: The store.
            name: Name of the table.
            rows: ``"copy"`` copies into a new table; ``"keep"`` keeps the rows of a table that the
                store has already, as after a restart.
            options: The other arguments of the class.

        Raises:
            InvalidError: A tensor of another shape, or a table that the store has already.

        Examples:
            >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
            ...     bag = tb.EmbeddingBag.from_pretrained(torch.eye(4), store=store, name="item")
            ...     bag(torch.tensor([[0, 2]]))
            tensor([[0.5000, 0.0000, 0.5000, 0.0000]])
        """
        new = check_pretrained(store, {name: embeddings}, rows)
        module = cls(*embeddings.shape, store=store, name=name, **options)
        copy_pretrained(store, {name: embeddings}, new)
        return module.requires_grad_(not freeze)

    @property
    def store(self) -> RowSource:
        """Where the rows live."""
        return self._rows.store

    @property
    def table(self) -> str:
        """Name of the table in the store."""
        return self._rows.table_names()[0]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes the rows, or lets them train again, as :class:`EmbeddingBagCollection` does.

        Args:
            requires_grad: Whether a backward steps the rows.
        """
        self._rows.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def set_grad_scaler(self, scaler: Any) -> None:
        """Tells which ``torch.amp.GradScaler`` scales the loss; None: none does.

        Args:
            scaler: That of the model, or None.
        """
        self._rows.set_grad_scaler(scaler)

    @property
    def skipped_steps(self) -> int:
        """Steps of the rows left out because their gradient was not finite."""
        return self._rows.skipped_steps

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns ``state_dict()`` and all rows as ``weight``, as torch's module has them.

        For a table that fits in memory. Of an open vocabulary also ``ids`` and ``shared``, as
        :meth:`EmbeddingBagCollection.iter_full_state` says.
        """
        full: dict[str, Tensor] = dict(self.state_dict())
        for name, rows in self._rows.full_state_dict().items():
            full[name.rpartition(".")[2]] = rows
        return full

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        names = {self.table: f"{prefix}weight"}
        take_rows(self._rows, names, state_dict, LoadReport(*rest[-3:]))

    @abstractmethod
    def _bags(self, *inputs: Any) -> KeyedJaggedTensor:
        """Returns the bags that ``forward`` looks up."""

    def _bags_of(self, inputs: Any) -> KeyedJaggedTensor:
        """Returns those of a batch: of the argument of ``forward``, or of a tuple of several."""
        return self._bags(*(inputs if isinstance(inputs, tuple) else (inputs,)))

    def _step_session(self) -> Announcing:
        """Returns what :func:`tierbed.lookahead` controls the look-ahead by."""
        return self._rows._step_session()
