"""The pickles of CIFAR-10's python version, read without executing what they say.

A pickle is a program: it names functions and calls them. Here the few names that such a file needs stand for classes of
this module, which keep what they are called with and do nothing; every other name is refused. Not even NumPy's own
functions are called with a file's arguments, since they trust the sizes in it.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from typing import Any, ClassVar

import numpy as np

from shardwright.data.images import Bytes

Contents = dict[str, Any]


class RefusedPickle(Exception):
    """A pickle that names something which a file of CIFAR-10 does not need, or uses it in another way."""


class _Inert:
    """A stand-in for a name in a pickle: it keeps its arguments and its state, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Inert):
    pass


class _Array(_Inert):
    """``_reconstruct(ndarray, shape, type)`` with the state (version, shape, dtype, Fortran order, bytes)."""

    def bytes_of(self) -> Bytes:
        _, shape, dtype, fortran, contents = self.state
        return _array(contents, dtype, shape, fortran)


class _Buffer(_Inert):
    """``_frombuffer(bytes, dtype, shape, order)``, what protocol 5 writes."""

    def bytes_of(self) -> Bytes:
        contents, dtype, shape, order = self.arguments
        return _array(contents, dtype, shape, order != "C")


class _Encoded(_Inert):
    """``_codecs.encode(text, "latin1")``, what Python 3 writes for bytes in protocol 2."""

    def __bytes__(self) -> bytes:
        text, encoding = self.arguments
        if encoding != "latin1":
            raise RefusedPickle(f"bytes in the encoding {encoding!r}")
        return str(text).encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): "ndarray",
    ("_codecs", "encode"): _Encoded,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Buffer for core in ("core", "_core")},
}


# Python's own unpickler and not the one in C: that one fills as much memory as a file of ten bytes tells it to.
class _InertUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise RefusedPickle(f"it names {module}.{name}, which could run code")
        return _NAMES[module, name]


def read_pickle(contents: bytes) -> Contents:
    """The dictionary in a pickle of strings, numbers, lists, dictionaries and arrays of bytes; keys become text.

    Raises `RefusedPickle`, with the offset and the reason, for anything else.
    """
    file = io.BytesIO(contents)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = _InertUnpickler(file, encoding="bytes").load()
        if not isinstance(value, dict):
            raise RefusedPickle(f"it holds a {type(value).__name__}")
        return {_text(key): entry for key, entry in value.items()}
    except Exception as error:  # an unpickler raises whatever a damaged file leads it to
        reason = str(error) if isinstance(error, RefusedPickle) else f"{type(error).__name__}: {error}"
        reason = "the end of the file" if isinstance(error, EOFError) else reason
        raise RefusedPickle(f"at offset {file.tell()}: expected a pickled dictionary, got: {reason}") from error


def byte_array(value: Any) -> Bytes:
    """The array of unsigned bytes that was read; raises `RefusedPickle` where it is none."""
    if not isinstance(value, (_Array, _Buffer)):
        raise RefusedPickle(f"expected an array of bytes, got a {type(value).__name__}")
    try:
        return value.bytes_of()
    except (ValueError, TypeError) as error:
        raise RefusedPickle(f"expected an array of bytes, got: {error}") from error


def _array(contents: Any, dtype: Any, shape: Any, fortran: Any) -> Bytes:
    if not isinstance(dtype, _Dtype) or _text(dtype.arguments[0]) != "u1":
        raise RefusedPickle("expected an array of unsigned bytes, got one of another type")
    if not isinstance(contents, (bytes, bytearray, _Encoded)):
        raise RefusedPickle(f"expected the bytes of an array, got a {type(contents).__name__}")
    return np.frombuffer(bytes(contents), dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> str:
    return bytes(value).decode("latin1") if isinstance(value, (bytes, _Encoded)) else str(value)


class _Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2's strings, which other people's readers expect, and not as calls of an encoder."""

    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch}

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)  # type: ignore[attr-defined]

    dispatch[bytes] = save_bytes


def pickle_bytes(value: Any) -> bytes:
    """``value`` as Python 2 pickled it.

    >>> pickle.loads(pickle_bytes({b"labels": [3, 7]}), encoding="latin1")
    {'labels': [3, 7]}
    """
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()
