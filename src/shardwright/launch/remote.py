"""One job on several hosts: the hosts of each attempt, checked anew before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.errors import LaunchError
from shardwright.launch.carriers.connection import Carrier
from shardwright.launch.carriers.ssh import SshCarrier
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.options.launch_options import LaunchOptions, read_tee
from shardwright.launch.options.request import RemoteOptions, RestartOptions
from shardwright.launch.restarts import Notify

MakeCarrier = Callable[[LaunchOptions, RemoteOptions], SshCarrier]


class RemoteAttempts:
    """Makes the carrier of each attempt: of all hosts, or where the job is elastic of those that can be used then.

    All hosts of the job are asked at each restart, so that one that has come back takes part again.
    """

    def __init__(self, options: LaunchOptions, remote: RemoteOptions, make_carrier: MakeCarrier) -> None:
        self.options, self.remote, self.make_carrier = options, remote, make_carrier
        self.hosts = remote.hosts
        self.ranks = 0  # of the first attempt
        self.last: tuple[str, ...] = ()  # the hosts of the last one

    def __call__(self, restarts: RestartOptions, notify: Notify) -> tuple[LaunchOptions, Carrier]:
        options = replace(self.options, restarts=restarts)
        if restarts.count == 0:
            carrier = self.make_carrier(options, self.remote)
            prepare_first(carrier)
            self.hosts, self.ranks = carrier.known, carrier.ranks
            try:
                restarts.check(self.ranks)
                shown = read_tee(self.remote.tee, self.ranks)
            except BaseException:
                carrier.close()
                raise
            self.last = _names(carrier)
            return replace(options, ranks=self.ranks, shown=shown), carrier
        carrier = self._on_what_is_left(options, notify) if restarts.elastic else self._on_all(options)
        self.last = _names(carrier)
        shown = read_tee(self.remote.tee, self.ranks) & frozenset(range(carrier.ranks))
        return replace(options, ranks=carrier.ranks, shown=shown), carrier

    def _on_all(self, options: LaunchOptions) -> SshCarrier:
        carrier = self.make_carrier(options, self.remote)
        try:
            _prepare(carrier)
        except LaunchError as error:
            if not 0 < len(carrier.unusable) < len(self.hosts):
                raise
            raise LaunchError(
                f"{error}\nwith --elastic the job would go on without hosts that are lost; what it has saved is there "
                "for another launch"
            ) from None
        return carrier

    def _on_what_is_left(self, options: LaunchOptions, notify: Notify) -> SshCarrier:
        """Return the carrier of the hosts that can be used; those left may be lost in the meantime, too."""
        left, lost = self.hosts.hosts, dict[str, list[str]]()
        while True:
            ranks = self._ranks_on(left)
            if ranks < options.restarts.min_ranks:
                rest = ", ".join(host.name for host in left)
                on = f"on what is left ({rest})" if left else "since no host is left"
                raise LaunchError(
                    f"the job would have {ranks} ranks {on}, fewer than --min-ranks {options.restarts.min_ranks}"
                    + _listed(lost)
                )
            carrier = self.make_carrier(options, replace(self.remote, hosts=Hosts(left), ranks=ranks))
            try:
                _prepare(carrier)
            except LaunchError:
                if not carrier.unusable:
                    raise
                lost |= carrier.unusable
                left = tuple(host for host in left if host.name not in lost)
                continue
            if (names := _names(carrier)) != self.last:
                without = f", without{_listed(lost)}" if lost else ""
                notify(f"the job goes on with {ranks} ranks on {', '.join(names)}{without}")
            return carrier

    def _ranks_on(self, hosts: tuple[Host, ...]) -> int:
        """Return the ranks on these hosts: as at first if there is room; else in proportion to the slots."""
        slots, before = Hosts(hosts).slots or 0, self.hosts.slots or 1
        return max(min(self.ranks, slots), self.ranks * slots // before) if hosts else 0


def _names(carrier: SshCarrier) -> tuple[str, ...]:
    return tuple(connection.name for connection in carrier.connections)


def _listed(lost: dict[str, list[str]]) -> str:
    return "".join(f"\n  {name}: {line}" for name, lines in lost.items() for line in lines)


def prepare_first(carrier: SshCarrier) -> None:
    """Prepare a carrier for the first time: what is in the way is told with where to look closer."""
    try:
        _prepare(carrier)
    except LaunchError as error:
        raise LaunchError(f"{error}{carrier.closer_look()}") from None


def _prepare(carrier: SshCarrier) -> None:
    try:
        carrier.prepare()
    except BaseException:
        carrier.close()
        raise
