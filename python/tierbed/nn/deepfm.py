"""DeepFM: a factorisation machine beside a deep network. Source: Guo et al., arXiv 1703.04247."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tierbed.errors import InvalidError
from tierbed.nn.ctr import CtrModel, mlp

__all__ = ["DeepFM"]


class DeepFM(CtrModel):
    """Factorisation machine and deep network over the same rows.

    A row is the first-order weight followed by ``embedding_dim - 1`` factors. A numerical
    feature is a field with one learned vector, scaled by its value. Arguments as
    :class:`CtrModel`. Default dim 9, that is 8 factors (RecDB §5.1).
    """

    kind = "deepfm"
    default_dim = 9

    def build(self) -> None:
        """Makes the dense fields and the deep network.

        Raises:
            InvalidError: An ``embedding_dim`` below 2.
        """
        factors = self.embedding_dim - 1
        if factors < 1:
            raise InvalidError("DeepFM needs an embedding_dim of at least 2")
        self.first_order = nn.Linear(self.dense_width, 1)
        self.dense_factors = nn.Parameter(torch.randn(self.dense_width, factors) * 0.01)
        fields = self.dense_width + len(self.table_sizes)
        self.deep = mlp([fields * factors, *self.hidden, 1], is_output=True)

    def head(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Computes logits ``[B]``."""
        scaled = dense[:, :, None] * self.dense_factors
        factors = torch.cat([scaled, rows[:, :, 1:]], dim=1)
        first: Tensor = self.first_order(dense).squeeze(1) + rows[:, :, 0].sum(dim=1)
        square_of_sum = factors.sum(dim=1).square()
        sum_of_squares = factors.square().sum(dim=1)
        second = 0.5 * (square_of_sum - sum_of_squares).sum(dim=1)
        deep: Tensor = self.deep(factors.flatten(1))
        return first + second + deep.squeeze(1)
