"""Encryption and signatures, by the secret of a job, for what its ranks write where others can read and write, too.

Others read noise, under names that are noise, and what they write is refused. The scheme is SIV (Rogaway and Shrimpton,
2006) of what Python's library has: the signature of name and value (HMAC-SHA256) begins the stream (SHAKE256) that
hides the value. Equal values of one name are equal noise, by which a store can compare them; nothing is random.

>>> seal = Seal("a secret")
>>> seal.opened("a name", seal.sealed("a name", b"a value"))
b'a value'
>>> seal.opened("another name", seal.sealed("a name", b"a value")) is None
True
"""

from __future__ import annotations

import hashlib
import hmac

_TAG_BYTES = 32


class Seal:
    """Hides and signs values by a secret."""

    def __init__(self, secret: str) -> None:
        self._names, self._tags, self._streams = (
            hmac.digest(secret.encode(), purpose, "sha256") for purpose in (b"names", b"tags", b"streams")
        )

    def name(self, name: str) -> str:
        """Return the name under which what is called ``name`` is written."""
        return hmac.digest(self._names, name.encode(), "sha256").hex()

    def sealed(self, name: str, value: bytes) -> bytes:
        """Return what is written of a value."""
        tag = self._tag(name, value)
        return tag + self._hidden(tag, value)

    def opened(self, name: str, written: bytes) -> bytes | None:
        """Return the value; None where nobody has written it under this name who knows the secret."""
        tag = written[:_TAG_BYTES]
        value = self._hidden(tag, written[_TAG_BYTES:])
        return value if hmac.compare_digest(tag, self._tag(name, value)) else None

    def _tag(self, name: str, value: bytes) -> bytes:
        of = name.encode()
        return hmac.digest(self._tags, len(of).to_bytes(8) + of + value, "sha256")

    def _hidden(self, tag: bytes, data: bytes) -> bytes:
        """Return data under the stream that begins with ``tag``: hidden data shown, and the reverse."""
        stream = hashlib.shake_256(self._streams + tag).digest(len(data))
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))
