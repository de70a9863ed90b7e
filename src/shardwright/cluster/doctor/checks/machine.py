"""Checks of a host's limits, disks, memory, cores and clock."""

from __future__ import annotations

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.checks.gpus import gpus
from shardwright.cluster.doctor.checks.infiniband import ports
from shardwright.cluster.doctor.checks.software import install
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem, warning
from shardwright.cluster.doctor.reading import HostReading, Unreadable, typed

_GIB = 1 << 30
_FEWEST_FILES, _FEWEST_PROCESSES = 4096, 4096
_LEAST_SHM = _GIB  # Docker gives 64 MiB, in which a loader's workers die
_LEAST_DISK, _LITTLE_DISK = _GIB, 10 * _GIB
_LEAST_LOCKED = 64 << 20
_CPUS = "/sys/devices/system/cpu"


def _soft(reading: HostReading, name: str) -> float:
    soft, _hard = reading.fact("limits", dict)[name]
    return float("inf") if soft == -1 else int(soft)


def _shown(value: float) -> str:
    return "unlimited" if value == float("inf") else f"{value:.0f}"


def limits(reading: HostReading) -> Finding:
    """Check that the limits on open files and processes leave room for many ranks and loaders."""
    files, processes = _soft(reading, "open files"), _soft(reading, "processes")
    said, lines = [], []
    if files < _FEWEST_FILES:
        said.append(f"{_shown(files)} open files")
        lines.append("ulimit -n 65536")
    if processes < _FEWEST_PROCESSES:
        said.append(f"{_shown(processes)} processes")
        lines.append("ulimit -u 65536")
    if said:
        what = f"at most {' and '.join(said)}: many ranks and loaders need more"
        return warning(what, *lines, "# for every login: a line in /etc/security/limits.conf")
    return ok(f"{_shown(files)} open files, {_shown(processes)} processes")


def locked_memory(reading: HostReading) -> Finding:
    """Check the memory that may be locked: InfiniBand locks the memory that it sends from."""
    locked = _soft(reading, "locked")
    infiniband = any(port.active for port in ports(reading))
    shown = "unlimited" if locked == float("inf") else f"{locked / 1024:.0f} KiB"
    if infiniband and locked != float("inf"):
        entry = typed("printf", "%s\\n", "* soft memlock unlimited", "* hard memlock unlimited")
        line = f"{entry} | {reading.as_root('tee /etc/security/limits.d/90-memlock.conf')}"
        finding = problem if locked < _LEAST_LOCKED else warning
        return finding(f"{shown} may be locked, InfiniBand needs unlimited; then log in anew", line)
    return ok(f"{shown}{'' if infiniband else ', no InfiniBand needs it'}")


def _disk(reading: HostReading, path: str) -> tuple[int, int]:
    free, size = reading.fact("disks", dict)[path]
    return int(free), int(size)


def shared_memory(reading: HostReading) -> Finding:
    """Check that enough of /dev/shm is free."""
    if "/dev/shm" not in reading.fact("disks", dict):
        return problem("there is no /dev/shm", reading.as_root("mount -t tmpfs -o size=50% tmpfs /dev/shm"))
    free, size = _disk(reading, "/dev/shm")
    if free < _LEAST_SHM:
        what = f"{free / _GIB:.1f} GiB of {size / _GIB:.1f} GiB free in /dev/shm: loaders and NCCL need more"
        line = reading.as_root("mount -o remount,size=50% /dev/shm")
        return warning(what, line, "# in a container: docker run --shm-size=16g, or --ipc=host")
    return ok(f"{free / _GIB:.1f} GiB free in /dev/shm")


def disks(reading: HostReading) -> Finding:
    """Check the file systems of temporary files, of the home and of the working directory."""
    paths = [path for path in reading.fact("disks", dict) if path != "/dev/shm"]
    free = {path: _disk(reading, path)[0] for path in paths}
    shown = ", ".join(f"{count / _GIB:.1f} GiB in {path}" for path, count in free.items())
    if little := [path for path, count in free.items() if count < _LITTLE_DISK]:
        finding = problem if min(free.values()) < _LEAST_DISK else warning
        lines = (f"{typed('du', '-xh', '--max-depth=1', path)} | sort -h | tail" for path in little)
        return finding(f"little room: {shown}", *lines)
    return ok(shown)


def memory(reading: HostReading) -> Finding:
    """Check that at least a tenth of the memory is available."""
    said = reading.file("/proc/meminfo") or ""
    values = {line.partition(":")[0]: line.split()[1] for line in said.splitlines() if len(line.split()) > 1}
    free, size = (int(values[name]) << 10 for name in ("MemAvailable", "MemTotal"))
    shown = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB available"
    if free < size // 10:
        return warning(shown, "ps -eo pid,user,rss,args --sort=-rss | head")
    return ok(shown)


def cores(reading: HostReading) -> Finding:
    """Report the cores, with a note where this process is bound to some of them."""
    usable, there = reading.fact("cpus", int), reading.fact("all_cpus", int)
    nodes = len(reading.glob("/sys/devices/system/node/node*/cpulist"))
    shown = f"{usable} of {there} cores, {nodes or 1} NUMA node{'s' * (nodes > 1)}"
    if usable < there:
        return note(f"{shown}: this process is bound to some of them", "taskset -cp $$")
    return ok(shown)


def numa(reading: HostReading) -> Finding:
    """Check the kernel's moving of pages between nodes, which stops ranks for a while each time."""
    said = reading.file("/proc/sys/kernel/numa_balancing")
    if said is None or len(reading.glob("/sys/devices/system/node/node*/cpulist")) < 2:
        return ok("one node, or a kernel that moves no pages")
    if not said.isdecimal():
        raise Unreadable(f"numa_balancing says {said!r}, expected a number")
    if said != "0" and gpus(reading):
        what = "the kernel moves pages between NUMA nodes, which slows ranks with GPUs"
        return warning(what, reading.as_root("sysctl -w kernel.numa_balancing=0"))
    return ok("pages stay where they are" if said == "0" else "the kernel moves pages, no GPU minds")


def governor(reading: HostReading) -> Finding:
    """Check that the frequency governor of every core is performance."""
    found = reading.glob(f"{_CPUS}/cpu*/cpufreq/scaling_governor")
    if not found:
        return ok("nothing to choose: a virtual machine, or a fixed frequency")
    slow = [word for word in found.values() if word != "performance"]
    if slow:
        what = f"{len(slow)} of {len(found)} cores are at {slow[0]}, expected performance"
        line = f"echo performance | {reading.as_root(f'tee {_CPUS}/cpu*/cpufreq/scaling_governor')}"
        return warning(what, line)
    return ok(f"performance on {len(found)} cores")


def clock(reading: HostReading) -> Finding:
    """Check that a time server sets the clock."""
    ran = reading.command(sources.CLOCK)
    if ran is None or "connect to bus" in ran.err or "Operating System Manager" in ran.err:
        return note("no systemd to ask whether a time server sets the clock, as in containers")
    said = reading.ran(sources.CLOCK) or ""
    if said.strip() not in ("yes", "no"):
        raise Unreadable(f"timedatectl says {said.strip()!r}, expected yes or no")
    if said.strip() == "no":
        lines = (*install(reading, "clock"), reading.as_root("timedatectl set-ntp true"))
        return note("the clock is not set by a time server; that of several hosts is compared below", *lines)
    return ok("set by a time server")


CHECKS = (
    Check("limits", "open files", limits),
    Check("limits", "locked memory", locked_memory),
    Check("limits", "shared memory", shared_memory),
    Check("limits", "disks", disks),
    Check("machine", "memory", memory),
    Check("machine", "cores", cores),
    Check("machine", "NUMA", numa),
    Check("machine", "governor", governor),
    Check("machine", "clock", clock),
)
