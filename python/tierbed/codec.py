"""Codecs that keep rows in fewer bytes.

A :class:`Codec` turns rows of one table to codes and back. ``f16``, ``bf16``, ``int8``, ``int4``
and ``gauss4`` need no training; ``int8`` and ``int4`` have a scale and bias per row, so that small
rows keep their shape. :func:`train_product` learns codebooks for a few bytes per row.
``evstore16``, ``evstore8`` and ``evstore4`` are the fixed-range formats of that system, for
comparison only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tierbed._native import NativeCodec
from tierbed.errors import InvalidError

__all__ = ["CODECS", "Codec", "train_product"]

CODECS = (
    "f32",
    "f16",
    "bf16",
    "int8",
    "int4",
    "gauss4",
    "evstore16",
    "evstore8",
    "evstore4",
)

ENTRIES = 256


class Codec:
    """Keeps rows of ``dim`` numbers in ``code_bytes`` bytes each.

    Args:
        name: One of :data:`CODECS`, or ``"product"``.
        dim: Elements of a row.
        codebooks: For ``"product"``: ``[P, 256, dim / P]`` f32 codebooks of ``P`` parts, as
            :func:`train_product` or faiss learn them.

    Raises:
        InvalidError: No such codec, or codebooks of another shape.
    """

    def __init__(self, name: str, dim: int, codebooks: Tensor | None = None) -> None:
        if (name == "product") != (codebooks is not None):
            raise InvalidError('codebooks belong to the codec "product", and it needs them')
        parts = 0
        if codebooks is not None:
            if codebooks.dim() != 3 or codebooks.shape[1] != ENTRIES:
                raise InvalidError(
                    f"codebooks must be [parts, {ENTRIES}, dim / parts], "
                    f"found {tuple(codebooks.shape)}"
                )
            parts = int(codebooks.shape[0])
            codebooks = codebooks.detach().contiguous()
        self.name = name
        self.dim = dim
        self._codebooks = codebooks
        self._native = NativeCodec(name, dim, codebooks, parts)

    @property
    def native(self) -> NativeCodec:
        """The engine's codec, for resident rows."""
        return self._native

    @property
    def codebooks(self) -> Tensor:
        """``[P, 256, dim / P]`` f32 of a product codec.

        Raises:
            InvalidError: Any other codec.
        """
        if self._codebooks is None:
            raise InvalidError(f"the codec {self.name!r} has no codebooks")
        return self._codebooks

    @property
    def code_bytes(self) -> int:
        """Bytes of a row."""
        return self._native.code_bytes()

    def encode(self, rows: Tensor) -> Tensor:
        """Encodes ``rows`` ``[N, D]`` f32; returns ``[N, code_bytes]`` u8.

        Args:
            rows: Rows ``[N, dim]`` f32.

        Raises:
            InvalidError: Rows of another dim, or a number that this codec cannot keep.
        """
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise InvalidError(f"rows must be [N, {self.dim}], found {tuple(rows.shape)}")
        codes = torch.empty(rows.shape[0], self.code_bytes, dtype=torch.uint8, device="cpu")
        self._native.encode(rows.detach().contiguous(), codes)
        return codes

    def decode(self, codes: Tensor, indices: Tensor | None = None) -> Tensor:
        """Decodes ``codes`` ``[N, code_bytes]`` to ``[N, D]`` f32.

        With ``indices`` ``[E]`` i64, decodes only those rows, in that order, to ``[E, D]``.

        Args:
            codes: Codes ``[N, code_bytes]`` u8.
            indices: Which of them, ``[E]`` i64; by default all.

        Raises:
            InvalidError: Codes of another width.
        """
        if codes.dim() != 2 or codes.shape[1] != self.code_bytes:
            raise InvalidError(f"codes must be [N, {self.code_bytes}], found {tuple(codes.shape)}")
        asked = torch.arange(codes.shape[0], device="cpu") if indices is None else indices
        out = torch.empty(asked.numel(), self.dim, device="cpu")
        self._native.decode(codes.contiguous(), asked.contiguous(), out, 1)
        return out

    def relative_error(self, rows: Tensor) -> float:
        """Returns the root mean square error of ``rows`` next to that of zeroes.

        Args:
            rows: Rows ``[N, dim]`` f32.
        """
        found = self.decode(self.encode(rows)).double()
        norm = rows.double().pow(2).sum()
        return float(((rows.double() - found).pow(2).sum() / norm).sqrt()) if norm > 0 else 0.0

    def __repr__(self) -> str:
        return f"Codec({self.name!r}, dim={self.dim}, code_bytes={self.code_bytes})"


def train_product(
    rows: Tensor,
    part_count: int,
    *,
    weights: Tensor | None = None,
    rounds: int = 12,
    sample_rows: int = 32_768,
    seed: int = 0,
) -> Codec:
    """Learns a product codec of ``part_count`` bytes per row.

    faiss trains the codebooks when it is installed and no ``weights`` are given; else k-means here
    does, part by part. Equal arguments give equal codebooks.

    Args:
        rows: ``[N, D]`` f32.
        part_count: Bytes of a code; divides ``D``.
        weights: ``[N]``, how much a row counts: its uses, for instance.
        rounds: Rounds of k-means.
        sample_rows: Most rows to learn from; drawn by ``weights``.
        seed: Of the sample and the first centres.

    Raises:
        InvalidError: ``D`` is no multiple of ``part_count``, or there are no rows.
    """
    count, dim = rows.shape
    if part_count < 1 or dim % part_count or count == 0:
        raise InvalidError(
            f"product codes of {part_count} parts need rows whose dim is a multiple of it; "
            f"found {count} rows of {dim}"
        )
    generator = torch.Generator().manual_seed(seed)
    sample = _sample(rows.detach(), weights, sample_rows, generator)
    faiss = _faiss() if weights is None and sample.shape[0] >= ENTRIES else None
    if faiss is not None:
        return Codec("product", dim, _faiss_codebooks(faiss, sample, part_count))
    parts = sample.view(sample.shape[0], part_count, dim // part_count)
    books = [_k_means(parts[:, at].contiguous(), rounds, generator) for at in range(part_count)]
    return Codec("product", dim, torch.stack(books))


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        return None


def _faiss_codebooks(faiss: Any, sample: Tensor, part_count: int) -> Tensor:
    quantizer = faiss.ProductQuantizer(sample.shape[1], part_count, 8)
    quantizer.train(sample.contiguous().numpy())
    books = torch.as_tensor(faiss.vector_to_array(quantizer.centroids))
    return books.reshape(part_count, ENTRIES, sample.shape[1] // part_count).clone()


def _sample(
    rows: Tensor, weights: Tensor | None, sample_rows: int, generator: torch.Generator
) -> Tensor:
    count = rows.shape[0]
    if weights is None:
        if count <= sample_rows:
            return rows
        return rows[torch.randperm(count, generator=generator)[:sample_rows]]
    shares = weights.double().cumsum(0)
    drawn = torch.rand(sample_rows, generator=generator, dtype=torch.float64) * shares[-1]
    return rows[torch.searchsorted(shares, drawn).clamp_max(count - 1)]


def _k_means(points: Tensor, rounds: int, generator: torch.Generator) -> Tensor:
    """Returns 256 centres ``[256, d]`` of ``points`` ``[N, d]``."""
    distinct: Tensor = torch.unique(points, dim=0)
    if distinct.shape[0] <= ENTRIES:
        padding = torch.zeros(ENTRIES - distinct.shape[0], points.shape[1])
        return torch.cat([distinct, padding])
    centres: Tensor = distinct[
        torch.randperm(distinct.shape[0], generator=generator)[:ENTRIES]
    ].clone()
    for _ in range(rounds):
        # The squared distance, without the point's own square, which is the same for all centres.
        squares = centres.pow(2).sum(1)
        nearest = torch.addmm(squares, points, centres.T, alpha=-2).argmin(1)
        sizes = torch.bincount(nearest, minlength=ENTRIES)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        is_used = sizes > 0
        centres[is_used] = sums[is_used] / sizes[is_used, None]
        unused = int((~is_used).sum())
        if unused:
            # A centre without points starts again at a point drawn anew.
            drawn = torch.randint(points.shape[0], (unused,), generator=generator)
            centres[~is_used] = points[drawn]
    return centres
