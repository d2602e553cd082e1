"""PNN: inner products of all pairs as input of a network. Source: Qu et al., arXiv 1611.00144."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tierbed.nn.ctr import CtrModel, mlp, pairwise_dots

__all__ = ["PNN"]


class PNN(CtrModel):
    """Product-based network with inner products (IPNN).

    All rows and their pairwise inner products feed one network; the numerical features enter as
    one more vector. Arguments as :class:`CtrModel`. Default dim 18 (RecDB §5.1).
    """

    kind = "pnn"
    default_dim = 18

    def build(self) -> None:
        """Makes the projection of the numerical features and the deep network."""
        vectors = len(self.table_sizes) + 1
        self.project = nn.Linear(self.dense_width, self.embedding_dim)
        width = vectors * self.embedding_dim + vectors * (vectors - 1) // 2
        self.deep = mlp([width, *self.hidden, 1], is_output=True)

    def head(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Computes logits ``[B]``."""
        vectors = torch.cat([self.project(dense)[:, None, :], rows], dim=1)
        features = torch.cat([vectors.flatten(1), pairwise_dots(vectors)], dim=1)
        logits: Tensor = self.deep(features)
        return logits.squeeze(1)
