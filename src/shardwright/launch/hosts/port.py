"""A port for the ranks to meet at, which no second job on this host can have while the first lives."""

from __future__ import annotations

import errno
import random
import socket
from dataclasses import dataclass

from shardwright.common.system_errors import in_words, is_explained
from shardwright.errors import LaunchError, UsageError
from shardwright.launch.host.system_files import text_of

_LOWEST = 10_000
LOOPBACK = "127.0.0.1"
_REACH_S = 5.0


@dataclass(frozen=True)
class PortLease:
    """A port and the open sockets that keep it: a name other launchers look for, and a bound TCP socket.

    The TCP socket is bound but never listens, with SO_REUSEADDR: rank 0's store can still listen on the port, while
    the kernel gives it to nobody who asks for any free port.
    """

    port: int
    sockets: tuple[socket.socket, ...]

    def file_descriptors(self) -> list[int]:
        """The sockets' numbers, for the supervisor to inherit, which outlives a launcher that is killed."""
        return [each.fileno() for each in self.sockets]

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def lease_port(port: int | None) -> PortLease:
    """Return ``port``, or where None a free one outside the range that the kernel hands out by itself.

    Raises `UsageError` where ``port`` is taken, `LaunchError` where no port is free or nothing is reached at 127.0.0.1.
    """
    refuse_without_loopback()
    if port is not None:
        try:
            return _lease(port)
        except OSError as error:
            raise UsageError(
                f"--port {port} cannot be had: {error.strerror}; another job or program on this host may hold it. "
                "Leave --port out and a free one is chosen"
            ) from None
    candidates = _candidates()
    for candidate in random.SystemRandom().sample(candidates, min(len(candidates), 200)):
        try:
            return _lease(candidate)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise LaunchError(f"no port can be had for the ranks to meet at: {in_words(error)}") from None
    raise LaunchError(f"no free TCP port among 200 tried between {candidates[0]} and {candidates[-1]}")


def refuse_without_loopback() -> None:
    """Raise `LaunchError` where ranks of this host cannot reach each other at 127.0.0.1."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_REACH_S).close()
    except OSError as error:
        remedy = "" if is_explained(error) else "; type `ip link set lo up`, or start a container that has a loopback"
        raise LaunchError(
            f"ranks of one host meet at {LOOPBACK}, which cannot be reached: {in_words(error)}{remedy}"
        ) from None


def _candidates() -> range:
    low, high = map(int, text_of("/proc/sys/net/ipv4/ip_local_port_range").split() or (32_768, 60_999))
    return range(_LOWEST, low) if low - _LOWEST >= 1000 else range(high + 1, 65_536) or range(_LOWEST, 65_536)


def _lease(port: int) -> PortLease:
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0shardwright-port-{port}")  # the kernel frees it with its last holder, however that ends
        return PortLease(port, (name, _bind(port)))
    except OSError:
        name.close()
        raise


def _bind(port: int) -> socket.socket:
    """Return a TCP socket that is bound on every address, of both families where the host has both."""
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    bound = socket.socket(families[0])
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if families[0] == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound
