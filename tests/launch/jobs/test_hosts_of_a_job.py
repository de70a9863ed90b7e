"""The pieces of a job on several hosts, without hosts: placement, interfaces, words, versions, a slow line."""

import pytest

from shardwright.errors import LaunchError, UsageError
from shardwright.launch.carriers import agent
from shardwright.launch.carriers.agent_connection import compare, why_no_answer
from shardwright.launch.carriers.ssh import portable_environment
from shardwright.launch.host.protocol import Output
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.hosts.interfaces import Address, choose, infiniband_ports
from shardwright.launch.hosts.placement import Placement
from shardwright.launch.hosts.rank_table import RankTable, Server, TableDevice
from shardwright.launch.options.carrier_facts import SSH, UNSAID, carrier_facts
from shardwright.launch.options.request import HostRequest, PerHost, RemoteOptions, hosts_of_allocation


@pytest.mark.parametrize(
    ("hosts", "ranks", "oversubscribe", "expected"),
    [
        ("a:2,b:2", None, False, [("a", (0, 1)), ("b", (2, 3))]),
        ("a:2,b:2", 3, False, [("a", (0, 1)), ("b", (2,))]),
        ("a:2,b:2", 2, False, [("a", (0, 1))]),
        ("a:2,b:1", 8, True, [("a", (0, 1, 2, 3, 4, 5)), ("b", (6, 7))]),
        ("a:1,b:3", 4, True, [("a", (0,)), ("b", (1, 2, 3))]),
    ],
)
def test_ranks_by_slots(hosts, ranks, oversubscribe, expected):
    placed = Placement.by_slots(Hosts.from_list(hosts), ranks, oversubscribe)
    assert [(host.name, on_host) for host, on_host in zip(placed.hosts, placed.ranks, strict=True)] == expected
    assert placed.size == sum(len(on_host) for _, on_host in expected)


def test_ranks_beyond_the_slots_are_refused():
    with pytest.raises(UsageError, match="-n 5 is more than the slots of 2 hosts, 4 slots: a:2, b:2; leave -n out"):
        Placement.by_slots(Hosts.from_list("a:2,b:2"), 5)
    with pytest.raises(UsageError, match="the slots of some host are not known"):
        Placement.by_slots(Hosts((Host("a", None),)), 1)


def test_ranks_by_table_keep_their_places():
    servers = (Server("b", (TableDevice(0, 3), TableDevice(1, 0))), Server("a", (TableDevice(4, 2), TableDevice(5, 1))))
    placed = Placement.by_table(RankTable(servers))
    assert [host.name for host in placed.hosts] == ["b", "a"]
    assert placed.ranks == ((0, 3), (1, 2))
    assert [host.devices for host in placed.hosts] == [(1, 0), (5, 4)]


def test_where_a_job_runs():
    assert HostRequest().read("2", None, UNSAID, "0") == 0
    assert HostRequest(hosts="localhost:4").read("3", None, UNSAID, "0") == 3
    there = HostRequest(hosts="localhost:4", wdir=("/w",)).read(None, None, SSH, "all")
    assert there == RemoteOptions(Hosts.from_list("localhost:4"), wdir=PerHost("/w"), tee="all")
    for options, via, message in (
        (HostRequest(hosts="localhost:2"), None, "-n 3 is more than the slots of 1 host, 2 slots: localhost:2"),
        (HostRequest(hosts="a,b"), "mpirun", "--via mpirun starts ranks on this host alone, but -H names 2 hosts"),
        (HostRequest(hosts="a", hostfile="f"), None, "-H and --hostfile both name hosts; type one of them"),
        (HostRequest(wdir=("/w",)), None, "--wdir /w is for other hosts, but the job is on this one; type -H"),
        (HostRequest(), "ssh", "--via ssh needs hosts; type -H HOST:SLOTS,... or --hostfile FILE"),
        (HostRequest(hosts="a,b", lease_s=0.1), None, "--lease 0.1 is too short"),
    ):
        with pytest.raises(UsageError) as told:
            options.read("3", None, carrier_facts(via), "0")
        assert str(told.value).startswith(message)


def test_an_allocation_counts_outside_of_its_steps():
    allocation = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert str(hosts_of_allocation(allocation)) == "2 hosts, 8 slots: n1:4, n2:4"
    assert hosts_of_allocation(allocation | {"SLURM_STEP_NODELIST": "n1"}) is None
    assert hosts_of_allocation({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4"}) is None
    assert hosts_of_allocation({}) is None


SLOW, FAST, CONTAINERS = (
    Address("eth0", "10.0.0.1", 1000),
    Address("ib0", "10.1.0.1", 100_000),
    Address("ctr0", "172.1.1.1"),
)


def test_the_fastest_address_that_all_reach_is_chosen():
    everywhere = {"b": {"10.0.0.1": "eno1", "10.1.0.1": "ibs2"}, "c": {"10.0.0.1": "eth3", "10.1.0.1": "ib7"}}
    assert choose("a", [SLOW, FAST, CONTAINERS], everywhere, None) == (
        "10.1.0.1",
        {"a": "ib0", "b": "ibs2", "c": "ib7"},
    )
    assert choose("a", [SLOW, FAST], everywhere, "eth0") == ("10.0.0.1", {"a": "eth0", "b": "eno1", "c": "eth3"})
    del everywhere["c"]["10.1.0.1"]
    assert choose("a", [CONTAINERS, FAST, SLOW], everywhere, None)[0] == "10.0.0.1"
    with pytest.raises(LaunchError, match=r"tried in vain\n  from c: 10.1.0.1 \(ib0\)\nopen the firewall"):
        choose("a", [SLOW, FAST], everywhere, "ib0")
    with pytest.raises(LaunchError, match=r"a has no address on --interface x; its addresses: 10.0.0.1 \(eth0\)"):
        choose("a", [SLOW], everywhere, "x")


def test_infiniband_ports_that_are_up(tmp_path):
    ports = [("m0", 1, "ACTIVE", "Ethernet"), ("m1", 1, "ACTIVE", "InfiniBand"), ("m1", 2, "DOWN", "InfiniBand")]
    for device, number, state, layer in [*ports, ("m2", 1, "ACTIVE", "InfiniBand")]:
        port = tmp_path / f"class/infiniband/{device}/ports/{number}"
        port.mkdir(parents=True)
        (port / "state").write_text(f"4: {state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
    assert infiniband_ports(tmp_path) == ["m1:1", "m2:1"]
    assert infiniband_ports(tmp_path / "none") == []


def test_versions_are_those_of_the_first_host():
    first = {"python": "3.11.2", "torch": "2.13.0", "shardwright": "0.1.0"}
    found = compare(
        {"a": first, "b": first | {"torch": "2.12.1"}, "c": first | {"python": "3.12.1", "shardwright": None}}
    )
    assert found == {
        "a": [],
        "b": ["torch 2.12.1 there, but 2.13.0 on a; install one version: `pip install torch==2.13.0`"],
        "c": ["Python 3.12.1 there, but 3.11.2 on a; type --python PATH with the same version on each host"],
    }


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", "there is no host of that name; look"),
        (255, "kex_exchange_identification: Connection closed by remote host", "ssh failed: kex_exchange"),
        (255, "", "ssh failed: it said nothing; try `ssh -o BatchMode=yes me@b true`"),
        (126, "sh: py: Permission denied", "py cannot be run there (sh: py: Permission denied); type --python PATH"),
        (1, "ImportError: no zlib", "py ended there with exit code 1 before the checks were through: ImportError"),
        (None, "", "it did not answer within 25 s; try `ssh -o BatchMode=yes me@b true`"),
    ],
)  # fmt: skip
def test_why_a_host_did_not_answer(code, said, expected):
    assert why_no_answer(Host("b", 1, "me"), {}, code, said.encode(), b"", "py", 25.0).startswith(expected)


def test_the_environment_of_a_login_stays():
    given = {
        "PATH": "/p",
        "HOME": "/h",
        "SSH_AUTH_SOCK": "s",
        "XDG_RUNTIME_DIR": "x",
        "RANK": "3",
        "LD_LIBRARY_PATH": "/l",
    }
    assert portable_environment(given) == {"PATH": "/p", "LD_LIBRARY_PATH": "/l"}


def test_a_line_holds_ranks_up_for_a_while_and_then_counts_what_it_leaves_out(monkeypatch):
    clock = 100.0
    monkeypatch.setattr(agent.time, "monotonic", lambda: clock)
    line, full, output = agent._Line(), 1 << 21, Output(1, "stdout", bytes(7))
    assert not line.holds_up(full - 1)
    assert line.holds_up(full)
    assert line.holds_up(full - 1), "until it is half empty"
    assert not line.holds_up(full // 2 - 1)
    assert line.holds_up(full)
    assert not line.leaves_out(output, full)
    clock += 2.0
    assert not line.holds_up(full)
    assert [line.leaves_out(output, full) for _ in range(2)] == [True, True]
    assert not line.leaves_out(output, full - 1)
    assert [(lost.rank, lost.lost_bytes) for lost in line.losses()] == [(1, 14)]
    assert line.losses() == []
    assert not line.holds_up(full), "a line that was slow is not waited for again at once"
