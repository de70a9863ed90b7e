"""The program of every rank of ``shardwright bench``; rank 0 writes the verdict where that command started it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shardwright.cluster.bench.bench import passed, run_bench
from shardwright.cluster.bench.options import BenchOptions
from shardwright.distributed.world import init
from shardwright.errors import ShardwrightError
from shardwright.launch.hosts.environment import read_environment


def measure(options: BenchOptions) -> bool:
    """Join the world, print the results on rank 0, and write the profile; return whether all elements were right."""
    world = init(options.backend)
    tests = run_bench(world, options, _print)
    if options.profile is not None:
        from shardwright.cluster.bench.profile import measure_hardware, report

        hardware = measure_hardware(world)
        if world.rank == 0:
            hardware.save(options.profile)
            if not options.json:
                _print(report(hardware))
                _print(f"saved as {options.profile}")
    return passed(tests)


def _print(text: str) -> None:
    print(text, flush=True)


def main(verdict: str, options: dict[str, Any]) -> None:
    """Measure; an error that a user can mend is a verdict too, said once and not as a failure of ranks.

    Without a file for it the verdict is the exit code.
    """
    options["collectives"] = tuple(options["collectives"])
    if not verdict:
        sys.exit(0 if measure(BenchOptions(**options)) else 1)
    try:
        outcome: dict[str, Any] = {"passed": measure(BenchOptions(**options))}
    except ShardwrightError as error:
        outcome = {"error": str(error)}
    if read_environment(os.environ).rank == 0:
        Path(verdict).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
