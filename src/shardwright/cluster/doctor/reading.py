"""The readings of one host: files, output of commands, and facts. Checks see a host by this alone.

Nothing of it is believed: it may have any form and any character. A check asks for what it needs by `file`, `glob`,
`ran` and `fact`; what is there but cannot be read is `Unreadable`.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardwright.common.schema import SchemaError, checked
from shardwright.common.words import plain

T = TypeVar("T")
_ANSWERED = ("files", "unreadable", "commands", "facts")


class Unreadable(Exception):
    """Something that a check needs is there, but does not say what it should; the text says why."""


@dataclass(frozen=True)
class CommandResult:
    """The end of a command; ``code`` is None where it did not end."""

    code: int | None
    out: str
    err: str

    def last_words(self) -> str:
        lines = [line for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


@dataclass(frozen=True)
class HostReading:
    """One host. ``files`` are texts by path, ``unreadable`` the reasons for those that could not be read."""

    name: str
    files: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, CommandResult] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, answer: Mapping[str, Any]) -> HostReading:
        """Return the answer of a probe. Raises `Unreadable` where it has another form."""
        try:
            return checked({"name": name, **{key: answer[key] for key in _ANSWERED}}, cls)
        except (KeyError, SchemaError) as error:
            raise Unreadable(f"the host answered in another form than expected: {error!r}") from None

    def file(self, path: str) -> str | None:
        """Return the text of a file, without the last line's end; None where it is not there."""
        if path in self.unreadable:
            raise Unreadable(f"{path} cannot be read: {self.unreadable[path]}")
        text = self.files.get(path)
        return None if text is None else text.strip()

    def glob(self, pattern: str) -> dict[str, str]:
        """Return the texts of the files whose paths match, of those that can be read."""
        if refused := fnmatch.filter(self.unreadable, pattern):
            raise Unreadable(f"{refused[0]} cannot be read: {self.unreadable[refused[0]]}")
        return {path: self.files[path].strip() for path in fnmatch.filter(self.files, pattern)}

    def command(self, words: Sequence[str]) -> CommandResult | None:
        """Return the result of a command; None where the program is not there."""
        return self.commands.get(" ".join(words))

    def ran(self, words: Sequence[str]) -> str | None:
        """Return the output of a command; None where the program is not there."""
        if (ran := self.command(words)) is None:
            return None
        if ran.code != 0:
            raise Unreadable(f"`{' '.join(words)}` failed: {ran.last_words()}")
        return ran.out

    def fact(self, name: str, kind: type[T]) -> T:
        value = self.facts.get(name)
        if not isinstance(value, kind):
            raise Unreadable(f"the host did not say its {name.replace('_', ' ')}")
        return value

    def package(self, name: str) -> str | None:
        """Return the version of an installed package."""
        version = self.fact("packages", dict).get(name)
        return None if version is None else str(version)

    def as_root(self, line: str) -> str:
        """Return a line to type that needs the superuser."""
        return line if self.facts.get("root") is True else f"sudo {line}"


def typed(*words: object) -> str:
    """Return a line to type, of which every word is quoted where a shell would take it apart.

    >>> typed("ip", "link", "set", "dev", "eth0; rm -rf /", "mtu", 1500)
    "ip link set dev 'eth0; rm -rf /' mtu 1500"
    """
    return shlex.join(plain(word) for word in words)
