"""The long one: the quick start on four hosts."""

import pytest
from many_hosts import jobs_on_hosts
from test_many_hosts import quick_start


@pytest.mark.slow
def test_the_quick_start_loses_on_four_hosts_as_on_one(tmp_path):
    with jobs_on_hosts(4, tmp_path) as (_, job):
        quick_start(job, "host1:2,host2:2,host3:2,host4:2")
