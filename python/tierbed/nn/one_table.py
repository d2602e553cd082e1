"""What modules over one table of a store have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import Collection, RowSource
from tierbed.nn.states import LoadReport, take_rows
from tierbed.train.session import Announcing

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OneTable"]


class OneTable(nn.Module):
    """A module over one table of a store, in the place of one of ``torch.nn``."""

    _rows: Collection

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, *, store: RowSource, name: str, freeze: bool = True, **options: Any
    ) -> Self:
        """Makes a module whose table has the rows ``embeddings``, which are written into it.

        Args:
            embeddings: ``[R, D]`` of any float type, in memory or mapped from a file.
            store: Where the rows live from then on.
            name: Name of the table. Rows that it has are overwritten: after a restart call the
                constructor instead.
            freeze: Whether the rows do not train.
            options: Other arguments of the constructor.

        Raises:
            InvalidError: No matrix.
        """
        if embeddings.dim() != 2:
            raise InvalidError(f"embeddings must be [R, D], found {tuple(embeddings.shape)}")
        module = cls(*embeddings.shape, store=store, name=name, **options)
        module.load_state_dict({"weight": embeddings})
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

    def _bags(self, *inputs: Any) -> KeyedJaggedTensor:
        """Returns the bags that ``forward`` looks up."""
        raise NotImplementedError

    def _bags_of(self, inputs: Any) -> KeyedJaggedTensor:
        """Returns those of a batch: of the argument of ``forward``, or of a tuple of several."""
        return self._bags(*(inputs if isinstance(inputs, tuple) else (inputs,)))

    def _step_session(self) -> Announcing:
        """Returns what :func:`tierbed.lookahead` controls the look-ahead by."""
        return self._rows._step_session()
