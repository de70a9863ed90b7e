"""Several hosts on this machine, for tests of what runs on many: each with its own network, name, processes and sshd.

    with host_network(3, tmp_path) as network:
        network.ssh("host2", "hostname")

A host is a network namespace (with its own interface, named unlike those of the others), a UTS namespace (its name),
a PID namespace (it sees its own processes alone) and a mount namespace (its /etc/hosts knows all of them). Files and
users are this machine's. The hosts and this machine stand on one bridge; `HostNetwork.cut` and `HostNetwork.slow` act
on the link of a host. ssh is told by ``HostNetwork.config`` alone, here and on each host: nothing in ~/.ssh is read or
written.

At the end everything is removed. Where this process is killed, the kernel ends all processes of its hosts; what has a
name carries this process's number, and the next `host_network` removes what belongs to no living process.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PROGRAMS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "setpriv", "mount", "hostname")
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where sshd and ip are, also for who is no superuser
_NAMED = re.compile(r"sw[hbv](\d+)(?:h\d+)?")  # a namespace, a bridge, a link
# Set aside for tests of network devices (RFC 2544): nobody's real network.
_NETWORKS = list(ipaddress.ip_network("198.18.0.0/15").subnets(new_prefix=24))
_SSH_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NetworkHost:
    """``pid`` is the first process of the host, sshd, as this machine numbers it; ``link`` is this machine's end."""

    name: str
    address: str
    interface: str
    namespace: str
    link: str
    pid: int


def why_not() -> str | None:
    """The reason why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine; type `apt-get install openssh-server iproute2`"
    probe = f"swh{os.getpid()}h0"
    for command in (["ip", "netns", "add", probe], ["ip", "netns", "exec", probe, "unshare", "-umpf", "true"]):
        if failure := _failure(*command):
            _failure("ip", "netns", "delete", probe)
            return f"network namespaces cannot be made here: {failure}"
    return _failure("ip", "netns", "delete", probe)


@contextlib.contextmanager
def host_network(count: int, folder: Path, homes: bool = False, password: str = "") -> Iterator[HostNetwork]:
    """``count`` hosts, host1 and so on, reachable when this returns. Keys, logs and configurations are in ``folder``.
    With ``homes`` each has a ~/.ssh of its own, empty, in ``folder/host1_home`` and so on, which its sshd reads too.
    With a ``password`` nobody has a key at first, and each host asks for that.

    The test is skipped, with the reason, where hosts cannot be made.
    """
    remove_stale()
    if reason := why_not():
        pytest.skip(reason)
    network = HostNetwork(folder, homes, password)
    try:
        network.start(count)
        yield network
    finally:
        network.remove()


class HostNetwork:
    """The hosts by name, and their links. One at a time in a process."""

    def __init__(self, folder: Path, homes: bool = False, password: str = "") -> None:
        self.folder, self.homes, self.password = folder, homes, password
        self.config = folder / "ssh_config"
        self.hosts: dict[str, NetworkHost] = {}
        self.bridge = f"swb{os.getpid()}"
        self.address = ""  # of this machine, as the hosts see it
        self.programs = folder / "bin"  # where `ssh` is one that knows these hosts
        self._started: list[subprocess.Popen[bytes]] = []

    # --- what tests do with hosts

    def ssh(self, host: str, *command: str, timeout_s: float = _SSH_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a command on a host from this machine; the words reach the host's shell joined by spaces."""
        return subprocess.run(
            self.ssh_command(host, *command),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def ssh_command(self, host: str, *command: str) -> list[str]:
        return ["ssh", "-F", str(self.config), host, *command]

    @property
    def path(self) -> str:
        """A PATH whose `ssh` reaches the hosts by their names."""
        return f"{self.programs}:{os.environ['PATH']}"

    def inside(self, host: str, *command: str) -> list[str]:
        """A command line that runs ``command`` on a host without ssh."""
        return [_program("nsenter"), f"--target={self.hosts[host].pid}", "-n", "-u", "-m", "-p", "--", *command]

    def cut(self, host: str) -> None:
        """Pull the cable: what is on its way is lost, and nobody is told."""
        _must("ip", "link", "set", self.hosts[host].link, "down")

    def mend(self, host: str) -> None:
        _must("ip", "link", "set", self.hosts[host].link, "up")

    def slow(self, host: str, bits_per_s: int) -> None:
        """Limit both directions of a host's link."""
        told = self.hosts[host]
        burst = max(
            16 * 1024, bits_per_s // 8 // 250
        )  # less than a tick of the scheduler lets through would slow it more
        limit = ["root", "tbf", "rate", f"{bits_per_s}bit", "burst", f"{burst}b", "latency", "200ms"]
        _must("tc", "qdisc", "replace", "dev", told.link, *limit)
        _must("ip", "netns", "exec", told.namespace, _program("tc"), "qdisc", "replace", "dev", told.interface, *limit)

    def unslow(self, host: str) -> None:
        told = self.hosts[host]
        _must("tc", "qdisc", "delete", "dev", told.link, "root")
        _must("ip", "netns", "exec", told.namespace, _program("tc"), "qdisc", "delete", "dev", told.interface, "root")

    def processes(self, host: str) -> list[int]:
        """The processes on a host, as this machine numbers them; sshd's are among them."""
        return _pids(self.hosts[host].namespace)

    # --- making and removing

    def start(self, count: int) -> None:
        network = self._make_bridge()
        addresses = [str(network[i]) for i in range(1, count + 1)]
        names = [f"host{i}" for i in range(1, count + 1)]
        self._write_client_files(names, addresses)
        os.makedirs("/run/sshd", exist_ok=True)  # sshd's own start script makes it
        made = []
        for number, (name, address) in enumerate(zip(names, addresses, strict=True), 1):
            namespace, link, interface = f"swh{os.getpid()}h{number}", f"swv{os.getpid()}h{number}", f"nic{number}"
            self._make_link(namespace, link, interface, f"{address}/{network.prefixlen}")
            made.append((name, address, interface, namespace, link, self._start_sshd(name, namespace)))
        for name, address, interface, namespace, link, started in made:
            pid = _wait_for_sshd(address, started, self.folder / f"{name}.log")
            self.hosts[name] = NetworkHost(name, address, interface, namespace, link, pid)

    def remove(self) -> None:
        _remove(os.getpid())
        for process in self._started:
            process.wait(60)

    def _make_bridge(self) -> ipaddress.IPv4Network:
        """On a network that no other bridge of ours has: one process chooses at a time."""
        with open("/run/shardwright-test-hosts.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            listed = json.loads(_must("ip", "-json", "address"))
            taken = [ipaddress.ip_address(a["local"]) for link in listed for a in link["addr_info"]]
            free = [network for network in _NETWORKS if not any(address in network for address in taken)]
            network = free[os.getpid() % len(free)]
            self.address = str(network[254])
            # Ports forward from the start instead of listening for other bridges for 15 s first.
            _must("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
            _must("ip", "address", "add", f"{self.address}/{network.prefixlen}", "dev", self.bridge)
            _must("ip", "link", "set", self.bridge, "up")
        assert isinstance(network, ipaddress.IPv4Network)
        return network

    def _make_link(self, namespace: str, link: str, interface: str, address: str) -> None:
        _must("ip", "netns", "add", namespace)
        _must("ip", "link", "add", link, "type", "veth", "peer", "name", interface, "netns", namespace)
        _must("ip", "link", "set", link, "master", self.bridge, "up")
        _must("ip", "-netns", namespace, "link", "set", "lo", "up")
        _must("ip", "-netns", namespace, "address", "add", address, "dev", interface)
        _must("ip", "-netns", namespace, "link", "set", interface, "up")

    def _write_client_files(self, names: list[str], addresses: list[str]) -> None:
        for name in ("client", *names):
            _must("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / f"{name}_key"))
        keys = {name: (self.folder / f"{name}_key.pub").read_text() for name in ("client", *names)}
        (self.folder / "authorized_keys").write_text("" if self.password else keys["client"])
        if self.password:
            self._write_shadow()
        pairs = list(zip(names, addresses, strict=True))
        (self.folder / "known_hosts").write_text("".join(f"{address} {keys[name]}" for name, address in pairs))
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in pairs)
        )
        own = "".join(f"Host {name}\n  HostName {address}\n" for name, address in pairs)
        self.config.write_text(
            f"{own}Host *\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/client_key\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  BatchMode yes\n  ConnectTimeout 15\n"
        )
        self.programs.mkdir()
        (self.programs / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.config} "$@"\n')
        (self.programs / "ssh").chmod(0o755)

    def _start_sshd(self, name: str, namespace: str) -> subprocess.Popen[bytes]:
        config = self.folder / f"{name}_sshd_config"
        methods, root = ("publickey password", "yes") if self.password else ("publickey", "prohibit-password")
        config.write_text(
            f"Port 22\nAddressFamily inet\nHostKey {self.folder}/{name}_key\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys .ssh/authorized_keys\n"
            f"AuthenticationMethods {methods}\nStrictModes no\nPermitRootLogin {root}\n"
            "UsePAM no\nUseDNS no\nPrintMotd no\nMaxStartups 100\nMaxSessions 100\n"
            "Subsystem sftp internal-sftp\n"
        )
        # sshd is the first process of the host: with it, and so with us, the kernel ends all others.
        script = f"""
            hostname {name}
            mount --bind {self.folder}/hosts /etc/hosts
            {f"mount --bind {self.folder}/shadow /etc/shadow" if self.password else ""}
            {self._own_home(name) if self.homes else ""}
            exec {_program("sshd")} -D -e -f {config}
        """
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [
                    _program("setpriv"), "--pdeathsig", "KILL", _program("ip"), "netns", "exec", namespace,
                    _program("unshare"), "--uts", "--pid", "--mount", "--propagation", "slave", "--mount-proc",
                    "--fork", "--kill-child", "sh", "-ec", script,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": _PATH}, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def _write_shadow(self) -> None:
        """The hosts' own /etc/shadow, in which this user has the password."""
        hashed = _must("openssl", "passwd", "-6", self.password).strip()
        (shadow := self.folder / "shadow").touch(0o600)
        shadow.write_text(f"{getpass.getuser()}:{hashed}:20000:0:99999:7:::\n")

    def _own_home(self, name: str) -> str:
        """What gives a host a home of its own, in which all folders but .ssh are those of this machine's."""
        (own := self.folder / f"{name}_home").mkdir()
        folders = [path for path in Path.home().iterdir() if path.is_dir() and path.name != ".ssh"]
        for path in folders:
            (own / path.name).mkdir()
        binds = [f"mount --bind {shlex.quote(f'{path}')} {shlex.quote(f'{own / path.name}')}" for path in folders]
        return "; ".join([*binds, f"mount --rbind {own} {Path.home()}"])


def remove_stale() -> None:
    """What processes left that no longer live. Without root there can be nothing."""
    if os.geteuid() != 0 or shutil.which("ip", path=_PATH) is None:
        return
    listed = [entry["name"] for entry in json.loads(_must("ip", "-json", "netns", "list") or "[]")]
    listed += [entry["ifname"] for entry in json.loads(_must("ip", "-json", "link"))]
    for pid in {int(match[1]) for name in listed if (match := _NAMED.fullmatch(name))}:
        if not Path(f"/proc/{pid}").exists():
            _remove(pid)


def _remove(pid: int) -> None:
    """Everything that carries the number of a process: the processes of its hosts, namespaces, links, the bridge."""
    entries = json.loads(_must("ip", "-json", "netns", "list") or "[]")
    for name in [entry["name"] for entry in entries if re.fullmatch(rf"swh{pid}h\d+", entry["name"])]:
        for process in _pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _failure("ip", "netns", "delete", name)
    # The kernel removes a link some time after its namespace; a later bridge must not meet it.
    for entry in json.loads(_must("ip", "-json", "link")):
        if re.fullmatch(rf"sw[bv]{pid}(h\d+)?", entry["ifname"]):
            _failure("ip", "link", "delete", entry["ifname"])


def _pids(namespace: str) -> list[int]:
    found = subprocess.run([_program("ip"), "netns", "pids", namespace], capture_output=True, text=True, timeout=60)
    return [int(word) for word in found.stdout.split()]


def _wait_for_sshd(address: str, started: subprocess.Popen[bytes], log: Path) -> int:
    """Until it accepts connections; returns its process number."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and started.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((address, 22), timeout=1).close()
            [child] = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
            return int(child)
        time.sleep(0.02)
    raise RuntimeError(f"sshd on {address} does not answer:\n{log.read_text()}")


def _program(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    assert found is not None, name
    return found


def _must(name: str, *arguments: str) -> str:
    done = subprocess.run([_program(name), *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _failure(name: str, *arguments: str) -> str | None:
    """What a command complains of, or None where it succeeds."""
    try:
        _must(name, *arguments)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None
