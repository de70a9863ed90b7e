"""The long one: the quick start on four hosts."""

import pytest
from many_hosts import ManyHosts
from test_many_hosts import quick_start

from hosts import host_network


@pytest.mark.slow
def test_the_quick_start_loses_on_four_hosts_as_on_one(tmp_path):
    (tmp_path / "network").mkdir()
    with host_network(4, tmp_path / "network") as network:
        job = ManyHosts(tmp_path, network)
        try:
            quick_start(job, "host1:2,host2:2,host3:2,host4:2")
            job.assert_none_left()
        finally:
            job.close()
