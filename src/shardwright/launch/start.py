"""The beginning of every job: its checks, its folder, its carrier, and the process in the background if it has one."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NoReturn

from shardwright.errors import LaunchError, ShardwrightError, UsageError
from shardwright.launch.carriers.connection import Carrier
from shardwright.launch.hosts.port import PortLease, lease_port
from shardwright.launch.joblog.job import JobFolder, create_job_folder
from shardwright.launch.options.launch_options import LaunchOptions, read_options
from shardwright.launch.options.request import LaunchRequest, RestartOptions
from shardwright.launch.restarts import Notify, Prepare, run_job


def launch(asked: LaunchOptions) -> int:
    """Run the job and return its exit code, 0 if detached. Raises `UsageError` or `LaunchError` where none began."""
    row = asked.carrier
    options: LaunchOptions = row.in_place(asked)
    if (remote := options.remote) is not None:
        from shardwright.launch.remote import RemoteAttempts

        assert row.on_hosts is not None
        return _run(options, RemoteAttempts(options, remote, row.on_hosts))
    with contextlib.closing(lease_port(options.port)) as lease:  # a port that is taken is told before a folder is made
        return _run(options, LocalAttempts(options, lease))


def check(request: LaunchRequest) -> Iterator[str]:
    """Yield the lines of `shardwright check`: connect to the hosts and check them as `launch` does.

    Raises `LaunchError` with everything that is in the way, `UsageError` for a job on this host alone.
    """
    options = read_options(request)
    make_carrier = options.carrier.on_hosts
    if options.remote is None or make_carrier is None:
        raise UsageError("a job on this host alone is not checked before it starts; type `shardwright doctor`")
    from shardwright.launch.remote import prepare_first

    carrier = make_carrier(options, options.remote)
    prepare_first(carrier)
    with contextlib.closing(carrier):
        hosts = carrier.describe_hosts()
        count = f"{len(hosts)} host{'s' * (len(hosts) != 1)}, {carrier.ranks} rank{'s' * (carrier.ranks != 1)}"
        yield f"{count}: a job can start; its ranks would meet at {carrier.address}"
        for host in hosts:
            ranks = host["ranks"]
            numbered = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            versions = [f"{name} {host[name]}" for name in ("python", "torch", "shardwright") if host[name]]
            by = [f"by {host['interface']}"] if host["interface"] else []
            yield f"{host['name']}: {', '.join([numbered, *by, *versions])}"


def _run(options: LaunchOptions, prepare: Prepare) -> int:
    folder = create_job_folder(options.log_dir, options.job)
    run = partial(run_job, options.restarts, folder, prepare)
    return detach(run, folder) if options.detach else run(lambda: None)


class LocalAttempts:
    """Makes the carrier of each attempt. ``lease`` is of the first one's port, or of the one port that was typed."""

    def __init__(self, options: LaunchOptions, lease: PortLease) -> None:
        self.options, self.lease = options, lease

    def __call__(self, restarts: RestartOptions, _: Notify) -> tuple[LaunchOptions, Carrier]:
        options = replace(self.options, restarts=restarts)
        if restarts.count > 0 and options.port is None:
            before, self.lease = self.lease, lease_port(None)
            before.close()  # no sooner, so that the new port is another
        assert options.carrier.here is not None
        return options, options.carrier.here(options, self.lease)


_STARTED = b"started"


def detach(run: Callable[[Callable[[], None]], int], folder: JobFolder) -> int:
    """Call ``run`` in a forked process; return 0 when that has called back to say that its ranks have started.

    What the background launcher says goes to the job's ``console`` file. Raises `LaunchError` where it did not start.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(read)
        _run_in_background(run, folder, write)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    if text != _STARTED:
        raise LaunchError(text.decode(errors="replace") or "the background launcher ended before its ranks started")
    where = f" --log-dir {folder.path.parent}" if str(folder.path.parent) != "log_output" else ""
    print(f"job {folder.name} runs in the background; its logs: {folder.path}")
    print(f"follow it:  shardwright logs -f{where} {folder.name}")
    return 0


def _run_in_background(run: Callable[[Callable[[], None]], int], folder: JobFolder, answer: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        console = os.open(folder.path / "console", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for fd, source in ((0, nothing), (1, console), (2, console)):
            os.dup2(source, fd)
        code = run(lambda: _tell(answer, _STARTED))
    except ShardwrightError as error:
        _tell(answer, str(error).encode())
    except BaseException:
        traceback.print_exc()
        _tell(answer, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _tell(answer: int, text: bytes) -> None:
    """Write the answer once: the caller waits for the end of the pipe."""
    try:
        os.write(answer, text)
        os.close(answer)
    except OSError:
        return  # told before, or the caller is gone
