"""A hang as people read it: a line on the console for each group of ranks, and every stack in a file."""

from __future__ import annotations

import re
import time
from itertools import takewhile
from pathlib import Path

from shardwright.common.words import describe_ranks
from shardwright.launch.hangs.stacks import Observation
from shardwright.launch.hangs.stall_verdict import Hang, location_of
from shardwright.launch.joblog.jobs import moment

_SHOWN_GROUPS = 12
_LONGEST_LINE = 500
_STARTERS = re.compile(r"/shardwright/launch/supervisor/\w+\.py$")  # below the script, and no part of it
_CONTROLS = dict.fromkeys((*range(32), 127), "?")  # a file or a function may have any name


def headline(hang: Hang) -> str:
    """Return the first line of a report: the time without progress, and the verdict."""
    text = f"no rank has finished a step or written anything for {hang.timeout_s:g} s: {hang.verdict()[0]}"
    return text.translate(_CONTROLS)


def group_lines(hang: Hang) -> list[str]:
    """Return a line for each group, "7 ranks in all_reduce of step 41 (0-6)", the largest first, and on others."""
    lines = []
    for text, ranks in hang.groups.items():
        if len(ranks) == 1:
            lines.append(f"{describe_ranks(ranks)}{hang.on_host(ranks)} {text}")
        else:
            lines.append(f"{len(ranks)} ranks {text} ({describe_ranks(ranks).partition(' ')[2]})")
    if len(lines) > _SHOWN_GROUPS:
        lines[_SHOWN_GROUPS:] = [f"and ranks in {len(lines) - _SHOWN_GROUPS} other places"]
    reasons: dict[str, list[int]] = {}
    for seen in hang.observations:
        if seen.no_stacks:
            reasons.setdefault(seen.no_stacks, []).append(seen.rank)
    lines += [f"no stack of {describe_ranks(ranks)}: {reason}" for reason, ranks in reasons.items()]
    if hang.returned:
        lines.append(f"{describe_ranks(hang.returned)} returned 0 before")
    lines += [f"from {name} came no word where its ranks are" for name in hang.silent]
    return [line[:_LONGEST_LINE].translate(_CONTROLS) for line in lines]


def write_report(hang: Hang, folder: Path) -> Path:
    """Write the whole report into the first free ``stall-N.txt``. Raises `OSError`."""
    number = 1
    while True:
        path = folder / f"stall-{number}.txt"
        try:
            with open(path, "x", errors="replace") as file:
                file.write(report_text(hang))
            return path
        except FileExistsError:
            number += 1


def report_text(hang: Hang) -> str:
    """Return the whole report of a hang, with every stack."""
    lines = [moment(time.time()), headline(hang), "", *group_lines(hang)]
    for seen in sorted(hang.observations, key=lambda seen: seen.rank):
        lines += ["", f"--- rank {seen.rank}{hang.on_host([seen.rank])}, pid {seen.pid}", *_described(seen)]
    return "\n".join(line.translate(_CONTROLS) for line in lines) + "\n"


def _described(seen: Observation) -> list[str]:
    kernel = f"state {seen.state or 'gone'}, {seen.busy * 100:.0f} % of a processor"
    kernel += f", waits in {seen.waits_in}" if seen.waits_in else ""
    kernel += f", system call {seen.syscall}" if seen.syscall else ""
    lines = [f"it is {location_of(seen).text}", kernel]
    if (pulse := seen.pulse) is not None and pulse.beats:
        last = f", the last one for {pulse.site}" if pulse.site else ""
        lines.append(f"steps begun: {pulse.steps}, collectives of shardwright's: {pulse.collectives}{last}")
    for step, count, checksum in pulse.calls if pulse is not None else ():
        lines.append(f"collectives that step {step} began: {count}, with checksum {checksum:08x}")
    if pulse is not None and pulse.queued > 0:
        lines.append(f"collectives that its GPU was asked for and has not ended: {pulse.queued}")
    if seen.recorded:
        lines += ["what torch has recorded of its collectives:", *(f"  {line}" for line in seen.recorded)]
    if seen.below:
        lines.append(f"processes below it: {', '.join(seen.below)}")
    if not seen.stacks:
        return [*lines, f"no stack: {seen.no_stacks}"]
    for number, stack in enumerate(seen.stacks):
        frames = takewhile(lambda frame: not _STARTERS.search(frame.file), stack)
        name = "main thread" if number == 0 else f"thread {number + 1}"
        lines += [f"{name}, by {seen.stacks_by}, innermost first:", *(f"  {frame}" for frame in frames)]
    return lines
