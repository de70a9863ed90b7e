"""The launcher of a job on one host: it starts the supervisor, shows and keeps what ranks write, and judges the end.

    launcher (this process: console, logs, verdict)
      └─ supervisor (own session; imports torch)
           ├─ rank 0 (forked, own session)
           └─ rank 1 ...

No operator of torch and no import of it happens here. The exit code is that of the rank that failed first (128 + N for
signal N), 0 where every rank returned 0, and 128 + N where the launcher was ended by signal N.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.errors import LaunchError
from shardwright.launch.console import Console
from shardwright.launch.failure import RankEnd, describe_ranks, first_failure, read_error_file, signal_name
from shardwright.launch.job import (
    FAILED,
    FAILED_VARIABLE,
    INTERRUPTED,
    SUCCEEDED,
    JobFolder,
    JobState,
    create_job_folder,
)
from shardwright.launch.logs import RankLogs
from shardwright.launch.options import RANK_VARIABLES, LaunchOptions
from shardwright.launch.port import PortLease, lease_port
from shardwright.launch.processes import JOB_VARIABLE, become_subreaper, descendants, kill_all, marked
from shardwright.launch.protocol import Decoder, Message, Start, encode
from shardwright.launch.zygote import can_preload

_SETTLE_S = 0.2  # after the first death, in which ranks may turn out to have failed before it
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# The supervisor's sys.path is that of `python script.py` without the script's folder: no file of the user's can shadow
# the standard library before a rank runs.
_BOOT = """
import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.append({root!r})
from shardwright.launch.supervisor import main
del sys.path[-1]
main()
"""


def launch(options: LaunchOptions) -> int:
    """Run the job and return its exit code; if detached, start it and return 0.

    Raises `UsageError` or `LaunchError` where nothing could be started; then no folder is left behind.
    """
    from shardwright.launch.detach import detach

    lease = lease_port(options.port)
    try:
        folder = create_job_folder(options.log_dir, options.job, options.ranks)
        if options.detach:
            return detach(lambda started: _Launcher(options, folder, lease, started).run(), folder)
        return _Launcher(options, folder, lease, lambda: None).run()
    finally:
        lease.close()


def rank_variables(options: LaunchOptions, port: int, run_id: str, folder: JobFolder) -> dict[int, dict[str, str]]:
    """torchrun's variables, and what a rank table adds to them, for each rank of a job on this host alone."""
    ranks = options.ranks
    return {
        rank: {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "ROLE_NAME": "default",
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "ROLE_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_ERROR_FILE": os.fspath(folder.error_file(rank)),
            FAILED_VARIABLE: os.fspath(folder.failed_mark),
        } | options.rank_environments.get(rank, {})
        for rank in range(ranks)
    }  # fmt: skip


def common_environment(options: LaunchOptions, run_id: str) -> dict[str, str]:
    """What all ranks share, in place before anything is imported."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.ranks)),
        "PYTHONUNBUFFERED": "1",  # a line is in the log when it was printed, even if the rank is killed after it
    }
    if os.path.exists("/sys/class/net/lo"):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's own name, which can hang
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return defaults | inherited | options.environment | {JOB_VARIABLE: run_id}


class _Launcher:
    """One run of one job."""

    def __init__(
        self, options: LaunchOptions, folder: JobFolder, lease: PortLease, started: Callable[[], None]
    ) -> None:
        self.options, self.folder, self.lease, self.started = options, folder, lease, started
        self.run_id = f"{folder.name}-{secrets.token_hex(8)}"
        self.pids: dict[int, int] = {}
        self.ends: dict[int, RankEnd] = {}
        self.settle_at_s: float | None = None
        self.cause: RankEnd | None = None
        self.interrupted: int | None = None
        self.ending = False
        self.ended = False
        self.not_started: str | None = None
        self.decoder = Decoder()
        self.selector = selectors.DefaultSelector()
        self.state = JobState.of_this_process([options.program.kind, *options.program.arguments], options.ranks)

    def run(self) -> int:
        with self._catch_signals():
            try:
                self.logs = RankLogs(self.folder, self.options.ranks, self._say)
                self.folder.write_state(self.state)
                self.folder.reserve()
                self.supervisor = self._start()
            except OSError as error:
                self.folder.remove()
                raise LaunchError(f"job {self.folder.name} cannot be started: {error}") from None
            self.console = Console(self.options.shown)
            become_subreaper()  # if the supervisor is killed, what it had adopted comes to us
            self.not_ours = descendants(os.getpid(), without={self.supervisor.pid})
            try:
                while not self.ended:
                    for key, _ in self.selector.select(self._timeout_s()):
                        key.data()
                    self._judge_when_settled()
                return self._conclude()
            finally:
                self._close()

    def _start(self) -> subprocess.Popen[bytes]:
        preload = self.options.preload and can_preload(self.options.program)
        held = self.lease.file_descriptors()
        supervisor = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(root=str(Path(__file__).parents[2]))],
            env=common_environment(self.options, self.run_id), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, pass_fds=held, start_new_session=True,
        )  # fmt: skip
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        self.orders = supervisor.stdin.fileno()
        self.events = supervisor.stdout.fileno()
        ranks = rank_variables(self.options, self.lease.port, self.run_id, self.folder)
        self._order(Start(self.options.program, preload, ranks, tuple(held), self.options.carrier).to_message())
        self.selector.register(self.events, selectors.EVENT_READ, self._take_events)
        return supervisor

    def _close(self) -> None:
        """With its orders at an end, a supervisor that still lives kills what it has and ends."""
        self.logs.close()
        self.console.close()
        with self.supervisor:
            pass
        self.selector.close()

    def _say(self, text: str) -> None:
        self.console.say(text)

    def _order(self, message: Message) -> None:
        data = encode(message)
        with contextlib.suppress(BrokenPipeError):  # that the supervisor is gone shows at its other end
            while data:
                data = data[os.write(self.orders, data) :]

    def _timeout_s(self) -> float | None:
        settle_s = max(0.0, self.settle_at_s - time.monotonic()) if self.settle_at_s is not None else None
        return min((t for t in (settle_s, self.console.show_fragments()) if t is not None), default=None)

    # --- signals

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Signals wake the loop; those that were ignored when we were started (nohup) stay so."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(read, selectors.EVENT_READ, lambda: self._take_signals(read))
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        caught = [s for s in (*_ENDING_SIGNALS, *_PASSED_SIGNALS) if signal.getsignal(s) != signal.SIG_IGN]
        handlers = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)

    def _take_signals(self, fd: int) -> None:
        for signum in os.read(fd, 512):
            if signum in _PASSED_SIGNALS:
                self._order({"order": "signal", "signal": signum})
            elif signum in _ENDING_SIGNALS:
                self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        name = signal_name(signum)
        if self.ending:
            if signum == signal.SIGINT:
                self._say(f"{name}: killing what is left")
                self._order({"order": "kill"})
                self.supervisor.send_signal(signal.SIGCONT)
            return
        self.interrupted, self.settle_at_s = signum, None
        if not self.pids:
            self.ending = True
            self.supervisor.kill()
            return
        living = self.options.ranks - len(self.ends)
        self._say(
            f"{name}: ending {living} ranks, which have {self.options.grace_s:g} s before they are killed"
            f" (Ctrl-C{' again' if signum == signal.SIGINT else ''} kills them now)"
        )
        self._end(signum)

    def _end(self, signum: int) -> None:
        self.ending = True
        self._order({"order": "end", "signal": signum, "grace_s": self.options.grace_s})
        self.supervisor.send_signal(signal.SIGCONT)  # somebody may have stopped it

    # --- events

    def _take_events(self) -> None:
        data = os.read(self.events, 1 << 20)
        if not data:
            self._supervisor_gone()
        for message, payload in self.decoder.feed(data):
            getattr(self, f"_on_{message['event']}")(message, payload)

    def _on_started(self, message: Message, _: bytes) -> None:
        self.pids[message["rank"]] = message["pid"]
        if len(self.pids) == self.options.ranks:
            self.started()

    def _on_output(self, message: Message, payload: bytes) -> None:
        self.logs.write(message["rank"], message["stream"], payload)
        self.console.output(message["rank"], message["stream"], payload)

    def _on_stopped(self, message: Message, _: bytes) -> None:
        if not self.ending:
            self._say(
                f"rank {message['rank']} is stopped ({signal_name(message['signal'])}) and the job waits for it; "
                f"`kill -CONT {message['pid']}` continues it, Ctrl-C ends the job"
            )

    def _on_continued(self, message: Message, _: bytes) -> None:
        if not self.ending:
            self._say(f"rank {message['rank']} continues")

    def _on_exited(self, message: Message, _: bytes) -> None:
        rank = message["rank"]
        error = read_error_file(self.folder.error_file(rank))
        time_s = message["time_s"]
        end = RankEnd(
            rank, message["code"], min(time_s, error[1]) if error else time_s,
            signalled=message["signalled"], out_of_memory=message["out_of_memory"],
            stderr_tail=self.logs.stderr_tail(rank), error=error[0] if error else None,
        )  # fmt: skip
        self.ends[rank] = end
        if end.code != 0 and not self.ending and self.settle_at_s is None:
            self.settle_at_s = time.monotonic() + _SETTLE_S

    def _on_left(self, message: Message, _: bytes) -> None:
        if not self.ending:
            names = ", ".join(f"{name} (pid {pid})" for pid, name in message["names"].items())
            self._say(f"the ranks left processes behind, which are ended now: {names}")

    def _on_carrier_said(self, message: Message, _: bytes) -> None:
        path = self.folder.path / "mpirun"
        with contextlib.suppress(OSError):
            path.write_text(f"{message['text']}\n")
            if message["matters"]:
                self._say(f"what mpirun said: {path}")

    def _on_not_started(self, message: Message, _: bytes) -> None:
        self.not_started = message["message"]
        self.ended = True

    def _on_ended(self, message: Message, _: bytes) -> None:
        self.settle_at_s = self.settle_at_s and 0.0
        self._judge_when_settled()
        if killed := message["killed"]:
            self._say(f"{describe_ranks(killed)} had to be killed")
        if unkillable := message["unkillable"]:
            self._say(f"processes that do not end even when killed: {', '.join(map(str, unkillable))}")
        self.ended = True

    def _supervisor_gone(self) -> None:
        """Without its last word. The kernel has killed the ranks; what they started is found by mark or descent."""
        self.ended = True
        code = self.supervisor.wait()
        kill_all(lambda: marked(self.run_id) | descendants(os.getpid()) - self.not_ours, 10.0)
        if self.interrupted is not None or self.cause is not None:
            return
        what = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if self.pids:
            self._fail(
                RankEnd(-1, code or 1, time.time()), f"the supervisor of the ranks {what}, and all ranks with it"
            )
        else:
            self.not_started = f"the supervisor of the ranks {what} while it imported torch"

    # --- the verdict

    def _judge_when_settled(self) -> None:
        if self.cause is not None or self.settle_at_s is None or self.ending:
            return
        if time.monotonic() < self.settle_at_s and len(self.ends) < self.options.ranks:
            return
        self.settle_at_s = None
        dying = []
        for rank in self.pids.keys() - self.ends.keys():
            if error := read_error_file(self.folder.error_file(rank)):
                tail = self.logs.stderr_tail(rank)
                dying.append(RankEnd(rank, 1, error[1], stderr_tail=tail, error=error[0]))
        cause = first_failure([*self.ends.values(), *dying])
        self._fail(cause, f"rank {cause.rank} failed first: {cause.cause()}")
        self._end(signal.SIGTERM)

    def _fail(self, cause: RankEnd, text: str) -> None:
        """Mark the job, then tell."""
        self.cause = cause
        rank = cause.rank if cause.rank >= 0 else None
        try:
            self.folder.write_failure(rank, text, cause.time_s)
        except OSError as error:
            self._say(f"the job cannot be marked as failed: {error}")
        lines = [text]
        if rank is not None:
            lines += [f"    {line.decode(errors='replace')}" for line in cause.last_lines()]
            lines.append(f"its log: {self.logs.path(rank, 'stderr')}")
        for end in sorted(self.ends.values(), key=lambda end: end.time_s):
            if end.code == 0:
                before_s = cause.time_s - end.time_s
                lines.append(
                    f"rank {end.rank} returned 0, {abs(before_s):.3f} s {'before' if before_s > 0 else 'after'}"
                )
        echoes = [end for end in self.ends.values() if end.code != 0 and end is not cause]
        if echoes:
            lines.append(f"after it failed {describe_ranks(end.rank for end in echoes)}")
        self._say("\n".join(lines))

    def _conclude(self) -> int:
        if self.not_started is not None:
            self.folder.remove()
            raise LaunchError(_why_not_started(self.not_started))
        if self.cause is not None:
            end = self.ends.get(self.cause.rank, self.cause)
            code = (self.cause if end.signalled or end.code == 0 else end).exit_code
            status = FAILED
        elif self.interrupted is not None:
            status, code = INTERRUPTED, 128 + self.interrupted
        else:
            status, code = SUCCEEDED, 0
        try:
            self.folder.write_state(self.state.ended(status, code))
        except OSError as error:
            self._say(f"the job's state cannot be written: {error}")
        self.folder.release()
        return code


def _why_not_started(message: str) -> str:
    last = message.strip().splitlines()[-1]
    if last.startswith("ModuleNotFoundError") and "'torch'" in last:
        return f"{sys.executable} has no torch; type `{sys.executable} -m pip install torch`"
    if message.startswith("Traceback"):
        return f"torch cannot be imported by {sys.executable}; `pip install torch` may mend it\n{message.strip()}"
    return message
