"""Looks up, pools and writes into the outputs of all ranks, in one kernel.

A program pools a tile of consecutive bags of one feature and stores each vector where its
sample's rank wants it: ``outputs`` are addresses, of peers' memory as of one's own. Nothing is
packed before or unpacked after. Source: PGAS §III, Listing 2. Differs: a tile of bags per program
instead of one, and 128-bit stores, because a peer's memory is best written in whole sectors.

Rows are added in index order in float32, products rounded before they are added, so that the bits
are those of the CPU kernels. Data stores are plain; what orders them are the signals launched
behind them on the same stream (``signals.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import OPTIONS, launch, tile
from tierbed.errors import InvalidError

__all__ = ["pool_tile", "pool_to_ranks", "pool_to_ranks_kernel"]

# Most bags of a program: more of them lengthen the loop to the longest one.
BAGS_MAX = 8


def pool_tile(dim: int) -> tuple[int, int]:
    """Returns bags of a program, and warps for them."""
    return tile(triton.next_power_of_2(dim), BAGS_MAX, 16)


# Numbers that differ from batch to batch make no kernel of their own.
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["outputs"])
def pool_to_ranks_kernel(
    rows,
    first_rows,
    indices,
    offsets,
    weights,
    outputs,
    first_samples,
    output_columns,
    batch,
    stride,
    dim: tl.constexpr,
    width: tl.constexpr,
    is_aligned: tl.constexpr,
    rank_count: tl.constexpr,
    bags_per_program: tl.constexpr,
    is_weighted: tl.constexpr,
    is_mean: tl.constexpr,
):
    """Pools ``bags_per_program`` bags of a feature; see :func:`pool_to_ranks`."""
    programs = tl.cdiv(batch, bags_per_program)
    feature = tl.program_id(0) // programs
    bag = (tl.program_id(0) % programs) * bags_per_program + tl.arange(0, bags_per_program)
    is_bag = bag < batch
    start = tl.load(offsets + feature * batch + bag, mask=is_bag, other=0)
    end = tl.load(offsets + feature * batch + bag + 1, mask=is_bag, other=0)
    first_row = tl.load(first_rows + feature)
    column = tl.arange(0, width)
    is_column = column[None, :] < dim
    total = tl.zeros((bags_per_program, width), tl.float32)
    for at in range(tl.max(end - start, axis=0)):
        is_index = start + at < end
        row = first_row + tl.load(indices + start + at, mask=is_index, other=0)
        is_there = is_index[:, None]
        if width != dim:
            is_there = is_there & is_column
        values = tl.load(rows + row[:, None] * dim + column[None, :], mask=is_there)
        if is_weighted:
            weight = tl.load(weights + start + at, mask=is_index, other=0.0)
            values = weight[:, None] * values
        # Not adding zeros: -0 and NaN stay what they are.
        total = tl.where(is_index[:, None], total + values, total)
    if is_mean:
        count = tl.maximum(end - start, 1).to(tl.float32)
        total = tl.div_rn(total, tl.broadcast_to(count[:, None], (bags_per_program, width)))
    rank = tl.zeros((bags_per_program,), tl.int32)
    for other in tl.static_range(1, rank_count):
        rank += (bag >= tl.load(first_samples + other)).to(tl.int32)
    sample = bag - tl.load(first_samples + rank, mask=is_bag, other=0)
    output = tl.load(outputs + rank, mask=is_bag, other=0).to(tl.pointer_type(tl.float32))
    word = sample.to(tl.int64) * stride + tl.load(output_columns + feature)
    place = output[:, None] + word[:, None] + column[None, :]
    if is_aligned:
        # The compiler cannot see through addresses from memory that rows are aligned.
        place = tl.max_contiguous(tl.multiple_of(place, (1, 16)), (1, width))
    is_there = is_bag[:, None]
    if width != dim:
        is_there = is_there & is_column
    tl.store(place, total, mask=is_there)


def pool_to_ranks(
    rows: Tensor,
    first_rows: Tensor,
    bags: tuple[Tensor, Tensor, Tensor | None],
    outputs: Tensor,
    first_samples: Tensor,
    output_columns: Tensor,
    stride: int,
    *,
    is_mean: bool = False,
    is_aligned: bool = True,
) -> None:
    """Pools all bags into the outputs of all ranks, of every rank its samples.

    Args:
        rows: ``[N, dim]`` f32, all tables of this rank one behind the other.
        first_rows: ``[F]`` i64, first row of each feature's table.
        bags: Ids ``[E]`` i64 within the tables, offsets ``[F*B+1]`` i64, and weights ``[E]`` f32
            or None, of the samples of all ranks.
        outputs: ``[ranks]`` i64, addresses of ``[samples, stride]`` f32, 16-byte aligned.
        first_samples: ``[ranks+1]`` i64, first sample of each rank, then ``B``.
        output_columns: ``[F]`` i64.
        stride: Columns of an output.
        is_mean: Whether vectors are divided by their bag's number of ids.
        is_aligned: Whether ``dim``, ``stride`` and all of ``output_columns`` are multiples of 4:
            stores have 128 bits then.

    Raises:
        InvalidError: ``is_aligned`` is said of a shape that is not.
    """
    dim = rows.shape[1]
    if is_aligned and (dim % 4 or stride % 4):
        raise InvalidError(f"dim {dim} and stride {stride} are not both multiples of 4")
    indices, offsets, weights = bags
    feature_count = first_rows.numel()
    batch = (offsets.numel() - 1) // feature_count
    bags_per_program, warps = pool_tile(dim)
    programs = feature_count * triton.cdiv(batch, bags_per_program)
    launch(
        pool_to_ranks_kernel,
        programs,
        rows,
        first_rows,
        indices,
        offsets,
        rows if weights is None else weights,
        outputs,
        first_samples,
        output_columns,
        batch,
        stride,
        dim=dim,
        width=triton.next_power_of_2(dim),
        is_aligned=is_aligned,
        rank_count=outputs.numel(),
        bags_per_program=bags_per_program,
        is_weighted=weights is not None,
        is_mean=is_mean,
        num_warps=warps,
        **OPTIONS,
    )
