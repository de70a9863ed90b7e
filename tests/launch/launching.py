"""Start the launcher as a person does, and look afterwards for processes that it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).with_name("shardwright"))
_MARK = "SHARDWRIGHT_TEST"
# A launcher that restarts a job at once after its first failure, and after the next one waits for somebody to end it.
PATIENT = [
    sys.executable, "-c",
    "from shardwright.cli import main\n"
    "from shardwright.launch import restarts\n"
    "pause = restarts._Attempts._pause\n"
    "def waits(self, failed):\n"
    "    restarts.PAUSE_S = 600.0 if len(self.past) > 1 else 0.01\n"
    "    pause(self, failed)\n"
    "restarts.LONGEST_PAUSE_S, restarts._Attempts._pause = 600.0, waits\n"
    "main()",
    "launch",
]  # fmt: skip
# In a rank: its supervisor has woken three times, more than a second apart, and has looked where the rank is.
SEEN_BY_SUPERVISOR = """
    import os, time
    for times in (1, 2, 3):
        time.sleep(1.1)
        print("here", flush=True)
        while open(f"log_output/1/rank.{os.environ['RANK']}/stdout").read().count("here") < times: time.sleep(0.01)
"""


@dataclass
class Ended:
    """How a launcher ended, with what it wrote."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


class Launching:
    """Launchers started in one folder. Every process below them carries a mark of its own in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.running: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def start(
        self, *arguments: str, command: str = "launch", env: dict[str, str] | None = None,
        line: Sequence[str] = (), **popen: Any,
    ) -> Any:  # fmt: skip
        """``line`` stands before the arguments, in place of our command."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
        environment = inherited | {_MARK: self.mark} | (env or {})
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        launcher = subprocess.Popen(
            [*(line or (COMMAND, command)), *arguments], cwd=self.folder, env=environment, **(streams | popen)
        )
        self.running.append(launcher)
        return launcher

    def finish(self, launcher: subprocess.Popen[str], timeout_s: float = 60) -> Ended:
        start = time.monotonic()
        stdout, stderr = launcher.communicate(timeout=timeout_s)
        return Ended(launcher.returncode, stdout, stderr, time.monotonic() - start)

    def run(self, *arguments: str, timeout_s: float = 60, **options: Any) -> Ended:
        return self.finish(self.start(*arguments, **options), timeout_s)

    def survivors(self) -> dict[int, str]:
        """Living processes with the mark, by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def assert_none_left(self, within_s: float = 60.0) -> None:
        try:
            wait_until(lambda: not self.survivors(), within_s, "the end of all processes")
        except AssertionError:
            raise AssertionError(f"left behind: {self.survivors()}") from None

    def wait_for_file(self, name: str, timeout_s: float = 60) -> str:
        path = self.folder / name
        wait_until(lambda: path.exists() and path.read_text(), timeout_s, f"{name} is written")
        return path.read_text()

    def light_torch(self, text: str = "") -> dict[str, str]:
        """What makes a torch be found that does no more than ``text``: where it does not matter, a job need not wait
        seconds for the true one.
        """
        package = self.folder / "light" / "torch"
        (package / "distributed").mkdir(parents=True)
        (package / "__init__.py").write_text(text)
        (package / "distributed" / "__init__.py").write_text("")
        return {"PYTHONPATH": str(package.parent)}

    def log(self, rank: int, stream: str = "stdout", job: str = "1") -> str:
        return (self.folder / "log_output" / job / f"rank.{rank}" / stream).read_text(errors="replace")

    def told(self, name: str, job: str = "1") -> Any:
        """What a file of the job's folder says, which is JSON."""
        return json.loads((self.folder / "log_output" / job / name).read_text())

    def close(self) -> None:
        """No process outlives a test, also where the test failed."""
        for launcher in self.running:
            if launcher.poll() is None:
                launcher.kill()
            for stream in (launcher.stdout, launcher.stderr):
                if stream is not None:
                    stream.close()
            launcher.wait()
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class MemoryGroup:
    """A control group with a limit, where this user may make one; else the test is skipped."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def __enter__(self) -> Path:
        for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            self.path = Path(root) / f"shardwright-test-{os.getpid()}"
            try:
                self.path.mkdir()
            except OSError:
                continue
            try:
                (self.path / limit).write_text(str(self.limit_bytes))
                return self.path
            except OSError:
                self.path.rmdir()
        pytest.skip("this user may not make a control group with a memory limit")

    def __exit__(self, *_: object) -> None:
        wait_until(self._removed, 60, "the control group is empty")

    def _removed(self) -> bool:
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True
