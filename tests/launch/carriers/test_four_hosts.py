"""The long ones: the quick start and the perceptron on four hosts."""

import pytest
from test_many_hosts import perceptron, quick_start

from many_hosts import jobs_on_hosts

HOSTS = "host1:2,host2:2,host3:2,host4:2"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_quick_start_loses_on_four_hosts_as_on_one(tmp_path):
    with jobs_on_hosts(4, tmp_path) as (_, job):
        quick_start(job, HOSTS)


def test_the_perceptron_loses_on_four_hosts_as_on_one(tmp_path):
    with jobs_on_hosts(4, tmp_path) as (_, job):
        perceptron(job, HOSTS)
