"""Benchmarks take no figures while other programs want the cores."""

from __future__ import annotations

import argparse
import os
import sys
import time

MOST = 0.5  # of the load average, for each core
_FALLS_S = 120.0  # within which the load of a benchmark that has just ended falls below that


def add_busy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--busy", action="store_true", help="measure though other programs want the cores")


def load_per_core() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def refuse_load(busy: bool) -> None:
    """Wait while the load of what ran before falls, exit where it does not, unless ``busy``; the load is printed."""
    end_s = time.monotonic() + _FALLS_S
    if load_per_core() > MOST and not busy:
        print(f"the load is {load_per_core():.1f} per core: waiting {_FALLS_S:.0f} s at most", file=sys.stderr)
        while load_per_core() > MOST and time.monotonic() < end_s:
            time.sleep(1)
    if load_per_core() > MOST and not busy:
        sys.exit(
            f"the load is {load_per_core():.1f} per core, and figures would be those of other programs; wait, or type "
            "--busy"
        )
    print(f"load {load_per_core():.1f} per core{', busy' if load_per_core() > MOST else ''}\n", flush=True)
