"""One job on several hosts, from the first connection to the end of the last one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from shardwright.launch.host_options import RemoteOptions
from shardwright.launch.job import JobFolder
from shardwright.launch.launcher import Launcher
from shardwright.launch.options import LaunchOptions, read_tee
from shardwright.launch.ssh import SshCarrier

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_on_hosts(
    options: LaunchOptions,
    remote: RemoteOptions,
    folder: JobFolder,
    started: Callable[[], None],
    make_carrier: Callable[[LaunchOptions, RemoteOptions], SshCarrier] = SshCarrier,
) -> int:
    """Returns the job's exit code; raises `UsageError` or `LaunchError` where nothing was started."""
    carrier = make_carrier(options, remote)
    try:
        try:
            with _ended_by_signals():
                carrier.prepare()
            known = replace(options, ranks=carrier.ranks, shown=read_tee(remote.tee, carrier.ranks))
        except BaseException:
            folder.remove()
            raise
        return Launcher(known, folder, carrier, started).run()
    finally:
        carrier.close()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """While nothing runs that would need a grace."""

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers = {s: signal.signal(s, end) for s in _ENDING_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
