"""Tensors of any dtype travel and are summed, also those that a backend does not take as what they are."""

import pytest
import torch

from shardwright.compiler.mesh.carried import moved, summed_as
from shardwright.distributed.backends.table import BACKENDS, GLOO, NCCL, Backend
from shardwright.errors import LoweringError

MOVED = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
]  # fmt: skip
SUMMED = [dtype for dtype in MOVED if dtype not in (torch.bool, torch.float8_e4m3fn)]


def numbers(dtype, rank):
    """Some numbers of a rank, among them the smallest and the largest of a kind of integer."""
    x = torch.arange(6).reshape(2, 3) + rank
    if dtype.is_complex:
        x = torch.complex(x.double(), x.double() * 2)
    found = x.to(dtype)
    if dtype in (torch.int16, torch.uint16, torch.int32, torch.uint32):
        found[0, 0], found[1, 1] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    return found


@pytest.mark.parametrize("backend", [NCCL, GLOO], ids=lambda row: row.name)
def test_what_a_backend_is_given_is_what_it_takes(backend):
    for dtype in MOVED:
        assert str(moved(numbers(dtype, 0), backend).dtype).removeprefix("torch.") in backend.dtypes
    for dtype in SUMMED:
        numbers_of = summed_as(dtype, backend)
        given = numbers(dtype, 0) if numbers_of is None else numbers_of.made(numbers(dtype, 0))
        assert str(given.dtype).removeprefix("torch.") in backend.dtypes
        assert numbers_of is None or numbers_of.back(given).dtype == dtype


def test_a_sum_that_no_backend_can_make_is_refused():
    with pytest.raises(LoweringError, match="nccl cannot sum tensors of float8_e4m3fn over ranks; compute what is"):
        summed_as(torch.float8_e4m3fn, NCCL)
    assert summed_as(torch.float8_e4m3fn, Backend(name="any")) is None
    assert not BACKENDS["mpi"].dtypes
