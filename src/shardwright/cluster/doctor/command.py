"""`shardwright doctor`: look at this host or at several, and print the findings as a table, JSON or a script."""

from __future__ import annotations

import json
import socket
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import click
from rich.console import Console
from rich.text import Text

from shardwright.cluster.doctor import probe
from shardwright.cluster.doctor.checks import CHECKS
from shardwright.cluster.doctor.checks.between import check_between
from shardwright.cluster.doctor.finding import HostFinding, Severity, examine
from shardwright.cluster.doctor.reach import Cluster, ask_all
from shardwright.cluster.doctor.reading import HostReading, typed
from shardwright.common.words import plain
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.options.request import NamedHosts

_WORDS = {
    Severity.PROBLEM: ("PROBLEM", "bold red"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.UNKNOWN: ("unknown", "magenta"),
    Severity.NOTE: ("note", "cyan"),
    Severity.OK: ("ok", "green"),
}
_INDENT, _WORD, _NAME = 2, 9, 15
_OF_A_SHELL = ("unset ", "export ", "ulimit ")  # what a script would do for itself alone
_ENDS_JOBS = ("reboot", "--gpu-reset")  # what nobody should run by the way


def merge(found: Iterable[HostFinding]) -> list[HostFinding]:
    """Return the findings with something to say; what several hosts have in common is one."""
    hosts: dict[tuple[object, ...], list[str]] = {}
    for one in found:
        if one.finding.text:
            key = (one.group, one.name, one.finding)
            hosts.setdefault(key, []).extend(name for name in one.hosts if name not in hosts.get(key, ()))
    merged = [HostFinding(str(k[0]), str(k[1]), tuple(names), k[2]) for k, names in hosts.items()]  # type: ignore[arg-type]
    worst = {group: max(f.finding.severity for f in merged if f.group == group) for group in {f.group for f in merged}}
    first = {group: at for at, group in reversed(list(enumerate(f.group for f in merged)))}
    return sorted(merged, key=lambda f: (-worst[f.group], first[f.group], -f.finding.severity))


def summary(found: Sequence[HostFinding]) -> str:
    """Return the number of findings of each severity, worst first."""
    counts = Counter(one.finding.severity for one in found)
    words = {Severity.PROBLEM: "problem", Severity.WARNING: "warning", Severity.NOTE: "note"}
    shown = [
        f"{counts[s]} {words.get(s, s.name.lower())}{'s' * (s in words and counts[s] != 1)}"
        for s in sorted(counts, reverse=True)
    ]
    return ", ".join(shown)


def show(found: Sequence[HostFinding], hosts: Sequence[str], console: Console) -> None:
    """Print the table: groups with the worst finding first, and under each finding the lines to type."""
    _line(console, Text(f"{', '.join(plain(name) for name in hosts)}: {summary(found)}", "bold"))
    for group in dict.fromkeys(one.group for one in found):
        _line(console, Text(f"\n{group}", "bold"))
        for one in (one for one in found if one.group == group):
            _row(one, hosts, console)


def _row(one: HostFinding, hosts: Sequence[str], console: Console) -> None:
    word, style = _WORDS[one.finding.severity]
    about = "" if set(one.hosts) >= set(hosts) else f"{', '.join(one.hosts)}: "
    space = max(20, console.width - _INDENT - _WORD - _NAME)
    first, *rest = textwrap.wrap(plain(f"{about}{one.finding.text}", 2000), space) or [""]
    _line(console, Text.assemble(" " * _INDENT, (f"{word:{_WORD}}", style), f"{one.name:{_NAME}}", first))
    for text in rest:
        _line(console, Text(" " * (_INDENT + _WORD + _NAME) + text))
    for typed_line in one.finding.remedy:
        _line(
            console, Text(" " * (_INDENT + _WORD) + plain(typed_line, 2000), "dim" if typed_line[:1] == "#" else "bold")
        )


def _line(console: Console, text: Text) -> None:
    """Print one line, which a terminal may fold but nothing cuts, so that it can be copied."""
    console.print(text, soft_wrap=True, highlight=False)


def to_json(found: Sequence[HostFinding], hosts: Sequence[str]) -> str:
    """Return the findings as JSON, in the order of the table."""
    worst = max((one.finding.severity for one in found), default=Severity.OK)
    rows = [
        {
            "group": one.group,
            "check": one.name,
            "hosts": list(one.hosts),
            "severity": one.finding.severity.name.lower(),
            "finding": one.finding.text,
            "type": list(one.finding.remedy),
        }
        for one in found
    ]
    return json.dumps({"hosts": list(hosts), "worst": worst.name.lower(), "findings": rows}, indent=2)


def fix_script(found: Sequence[HostFinding], readings: Mapping[str, HostReading]) -> str:
    """Return a script for sh with the lines to type, to be read and run on each host by a person.

    Commented out are notes, what a script could not do for the shell of the person, and what would end running jobs.
    """
    lines = [
        "#!/bin/sh",
        "# What `shardwright doctor` found to type. Nothing of it was run. Read it, then run it on each host.",
        'case "$(hostname)" in',
    ]
    lines[2:2] = [f"# Not reached: {plain(name)}" for one in found for name in one.hosts if name not in readings]
    for name, reading in readings.items():
        own = typed(reading.facts.get("name", name))
        mine = [
            one for one in found if name in one.hosts and one.finding.remedy and one.finding.severity != Severity.OK
        ]
        lines += [f"{own})", *(_script_lines(mine) or ["  # nothing"]), "  ;;"]
    return "\n".join([*lines, "esac", ""])


def _script_lines(found: Iterable[HostFinding]) -> list[str]:
    lines: list[str] = []
    for one in found:
        lines.append(f"  # {one.finding.severity.name.lower()}: {one.name}: {plain(one.finding.text)}")
        for line in dict.fromkeys(plain(text, 2000) for text in one.finding.remedy):
            lines.append(f"  {_commented(line, one.finding.severity)}")
    return lines


def _commented(line: str, severity: Severity) -> str:
    """Return a line of the script, behind a # with the reason where it is for a person alone."""
    if line.startswith("#"):
        return line
    reasons = {
        "in the shell from which you launch": line.startswith(_OF_A_SHELL),
        "where you launch from": line.startswith("shardwright "),
        "when no job runs here": line.endswith(_ENDS_JOBS),
        "if you want it": severity == Severity.NOTE,
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    return line if why is None else f"# {why}: {line}"


def doctor(where: NamedHosts | None, as_json: bool, script: bool) -> int:
    """Look, print, and return the exit code: 0, 1 for warnings, 2 for problems."""
    cluster = look_here() if where is None else ask_all(where)
    found = find(cluster)
    names = [host.name for host in cluster.hosts]
    if as_json:
        click.echo(to_json(found, names))
    elif script:
        click.echo(fix_script(found, cluster.readings), nl=False)
    else:
        show(found, names, Console())
    return max((one.finding.severity for one in found), default=Severity.OK).exit_code


def look_here() -> Cluster:
    """Return this host alone, read without a probe."""
    name = socket.gethostname()
    return Cluster(Hosts((Host(name),)), {name: HostReading.of(name, probe.look())})


def find(cluster: Cluster) -> list[HostFinding]:
    """Return all findings, as the table shows them."""
    each = [examine(check, reading) for check in CHECKS for reading in cluster.readings.values()]
    return merge([*check_between(cluster), *each])
