from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hosts import HostNetwork
from launching import Launching
from many_hosts import ManyHosts, hosts_with_accounts, jobs_on
from shardwright.cli import main


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    job = Launching(tmp_path)
    try:
        yield job
        job.assert_none_left()
    finally:
        job.close()


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Gives `shardwright launch`, or another command, words that it refuses, in this process: what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, command: str = "launch") -> str:
        monkeypatch.setattr("sys.argv", ["shardwright", command, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code, said.out, "Traceback" in said.err) == (2, "", False)
        return said.err

    return run


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostNetwork]:
    with hosts_with_accounts(tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture
def job(network: HostNetwork, tmp_path: Path) -> Iterator[ManyHosts]:
    with jobs_on(network, tmp_path) as job:
        yield job
