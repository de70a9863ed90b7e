"""Jobs on several hosts: an agent on each, reached by the system's OpenSSH, checked together and started together.

    launcher ─┬─ ssh ── sshd ── agent ── supervisor ── ranks 0-1     host a
              ├─ ssh ── sshd ── agent ── supervisor ── ranks 2-3     host b
              └─ agent ── supervisor ── ranks 4-5                    this host, if it is one of them

`SshCarrier.prepare` connects to all hosts at once and checks them (`preflight`), so that a job either starts on all or
tells at once everything that is in the way. `start` may then be called, once per run. Nothing of the environment is on
a command line: it passes through the stream.

The connections hold the leases and know the clocks of the hosts (`agent_connection`).
"""

from __future__ import annotations

import getpass
import os
import secrets
import selectors
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from typing import Any

from shardwright.common.pulse import JOB_VARIABLE
from shardwright.common.words import in_bytes
from shardwright.errors import LaunchError
from shardwright.launch.carriers.agent_connection import AgentConnection, compare, why_no_answer
from shardwright.launch.carriers.connection import (
    Carrier,
    Connection,
    default_environment,
    inherited_environment,
    rank_variables,
    where_unset,
)
from shardwright.launch.carriers.packed import BOOT, pack, sources
from shardwright.launch.host.agent_protocol import Answer, Check, Checked, Hello, Reach, Reached
from shardwright.launch.host.protocol import LogRetention, Start
from shardwright.launch.host.stream import encode
from shardwright.launch.hosts import interfaces
from shardwright.launch.hosts.hosts import Host, Hosts, is_this_host
from shardwright.launch.hosts.placement import Placement
from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.options.launch_options import LaunchOptions
from shardwright.launch.options.request import RemoteOptions
from shardwright.launch.progress_notes import waiting_for

_ANSWER_S = 15.0  # beyond the time to connect: a Python may be on a slow file system
_SSH = (
    "ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectionAttempts=1", "-o", "ClearAllForwardings=yes",
    "-o", "RemoteCommand=none", "-o", "LogLevel=INFO",
)  # fmt: skip


def login_command(host: Host, python: str, connect_timeout_s: float, batch: bool = True) -> list[str]:
    """Return the ssh command that starts an interpreter; without ``batch`` ssh may ask the person at the terminal."""
    words = ["BatchMode=no" if word == "BatchMode=yes" and not batch else word for word in _SSH]
    user = ["-l", host.user] if host.user else []
    timeout = ["-o", f"ConnectTimeout={max(1, round(connect_timeout_s))}"]
    return [*words, *timeout, *user, host.name, f"exec {shlex.quote(python)} -c {shlex.quote(BOOT)}"]


class SshCarrier(Carrier):
    """Reaches the hosts of a job by ssh, and this one without."""

    client, package = "ssh", "openssh-client"

    def __init__(self, options: LaunchOptions, remote: RemoteOptions) -> None:
        self.options, self.remote = options, remote
        self.connections: list[AgentConnection] = []
        self.placement: Placement | None = None
        self.known = remote.hosts  # with their slots, once they have been asked
        self.unusable: dict[str, list[str]] = {}  # what was wrong with each, where `prepare` fails for that alone
        self.address, self.port = "127.0.0.1", 0
        self.interfaces: dict[str, str] = {}
        self._here: dict[Host, bool] = {}
        self._started = False

    @property
    def ranks(self) -> int:
        assert self.placement is not None
        return self.placement.size

    # --- what is checked before anything starts

    def prepare(self) -> None:
        """Connect, check and place the ranks. Raises `LaunchError` with all that is in the way, `UsageError` for -n."""
        hosts = self._hosts_needed()
        with ThreadPoolExecutor(32) as pool:  # a name that nobody knows can take seconds
            self._here = dict(zip(hosts, pool.map(self.is_here, hosts), strict=True))
        for host in hosts:
            try:
                command, environment = self.command(host), self.client_environment()
                connection = AgentConnection(host, command, self.pack_for(host), self.remote.lease_s, environment)
            except OSError as error:
                raise LaunchError(
                    f"{self.client} to {host.name} cannot be started here: {error}; is there an {self.client} on the "
                    f"PATH (`apt-get install {self.package}`), and room for more processes and files (`ulimit -n`)?"
                ) from None
            self.connections.append(connection)
        word = secrets.token_hex(16)
        with selectors.DefaultSelector() as selector:
            for connection in self.connections:
                connection.attach(selector, partial(self._take, connection))
            try:
                self._wait(selector, Hello, self.remote.connect_timeout_s + _ANSWER_S)
                for connection in self._answering(Hello):
                    self._order_check(connection, word)
                self._wait(selector, Checked, _ANSWER_S)
                self._refuse_problems()
                self._place(hosts)
                self._find_way(selector, word)
            finally:
                for connection in self.connections:
                    connection.detach()

    def is_here(self, host: Host) -> bool:
        """Return whether no ssh is needed."""
        return host.user in (None, getpass.getuser()) and is_this_host(host.name)

    def python(self, host: Host) -> str:
        return self.remote.python.on(host.name) or sys.executable

    def client_environment(self) -> dict[str, str] | None:
        """Return the environment of ssh itself; None for that of the launcher."""
        return None

    def shared_environment(self) -> dict[str, str]:
        """Return the launcher's variables that ranks on all hosts get beside what -x says."""
        return portable_environment(os.environ)

    def why_silent(self, connection: AgentConnection) -> str:
        """Return the reason why a host did not answer, in a line."""
        c, python = connection, self.python(connection.host)
        if (error := c.stream_error) is not None:
            return f"{error.filename}, which is to be staged, cannot be read here: {error.strerror}"
        spent_s = self.remote.connect_timeout_s + _ANSWER_S
        text = why_no_answer(c.host, c.answers, c.exit_code, bytes(c.said), bytes(c.noise), python, spent_s)
        return text + self.other_way()

    def other_way(self) -> str:
        """Return another way to a silent host, to be added to why it is silent."""
        in_allocation = "SLURM_JOB_NODELIST" in os.environ
        return "; in this allocation of Slurm --via srun may do without ssh" if in_allocation else ""

    def closer_look(self) -> str:
        """Return the command that says more than the checks before the start, to be added to what they found."""
        pythons = [self.remote.python.everywhere, *(f"{h}={p}" for h, p in self.remote.python.by_host.items())]
        named = ",".join(host.address for host in self.remote.hosts)
        words = [word for python in pythons if python is not None for word in ("--python", python)]
        return f"\nfor a closer look type `{shlex.join(['shardwright', 'doctor', '-H', named, *words])}`"

    def command(self, host: Host) -> list[str]:
        """Return the command that starts an agent on the host: here, or by ssh."""
        python = self.python(host)
        if self._here[host]:
            return [python, "-c", BOOT]
        return login_command(host, python, self.remote.connect_timeout_s)

    def pack_for(self, host: Host) -> tuple[bytes, bytes]:
        """Return the bytes that are sent to the host, and the line after which its answers begin."""
        return self._packed

    @cached_property
    def _packed(self) -> tuple[bytes, bytes]:
        """Return what is sent to every host. Cached: the package's sources do not change while a process runs them."""
        return pack(sources())

    def _hosts_needed(self) -> Hosts:
        """Return the hosts that have ranks, as far as that is known before the hosts are contacted."""
        if self.remote.table is not None:
            self.placement = Placement.by_table(self.remote.table)
        elif self.remote.hosts.slots is not None:
            self.placement = Placement.by_slots(self.remote.hosts, self.remote.ranks, self.remote.oversubscribe)
        return self.remote.hosts if self.placement is None else Hosts(self.placement.hosts)

    def _place(self, hosts: Hosts) -> None:
        if self.placement is None:
            cpus = {connection.name: connection.answer(Hello).cpus for connection in self.connections}
            self.known = Hosts(tuple(h if h.slots is not None else Host(h.name, cpus[h.name], h.user) for h in hosts))
            self.placement = Placement.by_slots(self.known, self.remote.ranks, self.remote.oversubscribe)
            for connection in self.connections[len(self.placement.hosts) :]:
                connection.close()
            del self.connections[len(self.placement.hosts) :]
        for connection, ranks in zip(self.connections, self.placement.ranks, strict=True):
            connection.ranks = ranks

    def _take(self, connection: AgentConnection) -> None:
        if connection.receive() is None:
            connection.detach()
            connection.exit_code = connection.wait()

    def _answering(self, answer: type[Answer]) -> list[AgentConnection]:
        return [c for c in self.connections if c.has(answer) and c.exit_code is None]

    def _wait(self, selector: selectors.BaseSelector, answer: type[Answer], timeout_s: float) -> None:
        """Wait until each host that still can has answered, or the time is over.

        The time of a host to which much is sent begins anew whenever it is heard.
        """
        began_s = time.monotonic()
        asked = [c for c in self.connections if answer is Hello or c.has(Hello)]
        with waiting_for("reaching hosts") as work:
            while waiting := [c for c in asked if c.exit_code is None and not c.has(answer)]:
                work.stage(self._waited_for(waiting))
                heard_s = max(c.heard_s if c.streamed and c.heard_s > began_s else began_s for c in waiting)
                left_s = heard_s + timeout_s - time.monotonic()
                if left_s <= 0 or any(c.stream_error for c in waiting):
                    return
                beats = [c.tick() for c in self._answering(Hello)]
                for key, _ in selector.select(min([left_s, *(beat for beat in beats if beat is not None)])):
                    key.data()

    def _waited_for(self, waiting: Sequence[AgentConnection]) -> str:
        names = ", ".join(c.name for c in waiting)
        if (stage := self.remote.stage) is None or not any(c.streamed for c in waiting):
            return f"waiting for {names}"
        sent_bytes = min(*(c.streamed_bytes for c in waiting), stage.size_bytes)
        return f"staging to {names}: {in_bytes(sent_bytes)} of {in_bytes(stage.size_bytes)}"

    def _order_check(self, connection: AgentConnection, word: str) -> None:
        order = self._check_order(connection, word)
        if (stage := self.remote.stage) is None:
            connection.send(order)
        else:
            connection.send_stream(chain(stage.orders(), [encode(order)]))

    def _check_order(self, connection: AgentConnection, word: str) -> Check:
        program, here = self.options.program, None if self.remote.stage else os.getcwd()
        return Check(
            wdir=self.remote.wdir.on(connection.name) or here,
            log_dir=None if self.remote.collect_logs else os.fspath(self.options.log_dir.absolute()),
            program=program, preload=self.options.preload,
            first=connection is self.connections[0], port=self.options.port,
            ours=program.kind == "module" and program.arguments[0].partition(".")[0] == "shardwright",
            environment=self._environment_on(connection), lease_s=self.remote.lease_s, word=word,
        )  # fmt: skip

    def _refuse_problems(self) -> None:
        problems: dict[str, list[str]] = {}
        for c in self.connections:
            problems[c.name] = list(c.answer(Checked).problems) if c.has(Checked) else [self.why_silent(c)]
        checked = {c.name: _versions(c) for c in self._answering(Checked)}
        for name, lines in compare(checked).items():
            problems[name] += lines
        usage = shutil.disk_usage(self.options.log_dir)
        here = [] if usage.free >= 1 << 20 else [f"the disk of {self.options.log_dir} here is full; type --log-dir DIR"]
        bad = {name: lines for name, lines in problems.items() if lines}
        if bad or here:
            listed = [f"  {name}: {line}" for name, lines in bad.items() for line in lines] + [f"  {x}" for x in here]
            count = f"{len(bad)} of {len(self.connections)} hosts cannot be used" if bad else "nothing was started"
            self.unusable = {} if here else bad
            raise LaunchError("\n".join([f"{count}:", *listed]))

    def _find_way(self, selector: selectors.BaseSelector, word: str) -> None:
        first, *others = self.connections
        checked = first.answer(Checked)
        assert checked.port is not None
        self.port = checked.port
        if not others:
            if checked.loopback is not None:
                self.interfaces = {first.name: checked.loopback}
            return
        assert checked.probe is not None
        addresses = [interfaces.Address(*entry) for entry in checked.addresses]
        for other in others:
            other.send(Reach(tuple(a.address for a in addresses), checked.probe, word))
        first.answers[Reached] = Reached({})
        self._wait(selector, Reached, _ANSWER_S)
        if silent := [c.name for c in others if not c.has(Reached)]:
            what = f"did not answer while it was tried who reaches {first.name}"
            self.unusable = {name: [what] for name in silent}
            raise LaunchError(f"{', '.join(silent)} {what}")
        reached = {c.name: c.answer(Reached).by for c in others}
        self.address, self.interfaces = interfaces.choose(first.name, addresses, reached, self.remote.interface)

    # --- starting

    def start(
        self, run_id: str, folder: JobFolder, begin: str = "", shown: Collection[int] = ()
    ) -> Sequence[Connection]:
        kept = LogRetention(os.fspath(folder.path.absolute()), tuple(sorted(shown)), begin)
        self._started = True
        for index, connection in enumerate(self.connections):
            connection.over = False
            scratch = connection.answer(Hello).scratch
            connection.send(Start(
                self.options.program, self.options.preload, self._rank_variables(index, run_id, scratch),
                packed=True, lease_s=self.remote.lease_s, scratch=scratch, bind=self.options.bind,
                stall_s=self.options.stall_timeout_s,
                environment=self._host_environment(connection) | {JOB_VARIABLE: f"{run_id}/{index}"},
                kept=None if self.remote.collect_logs else kept,
            ))  # fmt: skip
        return self.connections

    def close(self) -> None:
        for connection in self.connections:
            connection.hang_up()
        for connection in self.connections:
            connection.close()
        if self._started and self.remote.stage is not None and self.remote.stage.keep:
            for c in self.connections:
                text = f"shardwright: {c.answer(Checked).staged} holds what was staged to {c.name}\n"
                os.write(2, text.encode())
        self._started = False

    def describe_hosts(self) -> list[dict[str, Any]]:
        return [
            {
                "name": c.name, "ranks": list(c.ranks), "interface": self.interfaces.get(c.name),
                **{key: getattr(c.answer(Hello), key) for key in ("python", "executable", "cpus", "gpus")},
                **{key: getattr(c.answer(Checked), key) for key in ("torch", "shardwright")},
                **({"staged": c.answer(Checked).staged} if self.remote.stage else {}),
            }
            for c in self.connections
        ]  # fmt: skip

    def _environment_on(self, connection: AgentConnection) -> dict[str, str]:
        own = self.remote.variables.get(connection.name, {})
        return {**self.shared_environment(), **self.options.environment, **own}

    def _host_environment(self, connection: AgentConnection) -> dict[str, str]:
        """Return the variables that nobody has set, and those that only this host has."""
        hello, checked = connection.answer(Hello), connection.answer(Checked)
        defaults = default_environment(hello.cpus, len(connection.ranks))
        if name := self.interfaces.get(connection.name):
            defaults["GLOO_SOCKET_IFNAME"] = name
            if len(self.connections) > 1:
                defaults["NCCL_SOCKET_IFNAME"] = f"={name}"
        if checked.infiniband and len(self.connections) > 1:
            defaults["NCCL_IB_HCA"] = f"={','.join(checked.infiniband)}"
        if connection.host.devices and hello.gpus:
            defaults["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, connection.host.devices))
        chosen = self._environment_on(connection)
        return where_unset(defaults, chosen)

    def _rank_variables(self, index: int, run_id: str, scratch: str) -> dict[int, dict[str, str]]:
        assert self.placement is not None
        here = self.placement.ranks[index]
        return {
            rank: rank_variables(
                rank, self.placement.size, local_rank, len(here), index, len(self.connections), self.address,
                self.port, run_id, f"{scratch}/error.{rank}.json", f"{scratch}/failed.json",
                self.options.restarts,
            ) | {"NODE_RANK": str(index)} | self.options.rank_environments.get(rank, {})
            for local_rank, rank in enumerate(here)
        }  # fmt: skip


def _versions(connection: AgentConnection) -> dict[str, str | None]:
    hello, checked = connection.answer(Hello), connection.answer(Checked)
    return {"python": hello.python, "torch": checked.torch, "shardwright": checked.shardwright}


# What belongs to a login or to this host alone; everything else is the same on each host, unless -x says otherwise.
_OWN = frozenset({
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "DISPLAY", "WAYLAND_DISPLAY", "TERM", "PWD",
    "OLDPWD", "SHLVL", "_", "TMPDIR", "TMP", "TEMP", "DBUS_SESSION_BUS_ADDRESS",
})  # fmt: skip
_OWN_PREFIXES = ("SSH_", "XDG_")


def portable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher that ranks on other hosts get."""
    return {
        name: value
        for name, value in inherited_environment(environment).items()
        if name not in _OWN and not name.startswith(_OWN_PREFIXES)
    }
