"""Checks of what is installed: Python, torch, this package, MPI."""

from __future__ import annotations

import re

from shardwright.cluster.doctor import wanted
from shardwright.cluster.doctor.checks.packages import install, pip
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem, warning
from shardwright.cluster.doctor.reading import Reading, Unreadable

_LOWEST_PYTHON = (3, 11)
_LOWEST_TORCH = (2, 11)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with. Raises `Unreadable` where it begins with none.

    >>> numbers("2.13.0+cpu")
    (2, 13, 0)
    """
    if (match := re.match(r"\d{1,6}(\.\d{1,6})*", version)) is None:
        raise Unreadable(f"{version!r} is no version")
    return tuple(map(int, match[0].split(".")))


def python(reading: Reading) -> Finding:
    version = reading.fact("python", str)
    if numbers(version) < _LOWEST_PYTHON:
        what = f"Python {version}, expected 3.11 or newer; name another one with --python"
        return problem(what, *install(reading, "python"), "python3.11 -m venv ~/train")
    return ok(f"{version}, {reading.fact('executable', str)}")


def torch(reading: Reading) -> Finding:
    version = reading.package("torch")
    if version is None:
        return problem("torch is not installed", pip(reading, "install", "torch"))
    if numbers(version) < _LOWEST_TORCH:
        return problem(f"torch {version}, expected 2.11 or newer", pip(reading, "install", "--upgrade", "torch"))
    cuda = reading.facts.get("torch_cuda")
    return ok(f"{version}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}")


def package(reading: Reading) -> Finding:
    version = reading.package("shardwright")
    if version is None:
        return warning("shardwright is not installed, which scripts import", pip(reading, "install", "shardwright"))
    return ok(f"{version}, sources {reading.fact('code', str)}")


def mpi(reading: Reading) -> Finding:
    said = reading.ran(wanted.MPIRUN)
    if said is None:
        lines = (pip(reading, "install", "shardwright[mpi]"), *install(reading, "mpi"))
        return note("no mpirun beside the interpreter or on the PATH; --backend mpi and --via mpirun need one", *lines)
    first = said.strip().splitlines()[0] if said.strip() else ""
    if not re.search(r"\d+\.\d+", first):
        raise Unreadable("`mpirun --version` names no version")
    return ok(first)


CHECKS = (
    Check("software", "Python", python),
    Check("software", "torch", torch),
    Check("software", "shardwright", package),
    Check("software", "MPI", mpi),
)
