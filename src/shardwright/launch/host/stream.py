"""Messages on a stream: each is a line of JSON, after which raw bytes may follow.

    {"message": "Exited", "rank": 0, "code": 3, "time_s": 1700000000.123}
    {"message": "Output", "rank": 0, "stream": "stdout", "payload_bytes": 65536}     and then 65,536 bytes

A message is a named tuple: the name of its class stands in the line beside its fields, and a field ``data`` of bytes is
what follows the line. These classes are no frozen dataclasses, since the launcher and the supervisor make thirty of
them before a rank starts, and a dataclass takes five times as long to make.
"""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar


class Message(Protocol):
    """A named tuple of what JSON can hold, where lists are tuples.

    A class with other fields has a class method ``from_json``, which takes the fields of a line by their names.
    """

    def _asdict(self) -> dict[str, Any]: ...


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Return a message as bytes: a line of JSON, and behind it the bytes of ``data``, if it has any."""
    fields = message._asdict()
    data: bytes = fields.pop("data", b"")
    if data:
        fields["payload_bytes"] = len(data)
    return json.dumps({"message": type(message).__name__, **fields}, default=vars).encode() + b"\n" + data


class Decoder(Generic[M]):
    """A decoder that takes bytes as they come and gives whole messages of the ``classes`` that the stream may carry."""

    def __init__(self, *classes: type[M]) -> None:
        self._classes = {one.__name__: one for one in classes}
        self._buffer = bytearray()
        self._line: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that are whole with these bytes.

        Raises `ValueError` for a message that is none of the classes, or has other fields.
        """
        self._buffer += data
        while True:
            if self._line is None:
                line, newline, _ = self._buffer.partition(b"\n")
                if not newline:
                    return
                del self._buffer[: len(line) + 1]
                self._line = json.loads(line)
            size = self._line.get("payload_bytes", 0)
            if len(self._buffer) < size:
                return
            payload = bytes(self._buffer[:size])
            del self._buffer[:size]
            fields, self._line = self._line, None
            yield self._message(fields, payload)

    def _message(self, line: dict[str, Any], payload: bytes) -> M:
        name = line.get("message")
        if name not in self._classes:
            raise ValueError(f"a message {name!r} came, expected one of {', '.join(self._classes)}")
        fields = {key: _frozen(value) for key, value in line.items() if key not in ("message", "payload_bytes")}
        if payload:
            fields["data"] = payload
        one: Any = self._classes[name]
        try:
            message: M = getattr(one, "from_json", one)(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"a message {name} came with {', '.join(fields) or 'nothing'}, expected {', '.join(one._fields)}"
            ) from error
        return message


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def take_stdio() -> tuple[int, int]:
    """Return copies of standard input and output, for orders and events; what an import prints then goes to stderr."""
    orders, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # an import that prints would garble the stream of events
    return orders, events


_CHUNK_BYTES = 1 << 18


class Writer:
    """Bytes for a descriptor whose other end may stand still: as much is written as it takes, the rest later.

    They are written from the loop of a selector, of which the keys carry what is to be called. ``gone`` is called where
    the other end is no more; what waits for it is then forgotten. ``more`` gives what follows once nothing waits.
    """

    def __init__(self, fd: int, gone: Callable[[], object], more: Callable[[], bytes] = bytes) -> None:
        self._fd, self._gone, self._more = fd, gone, more
        self._backlog = bytearray()
        self._selector: selectors.BaseSelector | None = None
        self._registered = False
        os.set_blocking(fd, False)

    @property
    def waiting_bytes(self) -> int:
        return len(self._backlog)

    def attach(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._watch()

    def detach(self) -> None:
        """Leave the selector; what waits goes on waiting."""
        if self._selector is not None and self._registered:
            self._selector.unregister(self._fd)
        self._selector, self._registered = None, False

    def put(self, data: bytes) -> None:
        """Write it when the loop comes to it."""
        self._backlog += data
        self._watch()

    def put_now(self, data: bytes) -> None:
        """Write it at once, unless something waits before it."""
        waiting = bool(self._backlog)
        self._backlog += data
        if not waiting:
            self._flush()

    def _flush(self) -> None:
        try:
            del self._backlog[: os.write(self._fd, self._backlog[:_CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._backlog.clear()
            self._gone()
        else:
            if not self._backlog:
                self._backlog += self._more()
        self._watch()

    def _watch(self) -> None:
        if self._selector is None or self._registered == bool(self._backlog):
            return
        if self._backlog:
            self._selector.register(self._fd, selectors.EVENT_WRITE, self._flush)
        else:
            self._selector.unregister(self._fd)
        self._registered = bool(self._backlog)
