"""Writes the gradient of a rank's output into the matrices of those who hold the rows.

A *run* is some consecutive columns of the output that one rank holds. A program copies a run of a
tile of samples to its place in the holder's matrix, ``[B, width]`` with the samples of all ranks:
nothing is packed, and nothing is permuted where it arrives. Source: PGAS §V. Differs: gradients of
bags are put, not those of rows added, so that who holds a row adds in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import launch, tile
from tierbed.errors import InvalidError

__all__ = ["put_grads", "put_grads_kernel", "put_tile"]

# Most samples of a program.
SAMPLES_MAX = 16


def put_tile(width: int) -> tuple[int, int]:
    """Returns samples of a program, and warps for them."""
    return tile(triton.next_power_of_2(width), SAMPLES_MAX, 16)


@triton.jit(
    do_not_specialize=["samples", "first_sample"], do_not_specialize_on_alignment=["matrices"]
)
def put_grads_kernel(
    grad,
    stride,
    runs,
    matrices,
    first_sample,
    samples,
    width: tl.constexpr,
    is_aligned: tl.constexpr,
    samples_per_program: tl.constexpr,
):
    """Puts one run of ``samples_per_program`` samples; see :func:`put_grads`."""
    programs = tl.cdiv(samples, samples_per_program)
    run = tl.program_id(0) // programs
    sample = (tl.program_id(0) % programs) * samples_per_program
    sample += tl.arange(0, samples_per_program)
    column = tl.arange(0, width)
    from_column = tl.load(runs + run * 4)
    to_column = tl.load(runs + run * 4 + 1)
    dim = tl.load(runs + run * 4 + 2)
    to_stride = tl.load(runs + run * 4 + 3)
    is_there = (sample < samples)[:, None] & (column < dim)[None, :]
    if is_aligned:
        is_there = tl.max_constancy(is_there, (1, 4))
    row = sample.to(tl.int64)
    source = grad + row[:, None] * stride + from_column + column[None, :]
    if is_aligned:
        # The compiler cannot see that columns from memory are multiples of 4.
        source = tl.max_contiguous(tl.multiple_of(source, (1, 16)), (1, width))
    values = tl.load(source, mask=is_there)
    matrix = tl.load(matrices + run).to(tl.pointer_type(tl.float32))
    place = matrix + (first_sample + row)[:, None] * to_stride + to_column + column[None, :]
    if is_aligned:
        place = tl.max_contiguous(tl.multiple_of(place, (1, 16)), (1, width))
    tl.store(place, values, mask=is_there)


def put_grads(
    grad: Tensor,
    runs: Tensor,
    matrices: Tensor,
    first_sample: int,
    width: int,
    *,
    is_aligned: bool = False,
) -> None:
    """Puts a rank's gradients into the matrices of all holders.

    Args:
        grad: ``[samples, stride]`` f32, of this rank's output.
        runs: ``[runs, 4]`` i64: first column in ``grad``, first column in the holder's matrix,
            columns, and columns of the holder's matrix.
        matrices: ``[runs]`` i64, address of each run's matrix.
        first_sample: Where this rank's samples begin in a matrix.
        width: Most columns of a run.
        is_aligned: Whether all of ``runs`` and ``stride`` are multiples of 4: loads and stores have
            128 bits then.

    Raises:
        InvalidError: ``is_aligned`` is said of a stride that is not.
    """
    samples, stride = grad.shape
    if is_aligned and stride % 4:
        raise InvalidError(f"stride {stride} is no multiple of 4")
    samples_per_program, warps = put_tile(width)
    launch(
        put_grads_kernel,
        runs.shape[0] * triton.cdiv(samples, samples_per_program),
        grad,
        stride,
        runs,
        matrices,
        first_sample,
        samples,
        width=triton.next_power_of_2(width),
        is_aligned=is_aligned,
        samples_per_program=samples_per_program,
        num_warps=warps,
    )
