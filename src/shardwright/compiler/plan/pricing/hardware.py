"""Hardware profiles: the speeds of a device, and the times of collectives over its links.

A `Hardware` is read from a profile: one JSON file, measured by ``shardwright bench --save-profile`` or shipped here
under ``profiles/`` with its sources named.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from shardwright.common.schema import SchemaError, checked, from_json
from shardwright.common.system_errors import in_words
from shardwright.common.whole_file import write_whole
from shardwright.compiler.mesh.redistribute import COLLECTIVES, CollectiveKind
from shardwright.compiler.plan.pricing.links import Curve, LinkCost, LinkKind, LinkTime, Segment, link_time
from shardwright.distributed.backends.table import (
    BACKENDS,
    NCCL,
    Backend,
    Buckets,
    DeviceType,
    backend_called,
    usual_backend,
)
from shardwright.errors import UsageError

_NAMES = {
    "v100": r"V100-SXM[23]-(16|32)GB(-LS)?",
    "a100": r"A100-SXM4-(40|80)GB",
    "h100": r"H100 80GB HBM3",
    "h200": r"H200",
}


def profile_of(device_name: str) -> str | None:
    """The name of the shipped profile of such GPUs, None where there is none.

    >>> [profile_of(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA RTX A1000")]
    ['h100', None, None]
    """
    model = re.sub(r"^(NVIDIA|Tesla) ", "", device_name.strip())
    return next((profile for profile, names in _NAMES.items() if re.fullmatch(names, model)), None)


FORMAT = "shardwright hardware profile"
VERSION = 1
_KINDS = frozenset(COLLECTIVES.values())
_AMONG_CPUS = usual_backend("cpu", shared=True).name


@dataclass(frozen=True)
class Updating:
    """The speed of an optimizer's update that keeps ``per_entry`` states of each entry of a parameter.

    ``bandwidth`` counts what has to be read and written once, in bytes per second: parameters, gradients and states.
    An optimizer of several operators reads and writes some of it several times, which makes the figure smaller.
    ``parameter_s`` is what any parameter takes.
    """

    per_entry: int
    bandwidth: float
    parameter_s: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """One device and the links between devices.

    Args:
        flops: floating-point operations per second in matrix products, by the name of the dtype, as programs reach.
        memory_bandwidth: bytes per second that a device reads and writes together.
        launch_s: seconds that any operator takes at least.
        attention: the speed of the products of fused attention, as a share of ``flops``.
        at_once: how much of what an operator does goes on behind what takes longest of it, of starting, multiplying,
            and reading and writing: 1 where a kernel does all at once, 0 where it does one after the other.
        hides_gradients: how much of the shorter of the two, communicating and computing, goes on behind the longer,
            where a program does both at once: of gradients in buckets, and where it prefetches, of all parameters.
        links: what collectives take; for every kind of link all kinds of collectives.
        ranks_per_host: how many neighbouring ranks share a host; None puts all of them on one.
        backend: what moves the tensors, by its name in `backends.table`; "" where that is not known.
        updates: what the steps of optimizers take; where there are none, an optimizer goes through memory once.
        split_s: seconds of a step that a parameter takes more where it is stored in parts.
        around_s: seconds of a step beside its operators, collectives and parameters.
        memory_bytes: what torch finds on the device; 0 where that is not known.
        outside_bytes: of it for CUDA's context, the buffers of NCCL and libraries; 0 where nobody has measured it.
        peak_flops: those per second that a data sheet names of dense products, by dtype, for utilisations alone.
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
    attention: float = 1.0
    at_once: float = 1.0
    hides_gradients: float = 0.0
    backend: str = ""
    updates: tuple[Updating, ...] = ()
    split_s: float = 0.0
    around_s: float = 0.0
    memory_bytes: int = 0
    outside_bytes: int = 0
    peak_flops: tuple[tuple[str, float], ...] = ()

    @property
    def device_type(self) -> DeviceType:
        """Return what torch calls such devices: "cuda" for GPUs, as the name of the device or the backend tells."""
        gpu = self.device.startswith(("NVIDIA", "Tesla", "AMD Instinct")) or self.backend == NCCL.name
        return "cuda" if gpu else "cpu"

    @property
    def prefetches(self) -> bool:
        """Return whether programs gather parameters, and scatter their gradients, beside what they compute."""
        return self._backend.overlaps

    @property
    def receives_early(self) -> bool:
        """Return whether stages of a pipeline ask for messages before they need them, as `lower.operators.stages`."""
        return self.device_type == "cpu"

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets in which gradients are joined for all-reduces."""
        return self._backend.buckets if self.ranks_per_host is None else self._backend.buckets_between

    @property
    def _backend(self) -> Backend:
        """Return what moves the tensors: what the profile names, or the usual backend of such devices."""
        return backend_called(self.backend) if self.backend else usual_backend(self.device_type)

    @cached_property
    def _flops(self) -> dict[str, float]:
        return dict(self.flops)

    def flops_in(self, dtype: torch.dtype) -> float:
        """The speed of products in ``dtype``; a dtype that the profile does not know counts as float32."""
        return self._flops.get(str(dtype).removeprefix("torch."), self._flops["float32"])

    def peak_in(self, dtype: torch.dtype) -> float:
        """Return the peak of products in ``dtype`` by the data sheet; where the profile has none, their speed."""
        peaks = dict(self.peak_flops)
        return peaks.get(str(dtype).removeprefix("torch."), peaks.get("float32", 0.0)) or self.flops_in(dtype)

    def updating(self, per_entry: int) -> Updating:
        """Return the speed of an update with so many states: of those measured the one with most up to that number."""
        fitting = [known for known in self.updates if known.per_entry <= per_entry] or sorted(
            self.updates, key=lambda known: known.per_entry
        )[:1]
        return max(fitting, key=lambda known: known.per_entry, default=Updating(per_entry, self.memory_bandwidth))

    def collective_s(
        self, kind: CollectiveKind, size_bytes: float, ranks: int, where: LinkKind, per_host: int = 1
    ) -> float:
        """The seconds of a collective on a buffer of ``size_bytes``; ``per_host`` as in `LinkCost`.

        A shift is one of the steps in which an all-gather goes round a ring.
        """
        if kind == "shift":
            return self.collective_s("all_gather", ranks * size_bytes, ranks, where, per_host) / (ranks - 1)
        key = kind, ranks, where, per_host
        if key not in self._times:
            found = link_time(self.links, *key)
            if found is None:
                raise UsageError(self._no_link(where))
            self._times[key] = found
        return self._times[key].seconds(size_bytes)

    def shared_s(
        self, kind: CollectiveKind, size_bytes: float, ranks: int, where: LinkKind, per_host: int = 1
    ) -> float:
        """The share that ``size_bytes`` have in the time of a collective that moves many such values at once."""
        return self.collective_s(kind, self.buckets.bytes, ranks, where, per_host) * size_bytes / self.buckets.bytes

    @cached_property
    def _times(self) -> dict[tuple[CollectiveKind, int, LinkKind, int], LinkTime]:
        """Cached by all that `link_time` is asked beside the links, which are frozen."""
        return {}

    def _no_link(self, where: LinkKind) -> str:
        known = ", ".join(sorted({link.where for link in self.links})) or "no links"
        between = "; run `shardwright bench --save-profile` over several hosts" if where == "between" else ""
        return f"the hardware profile {self.name} knows {known}, but a group of this mesh is {where} hosts{between}"

    def on_hosts(self, hosts: Sequence[str]) -> Hardware:
        """Return the hardware for ranks that stand on these hosts, rank 0's first."""
        counts = {hosts.count(host) for host in hosts}
        alike = len(counts) == 1 and all(hosts[i] == hosts[i - i % min(counts)] for i in range(len(hosts)))
        # Hosts with different numbers of ranks, or ranks dealt out in turn: no block of ranks is surely inside one.
        here = None if len(set(hosts)) == 1 else min(counts) if alike else 1
        return replace(self, ranks_per_host=here)

    # The file

    def to_json(self) -> str:
        """The profile as a file holds it."""
        found = {"format": FORMAT, "version": VERSION, **asdict(self), "flops": dict(self.flops)}
        found["peak_flops"] = dict(self.peak_flops)
        found["links"] = [_link_to_json(link) for link in self.links]
        return json.dumps(found, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, origin: str = "the text") -> Hardware:
        """The profile that `to_json` wrote; ``origin`` is named in messages.

        Raises:
            UsageError: where the text is no profile, with what is wrong in it.
        """
        try:
            found = from_json(text, dict[str, Any])
        except SchemaError as error:
            raise UsageError(f'{origin} is no hardware profile, an object with "format": "{FORMAT}": {error}') from None
        if found.get("format") != FORMAT:
            raise UsageError(f'{origin} is no hardware profile: expected an object with "format": "{FORMAT}"')
        if found.get("version") != VERSION:
            raise UsageError(f"{origin} has version {found.get('version')} of the format, this program reads {VERSION}")
        try:
            return _of_file(checked(found, _ProfileFile))
        except (SchemaError, UsageError) as error:
            raise UsageError(f"{origin}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile; a file that was there is replaced once the new one is whole."""
        try:
            write_whole(Path(path), lambda draft: draft.write_text(self.to_json()))
        except OSError as error:
            raise UsageError(f"cannot write the profile {in_words(error, path)}") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Read a profile; raises `UsageError` where there is none."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"cannot read the hardware profile {path}: {reason}") from None
        return Hardware.from_json(text, str(path))


def _link_to_json(link: LinkCost) -> dict[str, Any]:
    segments = [asdict(segment) for segment in link.curve.segments]
    plain = {"where": link.where, "collective": link.collective, "ranks": link.ranks, "segments": segments}
    plain |= {"per_host": link.per_host} if link.per_host > 1 else {}
    return plain | ({"points": [list(point) for point in link.points]} if link.points else {})


@dataclass(frozen=True)
class _LinkOfFile:
    where: LinkKind
    collective: CollectiveKind
    ranks: int
    segments: tuple[Segment, ...]
    points: tuple[tuple[int, float], ...] = ()
    per_host: int = 1


@dataclass(frozen=True)
class _ProfileFile:
    """The JSON that `Hardware.to_json` writes; earlier releases did not write what has a default."""

    format: str
    version: int
    name: str
    device: str
    flops: dict[str, float]
    memory_bandwidth: float
    launch_s: float
    links: tuple[_LinkOfFile, ...]
    sources: tuple[str, ...]
    ranks_per_host: int | None = None
    attention: float = 1.0
    at_once: float = 1.0
    hides_gradients: float = 0.0
    backend: str = ""
    updates: tuple[Updating, ...] = ()
    split_s: float = 0.0
    around_s: float = 0.0
    memory_bytes: int = 0
    outside_bytes: int = 0
    peak_flops: dict[str, float] = field(default_factory=dict)


def _of_file(found: _ProfileFile) -> Hardware:
    """Return what a file holds, once its figures are found to be possible."""
    if "float32" not in found.flops:
        raise UsageError('flops needs a figure for "float32"')
    for where in {link.where for link in found.links}:
        if missing := [k for k in _KINDS if not any(c.collective == k and c.where == where for c in found.links)]:
            raise UsageError(f"the links {where} hosts lack {', '.join(sorted(missing))}")
    if found.backend and found.backend not in BACKENDS:
        raise UsageError(f"backend is {found.backend!r}; expected one of {', '.join(BACKENDS)}")
    _refuse_figures(found)
    given = {name: value for name, value in vars(found).items() if name not in ("format", "version")}
    given |= {"flops": tuple(found.flops.items()), "links": tuple(map(_link, found.links))}
    given |= {"peak_flops": tuple(found.peak_flops.items())}
    return Hardware(**given)


def _refuse_figures(found: _ProfileFile) -> None:
    above = {name: getattr(found, name) for name in ("memory_bandwidth", "launch_s", "attention")} | found.flops
    above |= {f"peak_flops of {name}": figure for name, figure in found.peak_flops.items()}
    above |= {f"updates[{i}].bandwidth": update.bandwidth for i, update in enumerate(found.updates)}
    from_none = {name: getattr(found, name) for name in ("split_s", "around_s", "memory_bytes", "outside_bytes")}
    from_none |= {f"updates[{i}].per_entry": update.per_entry for i, update in enumerate(found.updates)}
    from_none |= {f"updates[{i}].parameter_s": update.parameter_s for i, update in enumerate(found.updates)}
    parts = {"at_once": found.at_once, "hides_gradients": found.hides_gradients}
    for name, figure in above.items():
        if not 0 < figure < math.inf:
            raise UsageError(f"{name} is {figure}; expected a number above 0")
    for name, figure in from_none.items():
        if not 0 <= figure < math.inf:
            raise UsageError(f"{name} is {figure}; expected a number from 0 on")
    for name, figure in parts.items():
        if not 0 <= figure <= 1:
            raise UsageError(f"{name} is {figure}; expected a number from 0 to 1")
    if found.ranks_per_host is not None and found.ranks_per_host < 1:
        raise UsageError(f"ranks_per_host is {found.ranks_per_host}; expected a whole number from 1 on, or null")


def _link(found: _LinkOfFile) -> LinkCost:
    if found.ranks < 2:
        raise UsageError(f"a link is among {found.ranks} ranks; expected 2 or more")
    if not 0 < found.per_host < found.ranks:
        raise UsageError(f"per_host is {found.per_host} of {found.ranks} ranks; expected 1 or more, and fewer than all")
    for segment in found.segments:
        if not (segment.from_bytes >= 0 and math.isfinite(segment.latency_s) and 0 < segment.bandwidth < math.inf):
            raise UsageError(f"a link has a {segment}; expected bytes, seconds and bytes per second")
    for size, seconds in found.points:
        if size < 0 or not 0 < seconds < math.inf:
            raise UsageError(f"a link has the point {(size, seconds)}; expected bytes and seconds")
    return LinkCost(found.where, found.collective, found.ranks, Curve(found.segments), found.points, found.per_host)


_FOLDER = resources.files("shardwright.compiler.plan.pricing") / "profiles"


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the shipped profiles.

    Cached once: they are files of the package.
    """
    names = [entry.name for entry in _FOLDER.iterdir()]
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


@cache
def shipped(name: str) -> Hardware:
    """The shipped profile of that name; raises `UsageError` where there is none.

    Cached by the name: it is a file of the package, and the value is frozen.
    """
    if name not in shipped_names():
        raise UsageError(f"there is no shipped profile {name!r}; the names are {', '.join(shipped_names())}")
    return Hardware.from_json((_FOLDER / f"{name}.json").read_text(), f"the shipped profile {name}")


def read_hardware(given: Hardware | str | os.PathLike[str], backend: str = _AMONG_CPUS) -> Hardware:
    """Return hardware as a user names it: a value, the name of a shipped profile, or the path of a file.

    "cpu" is the shipped profile of CPUs whose ranks have that ``backend``.

    >>> read_hardware("cpu").name, read_hardware("cpu", "gloo").name
    ('cpu_host_shm', 'cpu_host')

    Raises:
        UsageError: where it is none of these.
    """
    if isinstance(given, Hardware):
        return given
    if given == "cpu":
        return for_device("cpu", backend=backend)
    if isinstance(given, str) and given in shipped_names():
        return shipped(given)
    if Path(given).suffix != ".json" and not Path(given).exists():
        raise UsageError(
            f"{given} is no hardware that is known; type one of {', '.join(['cpu', *shipped_names()])}, or the path "
            "of a profile that `shardwright bench --save-profile FILE.json` wrote"
        )
    return Hardware.load(given)


def for_device(device_type: str, device_name: Callable[[], str] | None = None, backend: str = "") -> Hardware:
    """Return the shipped profile of ``cpu``, with that ``backend`` if there is one, or of the GPU.

    A GPU without a shipped profile counts as an H100, with a warning.
    """
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
