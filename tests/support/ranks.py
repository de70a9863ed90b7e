"""Start the ranks of a test in milliseconds, from one warm process that has imported torch.

``run_ranks(8, fn, arg)`` calls ``fn(arg)`` on eight processes with torchrun's variables set and returns
the eight results, rank 0 first. The processes are forked from the standard library's fork server, which
imports torch once per test session and never runs an operator.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Container, Iterator
from typing import Any

from shardwright.errors import UsageError
from shardwright.launch.hosts.port import lease_port

# With what test files import, and searches, trainers and groups on their first use; `warm` captures a few networks.
PRELOAD = [
    "torch", "torch.distributed", "numpy", "torch.distributed.tensor", "torch.export", "torch._dynamo",
    "torch._export.passes", "torch._functorch.aot_autograd", "torch.export._trace", "shardwright.runtime.parallel",
    "shardwright.checkpoint", "shardwright.distributed.backends.shm_meeting", "pytest", "hypothesis",
    "shardwright.compiler.plan.meshes", "shardwright.runtime.verification.verify", "shardwright.training.trainer",
    "omegaconf", "scipy.optimize", "warm",
]  # fmt: skip

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port that nothing else on this machine is given meanwhile, not even by the kernel."""
    lease = lease_port(None)
    try:
        yield lease.port
    finally:
        lease.close()


def given_port() -> int:
    """A free port for a program that is told its own: among those that neither launchers nor the kernel choose from.

    Tests at work beside this one look far from here: what one was given may not be in use yet.
    """
    first = os.getpid() * 97 % 7_000
    for port in (2_000 + (first + step) % 8_000 for step in range(97)):
        with contextlib.suppress(UsageError):
            lease_port(port).close()
            return port
    raise RuntimeError(f"no free port from {2_000 + first} on")


# Before any test has changed it for itself: ranks of all later tests have the environment of the first that starts any.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_PATH = _ENVIRONMENT.get("PYTHONPATH")  # of the ranks; the fork server finds `warm` and `models`, too
_HERE = os.path.dirname(__file__)
_ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [_HERE, os.path.join(_HERE, "files"), _PATH]))


@contextlib.contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """The fork server inherits the environment at its start, before it imports torch."""
    before = dict(os.environ)
    try:
        _set_environment(_ENVIRONMENT)
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _child(env: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...], pipe: Any, stay: bool) -> None:
    gc.freeze()  # a full collection behind torch's imports takes a third of a second, and copies pages that all share
    os.environ.update(env)
    if _PATH is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = _PATH
    try:
        if env.get("SHARDWRIGHT_TEST_DEVICE"):  # which has been looked at before
            from device import on_device

            on_device(env)
        result = (True, fn(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))  # by value: torch's own pickler would share memory that ends with us
    if stay:
        pipe.poll(None)  # until the other end is closed
    pipe.close()


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    dying: Container[int] = (),
    stay: bool = True,
) -> list[Any]:
    """Call ``fn(*args)`` on ``n`` processes and return their results in rank order.

    ``fn`` must be importable (defined at the top of a module). Raises `RankFailed` with the traceback of
    the rank that failed first, or with the names of the ranks that had not finished after ``timeout`` seconds;
    no process outlives the call. The result of a rank in ``dying``, which may end without one, is its exit code.
    The process of each rank lives until all have returned, so that nobody meets the end of rank 0, which serves the
    store, before he has read from it; unless ``stay`` is false, where others are to meet the end of one.
    """
    with free_port() as port:
        return _run(port, n, fn, args, timeout, env, dying, stay)


def _run(
    port: int,
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    env: dict[str, str] | None,
    dying: Container[int],
    stay: bool,
) -> list[Any]:
    children, pipes = [], {}
    with _environment_of_ranks():
        for rank in range(n):
            ours, theirs = _context.Pipe(duplex=stay)
            variables = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
                "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "SHARDWRIGHT_TEST_DEVICE": os.environ.get("SHARDWRIGHT_TEST_DEVICE", ""),
            } | (env or {})  # fmt: skip
            child = _context.Process(target=_child, args=(variables, fn, args, theirs, stay), daemon=True)
            child.start()
            theirs.close()
            children.append(child)
            pipes[ours] = rank
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < n:
            waiting = [p for p, rank in pipes.items() if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(pipes[p] for p in waiting)} of {n} had not finished after {timeout} s")
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    children[rank].join(30)
                    if rank in dying:
                        results[rank] = children[rank].exitcode
                        continue
                    raise RankFailed(f"rank {rank} of {n} died with exit code {children[rank].exitcode}") from None
                if not ok:
                    raise RankFailed(f"rank {rank} of {n} raised:\n{value}")
                results[rank] = value
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(10)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    return [results[rank] for rank in range(n)]
