from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import HostNetwork
from launching import Launching
from many_hosts import ManyHosts, hosts_with_accounts, jobs_on


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    job = Launching(tmp_path)
    try:
        yield job
        job.assert_none_left()
    finally:
        job.close()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostNetwork]:
    with hosts_with_accounts(tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture
def job(network: HostNetwork, tmp_path: Path) -> Iterator[ManyHosts]:
    with jobs_on(network, tmp_path) as job:
        yield job
