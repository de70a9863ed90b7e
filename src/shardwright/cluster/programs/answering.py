"""The loop of a program that `connection` has started on a host: orders are lines of JSON, and so are the answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.errors import ShardwrightError


def answer_orders(answers: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Answer each order by the function of its name, until there are no more; what fails is told in place of the
    answer. The order ``hello`` needs no function.
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
