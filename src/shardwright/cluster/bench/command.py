"""The command ``shardwright bench``: measure in this process under a launcher, else start the ranks that measure.

Imports no torch before it knows that this process is a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.cluster.bench.options import BenchOptions, ranks_and_iters, read_bench_options
from shardwright.errors import ShardwrightError, UsageError
from shardwright.launch.hosts.environment import read_environment
from shardwright.launch.options.carrier_facts import carrier_of_backend
from shardwright.launch.options.launch_options import LaunchOptions, read_options
from shardwright.launch.options.request import HostRequest, LaunchRequest
from shardwright.launch.start import launch


def bench(
    collective: str | None, number: str | None, ranks: str | None, iters: int | None,
    hosts: str | None = None, hostfile: str | None = None, **words: Any,
) -> int:  # fmt: skip
    """Run the benchmark that the words of a command line ask for.

    Returns 0 where every element was right and 1 where one was wrong. Where a rank crashed, it returns 2, or the rank's
    own code if that is larger, after the launcher has told which one and why; the logs are then kept.

    Raises:
        UsageError: where a word does not fit, or with what the ranks have to say.
    """
    place = read_environment(os.environ)
    launched = None if place.launcher == "none" else place.size
    start, count = ranks_and_iters(number, ranks, iters, launched)
    options = read_bench_options(collective, iters=count, **words)
    if options.profile is not None:
        _check_target(Path(options.profile))
    if launched is not None:
        if hosts or hostfile:
            raise UsageError("-H: a launcher has started the ranks already; leave -H and --hostfile out")
        from shardwright.cluster.bench.rank import measure

        return 0 if measure(options) else 1
    if hosts or hostfile:  # whose ranks say by their exit code how it went: a file of theirs need not be here
        return launch(_job(options, start, "", where=HostRequest(hosts=hosts, hostfile=hostfile)))
    return _launch(options, start)


def _check_target(path: Path) -> None:
    """A profile takes a while to measure: where it cannot be written is said before."""
    if path.suffix != ".json":
        raise UsageError(f"--save-profile {path}: a profile is a file that ends with .json")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save-profile {path}: there is no folder {path.absolute().parent}")


def _launch(options: BenchOptions, ranks: str | None) -> int:
    folder = Path(tempfile.mkdtemp(prefix="shardwright-bench-"))
    verdict = folder / "verdict.json"
    via = carrier_of_backend(options.backend).name
    job = _job(options, ranks, str(verdict), log_dir=str(folder / "logs"), via=via)
    try:
        code = launch(job)
    except ShardwrightError:
        shutil.rmtree(folder)
        raise
    if code or not verdict.exists():
        return max(code, 2)
    answer = json.loads(verdict.read_text())
    shutil.rmtree(folder)
    if "error" in answer:
        raise UsageError(answer["error"])
    return 0 if answer["passed"] else 1


def _job(options: BenchOptions, ranks: str | None, verdict: str, **words: Any) -> LaunchOptions:
    module = ["shardwright.cluster.bench.rank", verdict, json.dumps(asdict(options))]
    return read_options(LaunchRequest(kind="module", arguments=module, ranks=ranks, tee="0", **words))
