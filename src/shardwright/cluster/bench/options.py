"""The options of a benchmark of collectives: the words of the command line, read and checked. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.distributed.backends.table import BACKENDS
from shardwright.errors import UsageError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
DTYPES = ("int8", "uint8", "int32", "int64", "half", "bfloat16", "float", "double")
REDUCTIONS = ("sum", "prod", "max", "min")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str, flag: str) -> int:
    """Return the bytes of ``8``, ``1K``, ``1.5M``, ``1024M`` or ``1G``, in powers of 1024, as in nccl-tests.

    >>> parse_size("1024M", "-e") == parse_size("1G", "-e") == 2**30
    True

    Raises:
        UsageError: for anything else, naming ``flag``.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGkmg]?)", text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"{flag} {text} is no size; type bytes as 8, 1K, 1024M or 1G, from 1 on")
    return size


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark, by nccl-tests' flags: sizes grow by ``factor`` where that is over 1, else by ``step_bytes``."""

    collectives: tuple[str, ...]
    min_bytes: int = 32 * 2**20
    max_bytes: int = 32 * 2**20
    step_bytes: int = 2**20
    factor: int = 1
    iters: int = 20
    warmup: int = 5
    check: int = 1
    dtype: str = "float"
    reduction: str = "sum"
    root: int = 0
    backend: str | None = None
    json: bool = False
    profile: str | None = None

    def sizes(self) -> Iterator[int]:
        """Yield the bytes of each row, before each collective rounds them to its ranks."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size * self.factor if self.factor > 1 else size + self.step_bytes


def read_bench_options(
    collective: str | None, *, begin: str | None, end: str | None, step: str | None, factor: int | None,
    iters: int, warmup: int, check: int, dtype: str, reduction: str, root: int, devices: int, backend: str | None,
    json: bool, profile: str | None,
) -> BenchOptions:  # fmt: skip
    """Return the benchmark that a command line asks for. Raises `UsageError` for what cannot be served."""
    chosen = _collectives(collective, profile)
    for flag, value, known in (("-d", dtype, DTYPES), ("-o", reduction, REDUCTIONS), ("--backend", backend, BACKENDS)):
        if value is not None and value not in known:
            raise UsageError(f"{flag} {value} is not served; choose one of {', '.join(known)}")
    for flag, number, least in (("--iters", iters, 1), ("-w", warmup, 0), ("-c", check, 0), ("-r", root, 0)):
        if number < least:
            raise UsageError(f"{flag} {number}: expected a whole number from {least} on")
    if devices != 1:
        raise UsageError(f"-g {devices}: every rank has one device; start more ranks instead, as with -n {devices}")
    if factor is not None and factor < 2:
        raise UsageError(f"-f {factor}: sizes grow by a factor from 2 on; type -f 2, or an increment as -i 1M")
    first = parse_size(begin, "-b") if begin else 32 * 2**20
    last = parse_size(end, "-e") if end else max(first, 32 * 2**20)
    if first > last:
        raise UsageError(f"-b {begin} is larger than -e {end or '32M'}; the sizes go up")
    return BenchOptions(
        chosen, first, last, parse_size(step, "-i") if step else 2**20, factor or 1, iters, warmup, check, dtype,
        reduction, root, backend, json, profile,
    )  # fmt: skip


def _collectives(name: str | None, profile: str | None) -> tuple[str, ...]:
    if name is None:
        if profile is None:
            raise UsageError(f"which collective? type one of {', '.join(COLLECTIVES)}, or all")
        return ()
    if name == "all":
        return COLLECTIVES
    plain = {"alltoall": "all_to_all"}.get(name.removesuffix("_perf"), name.removesuffix("_perf"))
    if plain not in COLLECTIVES:
        raise UsageError(f"{name} is no collective that is measured; choose one of {', '.join(COLLECTIVES)}, or all")
    return (plain,)


def ranks_and_iters(
    number: str | None, ranks: str | None, iters: int | None, launched: int | None
) -> tuple[str | None, int]:
    """Return the ranks to start (None for the default, or under a launcher) and the iterations.

    ``-n`` (``number``) means ranks where this command starts them, and iterations, as in nccl-tests, where a launcher
    has started ``launched`` ranks.
    """
    if launched is None:
        if number is not None and ranks not in (None, number):
            raise UsageError(f"-n {number} and --ranks {ranks} both say how many ranks to start; leave one of them out")
        return ranks or number, 20 if iters is None else iters
    if ranks not in (None, str(launched)):
        raise UsageError(f"--ranks {ranks}, but a launcher has started {launched} ranks already; leave --ranks out")
    if number is not None:
        if not re.fullmatch(r"[0-9]{1,9}", number):
            raise UsageError(f"-n {number}: under a launcher -n is the number of iterations, a whole number from 1 on")
        if iters not in (None, int(number)):
            raise UsageError(f"-n {number} and --iters {iters} both say how many iterations; leave one of them out")
        iters = int(number)
    return None, 20 if iters is None else iters
