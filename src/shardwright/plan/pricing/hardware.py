"""What the planner believes of the machines: a device's speeds, and what collectives take over its links.

A `Hardware` is read from a profile: one JSON file, measured by ``shardwright bench --save-profile`` or shipped here
under ``profiles/`` with its sources named. A collective's time is a `Curve` over the bytes of its whole buffer
(`mesh.redistribute.Collective.bytes`), in segments of latency plus bytes over bandwidth, one curve for every kind of
collective, number of ranks, and kind of link: "inside" a host or "between" hosts.

An axis of a mesh picks its link by where its ranks stand. Ranks are numbered host by host, in row-major order over the
mesh, so that a group along some axes spans blocks of (stride x size of its major axis) ranks: it is inside a host where
such blocks divide ``ranks_per_host``, else it is between hosts. `Axis.link`, where given, counts instead. Groups that
have more ranks on each host use more of its network, as all groups along the same axes communicate at once.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from shardwright.backends.table import BACKENDS
from shardwright.errors import UsageError
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import CollectiveKind
from shardwright.plan.pricing.known_gpus import profile_of
from shardwright.whole_file import write_whole
from shardwright.world.gradients import BUCKET_BYTES

LinkKind = Literal["inside", "between"]
FORMAT = "shardwright hardware profile"
VERSION = 1
_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """From ``from_bytes`` on, a buffer of b bytes takes ``latency_s + b / bandwidth`` seconds.

    ``latency_s`` is below zero where larger buffers are slower by the byte.
    """

    from_bytes: int
    latency_s: float
    bandwidth: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bandwidth


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes, in segments that begin at 0 and never fall.

    >>> curve = Curve((Segment(0, 1e-3, 1e9), Segment(1_000_000, 0.0, 5e8)))
    >>> round(curve.seconds(500_000), 6), round(curve.seconds(4_000_000), 6)
    (0.0015, 0.008)

    Raises:
        UsageError: where the segments do not begin at 0, are out of order, or fall.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].from_bytes != 0:
            raise UsageError("the segments of a curve begin with from_bytes 0")
        for segment in self.segments:
            if not (segment.bandwidth > 0 and segment.seconds(segment.from_bytes) > 0):
                raise UsageError(f"{segment} takes no time; latency and bandwidth must give more than 0 seconds")
        for left, right in zip(self.segments, self.segments[1:], strict=False):
            if right.from_bytes <= left.from_bytes:
                raise UsageError(f"the segments of a curve rise: {right.from_bytes} follows {left.from_bytes}")
            if right.seconds(right.from_bytes) < left.seconds(right.from_bytes) * (1 - 1e-6):
                raise UsageError(f"more bytes would take less time at {right.from_bytes} bytes: {left}, then {right}")

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.from_bytes for segment in self.segments]

    def seconds(self, size_bytes: float) -> float:
        """The time of a collective on a buffer of so many bytes."""
        return self.segments[bisect_right(self._starts, size_bytes) - 1].seconds(size_bytes)


@dataclass(frozen=True)
class LinkCost:
    """What one kind of collective takes among ``ranks`` ranks; ``points`` are the (bytes, seconds) it was fitted to.

    Between hosts, ``per_host`` of the ranks stand on each host, and groups of the other ranks communicate beside them.
    """

    where: LinkKind
    collective: CollectiveKind
    ranks: int
    curve: Curve
    points: tuple[tuple[int, float], ...] = ()
    per_host: int = 1

    def residuals(self) -> list[float]:
        """How far each fitted point is from the curve, as a part of the point: 0.1 is predicted 10 % too slow."""
        return [self.curve.seconds(size) / seconds - 1 for size, seconds in self.points]


@dataclass(frozen=True)
class Hardware:
    """One device and the links between devices.

    Args:
        flops: floating-point operations per second in matrix products, by the name of the dtype.
        memory_bandwidth: bytes per second that a device reads and writes together.
        launch_s: seconds that any operator takes at least.
        at_once: how much of what an operator does goes on behind what takes longest of it, of starting, multiplying,
            and reading and writing: 1 where a kernel does all at once, 0 where it does one after the other.
        hides_gradients: how much of the shorter of the two, reducing gradients in buckets and computing the backward,
            goes on behind the longer.
        links: what collectives take; for every kind of link all kinds of collectives.
        ranks_per_host: how many neighbouring ranks share a host; None puts all of them on one.
        backend: what moves the tensors, by its name in `backends.table`; "" where that is not known.
        sources: where the figures come from.
    """

    name: str
    device: str
    flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch_s: float
    links: tuple[LinkCost, ...]
    ranks_per_host: int | None = None
    sources: tuple[str, ...] = ()
    at_once: float = 1.0
    hides_gradients: float = 0.0
    backend: str = ""

    @property
    def bucket_bytes(self) -> int:
        """As many bytes of gradients are joined for one all-reduce."""
        return BACKENDS[self.backend].bucket_bytes if self.backend in BACKENDS else BUCKET_BYTES

    @property
    def first_bucket_bytes(self) -> int:
        """The same of those that the backward comes to first."""
        return BACKENDS[self.backend].first_bucket_bytes if self.backend in BACKENDS else BUCKET_BYTES

    @cached_property
    def _flops(self) -> dict[str, float]:
        return dict(self.flops)

    def flops_in(self, dtype: torch.dtype) -> float:
        """The speed of products in ``dtype``; a dtype that the profile does not know counts as float32."""
        return self._flops.get(str(dtype).removeprefix("torch."), self._flops["float32"])

    def collective_s(
        self, kind: CollectiveKind, size_bytes: float, ranks: int, where: LinkKind, per_host: int = 1
    ) -> float:
        """The seconds of a collective on a buffer of ``size_bytes``; ``per_host`` as in `LinkCost`."""
        curve, scale, extra_s = self._choose(kind, ranks, where, per_host)
        return curve.seconds(size_bytes * scale) + extra_s

    def shared_s(
        self, kind: CollectiveKind, size_bytes: float, ranks: int, where: LinkKind, per_host: int = 1
    ) -> float:
        """The share that ``size_bytes`` have in the time of a collective that moves many such values at once."""
        return self.collective_s(kind, self.bucket_bytes, ranks, where, per_host) * size_bytes / self.bucket_bytes

    @cached_property
    def _chosen(self) -> dict[tuple[CollectiveKind, int, LinkKind, int], tuple[Curve, float, float]]:
        return {}

    def _choose(self, kind: CollectiveKind, ranks: int, where: LinkKind, per_host: int) -> tuple[Curve, float, float]:
        """The curve that fits best, what to scale the bytes by, and the seconds to add.

        A number of ranks that was not measured takes the next smaller one, or the smallest: as many bytes sent per
        rank take as long, and the latency grows with the steps of a tree, log2(ranks). Of the curves between hosts
        those count whose groups have as many ranks on each host, or the next smaller number.
        """
        if where == "inside":
            per_host = 1  # all ranks are on one host, whose network they do not share
        key = kind, ranks, where, per_host
        if key not in self._chosen:
            links = [c for c in self.links if c.collective == kind and c.where == where]
            if not links:
                raise UsageError(self._no_link(where))
            side_by_side = _nearest({c.per_host for c in links}, per_host)
            curves = {c.ranks: c.curve for c in links if c.per_host == side_by_side}
            nearest = _nearest(curves, ranks)
            curve = curves[nearest]
            scale = _on_the_way(kind, ranks, per_host) / _on_the_way(kind, nearest, side_by_side)
            extra_s = curve.seconds(0) * (math.log2(ranks) / math.log2(nearest) - 1)
            self._chosen[key] = curve, scale, extra_s
        return self._chosen[key]

    def _no_link(self, where: LinkKind) -> str:
        known = ", ".join(sorted({link.where for link in self.links})) or "no links"
        between = "; run `shardwright bench --save-profile` over several hosts" if where == "between" else ""
        return f"the hardware profile {self.name} knows {known}, but a group of this mesh is {where} hosts{between}"

    def on_hosts(self, hosts: Sequence[str]) -> Hardware:
        """The same hardware for ranks that stand on these hosts, rank 0's first."""
        counts = {hosts.count(host) for host in hosts}
        alike = len(counts) == 1 and all(hosts[i] == hosts[i - i % min(counts)] for i in range(len(hosts)))
        # Hosts with different numbers of ranks, or ranks dealt out in turn: no block of ranks is surely inside one.
        here = None if len(set(hosts)) == 1 else min(counts) if alike else 1
        return replace(self, ranks_per_host=here)

    # The file

    def to_json(self) -> str:
        """The profile as a file holds it."""
        found = {"format": FORMAT, "version": VERSION, **asdict(self), "flops": dict(self.flops)}
        found["links"] = [_link_to_json(link) for link in self.links]
        return json.dumps(found, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, origin: str = "the text") -> Hardware:
        """The profile that `to_json` wrote; ``origin`` is named in messages.

        Raises:
            UsageError: where the text is no profile, with what is wrong in it.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{origin} is no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise UsageError(f'{origin} is no hardware profile: expected an object with "format": "{FORMAT}"')
        if found.get("version") != VERSION:
            raise UsageError(f"{origin} has version {found.get('version')} of the format, this program reads {VERSION}")
        try:
            hardware = _from_fields(found)
        except (UsageError, TypeError, ValueError) as error:
            raise UsageError(f"{origin}: {error}") from None
        return hardware

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile; a file that was there is replaced once the new one is whole."""
        try:
            write_whole(Path(path), lambda draft: draft.write_text(self.to_json()))
        except OSError as error:
            raise UsageError(f"cannot write the profile {os.fspath(path)}: {error.strerror}") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Read a profile; raises `UsageError` where there is none."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"cannot read the hardware profile {path}: {reason}") from None
        return Hardware.from_json(text, str(path))


def _on_the_way(kind: CollectiveKind, ranks: int, per_host: int) -> float:
    """The part of a buffer that each rank sends over its share of a host's network, or of the links inside a host.

    Around a ring one rank of each host sends to the next host, with the shares of all ``per_host`` of them; in an
    all-to-all every rank sends by itself what is for the ranks of other hosts.
    """
    return 1 - per_host / ranks if kind == "all_to_all" else (1 - 1 / ranks) / per_host


def _nearest(known: Collection[int], asked: int) -> int:
    """The largest known number up to the one asked for, or the smallest."""
    return max((number for number in known if number <= asked), default=min(known))


def _link_to_json(link: LinkCost) -> dict[str, Any]:
    segments = [asdict(segment) for segment in link.curve.segments]
    plain = {"where": link.where, "collective": link.collective, "ranks": link.ranks, "segments": segments}
    plain |= {"per_host": link.per_host} if link.per_host > 1 else {}
    return plain | ({"points": [list(point) for point in link.points]} if link.points else {})


def _from_fields(found: Mapping[str, Any]) -> Hardware:
    flops = _field(found, "flops", dict)
    if "float32" not in flops:
        raise UsageError('flops needs a figure for "float32"')
    links = tuple(_link(link) for link in _field(found, "links", list))
    for where in {link.where for link in links}:
        if missing := [k for k in _KINDS if not any(c.collective == k and c.where == where for c in links)]:
            raise UsageError(f"the links {where} hosts lack {', '.join(missing)}")
    per_host = found.get("ranks_per_host")
    if per_host is not None and not (isinstance(per_host, int) and per_host > 0):
        raise UsageError(f"ranks_per_host is {per_host!r}; expected a whole number from 1 on, or null")
    return Hardware(
        name=_field(found, "name", str),
        device=_field(found, "device", str),
        flops=tuple((name, _positive(flops, name)) for name in flops),
        memory_bandwidth=_positive(found, "memory_bandwidth"),
        launch_s=_positive(found, "launch_s"),
        links=links,
        ranks_per_host=per_host,
        sources=tuple(map(str, _field(found, "sources", list))),
        at_once=_part(found, "at_once", 1.0),
        hides_gradients=_part(found, "hides_gradients", 0.0),
        backend=_field(found, "backend", str) if "backend" in found else "",
    )


def _link(found: Any) -> LinkCost:
    where, kind, ranks = _field(found, "where", str), _field(found, "collective", str), _field(found, "ranks", int)
    if where not in get_args(LinkKind) or kind not in _KINDS or ranks < 2:
        raise UsageError(
            f"a link is {where} hosts with {kind} among {ranks} ranks; expected {' or '.join(get_args(LinkKind))}, one "
            f"of {', '.join(_KINDS)}, and 2 ranks or more"
        )
    segments = tuple(
        Segment(_field(s, "from_bytes", int), float(_field(s, "latency_s", (int, float))), _positive(s, "bandwidth"))
        for s in _field(found, "segments", list)
    )
    points = tuple((int(size), float(seconds)) for size, seconds in found.get("points", ()))
    per_host = _whole(found.get("per_host", 1), "per_host")
    if per_host >= ranks:
        raise UsageError(f"per_host is {per_host} of {ranks} ranks; a group between hosts has ranks on others, too")
    return LinkCost(where, kind, ranks, Curve(segments), points, per_host)


def _field(found: Any, name: str, kind: type[T] | tuple[type, ...]) -> Any:
    if not isinstance(found, dict) or name not in found:
        raise UsageError(f"{name} is missing in {str(found)[:80]}")
    if not isinstance(found[name], kind) or isinstance(found[name], bool):
        raise UsageError(f"{name} is {found[name]!r}, which is no {getattr(kind, '__name__', 'number')}")
    return found[name]


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) and value > 0):
        raise UsageError(f"{name} is {value!r}; expected a whole number from 1 on")
    return value


def _part(found: Mapping[str, Any], name: str, default: float) -> float:
    """A number from 0 to 1, which earlier releases did not write."""
    value = float(_field(found, name, (int, float))) if name in found else default
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is {value}; expected a number from 0 to 1")
    return value


def _positive(found: Any, name: str) -> float:
    value = float(_field(found, name, (int, float)))
    if not 0 < value < math.inf:
        raise UsageError(f"{name} is {value}; expected a number above 0")
    return value


def link_along(mesh: Mesh, axes: Sequence[str], ranks_per_host: int | None) -> LinkKind:
    """Whether the groups along ``axes`` stay inside a host; see the top of this file.

    >>> mesh = Mesh.of(dp=2, tp=8)
    >>> link_along(mesh, ["tp"], 8), link_along(mesh, ["dp"], 8), link_along(mesh, ["dp"], 16)
    ('inside', 'between', 'inside')
    """
    if ranks_per_host is None:
        return "inside"
    stride = block = 1
    for axis in reversed(mesh.axes):
        stride *= axis.size
        if axis.name in axes and axis.size > 1:
            block = stride
    return "inside" if ranks_per_host % block == 0 else "between"


def per_host_along(mesh: Mesh, axes: Sequence[str], ranks_per_host: int) -> int:
    """How many ranks of each group along ``axes`` stand on one host.

    >>> mesh = Mesh.of(dp=8, tp=4)
    >>> per_host_along(mesh, ["dp"], 8), per_host_along(mesh, ["tp"], 8), per_host_along(mesh, ["dp", "tp"], 8)
    (2, 4, 8)
    """
    stride = found = 1
    for axis in reversed(mesh.axes):
        if axis.name in axes:
            found *= max(1, min(axis.size, ranks_per_host // stride))
        stride *= axis.size
    return found


# The shipped profiles

ALIASES = {"cpu": "cpu_host"}
_FOLDER = resources.files("shardwright.plan.pricing") / "profiles"


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the shipped profiles."""
    names = [entry.name for entry in _FOLDER.iterdir()]
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


@cache
def shipped(name: str) -> Hardware:
    """The shipped profile of that name; raises `UsageError` where there is none."""
    name = ALIASES.get(name, name)
    if name not in shipped_names():
        raise UsageError(f"there is no shipped profile {name!r}; the names are {', '.join(shipped_names())}")
    return Hardware.from_json((_FOLDER / f"{name}.json").read_text(), f"the shipped profile {name}")


def read_hardware(given: Hardware | str | os.PathLike[str]) -> Hardware:
    """Hardware as a user names it: a value, the name of a shipped profile, or the path of a file.

    >>> read_hardware("cpu").name
    'cpu_host'

    Raises:
        UsageError: where it is none of these.
    """
    if isinstance(given, Hardware):
        return given
    if isinstance(given, str) and ALIASES.get(given, given) in shipped_names():
        return shipped(given)
    if Path(given).suffix != ".json" and not Path(given).exists():
        raise UsageError(
            f"{given} is no hardware that is known; type one of {', '.join([*ALIASES, *shipped_names()])}, or the path "
            "of a profile that `shardwright bench --save-profile FILE.json` wrote"
        )
    return Hardware.load(given)


def for_device(device_type: str, device_name: Callable[[], str] | None = None, backend: str = "") -> Hardware:
    """The shipped figures for ``cpu``, with what ``backend`` takes where they are shipped of it, or for ``cuda``; a GPU
    of which none are shipped counts as an H100 and is warned of."""
    if device_type != "cuda":
        name = f"cpu_host_{backend}"
        return shipped(name if name in shipped_names() else "cpu_host")
    told = (device_name or torch.cuda.get_device_name)() if device_name or torch.cuda.is_available() else ""
    known = profile_of(told)
    if told and known is None:
        warnings.warn(
            f"no figures for {told} are shipped, and plans are priced as for H100 boards (SXM): they compute the same "
            "numbers, but others may be faster; measure this machine once with `shardwright bench -n RANKS "
            "--save-profile FILE.json`, and pass hardware='FILE.json'",
            stacklevel=2,
        )
    return shipped(known or "h100")
