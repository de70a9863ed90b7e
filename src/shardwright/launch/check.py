"""The checks before the start of a job on hosts, without the job: what `shardwright check` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardwright.errors import UsageError
from shardwright.launch.carriers.ssh import SshCarrier
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.launch.remote import prepare_first
from shardwright.launch.start import STARTS


def check(request: LaunchRequest) -> list[str]:
    """Return the lines of `shardwright check`: connect to the hosts and check them as `launch` does.

    Raises `LaunchError` with everything that is in the way, `UsageError` for a job on this host alone.
    """
    options = read_options(request)
    make_carrier = STARTS[options.carrier.name].on_hosts
    if options.remote is None or make_carrier is None:
        raise UsageError("a job on this host alone is not checked before it starts; type `shardwright doctor`")
    carrier = make_carrier(options, options.remote)
    prepare_first(carrier)
    with contextlib.closing(carrier):
        return list(_lines(carrier))


def _lines(carrier: SshCarrier) -> Iterator[str]:
    hosts = carrier.describe_hosts()
    count = f"{len(hosts)} host{'s' * (len(hosts) != 1)}, {carrier.ranks} rank{'s' * (carrier.ranks != 1)}"
    yield f"{count}: a job can start; its ranks would meet at {carrier.address}"
    for host in hosts:
        ranks = host["ranks"]
        numbered = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        versions = [f"{name} {host[name]}" for name in ("python", "torch", "shardwright") if host[name]]
        by = [f"by {host['interface']}"] if host["interface"] else []
        yield f"{host['name']}: {', '.join([numbered, *by, *versions])}"
