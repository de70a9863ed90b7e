"""The checks before a start, without a job."""

import pytest

from shardwright.errors import UsageError
from shardwright.launch.check import check
from shardwright.launch.options.request import HostRequest, LaunchRequest


def test_a_job_on_this_host_is_for_doctor():
    with pytest.raises(UsageError, match="type `shardwright doctor`"):
        check(LaunchRequest(arguments=("true",), kind="program", log_dir=".", where=HostRequest(hosts="localhost:2")))


@pytest.mark.slow
def test_the_checks_start_nothing_and_tell_everything(job):
    good = job.run("-H", "host1:2,host2:1", command="check")
    assert (good.code, good.stderr) == (0, "")
    first, one, two = good.stdout.splitlines()
    assert first.startswith("2 hosts, 3 ranks: a job can start; its ranks would meet at 198.")
    assert one.startswith("host1: ranks 0 to 1, by nic1, python 3.")
    assert two.startswith("host2: rank 2, by nic2, python 3.")
    assert not (job.folder / "log_output").exists()
    bad = job.run("-H", "host1,unknown", "train.py", command="check")
    assert bad.code == 2
    assert bad.stderr.startswith("shardwright: ")
    assert "train.py" in bad.stderr
    job.write("train.py", "")
    bad = job.run("-H", "host1,unknown", "train.py", command="check")
    assert "1 of 2 hosts cannot be used:\n  unknown: its host key is not known here" in bad.stderr
    assert bad.stderr.endswith("for a closer look type `shardwright doctor -H host1,unknown`\n")
