"""The messages between a launcher and an agent on another host, beside those it forwards (`protocol`).

The agent's first message is its `Hello`. The launcher sends what is staged, if anything is (`stage`), and a `Check`;
the agent answers with `Checked`. Each host but the first is then asked to `Reach` the first one, and answers `Reached`.
After that a `Start` may come, once per run.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from shardwright.launch.host.program import Program
from shardwright.launch.host.protocol import Event, Order, Start, read_program

# --- orders


class StageBegin(NamedTuple):
    """The announcement of so many bytes in so many entries; with ``keep`` the folder stays when the job has ended."""

    size_bytes: int
    entries: int
    keep: bool


class StageEntry(NamedTuple):
    """A folder, a file with its first bytes, or a link to ``target``; ``path`` is below the folder on the host."""

    path: str
    kind: str
    mode: int
    time_s: float
    target: str = ""
    data: bytes = b""


class StageMore(NamedTuple):
    """The next bytes of the last file."""

    data: bytes = b""


class Check(NamedTuple):
    """An order to check whether the host can take part (`preflight`).

    ``wdir`` is where ranks will run, None for the folder of what was staged; ``log_dir`` is None where logs are written
    elsewhere; ``ours``: the program is this package itself; ``first``: the ranks will meet on this host, at ``port`` if
    there is one. ``environment`` is that of the ranks; ``word`` is what those who try to reach this host will say.
    """

    wdir: str | None
    log_dir: str | None
    program: Program
    preload: bool
    first: bool
    port: int | None
    ours: bool
    environment: dict[str, str]
    lease_s: float
    word: str

    @classmethod
    def from_json(cls, *, program: Any, **fields: Any) -> Check:
        return cls(program=read_program(program), **fields)


class Reach(NamedTuple):
    """An order to try at which of the addresses of the first host somebody answers with the word."""

    addresses: tuple[str, ...]
    port: int
    word: str


AgentOrder = Start | Order | StageBegin | StageEntry | StageMore | Check | Reach
AGENT_ORDERS: tuple[type[AgentOrder], ...] = get_args(AgentOrder)


# --- answers


class Hello(NamedTuple):
    """The first words of an agent: its Python, its host, and the folder that the job has there."""

    python: str
    executable: str
    cpus: int
    gpus: int
    name: str
    scratch: str


class TooOld(NamedTuple):
    """In place of a `Hello`: the Python of the host, with which no agent can run (`packed` writes this by hand)."""

    python: str


class Staging(NamedTuple):
    """A sign of life while much is staged."""


class Checked(NamedTuple):
    """The problems of a host, a line for each, and its facts; versions are None where it has none.

    On the first host ``port`` is where the ranks meet, and at ``probe`` others may try to reach it; ``addresses`` are
    those of the host, with interface and speed. ``staged`` is the folder of what was staged.
    """

    problems: tuple[str, ...]
    torch: str | None
    shardwright: str | None
    port: int | None
    probe: int | None
    addresses: tuple[tuple[str, str, int], ...]
    loopback: str | None
    infiniband: tuple[str, ...]
    staged: str | None = None


class Reached(NamedTuple):
    """By which of this host's interfaces each address was reached."""

    by: dict[str, str]


class Clock(NamedTuple):
    """The answer to a `Beat`, with this host's clock."""

    sent_s: float
    time_s: float


Answer = Hello | TooOld | Checked | Reached
AgentEvent = Event | Answer | Staging | Clock
AGENT_EVENTS: tuple[type[AgentEvent], ...] = get_args(AgentEvent)
