"""Jobs on this host: their one supervisor, which is started here, and the connection to it.

launcher ── supervisor (own session; imports torch)
              ├─ rank 0 (forked, own session)
              └─ rank 1 ...
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Any

from shardwright.common import package
from shardwright.common.pulse import JOB_VARIABLE
from shardwright.launch.carriers.connection import (
    Carrier,
    Connection,
    default_environment,
    inherited_environment,
    rank_variables,
    where_unset,
)
from shardwright.launch.host.processes import descendants, kill_all, marked
from shardwright.launch.host.protocol import EVENTS, Event, Start
from shardwright.launch.host.stream import Decoder
from shardwright.launch.hosts.port import PortLease
from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.joblog.judge import how_it_ended
from shardwright.launch.options.launch_options import LaunchOptions

# The supervisor's sys.path is that of `python script.py` without the script's folder: no file of the user's can shadow
# the standard library before a rank runs.
_BOOT = """
import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.append({root!r})
from shardwright.launch.supervisor.main import main
del sys.path[-1]
main()
"""


class LocalCarrier(Carrier):
    """One supervisor, on this host. ``lease`` is closed by who made it."""

    def __init__(self, options: LaunchOptions, lease: PortLease) -> None:
        self.options, self.lease = options, lease
        self.connection: LocalConnection | None = None

    @property
    def ranks(self) -> int:
        return self.options.ranks

    def start(
        self, run_id: str, folder: JobFolder, begin: str = "", shown: Collection[int] = ()
    ) -> Sequence[Connection]:
        ports = self.lease.file_descriptors()
        supervisor = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(root=str(package.SEARCHED))],
            env=common_environment(self.options, run_id), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, pass_fds=ports, start_new_session=True,
        )  # fmt: skip
        connection = LocalConnection(supervisor, socket.gethostname())
        connection.ranks = tuple(range(self.ranks))
        command = self.options.start_command
        start = Start(
            self.options.program, self.options.preload, self._rank_variables(run_id, folder), tuple(ports),
            () if command is None else command.words, bind=self.options.bind, stall_s=self.options.stall_timeout_s,
        )  # fmt: skip
        connection.send(start)
        self.connection = connection
        return [connection]

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def describe_hosts(self) -> list[dict[str, Any]]:
        return [{"name": socket.gethostname(), "ranks": list(range(self.ranks)), "python": sys.version.split()[0]}]

    def _rank_variables(self, run_id: str, folder: JobFolder) -> dict[int, dict[str, str]]:
        own = self.options.rank_environments
        return {
            rank: rank_variables(
                rank, self.ranks, rank, self.ranks, 0, 1, "127.0.0.1", self.lease.port, run_id,
                folder.error_file(rank), folder.failed_mark, self.options.restarts,
            ) | own.get(rank, {})
            for rank in range(self.ranks)
        }  # fmt: skip


class LocalConnection(Connection):
    """The process is the supervisor itself."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        super().__init__(process, name)
        self._decoder: Decoder[Event] = Decoder(*EVENTS)

    def _decode(self, data: bytes) -> list[Event]:
        return list(self._decoder.feed(data))

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def abandon(self) -> None:
        self.process.kill()

    def why_lost(self, run_id: str, not_ours: set[int]) -> tuple[int, str]:
        """Return the supervisor's exit code and words for it; kill what its ranks, which are dead, had started."""
        code = self.process.wait()
        kill_all(lambda: marked(run_id) | descendants(os.getpid()) - not_ours, 10.0)
        return code, f"the supervisor of the ranks {how_it_ended(code)}"

    def close(self) -> None:
        with self.process:
            pass


def common_environment(options: LaunchOptions, run_id: str) -> dict[str, str]:
    """Return the environment that all ranks share, in place before anything is imported."""
    # Without an interface gloo looks up the host's own name, which can hang.
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if os.path.exists("/sys/class/net/lo") else {}
    defaults = default_environment(len(os.sched_getaffinity(0)), options.ranks) | interface
    chosen = inherited_environment(os.environ) | options.environment
    return where_unset(defaults, chosen) | chosen | {JOB_VARIABLE: run_id}
