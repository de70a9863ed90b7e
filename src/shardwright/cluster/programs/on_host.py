"""The common parts of the programs that `connection` starts on hosts: the loop of orders, and the trial of a login."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.errors import ShardwrightError


def answer_orders(answers: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Answer each order by the function of its name, until there are no more.

    An error is told in place of the answer. The order ``hello`` needs no function.
    """
    known = {"hello": lambda _: {}, **answers}
    with os.fdopen(os.dup(0), "rb") as orders:
        for line in orders:
            order = json.loads(line)
            try:
                answer = known[order["order"]](order)
            except (OSError, ValueError, KeyError, ShardwrightError) as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def login_try(target: str, connect_s: int) -> tuple[str, ...]:
    """Return a command that ends with 0 where ssh reaches ``target`` in ``connect_s`` seconds without a password."""
    options = ("BatchMode=yes", f"ConnectTimeout={connect_s}", "ConnectionAttempts=1")
    return ("ssh", "-T", "-x", *(word for option in options for word in ("-o", option)), "--", target, "true")
