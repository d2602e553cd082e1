"""Optimizers of a training store's tables: their numbers, which may change at any step."""

from __future__ import annotations

from tierbed.config.optim import Optimizer
from tierbed.errors import InvalidError
from tierbed.train.store_rows import StoreRows

__all__ = ["StoreOptimizers"]


class StoreOptimizers(StoreRows):
    """The optimizers of a :class:`tierbed.Store`, by table."""

    _optimizers: dict[int, Optimizer]

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers in force, by table id, of the tables that collections use."""
        return self._optimizers

    def set_learning_rate(self, lr: float, tables: list[str] | None = None) -> None:
        """Changes the learning rate from the next step on, of all tables or of ``tables``.

        Args:
            lr: Learning rate.
            tables: Names of tables; by default all.
        """
        wanted = None if tables is None else {self.table_id(name) for name in tables}
        for table, optimizer in list(self._optimizers.items()):
            if wanted is None or table in wanted:
                self._set_optimizer(table, optimizer.with_lr(lr))

    def learning_rate(self, table: str) -> float:
        """Returns the learning rate of a table.

        It is no part of a checkpoint: the optimizer of the collection gives it on each opening, or
        the ``state_dict`` of a :class:`tierbed.RowOptimizer`.

        Args:
            table: Name of the table.

        Raises:
            InvalidError: No such table, or no collection that gave it one.
        """
        return self.optimizer(table).lr

    def optimizer(self, table: str) -> Optimizer:
        """Returns the optimizer of a table, with its numbers in force.

        Args:
            table: Name of the table.

        Raises:
            InvalidError: No such table, or no collection that gave it one.
        """
        optimizer = self._optimizers.get(self.table_id(table))
        if optimizer is None:
            raise InvalidError(
                f"no collection uses table {table!r} yet, so it has no learning rate; make the "
                "collection first",
                {"table": table},
            )
        return optimizer

    def set_optimizer(self, table: str, optimizer: Optimizer) -> None:
        """Changes the numbers of a table's optimizer from the next step on.

        Args:
            table: Name of the table.
            optimizer: One of the same class.

        Raises:
            InvalidError: No such table, no collection that gave it an optimizer, or another class.
        """
        found = self.optimizer(table)
        if type(found) is not type(optimizer):
            raise InvalidError(
                f"the rows of table {table!r} have the state of {type(found).__name__}, not of "
                f"{type(optimizer).__name__}; give one of that class, or begin a new store",
                {"table": table},
            )
        self._set_optimizer(self.table_id(table), optimizer)

    def _set_optimizer(self, table: int, optimizer: Optimizer) -> None:
        self._native.set_optimizer(table, optimizer.hyper())
        self._optimizers[table] = optimizer
