"""The table of backends: what its rows name is there, and what is asked of it fits the rows."""

import subprocess
import sys
from importlib import import_module

import pytest
import torch.distributed as dist

from shardwright.compiler.mesh.redistribute import CollectiveKind
from shardwright.distributed.backends.table import (
    BACKENDS,
    GLOO,
    MPI,
    NCCL,
    Backend,
    backend_called,
    backend_moving,
    on_gpus,
)


@pytest.mark.parametrize("row", BACKENDS.values(), ids=list(BACKENDS))
def test_what_a_row_names_is_there(row):
    if row.module is not None:
        assert callable(import_module(row.module).prepare)
    else:
        assert row.registered in dist.Backend.backend_list
    assert set(row.ways) == set(CollectiveKind.__args__)
    assert backend_called(row.registered) is backend_called(row.name) is row


@pytest.mark.parametrize(
    ("text", "cpu", "cuda", "gpus"),
    [
        ("gloo", GLOO, GLOO, False),
        ("nccl", NCCL, NCCL, True),
        ("mpi", MPI, MPI, False),
        ("cpu:gloo,cuda:nccl", GLOO, NCCL, True),
        ("cuda:NCCL", NCCL, NCCL, True),
        ("ucc", Backend(name="ucc"), Backend(name="ucc"), False),
    ],
)
def test_a_text_names_a_backend_for_each_device(text, cpu, cuda, gpus):
    assert (backend_moving("cpu", text).name, backend_moving("cuda", text).name) == (cpu.name, cuda.name)
    assert on_gpus(text) == gpus


def test_the_table_imports_no_torch():
    code = (
        "import sys, shardwright.distributed.backends.table; "
        "print([m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
