"""Mappings, sequences and scalars as YAML, for manifests that a person goes on to edit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NO_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def yaml_text(values: Mapping[str, Any]) -> str:
    """The document.

    >>> print(yaml_text({"spec": {"size": "8", "pods": [{"name": "a", "run": ["sh", "-c"]}]}}), end="")
    spec:
      size: "8"
      pods:
        - name: a
          run: ["sh", "-c"]
    """
    return "".join(f"{line}\n" for line in _lines(values))


def _lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{key}:"
            for item in value:
                first, *rest = _lines(item, f"{indent}    ")
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """JSON is YAML; a word that can be taken for nothing else goes without quotes."""
    plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NO_WORDS
    return str(value) if plain else _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Return JSON without characters that YAML takes for line ends, or does not take.

    >>> print(_escaped('"a\\u2028b"'))
    "a\\U00002028b"
    """
    if re.search("[\ud800-\udfff]", text):
        raise UsageError(f"{text!r} is not UTF-8, which a manifest has to be; give it another name")
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)
