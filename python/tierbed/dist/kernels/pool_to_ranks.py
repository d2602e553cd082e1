"""Looks up, pools and writes into the outputs of all ranks, in one kernel.

A program pools a tile of consecutive bags of one feature and stores each vector where its
sample's rank wants it: ``outputs`` are addresses, of peers' memory as of one's own. Nothing is
packed before or unpacked after. Source: PGAS §III, Listing 2. Differs: a tile of bags per program
instead of one, and 128-bit stores, because a peer's memory is best written in whole sectors.

Rows are added in index order in float32, products rounded before they are added, so that the bits
are those of the CPU kernels. Some rows of a bag are on their way at once: a thread loads their
indices, then the rows, then adds them in order. Data stores are plain; what orders them are the
signals launched behind them on the same stream (``signals.py``).

Indices and outputs pass through the caches once; rows skip the first one, where none is found
again, and may stay in the second. Rows may be kept in fewer bytes, as in a
:class:`tierbed.CodedStore`: a number is brought to float32 first, by the formula of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import OPTIONS, launch, tile
from tierbed.dist.kernels.tiles import Tiles
from tierbed.errors import InvalidError

__all__ = [
    "ROW_TYPES",
    "PoolTile",
    "pool_tile",
    "pool_to_ranks",
    "pool_to_ranks_kernel",
    "split_codes",
]


@dataclass(frozen=True, kw_only=True)
class PoolTile:
    """What a program of the kernel takes at a time.

    Args:
        bags: Bags of a program.
        rows_at_once: Rows of each bag that are loaded together.
        warps: Warps of a program.
    """

    bags: int
    rows_at_once: int
    warps: int


# Bytes before the codes of a row of the codec ``int8``.
HEAD_BYTES = 4
# Most bags of a program: more of them lengthen the loop to the longest one.
BAGS_MAX = 8
# Most bags where no bag has two ids: there is no loop then.
SINGLES_MAX = 32
# Bytes of a row that a thread loads at once.
LOAD_BYTES = 16
# Rows of a bag that are loaded before the first is added.
ROWS_AT_ONCE = 4
# Most sums that a thread holds where there is no loop.
SINGLE_VALUES_MAX = 32
# How numbers of rows may be kept; u8 are codes with a scale and a bias per row.
ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def pool_tile(dim: int, *, is_single: bool = False, item_bytes: int = 4) -> PoolTile:
    """Returns what a program takes at a time.

    Either way a thread waits for some loads at once: of one bag's rows, or of several bags.

    Args:
        dim: Numbers of a row.
        is_single: Whether no bag has more than one id.
        item_bytes: Bytes that a number of a row is kept in.
    """
    width = triton.next_power_of_2(dim)
    values = LOAD_BYTES // item_bytes
    warps = min(8, max(1, width // (32 * values)))
    if is_single:
        values = min(values * ROWS_AT_ONCE, SINGLE_VALUES_MAX)
        bags, warps = tile(width, SINGLES_MAX, values, warps)
        return PoolTile(bags=bags, rows_at_once=1, warps=warps)
    bags, warps = tile(width, BAGS_MAX, values, warps)
    return PoolTile(bags=bags, rows_at_once=ROWS_AT_ONCE, warps=warps)


def split_codes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Parts rows of the codec ``int8``, ``[N, dim + 4]`` u8, into what the kernel takes.

    Returns:
        Codes ``[N, dim]`` u8, and ``[N]`` i32: the scale in the lower half, the bias in the upper
        one, both bf16. Apart, codes of whole vectors begin at whole vectors.
    """
    heads = codes[:, :HEAD_BYTES].contiguous().view(torch.int32)
    return codes[:, HEAD_BYTES:].contiguous(), heads.view(-1)


@triton.jit
def add_rows(
    total,
    rows,
    heads,
    first_row,
    indices,
    weights,
    start,
    end,
    column,
    dim: tl.constexpr,
    width: tl.constexpr,
    is_coded: tl.constexpr,
    is_weighted: tl.constexpr,
    rows_at_once: tl.constexpr,
):
    """Adds the next ``rows_at_once`` rows of each bag to ``total``, in order."""
    row_ids, factors, loaded, scales = (), (), (), ()
    for ahead in tl.static_range(rows_at_once):
        at = start + ahead
        index = tl.load(indices + at, mask=at < end, other=0, eviction_policy="evict_first")
        row_ids = row_ids + (first_row + index,)
        if is_weighted:
            weight = tl.load(weights + at, mask=at < end, other=0.0, eviction_policy="evict_first")
            factors = factors + (weight,)
    for ahead in tl.static_range(rows_at_once):
        is_there = (start + ahead < end)[:, None]
        if width != dim:
            is_there = is_there & (column < dim)[None, :]
        place = rows + row_ids[ahead][:, None] * dim + column[None, :]
        loaded = loaded + (tl.load(place, mask=is_there, cache_modifier=".cg"),)
        if is_coded:
            scales = scales + (tl.load(heads + row_ids[ahead], mask=start + ahead < end, other=0),)
    for ahead in tl.static_range(rows_at_once):
        values = loaded[ahead].to(tl.float32)
        if is_coded:
            # A bf16 is the upper half of a float32.
            scale = (scales[ahead] << 16).to(tl.float32, bitcast=True)
            bias = (scales[ahead] & -65536).to(tl.float32, bitcast=True)
            values = values * scale[:, None] + bias[:, None]
        if is_weighted:
            values = factors[ahead][:, None] * values
        # Not adding zeros: -0 and NaN stay what they are.
        total = tl.where((start + ahead < end)[:, None], total + values, total)
    return total


# Numbers that differ from batch to batch make no kernel of their own.
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["outputs"])
def pool_to_ranks_kernel(
    rows,
    heads,
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
    rows_at_once: tl.constexpr,
    is_single: tl.constexpr,
    is_coded: tl.constexpr,
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
    # Known before the rows come.
    rank = tl.zeros((bags_per_program,), tl.int32)
    for other in tl.static_range(1, rank_count):
        rank += (bag >= tl.load(first_samples + other)).to(tl.int32)
    sample = bag - tl.load(first_samples + rank, mask=is_bag, other=0)
    output = tl.load(outputs + rank, mask=is_bag, other=0).to(tl.pointer_type(tl.float32))
    output_column = tl.load(output_columns + feature)
    column = tl.arange(0, width)
    total = tl.zeros((bags_per_program, width), tl.float32)
    if is_single:
        total = add_rows(
            total, rows, heads, first_row, indices, weights, start, end, column,
            dim, width, is_coded, is_weighted, 1,
        )  # fmt: skip
    else:
        for ahead in range(0, tl.max(end - start, axis=0), rows_at_once):
            total = add_rows(
                total, rows, heads, first_row, indices, weights, start + ahead, end, column,
                dim, width, is_coded, is_weighted, rows_at_once,
            )  # fmt: skip
        # A bag of one id is its mean.
        if is_mean:
            count = tl.maximum(end - start, 1).to(tl.float32)
            count = tl.broadcast_to(count[:, None], (bags_per_program, width))
            total = tl.div_rn(total, count)
    word = sample.to(tl.int64) * stride + output_column
    place = output[:, None] + word[:, None] + column[None, :]
    if is_aligned:
        # The compiler cannot see through addresses from memory that rows are aligned.
        place = tl.max_contiguous(tl.multiple_of(place, (1, 16)), (1, width))
    is_there = is_bag[:, None]
    if width != dim:
        is_there = is_there & (column < dim)[None, :]
    tl.store(place, total, mask=is_there, cache_modifier=".cs")


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
    is_single: bool = False,
    heads: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Pools all bags into the outputs of all ranks, of every rank its samples.

    Args:
        rows: ``[N, dim]``, one of :data:`ROW_TYPES`, tables of this rank one behind the other.
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
        is_single: Whether no bag has more than one id; more ids of a bag are not seen then.
        heads: ``[N]`` i32, scale and bias of rows that are u8, as of :func:`split_codes`.
        tiles: By default the measured ones of the device, or those of :func:`pool_tile`.

    Raises:
        InvalidError: ``is_aligned`` is said of a shape that is not, or rows of another type.
    """
    dim = rows.shape[1]
    if is_aligned and (dim % 4 or stride % 4):
        raise InvalidError(f"dim {dim} and stride {stride} are not both multiples of 4")
    if rows.dtype not in ROW_TYPES or (rows.dtype == torch.uint8) != (heads is not None):
        raise InvalidError(
            f"rows are {rows.dtype} with {'no ' if heads is None else ''}heads; bring rows to one "
            f"of {ROW_TYPES}, and give heads to uint8 alone"
        )
    indices, offsets, weights = bags
    feature_count = first_rows.numel()
    batch = (offsets.numel() - 1) // feature_count
    chosen = pool_tile(dim, is_single=is_single, item_bytes=rows.element_size())
    if rows.dtype == torch.float32:
        tiles = Tiles.of(rows.device) if tiles is None else tiles
        name = "pool_to_ranks_single" if is_single else "pool_to_ranks"
        chosen = tiles.pick(name, dim, chosen)
    launch(
        pool_to_ranks_kernel,
        feature_count * triton.cdiv(batch, chosen.bags),
        rows,
        rows if heads is None else heads,
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
        bags_per_program=chosen.bags,
        rows_at_once=chosen.rows_at_once,
        is_single=is_single,
        is_coded=heads is not None,
        is_weighted=weights is not None,
        is_mean=is_mean,
        num_warps=chosen.warps,
        **OPTIONS,
    )
