"""Numbers for the bits of tensors, worked out where these are; a GPU is not waited for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

PIECE = 2**20
"""Entries that are looked at together, so that no copy of a whole tensor is made."""
_ROW = 2**10  # words that are summed together for a digest
_KEPT = 16  # bits of how many numbers of places are kept
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)


def sum_of_words(tensor: Tensor | None, device: torch.device) -> Tensor:
    """All bits of a tensor, as words times numbers that belong to their places, modulo 2**64, in whatever order."""
    if tensor is None or tensor.layout != torch.strided:
        return torch.ones((), dtype=torch.int64, device=device)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() > 8:
        plain = torch.view_as_real(plain)
    flat, size = _in_memory_order(plain).reshape(-1), plain.element_size()
    if flat.nbytes % 8 == 0 == flat.storage_offset() * size % 8:
        return brought(_weighed(flat.view(torch.int64)), device)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    # In pieces, since torch copies what it sums in another dtype.
    pieces = [_weighed(piece) for piece in torch.split(flat.view(kind), PIECE)]
    return brought(_times_places(torch.stack(pieces)), device)


def brought(number: Tensor, device: torch.device) -> Tensor:
    """Return the number on a device; a GPU that it is brought to is not waited for."""
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the numbers so that ``reshape(-1)`` copies none of a tensor whose channels come last."""
    for kind, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.ndim == dims and tensor.is_contiguous(memory_format=kind):
            return tensor.movedim(1, -1)
    return tensor


def _weighed(words: Tensor) -> Tensor:
    """The sums of rows and of columns of words, which are read twice and not copied, and what is no whole row."""
    count = len(words) // _ROW * _ROW
    if not count:
        return _times_places(words)
    rows = words[:count].view(-1, _ROW)
    return _times_places(torch.cat([rows.sum(0), rows.sum(1), words[count:].to(torch.int64)]))


def _times_places(words: Tensor) -> Tensor:
    count = len(words)
    kept = _numbers_of_places(min(count.bit_length(), _KEPT), words.device)
    numbers = kept[:count] if count <= len(kept) else mixed(torch.arange(1, count + 1, device=words.device)) | 1
    return (words * numbers).sum()


@functools.cache
def _numbers_of_places(bits: int, device: torch.device) -> Tensor:
    """Odd ones, for the first 2**bits places.

    Cached by all that they follow from; callers read them alone.
    """
    return mixed(torch.arange(1, 2**bits + 1, device=device)) | 1


def mixed(numbers: Tensor) -> Tensor:
    """Whole numbers of which neighbours become unlike; on their device, with signs, and not as `data.order` mixes."""
    numbers = numbers * _ODD[0]
    numbers = (numbers ^ numbers >> 31) * _ODD[1]
    return numbers ^ numbers >> 29
