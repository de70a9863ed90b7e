"""How a launcher and a supervisor talk: a line of JSON each way, after which ``payload_bytes`` raw bytes may follow.

The launcher's first line is what to start (`Start`), then come orders:

    {"order": "signal", "signal": 10}                   pass it on to the ranks, nothing else
    {"order": "end", "signal": 15, "grace_s": 10.0, "failure": null}
                                                        signal the ranks, then what they left, and kill after the grace
    {"order": "errors"}                                 tell what ranks that still live have written down as their error
    {"order": "kill"}                                   kill everything now
    {"order": "stacks"}                                 tell where the ranks are, where `Start.stall_s` is set

    {"order": "beat", "sent_s": 1700000000.123}         nothing but a sign of life, where there is a lease

The end of the launcher's stream is an order to kill, and so is its silence for the time of the lease. The
supervisor's events:

    {"event": "started", "rank": 0, "pid": 123}
    {"event": "output", "rank": 0, "stream": "stdout", "payload_bytes": 65536}
    {"event": "stopped", "rank": 0, "signal": 19, "pid": 123}, {"event": "continued", "rank": 0}
    {"event": "exited", "rank": 0, "code": -9, "time_s": 1700000000.123, "signalled": false, "out_of_memory": false,
     "error": ["ValueError: ...", 1700000000.120]}      "error" is null where the rank has written none down
    {"event": "errors", "errors": {"3": ["ValueError: ...", 1700000000.120]}}    the answer to the order
    {"event": "progress"}                               a rank has done a step, or a collective, since the last time
    {"event": "stacks", "quiet_s": 31.2, "payload_bytes": 4096}    the answer: how long no rank had done anything or
                                                        written, and `stacks.Observation` of each as JSON
    {"event": "left", "names": {"123": "sleep"}}        processes that the ranks left behind, about to be ended
    {"event": "carrier_said", "text": "...", "matters": true}    the words of mpirun itself; they matter where it failed
    {"event": "not_started", "message": "..."}          torch could not be imported, or no process be forked
    {"event": "ended", "killed": [0, 3], "unkillable": []}    the last one

All that a rank wrote before it ended comes before its "exited". Both ends are pipes: standard input and output of the
supervisor. On other hosts the same stream passes through ssh and an agent, which adds to it (`agent`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.launch.host.program import Kind, Program

Message = dict[str, Any]
STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Start:
    """What a supervisor starts: one process per entry of ``ranks``, each with its own variables beside the common ones.

    ``preload``: import torch once and fork the ranks. ``held``: file descriptors that ranks must not inherit.
    ``carrier``: the command, of mpirun, that is to start the ranks, in place of the supervisor itself.
    ``bind``: each rank has cores of its own. ``stall_s``: after how long a silence of all ranks somebody will ask where
    they are; None for never.
    Under an agent on another host: ``packed``, this package came with the agent and is not what ranks import;
    ``lease_s``, how long the orders may be silent; ``scratch``, the job's folder on the host.
    """

    program: Program
    preload: bool
    ranks: dict[int, dict[str, str]]
    held: tuple[int, ...] = ()
    carrier: tuple[str, ...] = ()
    packed: bool = False
    lease_s: float | None = None
    scratch: str | None = None
    bind: bool = False
    stall_s: float | None = None

    def to_message(self) -> Message:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Message) -> Start:
        kind: Kind = message["program"]["kind"]
        return cls(
            program=Program(kind, tuple(message["program"]["arguments"])),
            preload=message["preload"],
            ranks={int(rank): variables for rank, variables in message["ranks"].items()},
            held=tuple(message["held"]),
            carrier=tuple(message["carrier"]),
            packed=message["packed"],
            lease_s=message["lease_s"],
            scratch=message["scratch"],
            bind=message["bind"],
            stall_s=message["stall_s"],
        )


def encode(message: Message, payload: bytes = b"") -> bytes:
    if payload:
        message = message | {"payload_bytes": len(payload)}
    return json.dumps(message).encode() + b"\n" + payload


class Decoder:
    """Takes bytes as they come and gives whole messages with their payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._message: Message | None = None

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        self._buffer += data
        while True:
            if self._message is None:
                line, newline, _ = self._buffer.partition(b"\n")
                if not newline:
                    return
                del self._buffer[: len(line) + 1]
                self._message = json.loads(line)
            size = self._message.get("payload_bytes", 0)
            if len(self._buffer) < size:
                return
            payload = bytes(self._buffer[:size])
            del self._buffer[:size]
            message, self._message = self._message, None
            yield message, payload
