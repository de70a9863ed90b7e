"""A job that fails begins again: when, how often, with what, and what is told and kept of it."""

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launching import PATIENT
from ranks import given_port
from shardwright.errors import LaunchError, UsageError
from shardwright.launch import restarts
from shardwright.launch.carriers.agent_connection import AgentConnection
from shardwright.launch.carriers.srun import SrunCarrier
from shardwright.launch.carriers.ssh import SshCarrier
from shardwright.launch.host.program import Program
from shardwright.launch.hosts.hosts import Hosts
from shardwright.launch.hosts.placement import Placement
from shardwright.launch.options.carrier_facts import TORCHRUN
from shardwright.launch.options.launch_options import LaunchOptions
from shardwright.launch.options.request import PerHost, RemoteOptions, RestartOptions
from shardwright.launch.remote import RemoteAttempts

PYTHON = ["--", sys.executable]
ATTEMPT = """
    import os, signal, sys, time
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    told = [os.environ[name] for name in ("TORCHELASTIC_MAX_RESTARTS", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    print(attempt, *told, os.path.exists(os.environ["SHARDWRIGHT_FAILED_MARK"]), flush=True)
    open(f"up.{attempt}.{rank}", "w").write("x")
    while not all(os.path.exists(f"up.{attempt}.{r}") for r in range(int(os.environ["WORLD_SIZE"]))): time.sleep(0.01)
"""
FAILS_ONCE = ATTEMPT + "    if attempt == 0: rank == 1 and os._exit(3); time.sleep(600)\n"


def test_a_rank_that_fails_once_is_restarted_with_a_meeting_point_of_its_own(launching):
    script = launching.write("train.py", FAILS_ONCE)
    ended = launching.run("-n", "2", "--max-restarts", "3", *PYTHON, script)
    assert ended.code == 0, ended.stderr
    here = os.uname().nodename
    said = f"restart 1 of 3 on {here} in 1 s, since rank 1 failed first: exit code 3 (Ctrl-C ends the job)"
    assert [line for line in ended.stderr.splitlines() if "restart" in line] == [f"shardwright: {said}"]
    first, line, second = launching.log(1).splitlines()
    assert re.fullmatch(r"\[shardwright: restart 1 of 3, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]", line)
    (old, limit, port, run, _), (new, limit_2, port_2, run_2, marked) = first.split(), second.split()
    assert (old, new, limit, limit_2) == ("0", "1", "3", "3")
    assert port != port_2
    assert run != run_2
    assert marked == "False", "the mark of the first failure is gone"
    assert launching.log(1, "stderr").startswith("[shardwright: restart 1 of 3, ")
    report = launching.told("run.json")
    assert (report["status"], report["exit_code"], report["restarts"]) == ("succeeded", 0, 1)
    attempts = report["attempts"]
    assert [(a["cause"], a["exit_code"], a["ranks"], a["hosts"]) for a in attempts] == [
        ("rank 1 failed first: exit code 3", 3, 2, [here]), (None, 0, 2, [here]),
    ]  # fmt: skip
    assert attempts[0]["started_s"] < attempts[0]["ended_s"] < attempts[1]["started_s"] < attempts[1]["ended_s"]
    assert attempts[0]["ended_s"] + 1 <= attempts[1]["started_s"]
    assert launching.told("job.json")["restarts"] == 1
    assert not (launching.folder / "log_output/1/failed.json").exists()


def test_restarts_used_up_end_with_the_last_failure(launching):
    """Also of what fails where it imports: whether that passes, only another attempt can tell."""
    script = launching.write("train.py", ATTEMPT + "    if rank == 0: os._exit(10 + attempt)\n    time.sleep(600)\n")
    ended = launching.run("-n", "2", "--max-restarts", "1", *PYTHON, script)
    assert ended.code == 11
    assert "restart 1 of 1 on" in ended.stderr
    assert "the job has failed 2 times; --max-restarts 1 is used up" in ended.stderr
    assert launching.told("failed.json")["cause"] == "rank 0 failed first: exit code 11"
    assert launching.told("job.json")["status"] == "failed"
    assert [a["exit_code"] for a in launching.told("run.json")["attempts"]] == [10, 11]


@pytest.mark.slow
def test_the_error_of_an_attempt_is_not_taken_for_the_next_one_s(launching):
    """Each is dated by the file in which the zygote writes it down, which must not be the old one."""
    script = launching.write("train.py", "import os\nraise ValueError(os.environ['TORCHELASTIC_RESTART_COUNT'])\n")
    ended = launching.run("-n", "1", "--max-restarts", "1", script)
    assert ended.code == 1
    assert [a["cause"] for a in launching.told("run.json")["attempts"]] == [
        f"rank 0 failed first: exit code 1, ValueError: {attempt}" for attempt in (0, 1)
    ]


@pytest.mark.slow
def test_logs_follow_a_job_over_its_restarts(launching):
    script = launching.write("train.py", FAILS_ONCE)
    launcher = launching.start("-n", "2", "--max-restarts", "1", "--detach", *PYTHON, script)
    assert launching.finish(launcher).code == 0
    followed = launching.run("-f", "--rank", "1", command="logs")
    assert followed.code == 0
    assert [line.split()[0] for line in followed.stdout.splitlines()] == ["0", "[shardwright:", "1"]


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_in_the_pause_ends_the_job_at_once(launching, signum):
    script = launching.write("train.py", ATTEMPT + "    os._exit(3)\n")
    launcher = launching.start("-n", "1", "--max-restarts", "9", *PYTHON, script, line=PATIENT)
    said = "first"
    while said and "restart 2 of 9" not in said:
        said = launcher.stderr.readline()
    assert "in 600 s" in said
    launcher.send_signal(signum)
    ended = launching.finish(launcher)
    assert ended.code == 128 + signum
    assert f"{signal.Signals(signum).name}: the job is not restarted" in ended.stderr
    report = launching.told("run.json")
    assert (report["status"], report["exit_code"], len(report["attempts"])) == ("interrupted", 128 + signum, 2)
    assert launching.told("job.json")["status"] == "interrupted"


def test_the_pause_is_doubled_for_what_fails_as_soon_as_it_has_started():
    waited = []
    attempts = restarts._Attempts(RestartOptions(9), None, None, None, waited.append)
    attempts.console = SimpleNamespace(say=lambda text: None)
    for all_started_s in (None, None, None, None, None, -math.inf, None):
        kept, outcome = SimpleNamespace(hosts=["a"]), SimpleNamespace(cause="rank 0 failed first")
        failed = SimpleNamespace(all_started_s=all_started_s, unsure_until_s=-math.inf, kept=kept, outcome=outcome)
        attempts._pause(failed)
    assert waited == [1.0, 2.0, 4.0, 8.0, 8.0, 1.0, 1.0]


def test_a_signal_while_a_failed_job_ends_restarts_nothing(launching):
    stubborn = "    import signal\n    signal.signal(15, signal.SIG_IGN)\n"
    fails = "    if rank: os._exit(3)\n    time.sleep(600)\n"
    script = launching.write("train.py", stubborn + ATTEMPT + fails)
    launcher = launching.start("-n", "2", "--max-restarts", "2", "--grace", "600", *PYTHON, script)
    assert "rank 1 failed first: exit code 3" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    ended = launching.finish(launcher)
    assert ended.code == 3
    assert "SIGINT: the job is not restarted" in ended.stderr
    assert launching.told("job.json")["status"] == "failed"


@pytest.mark.slow
def test_a_supervisor_that_cannot_import_torch_any_more_is_another_failure(launching):
    """Between two attempts; the job has run, and what is wrong may pass."""
    launching.write("train.py", "import os\nopen('torch.py', 'w').write('raise ImportError(\"gone\")')\nos._exit(7)\n")
    ended = launching.run("-n", "1", "--max-restarts", "1", "train.py", env={"PYTHONPATH": launching.folder.as_posix()})
    assert ended.code == 1
    assert "ImportError: gone" in ended.stderr
    assert "the job has failed 2 times; --max-restarts 1 is used up" in ended.stderr
    assert launching.told("job.json")["exit_code"] == 1


@pytest.mark.slow
def test_a_full_log_disk_is_no_reason_not_to_begin_again(launching):
    (launching.folder / "log_output").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", "log_output"]
    if subprocess.run(mount, cwd=launching.folder, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        fails_once = "os._exit(3 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
        script = launching.write("train.py", f"import os\nos.write(1, b'x' * 999_999)\n{fails_once}\n")
        ended = launching.run("-n", "1", "--tee", "none", "--max-restarts", "1", *PYTHON, script)
        assert ended.code == 0, ended.stderr
        assert "log_output/1/rank.0/stdout cannot be written: No space left on device" in ended.stderr
        assert launching.told("job.json")["status"] == "succeeded"
    finally:
        subprocess.run(["umount", "log_output"], cwd=launching.folder, check=True)


@pytest.mark.slow
def test_a_given_port_serves_every_attempt(launching):
    port = given_port()
    script = launching.write("train.py", FAILS_ONCE)
    ended = launching.run("-n", "2", "--max-restarts", "1", "--port", str(port), *PYTHON, script)
    assert ended.code == 0, ended.stderr
    assert [line.split()[2] for line in launching.log(0).splitlines() if line[0] != "["] == [str(port)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((-1, False, None), "--max-restarts -1 is no number of restarts; type a whole number from 0 on"),
        ((0, True, None), "--elastic says what a restart may do without; type --max-restarts K too"),
        ((0, False, 1), "--min-ranks 1 is for jobs that may shrink; type --elastic too"),
        ((1, True, 0), "--min-ranks 0 is no number of ranks; type a whole number from 1 on"),
        ((1, True, 3), "--min-ranks 3 is more than the 2 ranks of the job; type one from 1 to 2"),
    ],
)
def test_words_that_contradict_each_other(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        RestartOptions.read(*words).check(2)


def test_an_elastic_job_takes_no_rank_table():
    with pytest.raises(UsageError, match=r"a rank table says where each is; type -H HOST:SLOTS,\.\.\. in place"):
        RestartOptions.read(1, True, None).check(None, by_table=True)


def test_an_elastic_job_is_not_made_of_torchruns():
    with pytest.raises(UsageError, match="--via torchrun starts one torchrun for each host; leave one of them out"):
        RestartOptions.read(1, True, None).check(None, carrier=TORCHRUN)


# --- which hosts an attempt gets


class Carrier:
    """Prepared as `SshCarrier` would be, with the hosts in ``lost`` out of reach."""

    def __init__(self, remote, lost):
        self.known, self.lost, self.unusable, self.closed = remote.hosts, lost, {}, False
        self.placement = Placement.by_slots(remote.hosts, remote.ranks, remote.oversubscribe)
        self.ranks = self.placement.size
        self.connections = list(self.placement.hosts)  # by their names

    def prepare(self):
        self.unusable = {h.name: ["it cannot be reached"] for h in self.placement.hosts if h.name in self.lost}
        if self.unusable:
            raise LaunchError(f"{len(self.unusable)} hosts cannot be used:\n  " + "\n  ".join(self.unusable))

    def close(self):
        self.closed = True

    def closer_look(self):
        return "\nlook closer"


class Job:
    """Attempts at a job on ``hosts``, of which some may be lost before each."""

    def __init__(self, hosts, *, min_ranks=1, elastic=True, **remote):
        self.lost, self.made, self.said = set(), [], []
        self.restarts = RestartOptions(9, elastic, min_ranks)
        options = LaunchOptions(Program("script", ("train.py",)), 0)
        self.attempts = RemoteAttempts(options, RemoteOptions(Hosts.from_list(hosts), **remote), self.make)

    def make(self, options, remote):
        assert options.restarts == self.restarts
        self.made.append(Carrier(remote, self.lost))
        return self.made[-1]

    def attempt(self, *lost):
        self.lost, self.made, self.said = set(lost), [], []
        try:
            options, carrier = self.attempts(self.restarts, self.said.append)
        finally:
            assert all(carrier.closed for carrier in self.made if carrier.unusable)
            self.restarts = replace(self.restarts, count=self.restarts.count + 1)
        assert options.ranks == carrier.ranks
        placed = zip(carrier.placement.hosts, carrier.placement.ranks, strict=True)
        return {host.name: list(ranks) for host, ranks in placed}, options.shown


def test_an_elastic_job_goes_on_without_what_is_lost_and_takes_back_what_returns():
    job = Job("a:2,b:2,c:1", tee="all")
    assert job.attempt() == ({"a": [0, 1], "b": [2, 3], "c": [4]}, frozenset(range(5)))
    assert job.attempt("a") == ({"b": [0, 1], "c": [2]}, frozenset(range(3)))
    assert job.said == ["the job goes on with 3 ranks on b, c, without\n  a: it cannot be reached"]
    assert job.attempt("a", "b") == ({"c": [0]}, frozenset({0}))
    assert job.attempt() == ({"a": [0, 1], "b": [2, 3], "c": [4]}, frozenset(range(5)))
    assert job.said == ["the job goes on with 5 ranks on a, b, c"]
    job.attempt()
    assert job.said == []
    with pytest.raises(LaunchError, match=r"(?s)would have 0 ranks since no host is left, fewer than .* 1\n  a: it"):
        job.attempt("a", "b", "c")


def test_an_elastic_job_has_no_fewer_than_min_ranks():
    job = Job("a:2,b:2", min_ranks=3)
    job.attempt()
    message = "the job would have 2 ranks on what is left (a), fewer than --min-ranks 3\n  b: it cannot be reached"
    with pytest.raises(LaunchError, match=re.escape(message)):
        job.attempt("b")
    with pytest.raises(UsageError, match="--min-ranks 5 is more than the 4 ranks of the job"):
        Job("a:2,b:2", min_ranks=5).attempt()


def test_hosts_that_had_no_ranks_stand_in():
    job = Job("a:2,b:2,c:2", ranks=3)
    assert job.attempt()[0] == {"a": [0, 1], "b": [2]}
    assert job.attempt("a")[0] == {"b": [0, 1], "c": [2]}
    assert job.attempt("a", "c")[0] == {"b": [0, 1]}


def test_hosts_that_are_shared_stay_shared_by_the_same_measure():
    job = Job("a:2,b:2", ranks=8, oversubscribe=True)
    assert job.attempt()[0] == {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    assert job.attempt("b")[0] == {"a": [0, 1, 2, 3]}


def test_a_job_that_is_not_elastic_needs_all_its_hosts():
    job = Job("a:1,b:1", elastic=False)
    job.attempt()
    with pytest.raises(LaunchError, match=r"(?s)1 hosts cannot be used:\n  b\nwith --elastic the job would go on"):
        job.attempt("b")


def test_a_job_that_cannot_start_points_to_a_closer_look():
    with pytest.raises(LaunchError, match=r"1 hosts cannot be used:\n  b\nlook closer"):
        Job("a:1,b:1").attempt("b")
    options = LaunchOptions(Program("script", ("train.py",)), 0)
    remote = RemoteOptions(Hosts.from_list("a:2,bob@b:2"), python=PerHost("/opt/py", {"a": "/my py"}))
    typed = "shardwright doctor -H a,bob@b --python /opt/py --python 'a=/my py'"
    assert SshCarrier(options, remote).closer_look() == f"\nfor a closer look type `{typed}`"
    assert SrunCarrier(options, remote).closer_look() == ""


def test_ranks_that_are_shown_and_no_longer_there_are_no_mistake():
    job = Job("a:2,b:2", tee="0,3")
    assert job.attempt()[1] == {0, 3}
    assert job.attempt("b")[1] == {0}


def test_how_long_a_lost_host_is_waited_for():
    """Where the agent has told of the end of its supervisor it has killed the ranks, too."""
    connection = AgentConnection.__new__(AgentConnection)
    connection.lease_s, connection._gone_code = 10.0, None
    assert connection.may_live_s == 13.0
    connection._gone_code = -9
    assert connection.may_live_s == 0.0
