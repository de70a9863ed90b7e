"""The mpi backend: collectives of CPU tensors by MPI, among ranks that ``mpirun`` started.

Importing this module imports no MPI.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch.distributed as dist

from shardwright.distributed.backends.table import MPI
from shardwright.errors import WorldError
from shardwright.launch.hosts.environment import LaunchEnvironment

INSTALL = "pip install 'shardwright[mpi]'"
# What mpirun, or srun in its place, leaves in the environment of a rank that may call MPI_Init.
_MARKERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")


def prepare(environment: LaunchEnvironment) -> None:
    """Load MPI and make the backend known to torch. A world of one needs no mpirun.

    Raises `WorldError` where mpi4py or an MPI library is missing, or where MPI sees other ranks than the launcher says.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise WorldError(f"backend='mpi' needs mpi4py and an MPI library; type {INSTALL}") from error
    if environment.size > 1 and not any(os.environ.get(name) for name in _MARKERS):
        raise WorldError(_not_by_mpirun(environment))
    one_host = environment.local_size == environment.size
    for name, value in transport_defaults(one_host).items():
        os.environ.setdefault(name, value)
    mpi4py.rc(thread_level="multiple", finalize=False)
    try:
        from mpi4py import MPI as library
    except (ImportError, RuntimeError) as error:  # which of them depends on how mpi4py was built
        reason = " ".join(str(error).split())
        raise WorldError(f"mpi4py finds no MPI library ({reason}); type {INSTALL}, or load your site's MPI") from error
    _check_ranks(environment, library)
    _register()


def transport_defaults(one_host: bool) -> dict[str, str]:
    """Return the OpenMPI settings that are used unless the user sets them (``mpirun --mca``, or these variables).

    A rank that waits gives its core to others, since ranks share cores with the threads of torch and of each other. On
    one host, messages go through shared memory and, where the kernel allows, in one copy from process to process.
    """
    defaults = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    if one_host:
        defaults |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
    return defaults


def _not_by_mpirun(environment: LaunchEnvironment) -> str:
    return (
        f"backend='mpi' needs ranks that mpirun started, and {environment.launcher} started these; type "
        f"`mpirun -n {environment.size} python train.py` or "
        f"`shardwright launch --via mpirun --backend mpi -n {environment.size} train.py`"
    )


def _check_ranks(environment: LaunchEnvironment, library: Any) -> None:
    world = library.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (environment.rank, environment.size):
        raise WorldError(
            f"{environment.launcher} says rank {environment.rank} of {environment.size}, MPI says rank "
            f"{world.Get_rank()} of {world.Get_size()}: mpi4py has loaded "
            f"{library.Get_library_version().split(',')[0]}, and another MPI's mpirun, or no mpirun, started these "
            "ranks; use the mpirun that belongs to it"
        )
    if library.Query_thread() != library.THREAD_MULTIPLE:
        raise WorldError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, which the mpi backend needs; call sw.init() before "
            "mpi4py.MPI is imported, or use an MPI library that has it"
        )


def _register() -> None:
    if MPI.registered in dist.Backend.backend_list:
        return
    # Loads MPI, which must have been told its settings before.
    from shardwright.distributed.backends.mpi_group import Job

    job = Job()
    dist.Backend.register_backend(MPI.registered, job.create, extended_api=True, devices=["cpu"])
    atexit.register(job.leave)
