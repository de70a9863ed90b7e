"""A launcher that goes on in the background: in a session of its own, so that it outlives the terminal."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from shardwright.errors import LaunchError, ShardwrightError
from shardwright.launch.joblog.job import JobFolder

_STARTED = b"started"


def detach(run: Callable[[Callable[[], None]], int], folder: JobFolder) -> int:
    """``run`` in a forked process; returns 0 when it has called back to say that its ranks have started.

    What the background launcher says goes to the job's ``console`` file. Raises `LaunchError` where it did not start.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(read)
        _run_in_background(run, folder, write)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    if text != _STARTED:
        raise LaunchError(text.decode(errors="replace") or "the background launcher ended before its ranks started")
    where = f" --log-dir {folder.path.parent}" if str(folder.path.parent) != "log_output" else ""
    print(f"job {folder.name} runs in the background; its logs: {folder.path}")
    print(f"follow it:  shardwright logs -f{where} {folder.name}")
    return 0


def _run_in_background(run: Callable[[Callable[[], None]], int], folder: JobFolder, answer: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        console = os.open(folder.path / "console", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for fd, source in ((0, nothing), (1, console), (2, console)):
            os.dup2(source, fd)
        code = run(lambda: _tell(answer, _STARTED))
    except ShardwrightError as error:
        _tell(answer, str(error).encode())
    except BaseException:
        traceback.print_exc()
        _tell(answer, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _tell(answer: int, text: bytes) -> None:
    """Once: the caller waits for the end of the pipe."""
    try:
        os.write(answer, text)
        os.close(answer)
    except OSError:
        return  # told before, or the caller is gone
