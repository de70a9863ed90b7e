#!/usr/bin/env python3
"""Print what `shardwright doctor` reads of this machine as a recorded host, which its tests then look at.

.venv/bin/python scripts/record_host.py h100 > tests/cluster/doctor/recorded/h100.toml

Read it before it is committed: it has addresses, paths, the user's name, and variables that doctor looks at.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from shardwright.cluster.doctor import probe


def record(name: str, answer: Mapping[str, Any]) -> str:
    """What a probe answered, as TOML. A command that ended well is what it printed."""
    commands = {words: _short(ran) for words, ran in answer["commands"].items()}
    facts = {**answer["facts"], "name": name}
    sections = {"files": answer["files"], "unreadable": answer["unreadable"], "commands": commands, "facts": facts}
    lines = [f"name = {_toml(name)}"]
    for title, entries in sections.items():
        lines += ["", f"[{title}]"]
        lines += [f"{_toml(key)} = {_toml(value)}" for key, value in entries.items() if value is not None]
    return "\n".join(lines) + "\n"


def _short(ran: Mapping[str, Any]) -> object:
    return ran["out"] if ran["code"] == 0 and not ran["err"] else dict(ran)


def _toml(value: object) -> str:
    """A value in TOML, which has no word for nothing."""
    if value is None:
        return "false"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_toml(str(key))} = {_toml(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":
    print(record(sys.argv[1], probe.look()), end="")
