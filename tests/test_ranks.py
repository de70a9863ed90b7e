"""The starter of test ranks itself: it must report failures, not hide them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ranks
from ranks import RankFailed, run_ranks


def who() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    t = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(t)
    dist.destroy_process_group()
    return float(t)


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("this is rank one")


def die() -> None:
    os.kill(os.getpid(), 9)


def sleep_for_ever() -> None:
    import time

    time.sleep(1000)


def test_results_come_in_rank_order():
    assert run_ranks(3, who) == [(0, 3), (1, 3), (2, 3)]


def test_ranks_can_talk():
    assert run_ranks(4, sum_of_ranks) == [6.0] * 4


@pytest.mark.parametrize(
    ("fn", "message", "timeout"),
    [
        (fail_on_one, "this is rank one", 60),
        (die, "exit code -9", 60),
        (sleep_for_ever, r"ranks \[0, 1\] of 2 had not", 1),
    ],
)
def test_failures_are_reported(fn, message, timeout):
    with pytest.raises(RankFailed, match=message):
        run_ranks(2, fn, timeout=timeout)


ASKS = """
import os
import ranks
ranks._context.set_forkserver_preload([])
os.environ["SET_BY_A_TEST"] = "1"
print(ranks.run_ranks(1, os.getenv, "SET_BY_A_TEST"), os.environ["SET_BY_A_TEST"])
"""


def test_ranks_have_the_environment_of_before_all_tests():
    """Those of all later tests would have what the first test with ranks has set for itself."""
    environment = os.environ | {"PYTHONPATH": str(Path(ranks.__file__).parent)}
    asked = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, timeout=60)
    assert asked.stdout == "[None] 1\n", asked.stderr
