"""Tensors of any dtype travel and are summed, also those that a backend does not take as what they are."""

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwright.compiler.mesh.carried import movable, summed_as
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
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


def collectives():
    dist.init_process_group("gloo")
    comm = communicator_over(Mesh.of(a=2))
    comm.prepare([("a",)])
    found = {}
    for dtype in MOVED:
        mine = numbers(dtype, comm.rank)
        found[dtype, "gather"] = list(comm.all_gather(mine, ("a",)))
        found[dtype, "scalar"] = list(comm.all_gather(mine[0, 1].clone(), ("a",)))
        found[dtype, "exchange"] = comm.all_to_all([numbers(dtype, comm.rank), numbers(dtype, comm.rank + 4)], ("a",))
    for dtype in SUMMED:
        mine = numbers(dtype, comm.rank)
        given = mine.clone()
        assert comm.all_reduce(given, ("a",)) is given
        found[dtype, "sum"] = given
        found[dtype, "scattered"] = comm.reduce_scatter(mine.repeat(2, 1, 1), ("a",))
    comm.close()
    dist.destroy_process_group()
    return {key: plain(value) for key, value in found.items()}


def plain(found):
    if isinstance(found, list):
        return [plain(each) for each in found]
    return str(found.dtype), (found.view(torch.uint8) if "float8" in str(found.dtype) else found).tolist()


@pytest.mark.slow
def test_every_dtype_travels():
    for rank, found in enumerate(run_ranks(2, collectives)):
        for dtype in MOVED:
            each = [numbers(dtype, other) for other in range(2)]
            assert found[dtype, "gather"] == plain(each), dtype
            assert found[dtype, "scalar"] == plain([x[0, 1] for x in each]), dtype
            assert found[dtype, "exchange"] == plain([numbers(dtype, other + 4 * rank) for other in range(2)]), dtype
        for dtype in SUMMED:
            wide = torch.complex128 if dtype.is_complex else torch.int64
            total = (numbers(dtype, 0).to(wide) + numbers(dtype, 1).to(wide)).to(dtype)
            assert found[dtype, "sum"] == found[dtype, "scattered"] == plain(total), dtype


@pytest.mark.parametrize("backend", [NCCL, GLOO], ids=lambda row: row.name)
def test_what_a_backend_is_given_is_what_it_takes(backend):
    for dtype in MOVED:
        assert str(movable(numbers(dtype, 0), backend).dtype).removeprefix("torch.") in backend.dtypes
    for dtype in SUMMED:
        sum_dtype = summed_as(dtype, backend)
        given = numbers(dtype, 0) if sum_dtype is None else sum_dtype.cast(numbers(dtype, 0))
        assert str(given.dtype).removeprefix("torch.") in backend.dtypes
        assert sum_dtype is None or sum_dtype.cast_back(given).dtype == dtype


def test_a_sum_that_no_backend_can_make_is_refused():
    with pytest.raises(LoweringError, match="nccl cannot sum tensors of float8_e4m3fn over ranks; compute what is"):
        summed_as(torch.float8_e4m3fn, NCCL)
    assert summed_as(torch.float8_e4m3fn, Backend(name="any")) is None
    assert not BACKENDS["mpi"].dtypes
