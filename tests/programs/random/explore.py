"""Hold many random programs against plain PyTorch, and tell of all that is found.

Type ``.venv/bin/python tests/programs/random/explore.py --examples 5000`` before a change of the compiler is done: the
tests hold 400 programs, this as many as you have time for. What is found is sorted by what was said, and the first
program of each kind is printed with as few steps as show it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

for folder in ("support", "support/gpus", "programs/random"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))

import torch  # noqa: E402
from random_programs import draft_of  # noqa: E402
from random_runs import CASES, told, verdict  # noqa: E402


def main() -> None:
    """Read the command line, hold the programs, and exit with 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--cases", type=int, default=2, help="how many plans of each are tried beside one device")
    parser.add_argument("--show-refused", action="store_true", help="print the first refusal of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    kinds: set[str] = set()
    refusals: set[str] = set()
    for done, number in enumerate(range(options.first, options.first + options.examples), start=1):
        draft, single = draft_of(number), CASES[0]
        found = verdict(draft, [single, *random.Random(number).sample(CASES[1:], options.cases)])
        counts[found.kind] += 1
        if found and found.kind not in kinds:
            print(f"=== program {number}, {told(draft, found)}", flush=True)
        said = str(found.error).split(", at ")[0]
        if found.kind == "refused" and options.show_refused and said not in refusals:
            refusals.add(said)
            print(f"--- program {number} is refused: {found.error}\n", flush=True)
        kinds.add(found.kind)
        if done % 100 == 0 or done == options.examples:
            print(f"{done} programs, {time.process_time():.0f} s of CPU: {dict(counts)}", flush=True)
    sys.exit(kinds - {"held", "refused", "of no use"} != set())


if __name__ == "__main__":
    main()
