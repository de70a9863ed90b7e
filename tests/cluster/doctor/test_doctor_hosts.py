"""doctor on hosts that differ: what is wrong between them is found, and the remedy works when it is typed."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
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


def test_of_four_hosts_that_agree_nothing_is_said(network):
    found, done = doctor(network)
    assert not found, (found, done.stderr)


def wheel(folder: Path, version: str) -> Path:
    """A torch in name alone."""
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            packed.writestr(f"torch-{version}.dist-info/{name}", text)
    return path


@pytest.mark.timeout(400)
def test_another_torch(network, tmp_path):
    """host2 has a Python of its own. The remedy is typed as it is; pip finds the versions in a folder."""
    theirs = importlib.metadata.version("torch")
    own = str(tmp_path / "venv/bin/python")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=100)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    wheel(tmp_path, theirs)
    typed_on(network, "host2", [f"{own} -m pip install {wheel(tmp_path, '2.12.0')}"], **pip)
    found, done = doctor(network, "--python", f"host2={own}")
    assert list(found) == ["torch"]
    assert (found["torch"]["severity"], found["torch"]["hosts"], done.returncode) == ("problem", ["host2"], 2)
    assert found["torch"]["type"][0].startswith(f"{own} -m pip install torch=={theirs}")
    typed_on(network, "host2", found["torch"]["type"], **pip)
    assert "torch" not in doctor(network, "--python", f"host2={own}")[0]


def test_a_clock_that_is_wrong(network, tmp_path):
    """No host here has a clock of its own: a Python stands for it, and a program of chrony's name sets it right."""
    (wrong := tmp_path / "wrong").touch()
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, time\n_true = time.time\ntime.time = lambda: _true() + 40 * os.path.exists({str(wrong)!r})\n"
    )
    executable(tmp_path / "bin/chronyd")
    executable(tmp_path / "bin/chronyc", f'[ "$*" = makestep ] && rm {wrong}')
    python, path = with_programs(tmp_path, f"export PYTHONPATH={tmp_path}")
    found, _ = doctor(network, "--python", f"host3={python}")
    assert list(found) == ["clock"]
    assert found["clock"]["hosts"] == ["host3"]
    seconds, words = found["clock"]["finding"].split(" ", 1)
    assert float(seconds) == pytest.approx(40, abs=1)
    assert words.startswith("s ahead")
    typed_on(network, "host3", found["clock"]["type"], PATH=path)
    assert not doctor(network, "--python", f"host3={python}")[0]


def test_a_small_mtu(network):
    typed_on(network, "host2", ["ip link set dev nic2 mtu 1400"])
    found, _ = doctor(network)
    assert list(found) == ["MTU"]
    assert found["MTU"]["hosts"] == ["host2"]
    typed_on(network, "host2", found["MTU"]["type"])
    assert not doctor(network)[0]


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


def test_a_host_that_is_gone_holds_nobody_up(network):
    network.cut("host4")
    try:
        found, done = doctor(network, "--connect-timeout", "15")
        assert found["reached"]["hosts"] == ["host4"]
        assert "cannot be reached" in found["reached"]["finding"]
        assert done.returncode == 2
    finally:
        network.mend("host4")
