"""The beginning of every job: its folder, and the function that makes its carrier.

`STARTS` has, for each carrier, the functions that belong to its row in `shardwright.launch.options.carrier_facts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from shardwright.launch.carriers.connection import Carrier
from shardwright.launch.carriers.local import LocalCarrier
from shardwright.launch.carriers.srun import SrunCarrier
from shardwright.launch.carriers.ssh import SshCarrier
from shardwright.launch.carriers.torchrun import command_lines, one_per_host
from shardwright.launch.hosts.port import PortLease, lease_port
from shardwright.launch.joblog.detach import detach
from shardwright.launch.joblog.job import create_job_folder
from shardwright.launch.options.launch_options import LaunchOptions
from shardwright.launch.options.restart_options import RestartOptions
from shardwright.launch.remote import MakeCarrier, run_on_hosts
from shardwright.launch.restarts import Say, run_job

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
    on_hosts: MakeCarrier | None = None
    commands: Callable[[LaunchOptions], str] | None = None
    in_place: Callable[[LaunchOptions], LaunchOptions] = lambda job: job


STARTS: Mapping[str, CarrierStart] = {
    "local": CarrierStart(here=LocalCarrier),
    "ssh": CarrierStart(on_hosts=SshCarrier),
    "mpirun": CarrierStart(here=LocalCarrier),
    "srun": CarrierStart(on_hosts=SrunCarrier),
    "torchrun": CarrierStart(
        here=LocalCarrier, on_hosts=SshCarrier, commands=command_lines, in_place=one_per_host
    ),
}  # fmt: skip


def launch(asked: LaunchOptions) -> int:
    """Run the job and return its exit code; if detached, start it and return 0.

    Raises `UsageError` or `LaunchError` where nothing could be started; then no folder is left behind.
    """
    row = STARTS[asked.carrier.name]
    options = row.in_place(asked)
    if (remote := options.remote) is not None:
        assert row.on_hosts is not None
        folder = create_job_folder(options.log_dir, options.job)
        run = partial(run_on_hosts, options, remote, folder, make_carrier=row.on_hosts)
        return detach(run, folder) if options.detach else run(lambda: None)
    assert row.here is not None
    with contextlib.closing(lease_port(options.port)) as lease:  # a port that is taken is told before a folder is made
        folder = create_job_folder(options.log_dir, options.job)
        run = partial(run_job, options.restarts, folder, LocalAttempts(options, lease, row.here))
        return detach(run, folder) if options.detach else run(lambda: None)


class LocalAttempts:
    """Makes the carrier of each attempt. ``lease`` is of the first one's port, or of the one port that was typed."""

    def __init__(self, options: LaunchOptions, lease: PortLease, make_carrier: MakeLocalCarrier) -> None:
        self.options, self.lease, self.make_carrier = options, lease, make_carrier

    def __call__(self, restarts: RestartOptions, _: Say) -> tuple[LaunchOptions, Carrier]:
        options = replace(self.options, restarts=restarts)
        if restarts.count > 0 and options.port is None:
            before, self.lease = self.lease, lease_port(None)
            before.close()  # no sooner, so that the new port is another
        return options, self.make_carrier(options, self.lease)
