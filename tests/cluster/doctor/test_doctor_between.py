"""Findings between hosts, from what recorded hosts said of each other."""

import subprocess

import pytest
from recorded_hosts import GPUS, altered, recorded

from shardwright.cluster.doctor.checks.between import check_between
from shardwright.cluster.doctor.finding import Severity
from shardwright.cluster.doctor.reach import Cluster, Route, TcpAttempt
from shardwright.cluster.doctor.reading import CommandResult
from shardwright.launch.hosts.hosts import Hosts

OK, NOTE, UNKNOWN, WARNING, PROBLEM = Severity
ADDRESS = {name: f"10.0.0.{number}" for number, name in enumerate("abc", 1)}
GOOD = CommandResult(0, "", "")


def host(name, **facts):
    base = {"name": name, "addresses": [["eth0", ADDRESS[name], 0]], "own_name": [ADDRESS[name]]}
    return altered(recorded("dgx"), facts=base | facts)


def way(here, there, how="all", said="", ssh=GOOD, addresses=None):
    mine = ADDRESS[here] if how in ("all", "stalls") else None
    return Route(
        (TcpAttempt(ADDRESS[there], how, mine, said),), (ADDRESS[there],) if addresses is None else addresses, ssh
    )


def three(ways=None, ahead_s=None, **changed):
    readings = {name: changed.get(name) or host(name) for name in "abc"}
    every = {(x, y): way(x, y) for x in "abc" for y in "abc" if x != y}
    clocks = dict.fromkeys("abc", 0.0) | (ahead_s or {})
    return Cluster(Hosts.from_list("a,b,c"), readings, ahead_s=clocks, ways=every | (ways or {}))


def small_mtu(name, mtu="1400"):
    return altered(host(name), files={"/sys/class/net/eth0/mtu": mtu})


DENIED = CommandResult(255, "", "alice@b: Permission denied (publickey).\r\n")
# what is wrong -> check, severity, host, words, what to type
CASES = {
    "torch": (
        three(b=host("b", packages={"torch": "2.12.0"})),
        (
            "torch",
            PROBLEM,
            "b",
            "torch 2.12.0 here, but 2.13.0+cu126 on a",
            "-m pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126",
        ),
    ),
    "code": (
        three(c=host("c", code="ffff")),
        ("code", WARNING, "c", "code ffff here, but 0123456789ab on a", "# install the same sources on all hosts"),
    ),
    "user": (
        three(c=host("c", user="bob")),
        ("user", WARNING, "c", "user bob here, but alice on a", "# log in as alice: -H alice@HOST"),
    ),
    "Python": (
        three(b=host("b", python="3.12.1")),
        ("Python", PROBLEM, "b", "Python 3.12 here, but 3.11 on a", "--python HOST=PATH"),
    ),
    "driver": (
        three(b=altered(host("b"), commands={GPUS: "0, A100, 550.54.14, Enabled, 0\n"})),
        ("GPU driver", WARNING, "b", "550.54.14 here, but 535.129.03 on a", "nvidia-headless-535-server"),
    ),
    "NCCL": (
        three(b=host("b", nccl={"package": "nvidia-nccl-cu12", "version": "2.20", "loads": True, "said": ""})),
        ("NCCL", PROBLEM, "b", "NCCL 2.20 here, but 2.27.5 on a", "-m pip install nvidia-nccl-cu12==2.27.5"),
    ),
    "MPI": (
        three(b=altered(host("b"), commands={"mpirun --version": "mpirun (Open MPI) 5.0\n"})),
        ("MPI", WARNING, "b", "(Open MPI) 5.0 here, but", "apt-get install -y openmpi-bin"),
    ),
    "clock": (
        three(ahead_s={"b": 40.0}),
        ("clock", PROBLEM, "b", "40.0 s ahead of that of a", "sudo systemctl restart"),
    ),
    "slow clock": (three(ahead_s={"b": -0.9}), ("clock", WARNING, "b", "0.9 s behind that of", "systemctl")),
    "names": (
        three({("a", "b"): way("a", "b", addresses=())}),
        ("names", WARNING, "a", "nobody here knows the name b", "echo '10.0.0.2 b' | sudo tee -a /etc/hosts"),
    ),
    "loopback": (
        three({("a", "b"): way("a", "b", addresses=("127.0.1.1",))}),
        ("names", WARNING, "a", "b is 127.0.1.1 here, none of its addresses", "echo '10.0.0.2 b'"),
    ),
    "closed port": (
        three({("a", "b"): way("a", "b", "silent", "timed out")}),
        (
            "ports",
            PROBLEM,
            "b",
            "a does not reach a free TCP port of this host (timed out)",
            "sudo ufw allow from 10.0.0.1",
        ),
    ),
    "mtu": (
        three(b=small_mtu("b")),
        ("MTU", WARNING, "b", "MTU 1400 on eth0, but 1500 on most others", "sudo ip link set dev eth0 mtu 1500"),
    ),
    "mtu on the way": (
        three(dict.fromkeys([("a", "b")], way("a", "b", "stalls")), **{n: small_mtu(n, "9000") for n in "abc"}),
        ("MTU", PROBLEM, "a", "b connects, but what it sends is lost", "sudo ip link set dev eth0 mtu 1500"),
    ),
    "one-way ssh": (
        three({("a", "b"): way("a", "b", ssh=DENIED)}),
        ("ssh", WARNING, "a", "ssh to b fails: alice@b: Permission denied", "shardwright hosts trust -H a,b,c"),
    ),
    "unreached": (
        Cluster(Hosts.from_list("a,b"), {"a": host("a")}, {"b": "it did not answer within 5 s"}),
        ("reached", PROBLEM, "b", "did not answer within 5 s", "ssh -v -o BatchMode=yes b true"),
    ),
}


@pytest.mark.parametrize("wrong", CASES)
def test_what_is_wrong_between_hosts_is_found_and_nothing_else(wrong):
    cluster, (name, severity, at, words, line) = CASES[wrong]
    bad = [one for one in check_between(cluster) if one.finding.severity > NOTE]
    assert [(one.name, one.finding.severity, one.hosts) for one in bad] == [(name, severity, (at,))], bad
    assert words in bad[0].finding.text
    assert any(line in typed for typed in bad[0].finding.remedy)
    assert subprocess.run(["sh", "-n"], input="\n".join(bad[0].finding.remedy), text=True).returncode == 0


@pytest.mark.parametrize(
    ("bad", "unknown"),
    [
        ({"files": {"/sys/class/net/eth0/mtu": "big"}}, {"MTU": ("b",)}),
        ({"facts": {"addresses": 3}}, {"MTU": ("b",), "ports": ("a", "b", "c")}),
        ({"facts": {"addresses": [["eth0"], 7]}}, {"MTU": ("b",), "ports": ("a", "b", "c")}),
        ({"commands": {"mpirun --version": CommandResult(1, "", "broken")}}, {"MPI": ("b",)}),
    ],
)
def test_what_is_said_in_another_form_is_unknown_and_hides_nothing_else(bad, unknown):
    found = check_between(three(b=altered(host("b"), **bad), ahead_s={"c": 40.0}))
    assert {one.name: one.hosts for one in found if one.finding.severity == UNKNOWN} == unknown
    assert [one.name for one in found if one.finding.severity == PROBLEM] == ["clock"]
