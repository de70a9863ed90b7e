"""The beginning of every job: its folder, its carrier, and the process in the background of one that is detached.

`STARTS` has, for each carrier, the functions that belong to its row in `shardwright.launch.options.carrier_facts`.
Carriers to other hosts are imported when a job has other hosts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from shardwright.errors import LaunchError, ShardwrightError
from shardwright.launch.carriers.connection import Carrier
from shardwright.launch.carriers.local import LocalCarrier
from shardwright.launch.hosts.port import PortLease, lease_port
from shardwright.launch.joblog.job import JobFolder, create_job_folder
from shardwright.launch.options.launch_options import LaunchOptions
from shardwright.launch.options.request import RemoteOptions, RestartOptions
from shardwright.launch.restarts import Notify, Prepare, run_job

if TYPE_CHECKING:
    from shardwright.launch.carriers.ssh import SshCarrier

MakeLocalCarrier = Callable[[LaunchOptions, PortLease], Carrier]


@dataclass(frozen=True, kw_only=True)
class CarrierStart:
    """The functions of a carrier.

    Attributes:
        here: makes the carrier of a job on this host.
        on_hosts: makes that of a job on several hosts, or on another one.
        commands: the lines that a person may type in place of the job; they are printed unless ``--run`` is typed.
        in_place: the job that is run in place of the one that is asked for.
    """

    here: MakeLocalCarrier | None = None
    on_hosts: Callable[[LaunchOptions, RemoteOptions], SshCarrier] | None = None
    commands: Callable[[LaunchOptions], str] | None = None
    in_place: Callable[[LaunchOptions], LaunchOptions] = lambda job: job


def _ssh_carrier(options: LaunchOptions, remote: RemoteOptions) -> SshCarrier:
    from shardwright.launch.carriers.ssh import SshCarrier

    return SshCarrier(options, remote)


def _srun_carrier(options: LaunchOptions, remote: RemoteOptions) -> SshCarrier:
    from shardwright.launch.carriers.srun import SrunCarrier

    return SrunCarrier(options, remote)


def _torchrun_commands(options: LaunchOptions) -> str:
    from shardwright.launch.carriers.torchrun import command_lines

    return command_lines(options)


def _torchruns(options: LaunchOptions) -> LaunchOptions:
    from shardwright.launch.carriers.torchrun import one_per_host

    return one_per_host(options)


STARTS: Mapping[str, CarrierStart] = {
    "local": CarrierStart(here=LocalCarrier),
    "ssh": CarrierStart(on_hosts=_ssh_carrier),
    "mpirun": CarrierStart(here=LocalCarrier),
    "srun": CarrierStart(on_hosts=_srun_carrier),
    "torchrun": CarrierStart(
        here=LocalCarrier, on_hosts=_ssh_carrier, commands=_torchrun_commands, in_place=_torchruns
    ),
}  # fmt: skip


def launch(asked: LaunchOptions) -> int:
    """Run the job and return its exit code; if detached, start it and return 0.

    Raises `UsageError` or `LaunchError` where nothing could be started; then no folder is left behind.
    """
    row = STARTS[asked.carrier.name]
    options = row.in_place(asked)
    if (remote := options.remote) is not None:
        from shardwright.launch.remote import RemoteAttempts

        assert row.on_hosts is not None
        return _run(options, RemoteAttempts(options, remote, row.on_hosts))
    assert row.here is not None
    with contextlib.closing(lease_port(options.port)) as lease:  # a port that is taken is told before a folder is made
        return _run(options, LocalAttempts(options, lease, row.here))


def _run(options: LaunchOptions, prepare: Prepare) -> int:
    folder = create_job_folder(options.log_dir, options.job)
    run = partial(run_job, options.restarts, folder, prepare)
    return detach(run, folder) if options.detach else run(lambda: None)


class LocalAttempts:
    """Makes the carrier of each attempt. ``lease`` is of the first one's port, or of the one port that was typed."""

    def __init__(self, options: LaunchOptions, lease: PortLease, make_carrier: MakeLocalCarrier) -> None:
        self.options, self.lease, self.make_carrier = options, lease, make_carrier

    def __call__(self, restarts: RestartOptions, _: Notify) -> tuple[LaunchOptions, Carrier]:
        options = replace(self.options, restarts=restarts)
        if restarts.count > 0 and options.port is None:
            before, self.lease = self.lease, lease_port(None)
            before.close()  # no sooner, so that the new port is another
        return options, self.make_carrier(options, self.lease)


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
