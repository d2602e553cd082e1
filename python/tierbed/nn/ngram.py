"""N-gram memory: hashed rows of the tokens before each position, added to a hidden state.

What a position of a text looks up depends on its tokens alone. So the rows of coming batches are
known before the model runs, and lie ready when it asks. That lets the memory be far larger than
the model, and lie on an SSD.

Source: Engram (Cheng et al., arXiv 2601.07372): several orders, several hash heads, a gate by the
hidden state; SCONE (Yu et al., arXiv 2502.01637): rows of n-grams kept off the accelerator.
Differs: no convolution behind the gate and no folding of the vocabulary, because a tokenizer
decides that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierbed.config.optim import Optimizer
from tierbed.config.tables import EmbeddingConfig, Init, Normal
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import EmbeddingCollection, RowSource

__all__ = ["NgramHash", "NgramMemory"]

# Knuth's multiplier of MMIX joins the tokens; the others are those of SplitMix64's finalizer.
_JOIN = 6364136223846793005
_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
_LAST_SHIFT = 31
_LEAST_FIT = 1e-6


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifts ``values`` i64 right without their sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(values: Tensor) -> Tensor:
    for bits, factor in _ROUNDS:
        values = (values ^ _shifted(values, bits)) * factor
    return values ^ _shifted(values, _LAST_SHIFT)


class NgramHash:
    """The rows of the n-grams that end at each token.

    Holds no rows: a dataset or ``collate_fn`` may have one, in a worker, too. The same arguments
    give the same rows on every machine.

    Args:
        rows: Rows of each head. Different n-grams may share a row, by chance.
        orders: Tokens of an n-gram, one number per table.
        heads: Rows that an n-gram has in its table, each by a hash of its own.
        name: Begins the names of tables and features, such as ``ngram_2``.
        seed: Another seed, other hashes.

    Raises:
        InvalidError: No order, one twice, or a number below 1.

    Examples:
        >>> ngrams = tb.nn.NgramHash(rows=1000, orders=(2,), heads=2)
        >>> batch = ngrams(torch.tensor([[7, 8, 7, 8]]))
        >>> batch.keys(), batch.values().shape
        (['ngram_2'], torch.Size([8]))
        >>> of_token = batch.values().view(4, 2)
        >>> bool((of_token[1] == of_token[3]).all())  # both end the n-gram (7, 8)
        True
    """

    def __init__(
        self,
        *,
        rows: int,
        orders: Sequence[int] = (2, 3),
        heads: int = 4,
        name: str = "ngram",
        seed: int = 0,
    ) -> None:
        if not orders or len(set(orders)) != len(orders) or min(*orders, rows, heads) < 1:
            raise InvalidError(
                f"an n-gram memory needs orders that differ, rows and heads of at least 1, not "
                f"orders={tuple(orders)}, rows={rows}, heads={heads}; orders=(2, 3) is usual"
            )
        self.rows = rows
        self.orders = tuple(orders)
        self.heads = heads
        self.name = name
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (len(self.orders), heads)
        self._salts = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device="cpu")

    def feature_names(self) -> list[str]:
        """Returns the features, which are the names of the tables, too; one per order."""
        return [f"{self.name}_{order}" for order in self.orders]

    def __call__(self, tokens: Tensor) -> KeyedJaggedTensor:
        """Finds the rows of a batch.

        Args:
            tokens: ``[B, T]`` integers of at least 0.

        Returns:
            Per order ``B`` bags of ``T * heads`` rows, head by head within a position. N-grams
            that begin before the text have other rows than all that do not.
        """
        tokens = tokens.to(torch.int64)
        samples, length = tokens.shape
        # Zero stands for what is before the text.
        longest = max(self.orders)
        padded = nn.functional.pad(tokens + 1, (longest - 1, 0))
        first_rows = torch.arange(self.heads, device=tokens.device) * self.rows
        salts_of_orders = self._salts.to(tokens.device)
        values = []
        for order, salts in zip(self.orders, salts_of_orders, strict=True):
            joined = torch.full_like(tokens, order)
            for back in reversed(range(order)):
                at = longest - 1 - back
                joined = joined * _JOIN + padded[:, at : at + length]
            # A shift leaves 63 bits, so that the remainder is none of a negative number.
            hashed = _shifted(_mixed(joined[..., None] ^ salts), 1)
            values.append((hashed % self.rows + first_rows).view(-1))
        bag_count = len(self.orders) * samples
        lengths = torch.full((bag_count,), length * self.heads, device=tokens.device)
        return KeyedJaggedTensor(
            self.feature_names(), torch.cat(values), lengths=lengths, stride=samples
        )


class NgramMemory(nn.Module):
    """Adds what a table says of the last tokens to the hidden state of a language model.

    The rows of all orders and heads of a position stand side by side, a key and a value are
    computed of them, and the value is added as far as the key fits the hidden state: ``hidden +
    sigmoid(root(norm(hidden) . norm(key) / sqrt(H))) * value``, where ``root`` is the square root
    of the absolute value, with its sign. Positions see earlier tokens only.

    Args:
        hidden_dim: ``H``, elements of the hidden state.
        ngrams: Which rows belong to which tokens.
        embedding_dim: ``D``, elements of a row. A table has ``heads * rows`` of them.
        store: Where the tables live: a store to train, a snapshot to serve.
        optimizer: As for :class:`tierbed.EmbeddingCollection`.
        init: How rows start.

    Examples:
        >>> ngrams = tb.nn.NgramHash(rows=1000, orders=(2, 3), heads=2)
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     memory = tb.nn.NgramMemory(32, ngrams, embedding_dim=8, store=store)
        ...     tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
        ...     memory(torch.zeros(2, 4, 32), ngrams(tokens)).shape
        torch.Size([2, 4, 32])
    """

    def __init__(
        self,
        hidden_dim: int,
        ngrams: NgramHash,
        *,
        embedding_dim: int,
        store: RowSource,
        optimizer: Optimizer | type[Any] | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        self.ngrams = ngrams
        self.embeddings: nn.Module = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=ngrams.heads * ngrams.rows,
                    embedding_dim=embedding_dim,
                    init=Normal(std=0.02) if init is None else init,
                )
                for name in ngrams.feature_names()
            ],
            store=store,
            optimizer=optimizer,
        )
        memory_dim = len(ngrams.orders) * ngrams.heads * embedding_dim
        self.key = nn.Linear(memory_dim, hidden_dim, bias=False)
        self.value = nn.Linear(memory_dim, hidden_dim, bias=False)
        self.norm_hidden = nn.RMSNorm(hidden_dim)
        self.norm_key = nn.RMSNorm(hidden_dim)

    def forward(self, hidden: Tensor, sparse: Any) -> Tensor:
        """Adds the memory of every position.

        Args:
            hidden: ``[B, T, H]``.
            sparse: What :class:`NgramHash` returned for the tokens ``[B, T]``.

        Returns:
            ``[B, T, H]``.

        Raises:
            InvalidError: Rows of another number of positions.
        """
        samples, length, hidden_dim = hidden.shape
        found = self.embeddings(sparse)
        rows = [found[name].values() for name in self.ngrams.feature_names()]
        wanted = samples * length * self.ngrams.heads
        if any(len(of_order) != wanted for of_order in rows):
            raise InvalidError(
                f"hidden states of {samples} x {length} positions need {wanted} rows of each "
                f"order, not {[len(of_order) for of_order in rows]}; hash the same tokens"
            )
        memory = torch.cat([of_order.view(samples, length, -1) for of_order in rows], dim=-1)
        products = self.norm_hidden(hidden) * self.norm_key(self.key(memory))
        fit = products.sum(dim=-1, keepdim=True) / math.sqrt(hidden_dim)
        # The bound keeps the gradient of the root finite.
        gate = torch.sigmoid(fit.sign() * fit.abs().clamp_min(_LEAST_FIT).sqrt())
        added: Tensor = gate * self.value(memory)
        return hidden + added
