"""Network namespaces on this machine: alone, or two of them joined by a veth link, for tests of what devices count.

A test process enters one with `enter`; what it opens then goes over the devices of that namespace, and its /sys shows
them. The namespaces go when the context ends, whatever happened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
ADDRESSES = ("10.199.7.1", "10.199.7.2")
DEVICE = "veth0"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "the program ip is missing; install iproute2"
    name = f"sw-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return ""


@contextlib.contextmanager
def namespaces(count: int = 2) -> Iterator[tuple[str, ...]]:
    """The names of one or two fresh namespaces; two are joined by the device veth0 of each, at `ADDRESSES`."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    names = tuple(f"sw-{os.getpid()}-{i}" for i in range(count))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        if count == 2:
            _run("ip", "-n", names[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                # No router solicitations and the like: what the link counts is what the test sends, but for ARP.
                _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", f"net.ipv6.conf.{DEVICE}.disable_ipv6=1")
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
                _run("ip", "-n", name, "link", "set", DEVICE, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


def enter(name: str, host: str | None = None) -> None:
    """Move this process into a namespace for good, with its /sys, and call its host ``host``."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    descriptor = os.open(Path("/run/netns") / name, os.O_RDONLY)
    check(libc.setns(descriptor, _CLONE_NEWNET), "setns")
    os.close(descriptor)
    check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "unshare")
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount /")
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")
    if host is not None:
        socket.sethostname(host)
