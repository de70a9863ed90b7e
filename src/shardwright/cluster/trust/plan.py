"""The keys and lines that each host lacks for logins without a password between all pairs.

Nothing is taken from the network without a check: the host keys are those that ssh itself has compared when it logged
in from here, or has asked the person about; the keys of this machine are those in /etc/ssh.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.common.words import plain
from shardwright.errors import LaunchError
from shardwright.launch.hosts.hosts import Host, is_this_host

_KEY = re.compile(r"((?:sk-)?(?:ssh|ecdsa)-[a-z0-9@.-]{3,40}) ([A-Za-z0-9+/]{40,16000}={0,3})(?: .*)?")
_LIMIT_S = 10.0
_PORT = "22"


def key_of(line: str) -> str | None:
    """Return kind and key of a public key, without its comment; None where a line is none.

    >>> key_of("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs root@a")
    'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs'
    >>> key_of('command="reboot" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs')
    """
    match = _KEY.fullmatch(line.strip())
    return f"{match[1]} {match[2]}" if match is not None and line.strip().isprintable() else None


def known_lines(host: Host) -> tuple[str, ...]:
    """Return the lines by which others know a host. Raises `LaunchError` where this machine does not know its key."""
    names, keys = _here(host) if is_this_host(host.name) and host.user is None else _verified(host)
    if not keys:
        raise LaunchError(
            f"this machine does not know the host key of {host.name}; type `ssh {host.name} true` once and compare it"
        )
    return tuple(f"{','.join(dict.fromkeys(names))} {key}" for key in dict.fromkeys(keys))


def _here(host: Host) -> tuple[list[str], list[str]]:
    files = sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub"))
    return [host.name], [key for path in files if (key := key_of(path.read_text()))]


def _verified(host: Host) -> tuple[list[str], list[str]]:
    said = _ran("ssh", "-G", "--", host.name)
    settings = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    real, port = settings.get("hostname", host.name), settings.get("port", _PORT)
    alias = settings.get("hostkeyalias", "none")
    searched = real if alias == "none" else alias
    names = [name if port == _PORT else f"[{name}]:{port}" for name in (host.name, real)]
    at = searched if port == _PORT or alias != "none" else f"[{searched}]:{port}"
    files = [*settings.get("userknownhostsfile", "").split(), *settings.get("globalknownhostsfile", "").split()]
    return names, [key for file in files for key in _in_file(at, file)]


def _in_file(name: str, file: str) -> Iterator[str]:
    path = Path(file).expanduser()
    if not path.is_file():
        return
    for line in _ran("ssh-keygen", "-F", name, "-f", str(path)).splitlines():
        _, _, rest = line.partition(" ")
        if not line.startswith(("#", "@")) and (key := key_of(rest)):
            yield key


def _ran(*words: str) -> str:
    """Return the output of a program; a search that finds nothing ends with 1."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{' '.join(words)}` cannot be run here: {error}") from None
    return done.stdout


@dataclass(frozen=True)
class SshState:
    """The state of a host's ~/.ssh: its public key or None, its lines, and the files that could be put back."""

    user: str
    key: str | None
    authorized: frozenset[str]
    known: frozenset[str]
    undo: tuple[str, ...]

    @classmethod
    def of(cls, host: Host, answer: Mapping[str, Any]) -> SshState:
        """Return the state that a host reports. Raises `LaunchError` where it answers something else."""
        try:
            authorized, known = (frozenset(map(str, answer[name])) for name in ("authorized", "known"))
            key = public_key(host, answer["key"])
            return cls(str(answer["user"]), key, authorized, known, tuple(map(str, answer["undo"])))
        except (KeyError, TypeError):
            raise LaunchError(f"{host.name} answered in another form than expected") from None


def public_key(host: Host, key: object) -> str | None:
    """Return the key of a host as it may be given to others: nothing but the key, so that no option comes with it."""
    if key is None:
        return None
    if (bare := key_of(str(key))) is None:
        raise LaunchError(f"the public key of {host.name} is none: {plain(key, 60)}")
    return bare


@dataclass(frozen=True)
class MissingLogins:
    """The work on one host: whether a key is to be made, whom it lets in, whom it is to know."""

    host: Host
    user: str
    makes_key: bool
    lets_in: tuple[str, ...]
    knows: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return not (self.makes_key or self.lets_in or self.knows)

    def lines(self) -> Iterator[str]:
        """Yield the work in words, for a person."""
        if self.nothing:
            yield f"{self.host.name} ({plain(self.user)}): nothing to do"
            return
        yield f"{self.host.name} ({plain(self.user)}):"
        if self.makes_key:
            yield "  make a key without a passphrase: ~/.ssh/id_ed25519"
        if self.lets_in:
            yield f"  let in {', '.join(self.lets_in)}: ~/.ssh/authorized_keys"
        if self.knows:
            yield f"  know {', '.join(self.knows)}: ~/.ssh/known_hosts"


def authorized_line(host: Host, key: str) -> str:
    """Return the line that lets a host's key in; the comment is the host as it was typed."""
    return f"{key} {host.address}"


def plan(
    hosts: Sequence[Host], looks: Mapping[str, SshState], known: Mapping[str, Sequence[str]]
) -> list[MissingLogins]:
    """Return the work on each host; ``known`` has the lines by which each is known."""
    lacking = []
    for host in hosts:
        look, others = looks[host.name], [other for other in hosts if other is not host]
        let_in = {key_of(line) for line in look.authorized} - {None}
        strangers = [o.name for o in others if looks[o.name].key not in let_in]
        unknown = [o.name for o in others if not set(known[o.name]) <= look.known]
        lacking.append(MissingLogins(host, look.user, look.key is None, tuple(strangers), tuple(unknown)))
    return lacking
