"""What hosts say of jobs, put together: which is which, who watches it, and what is shown of it."""

import re

import pytest

from shardwright.cluster.jobs.command import collect_jobs, find, lines_of
from shardwright.errors import UsageError

A, B = "1-0123456789abcdef", "1-fedcba9876543210"


def part(job=A, watched=True, origin="10.0.0.9", **facts):
    return {"id": job, "processes": 3, "age_s": 60.0, "watched": watched, "origin": origin, **facts}


def record(job=A, **facts):
    return {
        "marks": [job], "name": "1", "folder": "/logs/1", "state": "running", "started_s": 1.7e9, "grace_s": 10.0,
        "lives": True, **facts,
    }  # fmt: skip


def answer(*parts, records=()):
    return {"parts": list(parts), "records": list(records)}


def test_a_job_is_one_on_all_its_hosts_and_says_who_watches_it():
    jobs = collect_jobs({"a": answer(part(), records=[record()]), "b": answer(part(), part(B, origin="oops\x1b"))})
    jobs += collect_jobs({"c": answer(part("x-0000000000000000", watched=False, origin=None))})
    head, *rows = [re.split(r"  +", line) for line in lines_of(jobs)]
    assert head == ["JOB", "STATE", "HOSTS", "PROCESSES", "STARTED", "LAUNCHER"]
    shown = {row[0]: [row[1], row[2], row[3], row[-1]] for row in rows if len(row) == 6}
    assert shown == {
        A: ["running", "a,b", "6", "a:/logs/1"],
        B: ["elsewhere", "b", "3", "-"],
        "x": ["left", "c", "3", "-"],
    }
    assert [line for [line] in rows[-2:]] == [
        "elsewhere: its launcher is on none of these hosts, and hears of them; `stop -H` has it end the job",
        "left: no launcher hears of these processes; `stop -H` ends them",
    ]


def test_a_job_is_found_by_its_name_its_id_or_its_folder():
    jobs = collect_jobs({"a": answer(part(), records=[record()])})
    assert [find(jobs, word).id for word in ("1", A, "/logs/1")] == [A] * 3
    with pytest.raises(UsageError, match=r"no job 2 of this user runs on these hosts; those there are: 1$"):
        find(jobs, "2")
    with pytest.raises(UsageError, match=r"there is none$"):
        find([], "1")
    two = collect_jobs({"a": answer(part()), "b": answer(part(B))})
    with pytest.raises(UsageError, match=f"2 jobs there are named 1; name one by its id:\n  {A} on a\n  {B} on b"):
        find(two, "1")
    lost = collect_jobs({"a": answer(records=[record(B, lives=False, state="lost")]), "b": answer(part())})
    assert find(lost, "1").id == A, "one that is lost is shown for a while, and not meant"


@pytest.mark.parametrize("bad", [{}, {"parts": [], "records": [{}]}, answer(part(age_s=None)), answer({"id": A})])
def test_a_host_that_answers_something_else_is_named(bad):
    with pytest.raises(ValueError, match="b answered in another form than expected"):
        collect_jobs({"a": answer(part()), "b": bad})
