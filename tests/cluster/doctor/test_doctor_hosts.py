"""doctor on hosts that differ: what is wrong between them is found, and the remedy works when it is typed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import HostNetwork, host_network

pytestmark = pytest.mark.slow
NAMES = ("host1", "host2", "host3", "host4")
COMMAND = str(Path(sys.executable).with_name("shardwright"))


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with host_network(4, tmp_path_factory.mktemp("hosts"), homes=True) as network:
        for name in NAMES:  # every host may log in to every other one
            own = network.folder / f"{name}_home" / ".ssh"
            own.mkdir(mode=0o700)
            (own / "config").write_text(network.config.read_text())
        yield network


def doctor(network: HostNetwork, *words: str, hosts: tuple[str, ...] = NAMES):
    """What doctor finds between the hosts and on them, by check: its severity, hosts, text and lines to type."""
    environment = os.environ | {"PATH": network.path}
    done = subprocess.run(
        [COMMAND, "doctor", "-H", ",".join(hosts), "--json", *words],
        env=environment, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout, done.stderr
    rows = [row for row in json.loads(done.stdout)["findings"] if row["group"] == "between hosts"]
    return {row["check"]: row for row in rows if row["severity"] != "ok"}, done


def typed_on(network: HostNetwork, host: str, lines: list[str], **environment: str) -> None:
    for line in lines:
        words = network.inside(
            host, "env", *(f"{name}={value}" for name, value in environment.items()), "sh", "-ec", line
        )
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def executable(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def with_programs(folder: Path, *lines: str) -> tuple[str, str]:
    """An interpreter that begins with these lines, and finds the programs in ``folder/bin``; and its PATH."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return str(executable(folder / "python", f"export PATH={path}", *lines, f'exec {sys.executable} "$@"')), path


def test_a_closed_port(network, tmp_path):
    """host2 lets nobody in but to its sshd: the kernel's rules stand for a firewall, with a program of ufw's name."""
    ip = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    rule = "ipproto tcp sport 32768-60999 dport 32768-60999 prohibit"
    executable(tmp_path / "bin/ufw", f'[ "$1 $2" = "allow from" ] && {ip} rule add to "$3" lookup main pref 10')
    python, path = with_programs(tmp_path)
    typed_on(network, "host2", [f"{ip} rule add {rule}"])
    try:
        found, _ = doctor(network, "--python", f"host2={python}", hosts=NAMES[:2])
        assert list(found) == ["ports"]
        assert (found["ports"]["severity"], found["ports"]["hosts"]) == ("problem", ["host2"])
        assert found["ports"]["type"] == [f"ufw allow from {network.hosts['host1'].address}"]
        bare, _ = doctor(network, hosts=NAMES[:2])
        assert "ip rule show" in bare["ports"]["type"], "where there is no firewall that is known"
        typed_on(network, "host2", found["ports"]["type"], PATH=path)
        assert not doctor(network, hosts=NAMES[:2])[0]
    finally:
        typed_on(network, "host2", [f"{ip} rule delete {rule}", f"{ip} rule delete pref 10 || true"])


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
