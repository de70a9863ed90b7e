"""The environment of the ranks of a job: torchrun's variables, defaults, and what is left of the launcher's own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from shardwright.launch.hosts.environment import SECRET_VARIABLE
from shardwright.launch.joblog.job import FAILED_VARIABLE
from shardwright.launch.options.restart_options import ONCE, RestartOptions
from shardwright.launch.options.variables import RANK_VARIABLES


def rank_variables(
    rank: int, size: int, local_rank: int, local_size: int, group_rank: int, groups: int, address: str, port: int,
    run_id: str, error_file: str | os.PathLike[str], failed_mark: str | os.PathLike[str],
    restarts: RestartOptions = ONCE,
) -> dict[str, str]:  # fmt: skip
    """Return torchrun's variables for a rank: the groups are the hosts, and ``address`` is the first host's.

    ``run_id`` is not known to other users: it is in the environment of processes of the job, and in no file of others.
    """
    return {
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank), "ROLE_NAME": "default",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size), "ROLE_WORLD_SIZE": str(size),
        "GROUP_RANK": str(group_rank), "GROUP_WORLD_SIZE": str(groups),
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
        **restarts.variables(), "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": os.fspath(error_file), FAILED_VARIABLE: os.fspath(failed_mark),
        SECRET_VARIABLE: hashlib.sha256(f"the store of {run_id}".encode()).hexdigest(),
    }  # fmt: skip


def default_environment(cpus: int, local_ranks: int) -> dict[str, str]:
    """The variables that ranks have where nobody sets them."""
    return {
        "OMP_NUM_THREADS": str(max(1, cpus // local_ranks)),
        "PYTHONUNBUFFERED": "1",  # a line is in the log when it was printed, even if the rank is killed after it
    }


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
