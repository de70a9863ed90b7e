"""Starts a rank: its open files, the fork, its cores, and resetting the supervisor's state in the child."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardwright.common.pulse import PULSE_VARIABLE, PulseFile
from shardwright.common.step_lines import STEPS_VARIABLE
from shardwright.launch.host.processes import descendants, die_with_parent, kill_all
from shardwright.launch.host.protocol import STREAMS, NotStarted, Start
from shardwright.launch.host.stream import encode
from shardwright.launch.host.system_files import number_of
from shardwright.launch.hosts.gpus import cores_near

UNKILLABLE_S = 30.0  # the kernel may need long to take back hundreds of gigabytes
_SPARE_FILES = 16  # beside the pipes of each rank
STEPS = "steps"  # the pipe in which a rank tells of them


@dataclass
class RankProcess:
    """The process of a rank, as its supervisor knows it."""

    pid: int
    pipes: dict[str, int]
    error_file: Path | None = None  # where it writes down its error
    pulse: PulseFile | None = None
    stopped_by: int = 0  # the signal
    signalled: bool = False
    ended: bool = False


def error_file(variables: Mapping[str, str]) -> Path | None:
    """Return the file in which a rank with these variables writes its error."""
    name = variables.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def become_rank(parent: int, variables: dict[str, str], pipes: dict[str, int], private: list[int]) -> None:
    """Lay down, in the forked child, all that is of the supervisor but what it imported."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for fd, stream in enumerate(STREAMS, start=1):
        os.dup2(pipes[stream], fd)
    for fd in private:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.update(variables)


def forget_this_package() -> None:
    """Have the rank's program import what is installed on this host: what came over the line serves to start it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "shardwright"]:
        del sys.modules[name]


def execute(command_line: list[str]) -> None:
    """Replace this process by a program; end with exit code 127 where it cannot be run."""
    for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)  # what Python ignores or handles, a program of any kind must not
    try:
        os.execvp(command_line[0], command_line)
    except OSError as error:
        os.write(2, f"shardwright: cannot run {command_line[0]}: {error.strerror}\n".encode())
        os._exit(127)


def not_started(events: int, reason: str) -> NoReturn:
    """End this process, and what it has started, after a last word to the launcher."""
    kill_all(lambda: descendants(os.getpid()), UNKILLABLE_S)
    with contextlib.suppress(BrokenPipeError):
        _write(events, encode(NotStarted(reason)))
    os._exit(1)


def why_no_torch(message: str) -> str:
    """Return the reason why torch cannot be imported, and what to type."""
    last = message.strip().splitlines()[-1]
    if last.startswith("ModuleNotFoundError") and "'torch'" in last:
        return f"{sys.executable} has no torch; type `{sys.executable} -m pip install torch`"
    return f"torch cannot be imported by {sys.executable}; `pip install torch` may mend it\n{message.strip()}"


def open_pulses(start: Start, events: int) -> dict[int, PulseFile]:
    """Open a pulse file for each rank and set the variable that names it; none where hangs are not detected."""
    pulses: dict[int, PulseFile] = {}
    if start.stall_s is None:
        return pulses
    try:
        for rank, variables in start.ranks.items():
            pulses[rank] = PulseFile()
            variables[PULSE_VARIABLE] = pulses[rank].path
    except OSError as error:
        not_started(events, f"rank {rank} of {len(start.ranks)} on this host cannot be watched: {error}")
    return pulses


def open_steps(start: Start) -> tuple[dict[int, int], list[int]]:
    """Return the reading ends of the pipes in which ranks report steps, and the writing ends, which stay open here.

    A rank opens one by its path. Where too many files would be open nothing is reported.
    """
    reading: dict[int, int] = {}
    writing: list[int] = []
    try:
        with _held_open(_taken(start)):
            for rank in start.ranks:
                reading[rank], theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                writing.append(theirs)
    except OSError:
        for fd in (*reading.values(), *writing):
            os.close(fd)
        return {}, []
    for variables, theirs in zip(start.ranks.values(), writing, strict=True):
        variables[STEPS_VARIABLE] = f"/proc/{os.getpid()}/fd/{theirs}"
    return reading, writing


def check_open_files(start: Start, events: int) -> None:
    """End this process where too few files may be open: then not even the end of ranks could be watched."""
    taken = _taken(start)
    try:
        with _held_open(taken):
            pass
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        not_started(
            events,
            f"{len(start.ranks)} ranks on this host take {taken} more open files, and it may have {limit}: "
            f"{error.strerror}; type `ulimit -n 4096` in the shell's start file there",
        )


def _taken(start: Start) -> int:
    """Return the number of files that the ranks take; mpirun's find theirs by path, for which both ends stay open."""
    return len(start.ranks) * len(STREAMS) * (2 if start.carrier else 1) + _SPARE_FILES


@contextlib.contextmanager
def _held_open(files: int) -> Iterator[None]:
    """Hold so many files open. Raises `OSError` where they cannot be."""
    held: list[int] = []
    try:
        for _ in range(files):
            held.append(os.dup(0))
        yield
    finally:
        for fd in held:
            os.close(fd)


def start_rank(private: list[int]) -> tuple[RankProcess, dict[str, int]]:
    """Fork a rank. The pid is 0 in the child, to which the writing ends of the pipes belong."""
    ours, theirs = {}, {}
    for stream in STREAMS:
        ours[stream], theirs[stream] = os.pipe()
        os.set_blocking(ours[stream], False)
    private += ours.values()
    with warnings.catch_warnings():
        # Python 3.12 warns where numpy's thread pool exists: it is idle, and its library restarts it after a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return RankProcess(os.fork(), ours), theirs


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


_TOPOLOGY = Path("/sys/devices/system/cpu")


def bind(variables: Mapping[str, str], gpus: int) -> None:
    """Bind this process, and what it starts, to its share of the cores, as ``variables`` count the ranks.

    A rank with a GPU has its share of the cores near that. Nothing is bound where nobody knows which cores are near,
    where the cores cannot be shared evenly, or where ranks were told to use more threads than their share.
    """
    rank, ranks = int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"])
    cores = in_order(os.sched_getaffinity(0))
    mine = near_gpu(cores, rank, ranks, os.environ | dict(variables)) if gpus else share(cores, rank, ranks)
    threads = (os.environ | dict(variables)).get("OMP_NUM_THREADS", "")
    if mine and not (threads.isdecimal() and int(threads) > len(mine)):
        with contextlib.suppress(OSError):  # a sandbox that forbids it: the rank runs as it would have
            os.sched_setaffinity(0, mine)


def near_gpu(
    cores: Sequence[int], local_rank: int, ranks: int, environment: Mapping[str, str], root: Path = Path("/")
) -> list[int]:
    """Return a rank's share of the cores near its GPU, common to ranks whose GPUs are near the same."""
    near = [cores_near(rank, environment, root) & set(cores) for rank in range(ranks)]
    if not near[local_rank] or any(a != b and a & b for a in near for b in near):
        return []
    neighbours = [rank for rank in range(ranks) if near[rank] == near[local_rank]]
    mine = [core for core in cores if core in near[local_rank]]
    return share(mine, neighbours.index(local_rank), len(neighbours))


def share(cores: Sequence[int], local_rank: int, ranks: int) -> list[int]:
    """Return the cores of a rank; none where one rank, or one core, would have more of the others than the next.

    >>> share([0, 1, 2, 3, 4], 1, 2), share([0, 1], 5, 8), share([0, 1], 0, 3)
    ([2, 3], [1], [])
    """
    if ranks <= len(cores):
        count = len(cores) // ranks
        return list(cores[local_rank * count : (local_rank + 1) * count])
    return [cores[local_rank * len(cores) // ranks]] if ranks % len(cores) == 0 else []


def in_order(cores: set[int]) -> list[int]:
    """Return the cores with those of one core, and of one package, side by side."""

    def place(core: int) -> tuple[int, int, int]:
        topology = _TOPOLOGY / f"cpu{core}" / "topology"
        return number_of(topology / "physical_package_id"), number_of(topology / "core_id"), core

    return sorted(cores, key=place)
