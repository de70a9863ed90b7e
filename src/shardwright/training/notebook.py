"""A function of a notebook on several ranks of this host, by the launcher, whose ranks are processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from shardwright.errors import LaunchError, UsageError
from shardwright.launch.hosts.environment import read_environment

T = TypeVar("T")

FUNCTION, SEARCHED, RESULT = "function", "sys.path", "result.{rank}"
_SHOWN_LINES = 30  # of what the launcher said, in an error


def notebook_launch(function: Callable[..., T], ranks: int, *arguments: Any, options: Sequence[str] = ()) -> list[T]:
    """Call ``function(*arguments)`` on so many ranks of this host, and return what each of them returns, rank 0 first.

    The function begins with `shardwright.init`, as a script does. It and its arguments are copied into new
    processes, with what it uses of the notebook, so that it does not matter whether CUDA is in use here already, and
    what it changes there is not changed here. What rank 0 prints is shown as it comes; each rank has a log.

    Args:
        function: may be defined in the notebook.
        ranks: how many.
        arguments: for the function, on every rank the same.
        options: words for ``shardwright launch``, as ``["--stall-timeout", "60"]``.

    Raises:
        UsageError: where the function, an argument or a result cannot be copied into another process.
        LaunchError: where a rank fails, with what the launcher says of it.
        KeyboardInterrupt: where the cell is interrupted, after the ranks have ended.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-notebook-") as folder:
        Path(folder, FUNCTION).write_bytes(_copied((function, arguments), "the function or an argument"))
        Path(folder, SEARCHED).write_text(json.dumps(sys.path))
        words = ["launch", "-n", str(ranks), *options, "-m", "shardwright.training.notebook", folder]
        code, said = _shown([sys.executable, "-m", "shardwright", *words])
        if code != 0:
            raise LaunchError(f"a rank failed (exit code {code}):\n{said}")
        return [cloudpickle.loads(Path(folder, RESULT.format(rank=rank)).read_bytes()) for rank in range(ranks)]


def _shown(command: Sequence[str]) -> tuple[int, str]:
    """Run a command, print what it says as it comes, and return its exit code and the last lines."""
    # Whatever a notebook prints goes through Python's stdout, and not through the terminal of its server.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    last: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = [*last, line][-_SHOWN_LINES:]
        except BaseException:
            process.send_signal(signal.SIGINT)  # the launcher ends the ranks
            process.wait()
            raise
    return process.returncode, "".join(last)


def _copied(what: Any, name: str) -> bytes:
    try:
        copied: bytes = cloudpickle.dumps(what)
    except Exception as error:
        advice = "make it inside the function"
        raise UsageError(f"{name} cannot be copied into another process: {error}; {advice}") from error
    return copied


def _on_a_rank(folder: Path) -> None:
    rank = read_environment(os.environ).rank
    # A function of a module is looked for where this notebook found it.
    sys.path += [path for path in json.loads((folder / SEARCHED).read_text()) if path not in sys.path]
    function, arguments = cloudpickle.loads((folder / FUNCTION).read_bytes())
    result = function(*arguments)
    (folder / RESULT.format(rank=rank)).write_bytes(_copied(result, "what the function returned"))


if __name__ == "__main__":
    _on_a_rank(Path(sys.argv[1]))
