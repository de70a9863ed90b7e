from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import HostNetwork, host_network
from many_hosts import ManyHosts, jobs_on


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostNetwork]:
    with host_network(2, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture
def job(network: HostNetwork, tmp_path: Path) -> Iterator[ManyHosts]:
    with jobs_on(network, tmp_path) as job:
        yield job
