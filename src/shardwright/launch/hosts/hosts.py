"""The hosts of a job and the ranks that each takes: ``-H a:8,b:8``, hostfiles, Slurm's node lists.

Every way of writing them becomes one `Hosts`. The formats are those of OpenMPI and DeepSpeed:

    -H alice@a:8,b,[fd00::1]:2      without ``:N`` one slot
    a slots=8                       a line of a hostfile; without ``slots`` as many as the host has CPUs
    [alice@]b                       # comments, to the end of the line

A host that comes several times has the sum of its slots. Rank tables give hosts too (`rank_table.RankTable.hosts`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.errors import UsageError, WorldError

MOST_SLOTS = 99_999
_MOST_HOSTS = 100_000
_MOST_BYTES = 16 * 2**20
_RESOLVE_TIMEOUT_S = 5.0
# No name begins with a dash: ssh would take it for an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\\$-]*")
_LIST_FORM = "[user@]host[:slots], with IPv6 addresses in brackets: a:8,alice@b:8,[fd00::1]:2"
_LINE_FORM = "[user@]host [slots=N]"


@dataclass(frozen=True)
class Host:
    """One host: its name or address (IPv6 without brackets), and how many ranks it takes.

    ``slots`` is None where nobody said: as many as the host has CPUs. ``user`` is whom ssh logs in as, if not the
    usual one. ``devices``, where a rank table names them, has one device number per slot.
    """

    name: str
    slots: int | None = 1
    user: str | None = None
    devices: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """The host as it stands in a list: with its user, IPv6 in brackets.

        >>> Host("fd00::1", 2, "alice").address
        'alice@[fd00::1]'
        """
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{self.user}@{name}" if self.user else name

    @property
    def login(self) -> str:
        """The host as ssh takes it: with its user.

        >>> Host("fd00::1", 2, "alice").login
        'alice@fd00::1'
        """
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, each once, in the order in which ranks are given out.

    >>> print(Hosts.from_list("a:8,b,a"))
    2 hosts, 10 slots: a:9, b:1
    """

    hosts: tuple[Host, ...]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def __str__(self) -> str:
        listed = ", ".join(f"{h.address}:{'?' if h.slots is None else h.slots}" for h in self)
        count = "unknown" if self.slots is None else self.slots
        return f"{len(self)} host{'s' * (len(self) != 1)}, {count} slot{'s' * (self.slots != 1)}: {listed}"

    @property
    def slots(self) -> int | None:
        """The slots of all hosts together; None where a host's number is not known yet."""
        counts = [host.slots for host in self]
        return None if None in counts else sum(count for count in counts if count is not None)

    @classmethod
    def from_list(cls, text: str, source: str = "-H") -> Hosts:
        """Return the hosts that the words of ``-H`` name. Raises `UsageError`, which begins with ``source``.

        >>> Hosts.from_list("alice@a:2,[::1]").hosts
        (Host(name='a', slots=2, user='alice', devices=()), Host(name='::1', slots=1, user=None, devices=()))
        """
        words = [word.strip() for word in text.split(",")]
        where = [f"{source} {text}" if len(words) == 1 else f"{source} {text}: {word!r}" for word in words]
        return _joined((_host_of_word(word, place), place) for word, place in zip(words, where, strict=True))

    @classmethod
    def from_hostfile(cls, path: str | Path) -> Hosts:
        """Return the hosts of a hostfile of OpenMPI or DeepSpeed. Raises `UsageError` with the file and the line."""
        entries = list(parse_lines(read_text(Path(path), "the hostfile"), str(path)))
        if not entries:
            raise UsageError(f"{path} names no host; expected lines like `{_LINE_FORM}`")
        return _joined(entries)

    @classmethod
    def from_slurm(cls, nodelist: str, tasks_per_node: str) -> Hosts:
        """Return the hosts of Slurm's variables. Raises `WorldError` where those cannot be read or differ in length.

        >>> print(Hosts.from_slurm("gnode[10,20-21]", "4(x2),1"))
        3 hosts, 9 slots: gnode10:4, gnode20:4, gnode21:1
        """
        names, tasks = expand_hosts(nodelist), expand_tasks(tasks_per_node)
        if len(names) != len(tasks):
            raise WorldError(
                f"Slurm's variables contradict each other: {nodelist} are {len(names)} hosts, but {tasks_per_node} "
                f"gives the tasks of {len(tasks)}"
            )
        return cls(tuple(Host(name, slots) for name, slots in zip(names, tasks, strict=True)))

    def to_list(self) -> str:
        """Return the hosts as ``-H`` takes them. Raises `UsageError` where slots are not known."""
        for host in self:
            if host.slots is None:
                raise UsageError(f"-H cannot say that {host.address} has as many slots as CPUs; give it slots")
        return ",".join(f"{host.address}:{host.slots}" for host in self)

    def to_hostfile(self) -> str:
        """Return the lines of a hostfile. Devices are not part of it."""
        return "".join(f"{host.address}{'' if host.slots is None else f' slots={host.slots}'}\n" for host in self)


def parse_lines(text: str, source: str) -> Iterator[tuple[Host, str]]:
    """Yield the host of each line that has one, with its place as ``source:line``."""
    for number, line in enumerate(text.split("\n"), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if words:
            yield _host_of_line(words, f"{source}:{number}"), f"{source}:{number}"


def _host_of_line(words: list[str], place: str) -> Host:
    user, name, rest = _split_address(words[0], place, _LINE_FORM)
    if rest:
        raise UsageError(f"{place}: got {words[0]!r}, expected `{_LINE_FORM}`: type `{words[0][: -len(rest)]} slots=N`")
    counts: dict[str, int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if key not in ("slots", "max_slots") or not equals or key in counts:
            raise UsageError(f"{place}: got {word!r} after {words[0]}, expected `{_LINE_FORM}`")
        counts[key] = _slots(value, place, f"`{_LINE_FORM}`")
    slots = counts.get("slots")
    if "max_slots" in counts and (slots is None or slots > counts["max_slots"]):
        raise UsageError(f"{place}: got max_slots={counts['max_slots']}, expected it beside slots that are not more")
    return Host(name, slots, user)


def _host_of_word(word: str, place: str) -> Host:
    user, name, rest = _split_address(word, place, _LIST_FORM)
    return Host(name, _slots(rest[1:], place, _LIST_FORM) if rest else 1, user)


def _split_address(word: str, place: str, form: str) -> tuple[str | None, str, str]:
    """Return user, name without brackets, and what follows the name from its colon on."""
    user, at, address = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{place}: got the user {user!r}, expected {form}")
    if address.startswith("["):
        name, bracket, rest = address[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (rest and not rest.startswith(":")):
            raise UsageError(f"{place}: got {address!r}, expected an IPv6 address in brackets as [fd00::1]")
        return user or None, str(ipaddress.IPv6Address(name)), rest
    if _is_ipv6(address):
        raise UsageError(f"{place}: got {address!r}, expected an IPv6 address in brackets: type [{address}]")
    name, colon, rest = address.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{place}: got the host {name!r}, expected {form}")
    return user or None, name, colon + rest


def is_host_name(text: str) -> bool:
    """Return whether a host may have this name, or address, IPv6 without brackets."""
    return _NAME.fullmatch(text) is not None or _is_ipv6(text)


def _is_ipv6(text: str) -> bool:
    try:
        # ssh takes a scope to be part of the name, and so do we, as long as it can be one.
        return _NAME.fullmatch(ipaddress.IPv6Address(text).scope_id or "none") is not None
    except ValueError:
        return False


def _slots(text: str, place: str, form: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) == 0:
        raise UsageError(f"{place}: got {text!r} slots, expected a whole number from 1 to {MOST_SLOTS}, as in {form}")
    return int(text)


def _joined(entries: Iterable[tuple[Host, str]]) -> Hosts:
    hosts: dict[str, Host] = {}
    places: dict[str, str] = {}
    for host, place in entries:
        first = hosts.setdefault(host.name, host)
        earlier = places.setdefault(host.name, place)
        if first is host:
            continue
        if first.user != host.user:
            raise UsageError(f"{place}: got {host.address}, but {earlier} has {first.address}: expected one user")
        if first.slots is None or host.slots is None:
            raise UsageError(
                f"{place}: got {host.name} again, after {earlier}: the slots of a host add up, so that all its lines "
                "must give them, or it must come once"
            )
        slots = first.slots + host.slots
        hosts[host.name] = replace(first, slots=int(_slots(str(slots), place, f"the sum for {host.name}")))
    return Hosts(tuple(hosts.values()))


def read_text(path: Path, what: str) -> str:
    """Return a small text file. Raises `UsageError`, with ``what`` the file is, where it cannot be read as one."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{what} {path} has more than {_MOST_BYTES} bytes; expected a small text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is no text: byte {error.start} is no UTF-8") from None


def own_slots() -> int:
    """Return the number of CPUs of this host that this process may use."""
    return len(os.sched_getaffinity(0))


def is_this_host(name: str) -> bool:
    """Return whether a name or address is this machine's. A name that is not found within 5 s is not."""
    if name in ("localhost", own := socket.gethostname(), own.partition(".")[0]):
        return True
    return any(_is_own_address(address) for address in _addresses(name))


def _addresses(name: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(name))]
    except ValueError:
        return resolve(name, _RESOLVE_TIMEOUT_S)


def resolve(name: str, timeout_s: float) -> list[str]:
    """Return the addresses of a name; none where nobody knows it, or no name server answers in time."""
    addresses: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            addresses.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    # getaddrinfo has no deadline, and a name server that is away can hold it for minutes.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return list(dict.fromkeys(addresses))


def _is_own_address(address: str) -> bool:
    """Return whether an address is of this machine: the kernel binds a socket to no other."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified or parsed.is_multicast:
        return False
    family = socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0][4])
    except OSError:
        return False
    return True


def expand_hosts(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm node list, in its order.

    >>> expand_hosts("gnode[08,10-12],login,rack[1-2]n[1-2]")
    ['gnode08', 'gnode10', 'gnode11', 'gnode12', 'login', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']

    Raises `WorldError` when brackets or ranges are broken.
    """
    pattern = r"(?:[^\[\],]|\[[^\[\]]*\])+"
    if not re.fullmatch(f"{pattern}(?:,{pattern})*", nodelist.strip()):
        raise WorldError(f"the Slurm node list {nodelist!r} cannot be read; expected names like gnode[10,20-25]")
    hosts: list[str] = []
    for names in re.findall(pattern, nodelist.strip()):
        expanded = [""]
        for text, brackets in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", names):
            choices = [text] if text else _expand_ranges(brackets, nodelist)
            _check_count(len(hosts) + len(expanded) * len(choices), nodelist)
            expanded = [prefix + choice for prefix in expanded for choice in choices]
        hosts += expanded
    return hosts


def _check_count(count: int, text: str) -> None:
    if count > _MOST_HOSTS:
        raise WorldError(f"{text!r} stands for {count} hosts; expected at most {_MOST_HOSTS}")


def _expand_ranges(ranges: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if not match:
            raise WorldError(f"{part!r} in the Slurm node list {nodelist!r} is no number and no range like 20-25")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise WorldError(
                f"{part!r} in the Slurm node list {nodelist!r} runs backwards; expected a range like 20-25"
            )
        _check_count(int(last) - int(first) + 1, nodelist)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(tasks_per_node: str) -> list[int]:
    """Return the number of tasks on each host, in the order of the hosts.

    >>> expand_tasks("4(x2),1")
    [4, 4, 1]

    Raises `WorldError` when the text has another form.
    """
    tasks: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not match:
            raise WorldError(f"SLURM_TASKS_PER_NODE={tasks_per_node!r} cannot be read; expected something like 4(x2),1")
        _check_count(len(tasks) + int(match[2] or 1), tasks_per_node)
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
