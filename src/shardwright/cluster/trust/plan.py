"""What each host lacks for logins without a password between all pairs: made from what the hosts say, shown first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.cluster.doctor.reading import plain
from shardwright.cluster.trust.host_keys import key_of
from shardwright.errors import LaunchError
from shardwright.launch.hosts.hosts import Host


@dataclass(frozen=True)
class Look:
    """What a host says of its ~/.ssh: its public key or None, the lines that are there, and what could be undone."""

    user: str
    key: str | None
    authorized: frozenset[str]
    known: frozenset[str]
    undo: tuple[str, ...]

    @classmethod
    def of(cls, host: Host, answer: Mapping[str, Any]) -> Look:
        """Raises `LaunchError` where a host answers something else."""
        try:
            authorized, known = (frozenset(map(str, answer[name])) for name in ("authorized", "known"))
            key = _public(host, answer["key"])
            return cls(str(answer["user"]), key, authorized, known, tuple(map(str, answer["undo"])))
        except (KeyError, TypeError):
            raise LaunchError(f"{host.name} answered in another form than expected") from None


def _public(host: Host, key: object) -> str | None:
    """The key of a host as it may be given to others: nothing but the key itself, so that no option comes with it."""
    if key is None:
        return None
    if (bare := key_of(str(key))) is None:
        raise LaunchError(f"the public key of {host.name} is none: {plain(key, 60)}")
    return bare


@dataclass(frozen=True)
class Lacking:
    """What is to be done on one host: whether a key is to be made, whom it lets in, whom it is to know."""

    host: Host
    user: str
    makes_key: bool
    lets_in: tuple[str, ...]
    knows: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return not (self.makes_key or self.lets_in or self.knows)

    def lines(self) -> Iterator[str]:
        """What will be done there, for a person."""
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
    """The line that lets a host's key in; the comment is the host as it was typed."""
    return f"{key} {host.address}"


def plan(hosts: Sequence[Host], looks: Mapping[str, Look], known: Mapping[str, Sequence[str]]) -> list[Lacking]:
    """What each host lacks; ``known`` has the lines by which each is known."""
    lacking = []
    for host in hosts:
        look, others = looks[host.name], [other for other in hosts if other is not host]
        strangers = [o.name for o in others if not _lets_in(look, looks[o.name].key)]
        unknown = [o.name for o in others if not set(known[o.name]) <= look.known]
        lacking.append(Lacking(host, look.user, look.key is None, tuple(strangers), tuple(unknown)))
    return lacking


def _lets_in(look: Look, key: str | None) -> bool:
    return key is not None and any(key_of(line) == key for line in look.authorized)
