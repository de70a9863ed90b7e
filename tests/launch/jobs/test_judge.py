"""Who failed first, when it is time to say so, and with what exit code a job ends: without processes or clocks."""

import signal

import pytest

from shardwright.launch.host.protocol import Exited
from shardwright.launch.joblog.job import FAILED, INTERRUPTED, SUCCEEDED
from shardwright.launch.joblog.judge import Judge, Outcome, RankEnd, rank_end

HOSTS = {0: "host0", 1: "host1"}
ECHO = b"RuntimeError: Connection closed by peer\n"


def failure(rank, code, time_s, ahead_s, tail=b""):
    return rank_end(Exited(rank, code, time_s + ahead_s), ahead_s, tail, f"host{rank}")


def running(ranks=2, hosts=None):
    """An attempt of which all ranks have started."""
    judge = Judge(ranks, hosts=hosts)
    assert [judge.rank_started(rank) for rank in range(ranks)] == [False] * (ranks - 1) + [True]
    return judge


# --- which failure is the cause, and when


def test_a_complaint_about_a_peer_waits_for_hosts_that_have_not_answered():
    judge = running(hosts=HOSTS)
    assert judge.ended(failure(0, 1, 50.0, 5.0, ECHO))
    judge.settle([("host0", 10.0), ("host1", 10.0)], 100.0)
    judge.answered("host0", {})
    assert judge.decide(101.0) is None
    judge.answered("host1", {1: ("ValueError: x", 49.9)})
    assert judge.decide(102.0).rank == 1
    assert judge.headline(judge.cause) == "rank 1 on host1 failed first: exit code 1, ValueError: x"


def test_a_complaint_that_nobody_explains_is_told_after_the_lease():
    judge = running(hosts=HOSTS)
    judge.ended(failure(0, 1, 50.0, 0.0, ECHO))
    judge.settle([("host1", 10.0)], 100.0)
    assert judge.decide(109.0) is None
    assert judge.decide(111.0).rank == 0


def test_the_earlier_failure_by_corrected_clocks_is_the_cause():
    judge = running()
    judge.ended(failure(0, 3, 50.05, -5.0))
    judge.ended(failure(1, 4, 50.0, 5.0))
    judge.settle([], 100.0)
    assert judge.decide(100.0).rank == 1, "all have ended, and nobody is waited for"
    assert judge.outcome().exit_code == 4


def test_others_have_a_while_to_have_failed_before():
    judge = running(3)
    assert not judge.ended(RankEnd(2, 0, 49.0)), "a rank that returned 0 asks for no verdict"
    assert judge.ended(RankEnd(0, 3, 50.0))
    judge.settle([("here", None)], 100.0)
    assert judge.wait_s(100.05) == pytest.approx(0.15)
    assert judge.decide(100.1) is None
    assert not judge.ended(RankEnd(1, -6, 49.9)), "the others are asked already"
    cause = judge.decide(100.1)
    assert (cause.rank, judge.wait_s(100.1), judge.ending) == (1, None, True)
    assert judge.decide(200.0) is None, "it is told once"
    later = ["rank 2 returned 0, 0.900 s before", "after it failed rank 0"]
    assert judge.details(cause, "{1} of {0}".format) == ["its log: stderr of 1", *later]
    printed = [f"    line {number}" for number in range(8, 20)]
    said = judge.details(cause, "{1} of {0}".format, lambda rank: b"".join(b"line %d\n" % n for n in range(20)))
    assert said == [*printed, "its log: stdout of 1", *later], "the end of what it printed, without a traceback"


def test_a_traceback_is_told_without_what_was_printed_and_with_what_helps():
    judge = running(1)
    nccl = b"Traceback (most recent call last):\nRuntimeError: Distributed package doesn't have NCCL built in\n"
    judge.ended(end := RankEnd(0, 1, 50.0, stderr_tail=nccl))
    assert judge.details(end, "{1} of {0}".format, lambda rank: b"printed\n") == [
        "    Traceback (most recent call last):", "    RuntimeError: Distributed package doesn't have NCCL built in",
        "its log: stderr of 0", "nccl moves tensors of GPUs, and there is none for this rank: use gloo in its place",
    ]  # fmt: skip
    judge.ended(end := RankEnd(0, 1, 50.0, stderr_tail=b"usage: x\n"))
    assert judge.details(end, "{1} of {0}".format, lambda rank: b"printed\n") == [
        "    usage: x", "its log: stderr of 0", "    printed", "its log: stdout of 0"
    ]  # fmt: skip


def test_ranks_of_a_lost_host_are_not_waited_for():
    judge = running(hosts=HOSTS)
    end = RankEnd(-1, 1, 50.0, host="host1", other_cause="nothing was heard from host1, and all ranks with it")
    assert judge.host_lost(end, [1]) == "settle"
    judge.settle([("host0", 10.0)], 100.0)
    judge.ended(failure(0, 1, 50.1, 0.0, ECHO))
    assert judge.decide(100.0, gone={1}) is end
    assert judge.headline(end) == end.other_cause
    assert judge.outcome() == Outcome(FAILED, 1, end.other_cause)


def test_a_supervisor_s_own_end_is_the_exit_code():
    judge = running(1)
    judge.host_lost(RankEnd(-1, -9, 50.0, other_cause="the supervisor of the ranks was killed by SIGKILL"), [0])
    judge.settle([], 100.0)
    judge.decide(101.0, gone={0})
    assert judge.outcome().exit_code == 137


# --- signals and losses, by when they come


def test_a_signal_ends_ranks_and_a_second_ctrl_c_kills_them():
    judge = running()
    assert judge.interrupt(signal.SIGINT) == "end"
    assert judge.interrupt(signal.SIGTERM) == "nothing"
    assert judge.interrupt(signal.SIGINT) == "kill"
    judge.ended(RankEnd(0, -2, 50.0, signalled=True))
    assert judge.decide(200.0) is None
    assert judge.outcome() == Outcome(INTERRUPTED, 130)


def test_a_signal_before_any_rank_has_started_abandons_them():
    judge = Judge(2, hosts=HOSTS)
    assert judge.interrupt(signal.SIGTERM) == "abandon"
    assert judge.host_lost(RankEnd(-1, 1, 50.0, host="host0", other_cause="the connection ended"), [0]) == "nothing"
    assert judge.outcome() == Outcome(INTERRUPTED, 143)


def test_a_failure_that_a_signal_comes_after_stays_the_cause():
    judge = running()
    judge.ended(RankEnd(0, 5, 50.0))
    judge.settle([], 100.0)
    judge.decide(101.0)
    assert judge.interrupt(signal.SIGTERM) == "nothing"
    assert (judge.outcome().exit_code, judge.told_to_end) == (5, signal.SIGTERM)


def test_a_signal_that_comes_while_others_are_asked_is_what_ends_the_job():
    judge = running()
    judge.ended(RankEnd(0, 5, 50.0))
    judge.settle([], 100.0)
    assert judge.interrupt(signal.SIGTERM) == "end"
    assert judge.decide(101.0, gone={0, 1}) is None
    assert judge.outcome() == Outcome(INTERRUPTED, 143)


@pytest.mark.parametrize(("hosts", "expected"), [(HOSTS, "say"), (None, "nothing")])
def test_a_host_that_is_lost_while_the_job_ends_is_told_where_there_are_several(hosts, expected):
    judge = running(hosts=hosts)
    judge.interrupt(signal.SIGINT)
    assert judge.host_lost(RankEnd(-1, 1, 50.0, host="host1", other_cause="gone"), [1]) == expected
    assert judge.lost_hosts == []


def test_a_host_that_is_lost_before_its_ranks_started_has_not_started():
    judge = Judge(2, hosts=HOSTS)
    judge.rank_started(0)
    assert judge.host_lost(RankEnd(-1, 1, 50.0, host="host1", other_cause="gone"), [1]) == "not started"
    judge.not_started = "host1: gone while it imported torch"
    assert judge.outcome() == Outcome(FAILED, 1, "host1: gone while it imported torch")


def test_a_hang_is_blamed_on_what_was_seen():
    judge = running()
    judge.ended(RankEnd(1, 0, 49.0))
    judge.blame(RankEnd(-1, 124, 50.0, other_cause="no rank has finished a step"))
    assert not judge.undecided
    assert judge.outcome() == Outcome(FAILED, 124, "no rank has finished a step")


def test_all_returned_0():
    judge = running()
    assert [judge.ended(RankEnd(rank, 0, 50.0)) for rank in range(2)] == [False, False]
    assert judge.decide(100.0) is None
    assert judge.outcome() == Outcome(SUCCEEDED, 0)
