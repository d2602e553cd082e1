"""DLRM: dot products of all pairs of features. Source: Naumov et al., arXiv 1906.00091."""

from __future__ import annotations

import torch
from torch import Tensor

from tierbed.nn.ctr import CtrModel, mlp, pairwise_dots

__all__ = ["DLRM"]


class DLRM(CtrModel):
    """Deep learning recommendation model.

    A bottom network brings the numerical features to ``embedding_dim``; the dot products of all
    pairs of the resulting vectors, and the bottom's output, feed the top network. Arguments as
    :class:`CtrModel`; ``hidden`` are the top's hidden layers. Default dim 36 (RecDB §5.1).
    """

    kind = "dlrm"
    default_dim = 36

    def build(self) -> None:
        """Makes the bottom and the top network."""
        vectors = len(self.table_sizes) + 1
        self.bottom = mlp([self.dense_width, 64, self.embedding_dim])
        pairs = vectors * (vectors - 1) // 2
        self.top = mlp([self.embedding_dim + pairs, *self.hidden, 1], is_output=True)

    def head(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Computes logits ``[B]``."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None, :], rows], dim=1)
        logits: Tensor = self.top(torch.cat([bottom, pairwise_dots(vectors)], dim=1))
        return logits.squeeze(1)
