"""Why a host did not answer, or does not fit the others, in words: what was seen, and what to type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.launch.carriers.packed import LOWEST_PYTHON
from shardwright.launch.host.agent_protocol import Answer, Hello, TooOld
from shardwright.launch.hosts.hosts import Host

WHEELS = "https://download.pytorch.org/whl"
"""Where torch is built for each CUDA, and for none."""
_SSH_FAILED = 255
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def why_no_answer(
    host: Host, answers: Mapping[type, Answer], exit_code: int | None, said: bytes, noise: bytes, python: str,
    spent_s: float,
) -> str:  # fmt: skip
    """One line. ``exit_code`` is of ssh, None where it still runs; ``noise`` what came in place of the agent's word."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if isinstance(old := answers.get(TooOld), TooOld):
        lowest = ".".join(map(str, LOWEST_PYTHON))
        return f"{python} is Python {old.python} there, expected {lowest} or newer; type --python PATH"
    if exit_code is None:
        what = "answered, but then fell silent" if Hello in answers else "did not answer"
        return f"it {what} within {spent_s:g} s; try `ssh -o BatchMode=yes {host.login} true`"
    if exit_code == _SSH_FAILED:
        return _why_ssh_failed(host, "\n".join(lines), last)
    if exit_code == _NOT_FOUND:
        return f"there is no {python} there ({last}); type --python PATH, one that each host has"
    if exit_code == _NOT_EXECUTABLE:
        return f"{python} cannot be run there ({last}); type --python PATH, one that each host has"
    heard = noise.decode(errors="replace").strip().splitlines()[-1:]
    tail = last or "".join(heard) or "it said nothing"
    return f"{python} ended there with exit code {exit_code} before the checks were through: {tail}"


def _why_ssh_failed(host: Host, said: str, last: str) -> str:
    target = host.login
    for words, text in (
        (
            ("IDENTIFICATION HAS CHANGED",),
            f"its host key is not the one in known_hosts: the host was installed anew, or it is not that host; where "
            f"you know why, type `ssh-keygen -R {host.name}` and `ssh {target} true`",
        ),
        (
            ("Host key verification failed", "host key is known"),
            f"its host key is not known here; type `ssh {target} true` once and compare it",
        ),
        (("Permission denied",), f"ssh may not log in ({last}); type `ssh-copy-id {target}`"),
        (("Could not resolve hostname",), "there is no host of that name; look at the spelling, or in ~/.ssh/config"),
        (("Connection refused",), f"no sshd answers there ({last}); start it: `systemctl start sshd`"),
        (
            ("timed out", "No route to host", "Network is unreachable", "Host is down"),
            f"it cannot be reached ({last}); is it up? `ping {host.name}`",
        ),
    ):
        if any(word in said for word in words):
            return text
    return f"ssh failed: {last or 'it said nothing'}; try `ssh -o BatchMode=yes {target} true`"


def compare(checked: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """What differs from the first host, for each host. ``checked`` has its versions, None for what it has not.

    >>> compare({"a": {"python": "3.11.2", "torch": "2.13.0", "shardwright": None},
    ...          "b": {"python": "3.12.0", "torch": None, "shardwright": None}})
    {'a': [], 'b': ['Python 3.12.0 there, but 3.11.2 on a; type --python PATH with the same version on each host']}
    """
    problems: dict[str, list[str]] = {name: [] for name in checked}
    if not checked:
        return problems
    (first, reference), *others = checked.items()
    for name, versions in others:
        if versions["python"].split(".")[:2] != reference["python"].split(".")[:2]:
            problems[name].append(
                f"Python {versions['python']} there, but {reference['python']} on {first}; type --python PATH with the "
                "same version on each host"
            )
        for package in ("torch", "shardwright"):
            mine, theirs = versions[package], reference[package]
            if mine is not None and theirs is not None and mine != theirs:
                problems[name].append(
                    f"{package} {mine} there, but {theirs} on {first}; install one version: "
                    f"`pip {' '.join(pip_words(package, theirs))}`"
                )
    return problems


def pip_words(package: str, version: str) -> list[str]:
    """What pip is told to install exactly that version. One with a local part is in the index of its wheels alone.

    >>> pip_words("torch", "2.13.0+cpu")
    ['install', 'torch==2.13.0+cpu', '--index-url', 'https://download.pytorch.org/whl/cpu']
    """
    local = version.partition("+")[2]
    index = ["--index-url", f"{WHEELS}/{local}"] if package == "torch" and local else []
    return ["install", f"{package}=={version}", *index]
