"""The hosts that tests of several hosts stand on are what they say: names, networks, links, and nothing left behind."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import hosts
from hosts import host_network

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with host_network(2, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "making network namespaces takes root"),
        (lambda patch: patch.setattr(hosts, "_PATH", "/nothere"), "no ip, tc, sshd, .* on this machine; type `apt-get"),
        (
            lambda patch: patch.setattr(
                hosts, "_must", lambda *_: (_ for _ in ()).throw(RuntimeError("not permitted"))
            ),
            "network namespaces cannot be made here: not permitted",
        ),
    ],
)
def test_where_hosts_cannot_be_made_the_reason_is_said(monkeypatch, change, reason):
    monkeypatch.setattr(hosts, "remove_stale", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda program, path: None if path == "/nothere" else program)
    change(monkeypatch)
    with pytest.raises(pytest.skip.Exception, match=reason), host_network(1, Path("nothere")):
        pass


def test_ssh_reaches_each_host_and_each_says_its_own_name(network):
    for name in ("host1", "host2"):
        done = network.ssh(name, "hostname")
        assert (done.stdout, done.returncode) == (f"{name}\n", 0), done.stderr
        assert network.ssh(name, "exit 7").returncode == 7
    hop = network.ssh("host1", f"ssh -F {network.config} host2 hostname")
    assert hop.stdout == "host2\n", hop.stderr
    assert subprocess.run(["hostname"], capture_output=True, text=True).stdout not in ("host1\n", "host2\n")


def test_a_host_has_its_own_interface_and_sees_its_own_processes_alone(network):
    for name, other in (("host1", "nic2"), ("host2", "nic1")):
        host = network.hosts[name]
        listed = network.ssh(name, "ls /sys/class/net; ps -e -o pid= -o comm=; getent hosts host1 host2").stdout
        assert host.interface in listed.split()
        assert other not in listed.split()
        assert str(os.getpid()) not in listed.split()
        assert f"{host.address} {name}" in [" ".join(line.split()) for line in listed.splitlines()]


def test_only_the_key_of_the_network_opens_a_host(network, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    text = network.config.read_text().replace(f"{network.folder}/client_key", f"{tmp_path}/other")
    (tmp_path / "config").write_text(text)
    refused = subprocess.run(
        ["ssh", "-F", str(tmp_path / "config"), "host1", "true"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 255
    assert "Permission denied (publickey)" in refused.stderr


ALL_REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.full((1_000_000,), dist.get_rank() + 1.0)
    dist.all_reduce(value)
    print(value.unique().tolist(), flush=True)
    dist.barrier()
"""


@pytest.mark.slow
def test_gloo_reduces_between_two_hosts_over_their_interfaces(network, tmp_path):
    (tmp_path / "reduce.py").write_text(textwrap.dedent(ALL_REDUCE))

    def sent_bytes(name):
        counter = f"/sys/class/net/{network.hosts[name].interface}/statistics/tx_bytes"
        return int(subprocess.run(network.inside(name, "cat", counter), capture_output=True, check=True).stdout)

    before = {name: sent_bytes(name) for name in network.hosts}
    ranks = [
        subprocess.Popen(
            network.ssh_command(
                name,
                f"env RANK={rank} WORLD_SIZE=2 MASTER_ADDR={network.hosts['host1'].address} MASTER_PORT=29500",
                f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={host.interface} {sys.executable} {tmp_path}/reduce.py",
            ),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, (name, host) in enumerate(network.hosts.items())
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=80) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [stdout for stdout, _ in said] == ["[3.0]\n"] * 2, said
    # Each of two ranks sends half of the values twice: to be added, and added.
    assert all(sent_bytes(name) - before[name] > 4_000_000 for name in network.hosts)


def transfer_s(network, host, size):
    """Seconds for a login and so many bytes, and those from the first of these to the last."""
    start = time.monotonic()
    with subprocess.Popen(network.ssh_command(host, f"head -c {size} /dev/zero"), stdout=subprocess.PIPE) as sender:
        got = len(os.read(sender.stdout.fileno(), 1))
        first = time.monotonic()
        while got < size:
            chunk = os.read(sender.stdout.fileno(), 65536)
            assert chunk, "the stream ended early"
            got += len(chunk)
        return time.monotonic() - start, time.monotonic() - first


def is_quick(network, host, size, within_s):
    """Whether it ever is: this machine may be slower than the link."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        if transfer_s(network, host, size)[1] < within_s:
            return True
    return False


@pytest.mark.slow
def test_a_slowed_link_is_slower_than_its_rate_and_a_mended_one_is_not(network):
    size, bits_per_s = 1_000_000, 5_000_000
    try:
        network.slow("host1", bits_per_s)
    except RuntimeError as error:
        pytest.skip(f"this kernel limits no link: {error}")
    at_the_rate_s = 8 * size / bits_per_s
    try:
        assert transfer_s(network, "host1", size)[0] > 0.9 * at_the_rate_s
        assert is_quick(network, "host2", size, 0.9 * at_the_rate_s)
    finally:
        network.unslow("host1")
    assert is_quick(network, "host1", size, 0.9 * at_the_rate_s)


@pytest.mark.slow
def test_a_cut_link_stops_traffic_without_a_word_until_it_is_mended(network):
    ticks = "i=0; while true; do echo $i; i=$((i+1)); sleep 0.05; done"
    with subprocess.Popen(network.ssh_command("host1", ticks), stdout=subprocess.PIPE) as ticking:
        try:
            os.read(ticking.stdout.fileno(), 1)
            network.cut("host1")
            os.set_blocking(ticking.stdout.fileno(), False)
            deadline = time.monotonic() + 60
            while True:
                time.sleep(0.5)
                arrived = ticking.stdout.read()
                if arrived is None:  # neither ticks nor the end
                    break
                assert arrived  # what was on its way
                assert time.monotonic() < deadline
            assert ticking.poll() is None
            away = network.ssh("host1", "-o", "ConnectTimeout=1", "true")
            assert away.returncode == 255
            assert network.ssh("host2", "hostname").stdout == "host2\n"
            network.mend("host1")
            os.set_blocking(ticking.stdout.fileno(), True)
            assert os.read(ticking.stdout.fileno(), 1)  # TCP sends again what was lost
        finally:
            network.mend("host1")
            ticking.kill()
    assert network.ssh("host1", "hostname").stdout == "host1\n"


ANOTHER = """
    import pathlib, sys, time
    from hosts import host_network
    with host_network(1, pathlib.Path(sys.argv[1])) as network:
        print(network.hosts["host1"].pid, flush=True)
        network.ssh("host1", "setsid sleep 300 > /dev/null 2> /dev/null < /dev/null &")
        print(*network.processes("host1"), flush=True)
        sys.stdin.read()
        raise KeyError("a test that fails")
"""


@pytest.fixture
def another(network, tmp_path):
    """A process of its own that holds a host until its standard input ends, with a process left running on it."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ANOTHER), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        hosts.remove_stale()


def names_of(pid):
    listed = [entry["name"] for entry in json.loads(hosts._must("ip", "-json", "netns", "list") or "[]")]
    listed += [entry["ifname"] for entry in json.loads(hosts._must("ip", "-json", "link"))]
    return sorted(name for name in listed if (match := hosts._NAMED.fullmatch(name)) and int(match[1]) == pid)


def started(process):
    sshd = int(process.stdout.readline())
    everything = [int(word) for word in process.stdout.readline().split()]
    assert sshd in everything
    assert len(everything) >= 2  # the one that sleeps
    assert names_of(process.pid) == [f"swb{process.pid}", f"swh{process.pid}h1", f"swv{process.pid}h1"]
    return everything


def gone(pids, within_s=60):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and _state(pid) != "Z"]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def unnamed(pid):
    """Nothing carries the number of a process any more, whether this session removes it or another one is about to."""
    deadline = time.monotonic() + 60
    while (left := names_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left == []


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_failing_test_leaves_nothing(another):
    everything = started(another)
    _, stderr = another.communicate(timeout=60)
    assert "a test that fails" in stderr
    assert gone(everything)
    assert unnamed(another.pid)


def test_a_killed_session_leaves_no_process_and_its_names_go_at_the_next_start(another):
    everything = started(another)
    another.kill()
    another.wait()
    assert gone(everything)
    hosts.remove_stale()  # as a session beside this one may have done already
    assert unnamed(another.pid)
    assert names_of(os.getpid()) != []  # of the living one nothing is touched
