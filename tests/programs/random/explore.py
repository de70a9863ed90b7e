"""Hold many random programs against plain PyTorch, and tell of all that is found.

Type ``.venv/bin/python tests/programs/random/explore.py --examples 5000``.

What is found is sorted by what was said, and the first program of each kind is printed with as few steps as show it.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

for folder in ("support", "support/gpus", "programs/random"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))

import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from random_programs import DRAFTS, Draft  # noqa: E402
from random_runs import CASES, Case, reference, refused  # noqa: E402


def kind_of(error: BaseException, case: Case | None) -> str:
    """Return what is alike in what is said of programs of one kind."""
    said = re.sub(
        r", at <random .*|(gradient of|buffer) \S+|-?\d[\d.]*(e-?\d+)?|%\w+", "_", " ".join(str(error).split("\n")[:2])
    )[:140]
    return f"{type(error).__name__}: {said}" + (f" [{case.mode}]" if case and type(error).__name__ == "Unlike" else "")


def verdict(draft: Draft, cases: list[Case]) -> tuple[str, Case | None, BaseException | None]:
    """Return "held", "refused", "useless" or what was found, and in which case."""
    held = reference(draft)
    if held is None:
        return "useless", None, None
    try:
        held.capture()
    except Exception as error:
        return "refused" if refused(error) else kind_of(error, None), None, error
    for case in cases:
        try:
            held.hold(case)
        except Exception as error:
            return "refused" if refused(error) else kind_of(error, case), case, error
    return "held", None, None


def smallest(draft: Draft, case: Case | None, kind: str) -> Draft:
    """Return the draft with as few steps as still show the same."""
    at = len(draft.steps) - 1
    tries = [replace(draft, aux=False), replace(draft, autocast=False)]
    for other in tries:
        if verdict(other, [case] if case else [])[0] == kind:
            draft = other
    while at >= 0:
        fewer = replace(draft, steps=draft.steps[:at] + draft.steps[at + 1 :])
        if verdict(fewer, [case] if case else [])[0] == kind:
            draft = fewer
        at -= 1
    for at, step in enumerate(draft.steps):
        plainer = replace(draft, steps=(*draft.steps[:at], replace(step, around=""), *draft.steps[at + 1 :]))
        if step.around and verdict(plainer, [case] if case else [])[0] == kind:
            draft = plainer
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cases", type=int, default=2, help="how many plans of each program are tried beside one device"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    begun = time.process_time()

    @seed(options.seed)
    @settings(
        max_examples=options.examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(DRAFTS, st.lists(st.sampled_from(CASES[1:]), min_size=options.cases, max_size=options.cases, unique=True))
    def look(draft: Draft, cases: list[Case]) -> None:
        kind, case, error = verdict(draft, [CASES[0], *cases])
        counts[kind] += 1
        if counts.total() % 100 == 0:
            print(f"{time.process_time() - begun:.0f} s of CPU: {dict(counts)}", flush=True)
        if kind == "refused":
            refusals[kind_of(error, case)] += 1
            if refusals[kind_of(error, case)] <= 2:
                print(f"--- refused ({case}): {error}\n", flush=True)
        elif kind not in ("held", "useless") and counts[kind] == 1:
            try:
                small = smallest(draft, case, kind)
                held = reference(small)
                print(f"=== {case}: {type(error).__name__}: {str(error)[:1500]}\n{held.program}\n", flush=True)
            except Exception as failure:
                print(
                    f"=== {case}: {error!r}; could not be made smaller: {failure!r}\n{reference(draft).program}",
                    flush=True,
                )

    look()
    print(f"{sum(counts.values())} programs, {time.process_time() - begun:.0f} s of CPU")
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}")
    print("refused:")
    for kind, count in refusals.most_common():
        print(f"{count:6} {kind}")


if __name__ == "__main__":
    main()
