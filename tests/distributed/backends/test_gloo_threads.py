"""Gloo's receiving threads are batch work from the first collective on, those of every group."""

import contextlib
import os
from pathlib import Path

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import ProcessCommunicator


def policies():
    """The scheduling policies of this process's receiving threads, and of its main one."""
    found = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread of a group that was closed, which has just ended
            if path.joinpath("comm").read_text() == "gloo_tcp_loop\n":
                found.append(os.sched_getscheduler(int(path.name)))
    return found, os.sched_getscheduler(0)


def in_groups():
    sw.init()
    found = [policies()]
    comm = ProcessCommunicator(Mesh.of(rows=2, columns=2))
    comm.prepare([("rows",), ("columns",)])
    found.append(policies())
    comm.close()
    sw.create_group([0, 1, 2])
    found.append(policies())
    return found


def test_receivers_of_every_group_are_batch_work():
    for rank, (world, rows_and_columns, created) in enumerate(run_ranks(4, in_groups)):
        assert world == ([os.SCHED_BATCH], os.SCHED_OTHER)
        assert rows_and_columns == ([os.SCHED_BATCH] * 3, os.SCHED_OTHER)
        assert set(created[0]) == {os.SCHED_BATCH}, rank
        assert created[1] == os.SCHED_OTHER
