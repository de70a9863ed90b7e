"""A kernel that makes the dropout masks of `randomness` on a GPU, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def below(bases: Tensor, length: int, first: int, second: int, limit: int) -> Tensor:
    """Return whether the words of runs are below a limit, as bools ``[runs, length]``.

    Args:
        bases: the positions of the first elements of the runs, int32 ``[runs]``.
        length: how many elements each run has.
        first, second: the halves of the mixed key, as int32.
        limit: the limit of a word, as int32.
    """
    made = torch.empty(len(bases), length, dtype=torch.uint8, device=bases.device)
    if made.numel():
        grid = (triton.cdiv(made.numel(), _BLOCK),)
        _below[grid](made, bases, made.numel(), length, first, second, limit, len(bases) == 1, _BLOCK)
    return made.view(torch.bool)


@triton.jit
def word_of(word, first, second):  # type: ignore[no-untyped-def]
    """Return 32 random bits of each position, as `randomness._finalised`.

    The shifts of int32 repeat the sign bit, which is masked away.
    """
    word ^= first
    word ^= (word >> 16) & 0xFFFF
    word *= 0x7FEB352D
    word ^= second
    word ^= (word >> 15) & 0x1FFFF
    word *= -0x7B935975
    return word ^ ((word >> 16) & 0xFFFF)


# Keys change with each step, and other values of them are no reason to compile the kernel anew.
@triton.jit(do_not_specialize=["count", "length", "first", "second", "limit"])  # type: ignore[untyped-decorator]
def _below(  # type: ignore[no-untyped-def]
    made, bases, count, length, first, second, limit, IS_ONE_RUN: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    run = at * 0 if IS_ONE_RUN else at // length
    position = tl.load(bases + run, mask=there, other=0) + (at - run * length).to(tl.int32)
    tl.store(made + at, (word_of(position, first, second) < limit).to(tl.uint8), mask=there)
