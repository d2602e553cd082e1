"""Looks up, pools and writes into the outputs of all ranks, in one kernel.

A program pools a tile of consecutive bags of one feature and stores each vector where its
sample's rank wants it: ``outputs`` are addresses, of peers' memory as of one's own. Nothing is
packed before or unpacked after. Source: PGAS §III, Listing 2. Differs: a tile of bags per program
instead of one, and 128-bit stores, because a peer's memory is best written in whole sectors.

Rows are added in index order in float32, products rounded before they are added, so that the bits
are those of the CPU kernels. Data stores are plain; what orders them is :func:`signal_ranks`,
launched behind on the same stream: release at system scope, one epoch per receiver.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierbed.errors import InvalidError

__all__ = ["OPTIONS", "pool_to_ranks", "pool_to_ranks_kernel", "signal_ranks", "wait_for_ranks"]

# Bags of a program, and threads for them: 8 bags of 64 f32 are 4 KiB in the registers of a warp's
# neighbours; more bags lengthen the loop to the longest of them.
BAGS_PER_PROGRAM = 8
# Products must be rounded before they are added: no fused multiply-add.
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


@triton.jit
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
    column = tl.arange(0, dim)
    total = tl.zeros((bags_per_program, dim), tl.float32)
    for at in range(tl.max(end - start, axis=0)):
        is_index = start + at < end
        row = first_row + tl.load(indices + start + at, mask=is_index, other=0)
        values = tl.load(rows + row[:, None] * dim + column[None, :], mask=is_index[:, None])
        if is_weighted:
            weight = tl.load(weights + start + at, mask=is_index, other=0.0)
            values = weight[:, None] * values
        # Not adding zeros: -0 and NaN stay what they are.
        total = tl.where(is_index[:, None], total + values, total)
    if is_mean:
        count = tl.maximum(end - start, 1).to(tl.float32)
        total = tl.div_rn(total, tl.broadcast_to(count[:, None], (bags_per_program, dim)))
    rank = tl.zeros((bags_per_program,), tl.int32)
    for other in tl.static_range(1, rank_count):
        rank += (bag >= tl.load(first_samples + other)).to(tl.int32)
    sample = bag - tl.load(first_samples + rank, mask=is_bag, other=0)
    output = tl.load(outputs + rank, mask=is_bag, other=0).to(tl.pointer_type(tl.float32))
    word = sample.to(tl.int64) * stride + tl.load(output_columns + feature)
    place = output[:, None] + word[:, None] + column[None, :]
    # The compiler cannot see through addresses from memory that rows are aligned.
    place = tl.max_contiguous(tl.multiple_of(place, (1, 16)), (1, dim))
    tl.store(place, total, mask=is_bag[:, None])


@triton.jit
def signal_kernel(words, epoch, rank_count: tl.constexpr):
    """Stores ``epoch`` into the word of every receiver, after everything before this launch."""
    for receiver in tl.static_range(rank_count):
        word = tl.load(words + receiver).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(word, epoch, sem="release", scope="sys")


@triton.jit
def wait_kernel(words, epoch, spins, late, rank_count: tl.constexpr):
    """Waits for every sender's epoch; ``late[sender]`` is 1 where it did not come in time."""
    for sender in tl.static_range(rank_count):
        word = words + sender * 32
        found = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        spin = 0
        while (found - epoch < 0) & (spin < spins):
            found = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            spin += 1
        tl.store(late + sender, (found - epoch < 0).to(tl.int32))


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
) -> None:
    """Pools all bags into the outputs of all ranks, of every rank its samples.

    Args:
        rows: ``[N, dim]`` f32, all tables of this rank one behind the other; ``dim`` is a power of
            two of at least 4.
        first_rows: ``[F]`` i64, first row of each feature's table.
        bags: Ids ``[E]`` i64 within the tables, offsets ``[F*B+1]`` i64, and weights ``[E]`` f32
            or None, of the samples of all ranks.
        outputs: ``[ranks]`` i64, addresses of ``[samples, stride]`` f32, 16-byte aligned.
        first_samples: ``[ranks+1]`` i64, first sample of each rank, then ``B``.
        output_columns: ``[F]`` i64, multiples of 4.
        stride: Columns of an output, a multiple of 4.
        is_mean: Whether vectors are divided by their bag's number of ids.

    Raises:
        InvalidError: A shape that 128-bit stores cannot serve.
    """
    dim = rows.shape[1]
    if dim < 4 or dim & (dim - 1) or stride % 4:
        raise InvalidError(
            f"dim must be a power of two of at least 4 and stride a multiple of 4, not {dim} and "
            f"{stride}"
        )
    indices, offsets, weights = bags
    feature_count = first_rows.numel()
    batch = (offsets.numel() - 1) // feature_count
    programs = feature_count * triton.cdiv(batch, BAGS_PER_PROGRAM)
    if programs == 0:
        return
    pool_to_ranks_kernel[(programs,)](
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
        rank_count=outputs.numel(),
        bags_per_program=BAGS_PER_PROGRAM,
        is_weighted=weights is not None,
        is_mean=is_mean,
        **OPTIONS,
    )


def signal_ranks(words: Tensor, epoch: int) -> None:
    """Tells receivers that all earlier launches of this stream wrote what they had to.

    Args:
        words: ``[ranks]`` i64, the address of this rank's word in each receiver's pad.
        epoch: A number that only grows.
    """
    signal_kernel[(1,)](words, epoch, rank_count=words.numel(), num_warps=1)


def wait_for_ranks(pad: Tensor, epoch: int, spins: int = 1 << 24) -> Tensor:
    """Waits, as one program, until every sender signalled ``epoch``.

    Args:
        pad: ``[ranks, 32]`` i32, this rank's words, one per line of 128 bytes.
        epoch: What to wait for.
        spins: Looks per sender before it counts as late.

    Returns:
        ``[ranks]`` i32, 1 for each sender that is late.
    """
    late = torch.zeros(pad.shape[0], dtype=torch.int32, device=pad.device)
    wait_kernel[(1,)](pad, epoch, spins, late, rank_count=pad.shape[0], num_warps=1)
    return late
