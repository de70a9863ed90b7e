"""Every rank of ``shardwright verify`` runs this module; rank 0 leaves the verdict in a file for the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shardwright.distributed.agreement import agree
from shardwright.distributed.seed import set_seed
from shardwright.distributed.world import init
from shardwright.errors import ShardwrightError, UsageError
from shardwright.runtime.verification.build import BuildFunction, BuiltModel
from shardwright.runtime.verification.loop import Loop
from shardwright.runtime.verification.verify import verify


def main(target: str, verdict_file: str, options: dict[str, Any]) -> None:
    """Build, verify and print. What a user can mend is a verdict too, said once and not as a failure of ranks."""
    world = init()
    try:
        set_seed(options.pop("seed"))
        built, loop = _build_everywhere(target, options.pop("loop", None))
        result = verify(built.model, built.loss_fn, list(built.batches), pins=built.pins, loop=loop, **options)
        verdict: dict[str, Any] = {"ok": result.ok}
        if world.rank == 0:
            print(result, flush=True)
    except ShardwrightError as error:
        verdict = {"error": str(error)}
    if world.rank == 0:
        Path(verdict_file).write_text(json.dumps(verdict))


def _build_everywhere(target: str, loop: str | None) -> tuple[BuiltModel, Loop | None]:
    """Return what ``build()`` returns, and a loop of its file by its name.

    Where either fails on some rank, every rank says so, and none is left waiting.
    """
    built, train, problem = None, None, None
    try:
        function = BuildFunction.parse(target)
        built = function.load()()
        train = function.neighbour(loop) if loop else None
    except ShardwrightError as error:
        problem = str(error)
    agree("verify", {}, problem)
    if built is None:
        raise UsageError(problem)
    return built, train


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
