"""Memory in which a rank makes tensors that others write to: it serves again, and where it ends that is told."""

import contextlib
import io
import mmap
import os
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwright.distributed.backends import shm
from shardwright.distributed.backends.segment import arena
from shardwright.distributed.backends.segment.arena import Arena
from shardwright.errors import WorldError

MIB = 2**18  # elements of float32


def test_memory_serves_the_next_tensor_and_goes_where_another_size_is_wanted(monkeypatch):
    monkeypatch.setattr(arena, "_MOST_BYTES", 5 * 2**20)
    own = Arena(b"0" * 16)
    first, second = own.empty(MIB, torch.float32), own.empty(2 * MIB, torch.float32)
    start = first.data_ptr()
    assert first.fill_(1).sum() + second.fill_(2).sum() == 5 * MIB
    assert own.empty(2 * MIB, torch.float32) is None  # there are no further addresses
    del first
    again = own.empty(2 * MIB - 5, torch.bfloat16)
    assert (again.data_ptr(), again.numel(), again.untyped_storage().nbytes()) == (start, 2 * MIB - 5, 4 * MIB - 10)
    view = second[5:]
    del again, second
    half = own.empty(MIB // 2, torch.float32).zero_()
    assert os.fstat(own.file).st_blocks * 512 < 3 * 2**20  # what the first one had has gone back
    assert view.sum() == 2 * (2 * MIB - 5)
    own.close()
    assert own.empty(MIB, torch.float32) is None
    assert half.sum() == 0


def test_a_tensor_serves_again_once_nobody_has_its_memory():
    own = Arena(b"0" * 16)
    held = [own.empty(MIB, torch.float32) for _ in range(3)]
    starts = [tensor.data_ptr() for tensor in held]
    assert len(set(starts)) == 3
    view = held[1][5:].detach()
    with torch.inference_mode():
        del held[1:]
        again = [own.empty(MIB, torch.float32) for _ in range(2)]
        assert not any(tensor.is_inference() for tensor in again)
    assert starts[2] in {tensor.data_ptr() for tensor in again}
    assert not {view.data_ptr() - 20, starts[0]} & {tensor.data_ptr() for tensor in again}
    del view, again
    assert own.empty(MIB, torch.int32).data_ptr() in starts[1:]  # as another tensor
    own.close()


def test_what_the_kernel_does_not_take_back_serves_again(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_REMOVE", 9999)  # refused, as by gVisor
    own = Arena(b"0" * 16)
    start = own.empty(MIB, torch.float32).data_ptr()
    assert own.empty(2 * MIB, torch.float32).sum() == 0
    assert own.empty(MIB, torch.float32).fill_(1).data_ptr() == start
    own.close()


def test_an_arena_that_cannot_be_mapped_leaves_no_file(monkeypatch):
    made, make = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *how: made.append(make(*how)) or made[-1])
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError))
    with pytest.raises(OSError):
        Arena(b"0" * 16)
    [file] = made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_core_dumps_leave_it_out():
    own = Arena(b"0" * 16)
    parts = Path("/proc/self/smaps").read_text().split("/memfd:shardwright")
    assert " dd" in parts[-1].partition("VmFlags:")[2].partition("\n")[0]
    own.close()


def forked():
    shm.register()
    dist.init_process_group("shm")
    group = dist.group.WORLD
    tensor = torch.ones(MIB)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        refused = sum(map(refuses, [
            partial(dist.all_reduce, tensor), partial(dist.all_reduce, torch.ones(1)), dist.barrier,
            partial(dist.send, tensor, 1 - dist.get_rank()), partial(dist.recv, tensor, 1 - dist.get_rank()),
        ]))  # fmt: skip
        del tensor
        group.shutdown()  # as at its exit
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.unique().tolist()


def refuses(call):
    try:
        call()
    except WorldError as error:
        return f"process {os.getpid()} was forked from rank {dist.get_rank()}, " in str(error)
    return False


@pytest.mark.slow
def test_a_forked_child_leaves_tensors_and_group_to_its_parent():
    assert run_ranks(2, forked) == [[4.0]] * 2


def too_much():
    arena._MOST_BYTES, said = 3 * 2**20, io.StringIO()
    shm.register()
    dist.init_process_group("shm")
    kept = [torch.full((MIB,), dist.get_rank() + 1.0) for _ in range(4)]
    with contextlib.redirect_stderr(said):
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in kept]:
            work.wait()
    dist.destroy_process_group()
    return [tensor.unique().tolist() for tensor in kept], said.getvalue()


def test_a_full_memory_is_told_once_and_costs_no_numbers():
    for rank, (sums, said) in enumerate(run_ranks(2, too_much)):
        assert sums == [[3.0]] * 4
        assert said.count(f"shardwright: rank {rank} has no more memory to share") == 1
