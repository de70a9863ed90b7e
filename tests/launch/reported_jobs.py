"""Jobs that ran nowhere, with what their ranks would have told of their steps."""

import json
import time

from shardwright.launch.joblog.job import JobFolder, JobState
from shardwright.launch.joblog.logs import LiveFiles

LINE = {"steps": 5, "seconds": 5.0, "data_s": 0.5, "samples": 160, "communicating_s": 1.0, "held_bytes": 3_000_000}
PLAN = {
    "hardware": "h100",
    "seconds": 0.9,
    "computing_s": 0.7,
    "communicating_s": 0.2,
    "held_bytes": 2_500_000,
    "sent_bytes": 4_200_000,
}


def job(folder, ranks=4, hosts=("first", "second"), name="digits", lasted_s=None, **state):
    """A job with a folder, and its live files; no rank has told of anything. Without ``lasted_s`` it still runs."""
    started_s = time.time() - 151
    ended_s = None if lasted_s is None else started_s + lasted_s
    made = JobFolder(folder / name)
    made.path.mkdir()
    made.make_ranks(ranks)
    made.write_state(JobState(["script", "train.py"], ranks, "elsewhere", 1, 1, started_s, ended_s=ended_s, **state))
    live = LiveFiles(made, 0, ranks)
    for rank in range(ranks):
        live.write_state(rank, "running", pid=100 + rank, host=hosts[rank * len(hosts) // ranks])
    return made, live


def tell(live, rank, at_s=0.0, **line):
    live.write_steps(
        rank, json.dumps({"time_s": time.time() + at_s, "step": 12, **LINE, "loss": 2.25, **line}).encode() + b"\n"
    )
