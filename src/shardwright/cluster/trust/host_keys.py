"""The host keys that this machine has verified, as lines for the known_hosts of others.

Nothing is taken from the network without a check: ssh itself has compared the key when it logged in from here, or has
asked the person. The keys of this machine are those in /etc/ssh.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from shardwright.errors import LaunchError
from shardwright.launch.hosts.hosts import Host, is_this_host

_KEY = re.compile(r"((?:sk-)?(?:ssh|ecdsa)-[a-z0-9@.-]{3,40}) ([A-Za-z0-9+/]{40,16000}={0,3})(?: .*)?")
_LIMIT_S = 10.0
_PORT = "22"


def key_of(line: str) -> str | None:
    """Kind and key of a public key, without its comment; None where a line is none.

    >>> key_of("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs root@a")
    'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs'
    >>> key_of('command="reboot" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs')
    """
    match = _KEY.fullmatch(line.strip())
    return f"{match[1]} {match[2]}" if match is not None and line.strip().isprintable() else None


def known_lines(host: Host) -> tuple[str, ...]:
    """The lines by which others know a host: by its name, and by what the name stands for here.

    Raises `LaunchError` where this machine does not know the host's key.
    """
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
    """What a program prints; a search that finds nothing ends with 1."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{' '.join(words)}` cannot be run here: {error}") from None
    return done.stdout
