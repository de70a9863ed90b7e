"""What the options of other launchers come to: the words of ours, or the command to type in their place.

Torchrun and msrun are typed on every host, and each of these commands knows the first host and how many there are. Ours
is typed once and names all hosts, so that what they say of several is a command to complete where ``-H`` is not typed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Hosts, is_this_host, own_slots
from shardwright.launch.options.host_options import HostRequest, hosts_of_allocation
from shardwright.launch.options.other_options import OTHER_OPTIONS, OtherOption, Part

_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Typed:
    """The command as it was typed: the words before the program, and the program with its own."""

    options: tuple[str, ...]
    program: tuple[str, ...]

    def without_others(self) -> list[str]:
        """Our own options."""
        rest, kept = iter(self.options), []
        for word in rest:
            name, equals, _ = word.partition("=")
            option = _NAMES.get(name.replace("_", "-"))
            if option is None:
                kept.append(word)
            elif option.value and not equals:
                next(rest, None)
        return kept


_NAMES = {name: option for option in OTHER_OPTIONS for name in option.names}


def in_our_words(said: Mapping[OtherOption, str], words: Mapping[str, Any], typed: Typed) -> dict[str, Any]:
    """The ``words`` of our command with what options of others have ``said``.

    Raises `UsageError` for what is not served, for contradictions, and, with the command to type, for several hosts of
    which only the first is named.
    """
    for option in said:
        if option.refusal:
            raise UsageError(f"{option.names[0]} is {option.of}'s: {option.refusal}")
    ours = dict(words)
    for option, value in said.items():
        ours |= option.ours(value) if option.ours is not None else {}
    job = _Job(dict(_parts(said)), ours["ranks"])
    return ours | (job.on_named(hosts, ours) if (hosts := _named(ours)) is not None else job.here(ours, typed))


def to_be_said(said: Mapping[OtherOption, str], words: Mapping[str, Any]) -> list[str]:
    """A line of each word that means something else here than with the launcher that it comes from."""
    lines = [option.word(value) for option, value in said.items()]
    tee, of_torchrun = words["tee"], any("torchrun" in option.of for option in said)
    if tee == "3" or (of_torchrun and tee in ("0", "1", "2")):
        streams = "none" if tee == "0" else "all"
        lines.append(f"--tee {tee} shows what rank {tee} writes; for torchrun's --tee {tee} type --tee {streams}")
    return [line for line in lines if line]


def _named(words: Mapping[str, Any]) -> Hosts | None:
    """The hosts that our own options name, or Slurm has allocated."""
    if words["rank_table"] is not None:
        return None
    named, _ = HostRequest(hosts=words["hosts"], hostfile=words["hostfile"]).named(None)
    return named or hosts_of_allocation(words["allocation"], asked=words["via"] == "srun")


def _parts(said: Mapping[OtherOption, str]) -> Iterator[tuple[Part, tuple[str, str]]]:
    """What is said of each part of the job, and by which option. Raises `UsageError` where two do not agree."""
    parts: dict[Part, tuple[str, str]] = {}
    for option, value in said.items():
        if option.part is None:
            continue
        for part, text in _split(option.part, value):
            name = option.names[0]
            if parts.setdefault(part, (text, name))[0] != text:
                raise UsageError(f"{parts[part][1]} {parts[part][0]} and {name} {text} differ; type one of them")
    yield from parts.items()


def _split(part: Part, value: str) -> list[tuple[Part, str]]:
    if part != "address and port":
        return [(part, value)]
    address, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal():
        return [("address", value)]
    return [("address", address.strip("[]")), ("port", port)]


class _Job:
    """What of a job the parts say. Attributes are None where nothing is said."""

    def __init__(self, parts: Mapping[Part, tuple[str, str]], ranks: str | None) -> None:
        self._parts = parts
        self.per_host = self._per_host()
        total = self._number("ranks")
        if total is not None and ranks not in (None, str(total)):
            raise UsageError(f"-n {ranks} and {self._said('ranks')} differ; type one of them")
        self.ranks = str(total) if total is not None else ranks
        self.fewest, self.hosts = self._hosts()
        self.host = self._number("host", least=0) or 0
        self.address = parts.get("address", (None, ""))[0]
        port = self._number("port", least=0)
        self.port = {"port": port} if port else {}  # 0 is any, as without

    def _said(self, part: Part) -> str:
        value, name = self._parts[part]
        return f"{name} {value}"

    def _number(self, part: Part, least: int = 1) -> int | None:
        if part not in self._parts:
            return None
        value, _ = self._parts[part]
        if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) < least:
            raise UsageError(f"{self._said(part)}: expected a whole number from {least} on")
        return int(value)

    def _per_host(self) -> int | str | None:
        value, _ = self._parts.get("ranks of a host", (None, ""))
        if value in ("auto", "gpu"):
            return "auto"
        return own_slots() if value == "cpu" else self._number("ranks of a host")

    def _hosts(self) -> tuple[int | None, int | None]:
        """The fewest and the most hosts."""
        if "hosts" in self._parts:
            fewest, _, most = self._parts["hosts"][0].partition(":")
            if not all(re.fullmatch(r"[1-9][0-9]{0,4}", word) for word in (fewest, most or fewest)):
                raise UsageError(
                    f"{self._said('hosts')}: expected a number of hosts, or the fewest and the most as 2:4"
                )
            return int(fewest), int(most or fewest)
        if isinstance(self.per_host, int) and self.ranks is not None and self.ranks.isdecimal():
            count = -(-int(self.ranks) // self.per_host)
            return count, count
        return None, None

    def here(self, words: Mapping[str, Any], typed: Typed) -> dict[str, Any]:
        """The words of a job on this host. Raises `UsageError`, with the command to type, for one on several."""
        elsewhere = self.address is not None and self.address not in _HERE and not is_this_host(self.address)
        if words["rank_table"] is None and ((self.hosts or 1) > 1 or self.host > 0 or elsewhere):
            raise UsageError(self._instead(typed))
        return self.port | {"ranks": self.ranks or (None if self.per_host is None else str(self.per_host))}

    def _instead(self, typed: Typed) -> str:
        count = max(self.hosts or 1, self.host + 1)
        first = self.address if self.address not in (None, *_HERE) else "HOST1"
        others = [f"HOST{number}" for number in range(2, count + 1)]
        each = self.per_host or self.ranks or 1
        hosts = ",".join(f"{name}:{'SLOTS' if each == 'auto' else each}" for name in (first or "", *others))
        words = ["-H", hosts]
        if self.fewest != self.hosts:
            words += (
                ["--elastic"] if each == "auto" else ["--elastic", "--min-ranks", str((self.fewest or 1) * int(each))]
            )
        elif self.ranks is not None and self.per_host is not None and int(self.ranks) != count * int(self.per_host):
            words += ["-n", self.ranks]
        words += [word for name, value in self.port.items() for word in (f"--{name}", str(value))]
        command = shlex.join(["shardwright", "launch", *words, *typed.without_others(), *typed.program])
        unnamed = [name for name in (first, *others) if name is not None and name.startswith("HOST")]
        complete = f", with the names of hosts for {', '.join(unnamed)}" if unnamed else ""
        return f"one command starts the ranks of all hosts; type once, on any of them{complete}:\n  {command}"

    def on_named(self, hosts: Hosts, words: Mapping[str, Any]) -> dict[str, Any]:
        """The words of a job on the hosts that our own options name. Raises `UsageError` where it contradicts them."""
        if self.hosts is not None and not (self.fewest or 0) <= len(hosts) <= self.hosts:
            by = self._said("hosts") if "hosts" in self._parts else f"{self._said('ranks of a host')}, -n {self.ranks}"
            raise UsageError(f"{by}: these are {self.hosts} hosts, and {len(hosts)} are named: {hosts}")
        if self.host > 0:
            raise UsageError(f"{self._said('host')}: type the command once, on any host; it starts the ranks of all")
        first = hosts.hosts[0].name
        if self.address not in (None, first, *_HERE):
            raise UsageError(
                f"{self._said('address')}: ranks meet at the first host, which is {first}; leave it out, or name "
                f"{self.address} first"
            )
        found = self.port | {"ranks": self.ranks}
        if not isinstance(self.per_host, int):
            return found
        for host in hosts:
            if host.slots not in (None, 1) and host.slots < self.per_host and not words["oversubscribe"]:
                raise UsageError(f"{self._said('ranks of a host')}, but {host.name} has {host.slots} slots")
        each = Hosts(tuple(replace(host, slots=self.per_host) for host in hosts))
        return found | {"hosts": each.to_list(), "hostfile": None}


def split_typed(words: Sequence[str], program: Sequence[str]) -> Typed:
    """The words of a command line, of which the last are the program."""
    begin = len(words) - len(program)
    return Typed(tuple(words[:begin]), tuple(words[begin:]))
