"""Signals between ranks: an epoch, released at system scope.

A kernel of one program, launched behind the stores on the same stream, writes a number that only
grows into a word of each receiver; another one looks at the words of all senders. Data stores are
plain: the end of their kernel, then the release, orders them. Source: PGAS §III, signals instead
of a barrier. Differs: epochs are never reset, so a word has one writer.

On a GPU a word is stored and loaded, never exchanged: one that lies in memory of the host is not
read and written at once by a GPU, so that an epoch of another one could be lost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierbed.dist.kernels.launch import is_interpreted, launch

__all__ = ["signal_kernel", "signal_ranks", "wait_for_ranks", "wait_kernel"]


@triton.jit
def store_released(word, epoch, has_asm: tl.constexpr):
    """Stores ``epoch``, for all devices after everything before."""
    if has_asm:
        tl.inline_asm_elementwise(
            "st.global.release.sys.b32 [$1], $2; mov.b32 $0, $2;",
            "=r,l,r",
            [word, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(word, epoch, sem="release", scope="sys")


@triton.jit
def load_acquired(word, has_asm: tl.constexpr):
    """Loads an epoch, before everything behind."""
    if has_asm:
        found = tl.inline_asm_elementwise(
            "ld.global.acquire.sys.b32 $0, [$1];",
            "=r,l",
            [word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    return found


@triton.jit(do_not_specialize=["epoch"])
def signal_kernel(words, epoch, rank_count: tl.constexpr, has_asm: tl.constexpr):
    """Stores ``epoch`` into the word of every receiver, after everything before this launch."""
    for receiver in tl.static_range(rank_count):
        word = tl.load(words + receiver).to(tl.pointer_type(tl.int32))
        store_released(word, epoch, has_asm)


@triton.jit(do_not_specialize=["epoch", "spins"])
def wait_kernel(words, epoch, spins, late, rank_count: tl.constexpr, has_asm: tl.constexpr):
    """Waits for every sender's epoch; ``late[sender]`` is 1 where it did not come in time."""
    for sender in tl.static_range(rank_count):
        word = words + sender * 32
        found = load_acquired(word, has_asm)
        spin = 0
        while (found - epoch < 0) & (spin < spins):
            found = load_acquired(word, has_asm)
            spin += 1
        tl.store(late + sender, (found - epoch < 0).to(tl.int32))


def signal_ranks(words: Tensor, epoch: int) -> None:
    """Tells receivers that all earlier launches of this stream wrote what they had to.

    Args:
        words: ``[ranks]`` i64, the address of this rank's word in each receiver's pad.
        epoch: A number that only grows.
    """
    constants = {"rank_count": words.numel(), "has_asm": not is_interpreted(signal_kernel)}
    launch(signal_kernel, 1, words, _wrapped(epoch), num_warps=1, **constants)


def wait_for_ranks(
    pad: Tensor, epoch: int, spins: int = 1 << 24, device: torch.device | None = None
) -> Tensor:
    """Waits, as one program, until every sender signalled ``epoch``.

    Args:
        pad: ``[ranks, 32]`` i32, this rank's words, one per line of 128 bytes.
        epoch: What to wait for.
        spins: Looks per sender before it counts as late.
        device: Where the kernel runs, if not where the pad lies: a pad may be in pinned memory.

    Returns:
        ``[ranks]`` i32, 1 for each sender that is late.
    """
    late = torch.zeros(pad.shape[0], dtype=torch.int32, device=device or pad.device)
    constants = {"rank_count": pad.shape[0], "has_asm": not is_interpreted(wait_kernel)}
    launch(wait_kernel, 1, pad, _wrapped(epoch), spins, late, num_warps=1, **constants)
    return late


def _wrapped(epoch: int) -> int:
    """Returns an epoch as the kernels count: 32 bits with a sign, which wrap around."""
    return (epoch + (1 << 31)) % (1 << 32) - (1 << 31)
