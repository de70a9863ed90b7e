"""doctor on hosts that differ: what is wrong between them is found, and the remedy works when it is typed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hosts import HostNetwork, host_network

pytestmark = pytest.mark.slow
NAMES = ("host1", "host2", "host3", "host4")
COMMAND = str(Path(sys.executable).with_name("shardwright"))


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with host_network(4, tmp_path_factory.mktemp("hosts"), homes=True) as network:
        programs = network.folder / "bin"
        programs.mkdir()
        (programs / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {network.config} "$@"\n')
        (programs / "ssh").chmod(0o755)
        for name in NAMES:  # every host may log in to every other one
            own = network.folder / f"{name}_home" / ".ssh"
            own.mkdir(mode=0o700)
            (own / "config").write_text(network.config.read_text())
        yield network


def doctor(network: HostNetwork, *words: str, hosts: tuple[str, ...] = NAMES):
    """What doctor finds between the hosts and on them, by check: its severity, hosts, text and lines to type."""
    environment = os.environ | {"PATH": f"{network.folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [COMMAND, "doctor", "-H", ",".join(hosts), "--json", *words],
        env=environment, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout, done.stderr
    rows = [row for row in json.loads(done.stdout)["findings"] if row["group"] == "between hosts"]
    return {row["check"]: row for row in rows if row["severity"] != "ok"}, done


def typed_on(network: HostNetwork, host: str, lines: list[str]) -> None:
    for line in lines:
        done = subprocess.run(network.inside(host, "sh", "-ec", line), capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr


def test_four_hosts_in_ten_seconds(network):
    began_s = time.monotonic()
    found, done = doctor(network)
    seconds = time.monotonic() - began_s
    assert not found, found
    assert seconds < 10 * max(1.0, os.getloadavg()[0] / 2), done.stderr


def test_another_torch(network, tmp_path):
    info = tmp_path / "torch-2.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found, done = doctor(network, "--python", f"host2={python}")
    assert list(found) == ["torch"]
    assert (found["torch"]["severity"], found["torch"]["hosts"], done.returncode) == ("problem", ["host2"], 2)
    assert found["torch"]["type"][0].startswith(f"{sys.executable} -m pip install torch==2.13.0")


def test_a_clock_that_is_wrong(network, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\n_true = time.time\ntime.time = lambda: _true() + 40\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found, _ = doctor(network, "--python", f"host3={python}")
    assert list(found) == ["clock"]
    assert found["clock"]["hosts"] == ["host3"]
    assert found["clock"]["finding"].startswith(("40.0 s ahead", "39.9 s ahead"))


def test_a_small_mtu(network):
    typed_on(network, "host2", ["ip link set dev nic2 mtu 1400"])
    found, _ = doctor(network)
    assert list(found) == ["MTU"]
    assert found["MTU"]["hosts"] == ["host2"]
    typed_on(network, "host2", found["MTU"]["type"])
    assert not doctor(network)[0]


def test_a_closed_port(network):
    """host2 lets nobody in but to its sshd: the kernel's rules stand for a firewall."""
    rule = "ipproto tcp sport 32768-60999 dport 32768-60999 prohibit"
    typed_on(network, "host2", [f"ip rule add {rule}"])
    try:
        found, _ = doctor(network, hosts=NAMES[:2])
        assert list(found) == ["ports"]
        assert found["ports"]["severity"] == "problem"
        assert "ip rule show" in found["ports"]["type"] or "allow" in found["ports"]["type"][0]
    finally:
        typed_on(network, "host2", [f"ip rule delete {rule}"])
    assert not doctor(network, hosts=NAMES[:2])[0]


def test_ssh_in_one_direction(network):
    config = network.folder / "host2_home" / ".ssh" / "config"
    before = config.read_text()
    config.write_text(before.replace("client_key", "host4_key"))  # a key that nobody knows
    try:
        found, done = doctor(network, hosts=NAMES[:2])
        assert list(found) == ["ssh"]
        assert found["ssh"]["hosts"] == ["host2"]
        assert "ssh to host1 fails" in found["ssh"]["finding"]
        assert found["ssh"]["type"] == ["shardwright hosts trust -H host1,host2  # where you launch from"]
        assert done.returncode == 1
    finally:
        config.write_text(before)


def test_a_host_that_is_gone_holds_nobody_up(network):
    network.cut("host4")
    try:
        found, done = doctor(network, "--connect-timeout", "2")
        assert found["reached"]["hosts"] == ["host4"]
        assert "cannot be reached" in found["reached"]["finding"]
        assert done.returncode == 2
    finally:
        network.mend("host4")
