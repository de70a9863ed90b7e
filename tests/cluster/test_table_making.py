"""Rank tables are written byte by byte as HCCL's generator writes them, and a rule that is broken says so."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cli import cli
from shardwright.cluster import table_making
from shardwright.errors import ShardwrightError
from shardwright.launch.carriers.srun import batch_script
from shardwright.launch.hosts.environment import read_environment
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.hosts.rank_table import parse_rank_table
from shardwright.launch.hosts.table_check import read_rank_table
from shardwright.launch.options.launch_options import read_table
from shardwright.launch.options.request import LaunchRequest

REFERENCE = Path(__file__).parents[1] / "reference"
FOUR, EIGHT = "hccl_4p_4567_127.0.0.1.json", "hccl_8p_01234567_127.0.0.1.json"
ADDRESSES = "".join(
    [f"address_{i}=192.168.10{i}.101\nnetmask_{i}=255.255.255.0\n" for i in range(4)]
    + [f"address_{i}=192.168.10{i - 4}.100\n" for i in range(4, 8)]
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A host without devices, whatever this one has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table_making, "ADDRESS_FILE", tmp_path / "etc_hccn.conf")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "hccn.conf").write_text(ADDRESSES)
    return tmp_path


def run(*arguments):
    """What a command printed; what it refuses is raised."""
    done = CliRunner().invoke(cli, ["ranktable", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*arguments):
    with pytest.raises(ShardwrightError) as refused:
        run(*arguments)
    return str(refused.value)


def checked(path, *arguments):
    done = CliRunner().invoke(cli, ["ranktable", "check", str(path), *arguments])
    assert done.exit_code == any(": note: " not in line for line in done.stderr.splitlines())
    return done.stderr.splitlines()


@pytest.mark.parametrize(("devices", "name"), [("[4,8)", FOUR), ("[0,8)", EIGHT)])
def test_the_reference_tables_byte_by_byte(devices, name):
    assert run("make", devices, "--address-file", "hccn.conf") == f"{name}\n"
    assert Path(name).read_bytes() == (REFERENCE / name).read_bytes()
    assert read_rank_table(Path(name)).to_json() == Path(name).read_text()
    assert checked(name) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0,4}"], "127.0.0.1 uses the devices 0, 4; 0-3 and 4-7 are two networks of an 8-device server, and fewer"),
        (["[2,6)"], "uses the devices 2, 3, 4, 5; 0-3 and 4-7 are two networks"),
        (["[0,3)"], "127.0.0.1 uses 3 devices (0, 1, 2); an 8-device server alone uses 1, 2, 4 or 8"),
        (["[1,8)"], "uses 7 devices"),
        (["8"], "127.0.0.1 has no device 8; an 8-device server has the devices 0 to 7"),
        (["[4,4)"], "[4,4) has 0 devices"),
        (["[0,9999)"], "has 9999 devices; expected 1 to 1024"),
        (["{1,1}"], "has a device twice"),
        (["[0,8]"], '[0,8] names no devices; type a range without its end, "[4,8)", or a list, "{1,2}"'),
        (["{0,1"], "names no devices"),
        (["0,,1"], "names no devices"),
        (["0", "--server-id", "../x"], "--server-id '../x' is no host"),
        (["0", "--server-id", "-x"], "--server-id '-x' is no host"),
        (["0", "--address-file", "nothere"], "the address file nothere cannot be read: No such file"),
        (["0", "--out", "nothere/table.json"], "nothere/table.json cannot be written: No such file"),
    ],
)
def test_what_cannot_be_made_is_said_and_nothing_is_written(folder, arguments, message):
    before = sorted(folder.iterdir())
    assert message in refusal("make", *arguments)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("address_4=1.2.3.4\n", "hccn.conf has no line `address_5=IP`; it has the addresses of the devices 4"),
        ("", "it has the addresses of the devices (none)"),
        ("address_4=1.2.3.4\naddress_5=1.2.3\n", "hccn.conf:2: got 'address_5=1.2.3', expected address_N=IP"),
        ("# x\naddress 5=1.2.3.4", "hccn.conf:2: got 'address 5=1.2.3.4', expected address_N=IP"),
        ("address_4=1.2.3.4\naddress_4=1.2.3.5", "hccn.conf:2: got 1.2.3.5 for device 4, which has 1.2.3.4 above"),
    ],
)
def test_addresses_that_are_missing_or_broken(text, message):
    Path("hccn.conf").write_text(text)
    assert message in refusal("make", "{4,5}", "--address-file", "hccn.conf")


def test_where_addresses_come_from(folder, monkeypatch):
    done = CliRunner().invoke(cli, ["ranktable", "make", "{4,5}", "--out", "none.json"])
    assert (
        "no hccn_tool on this host: the table has no device addresses, which HCCL needs across servers" in done.stderr
    )
    assert "device_ip" not in Path("none.json").read_text()
    assert checked("none.json") == [
        "none.json: note: devices without device_ip: enough for shardwright, but HCCL needs them across servers"
    ]

    (folder / "bin").mkdir()
    tool = folder / "bin" / "hccn_tool"
    tool.write_text('#!/bin/sh\n[ "$1 $3 $4" = "-i -ip -g" ] && echo "ipaddr:10.0.0.$2" && echo "netmask:255.0.0.0"\n')
    tool.chmod(0o755)
    run("make", "{4,5}", "--out", "tool.json")
    assert [d.device_ip for _, d in read_rank_table(Path("tool.json")).placed.values()] == ["10.0.0.4", "10.0.0.5"]
    tool.write_text("#!/bin/sh\necho the driver is away >&2; exit 3\n")
    assert "hccn_tool -i 4 -ip -g` gave no address: the driver is away; expected `ipaddr:IP`" in refusal("make", "4")

    (folder / "etc_hccn.conf").write_text(ADDRESSES)
    run("make", "{4,5}", "--out", "file.json")
    assert read_rank_table(Path("file.json")).placed[1][1].device_ip == "192.168.101.100"


def test_another_file_is_not_replaced_without_force(folder):
    Path(FOUR).write_text("mine")
    assert f"{FOUR} is there already and differs; type --force to replace it" in refusal("make", "[4,8)")
    assert Path(FOUR).read_text() == "mine"
    run("make", "[4,8)", "--force")
    written = Path(FOUR).stat().st_mtime_ns
    run("make", "[4,8)")  # the same again
    assert Path(FOUR).stat().st_mtime_ns == written
    assert sorted(path.name for path in folder.iterdir()) == [FOUR, "hccn.conf"]


def test_a_table_is_written_whole_or_not_at_all(folder, monkeypatch):
    Path(FOUR).write_text("mine")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    assert f"{FOUR} cannot be written: No space left on device" in refusal("make", "[4,8)", "--force")
    assert Path(FOUR).read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == [FOUR, "hccn.conf"]


def test_merging_follows_the_sorted_server_ids():
    for server in ("10.0.0.9", "10.0.0.10", "a"):
        run("make", "[0,8)", "--server-id", server)
    names = [f"hccl_8p_01234567_{server}.json" for server in ("10.0.0.9", "a", "10.0.0.10")]
    assert run("merge", *names) == "hccl_3s_24p.json\n"
    table = json.loads(Path("hccl_3s_24p.json").read_text())
    assert table["server_count"] == "3"
    assert [server["server_id"] for server in table["server_list"]] == ["10.0.0.10", "10.0.0.9", "a"]
    assert [d["rank_id"] for server in table["server_list"] for d in server["device"]] == [str(r) for r in range(24)]
    assert run("merge", *names[:2]) == "hccl_2s_16p.json\n"
    assert "both have the server a; make each with the address of its own host" in refusal("merge", names[1], names[1])
    assert "at least two servers" in refusal("merge", names[0])
    run("make", "[0,4)", "--server-id", "b")
    assert "b uses 4 devices (0, 1, 2, 3); of several 8-device servers each uses all 8" in refusal(
        "merge", names[0], "hccl_4p_0123_b.json"
    )


def table_1_2(first, pods=True):
    """Four devices on two servers of one super pod, with numbers for ids and a field nobody knows."""
    servers = [
        {
            "server_id": f"node_{first + s}", "host_ip": f"172.16.0.{100 + first + s}", "rack": {"row": s},
            "device": [
                {"device_id": d, "super_device_id": 8 * (first + s) + d, "device_ip": f"192.168.{first + s}.{d}",
                 "device_port": "16666", "rank_id": 2 * s + d}
                for d in range(2)
            ],
        }
        for s in range(2)
    ]  # fmt: skip
    listed = [{"super_pod_id": 0, "server_list": [{"server_id": server["server_id"]} for server in servers]}]
    table = {"status": "completed", "version": "1.2", "server_count": 2, "server_list": servers}
    return table | ({"super_pod_list": listed} if pods else {})


def test_version_1_2_is_read_and_written_in_strings(folder):
    Path("a.json").write_text(json.dumps(table_1_2(0)))
    Path("b.json").write_text(json.dumps(table_1_2(2)))
    table = read_rank_table(Path("a.json"))
    assert table.hosts().hosts == (Host("172.16.0.100", 2, devices=(0, 1)), Host("172.16.0.101", 2, devices=(0, 1)))
    assert checked("a.json", "--product", "any") == []
    run("merge", "b.json", "a.json", "--product", "any")
    merged = json.loads(Path("hccl_4s_8p.json").read_text())
    assert merged["server_list"][2] == {
        "server_id": "node_2", "host_ip": "172.16.0.102", "rack": {"row": 0},
        "device": [
            {"device_id": str(d), "super_device_id": str(16 + d), "device_ip": f"192.168.2.{d}", "device_port": "16666",
             "rank_id": str(4 + d)} for d in range(2)
        ],
    }  # fmt: skip
    [pod] = merged["super_pod_list"]
    assert sorted(server["server_id"] for server in pod["server_list"]) == [f"node_{i}" for i in range(4)]
    assert checked("hccl_4s_8p.json", "--product", "any") == []
    Path("c.json").write_text(json.dumps(table_1_2(4, pods=False) | {"version": "1.0"}))
    assert "tables of one version can be merged" in refusal("merge", "a.json", "c.json", "--product", "any")


def test_every_way_in_refuses_what_the_check_refuses_and_takes_what_it_takes(folder):
    """One check: the command, a launch, what is printed for Slurm, a loop that sets variables, and a conversion."""

    def refused(way):
        try:
            way()
        except ShardwrightError as error:
            return str(error)
        return None

    one = [devices(0, 1)]
    tables = {
        changed(server_list=one): None,
        changed(server_list=one, version=None, status=None, server_count=None): None,
        changed(server_list=[devices(0, 4)], product="any"): None,
        changed(server_list=[devices(0, 4)]): "a uses the devices 0, 4; 0-3 and 4-7 are two networks",
        changed(server_list=[devices(0, 1, 2)]): "a uses 3 devices (0, 1, 2)",
        changed(server_list=[devices(8)]): "a has no device 8",
        changed(server_list=[devices(0), devices(0, server="b", first=1)], server_count="2"): "each uses all 8",
        changed(server_list=one, product="x"): "product is 'x', expected 8-device or any",
        changed(server_list=[{"server_id": "a", "device": [{"device_id": d, "rank_id": d, "device_ip": "1.2.3.4"}
                                                           for d in range(2)]}]): "have one device_ip, 1.2.3.4",
        changed(server_list=[{"server_id": "a", "device": [{"device_id": 0, "rank_id": 0, "device_ip": "1.2.3"}]}]):
            "device_ip is '1.2.3', expected an IP address",
    }  # fmt: skip
    path = folder / "table.json"
    request = LaunchRequest(kind="program", arguments=["true"], rank_table=str(path))
    ways = {
        "launch": lambda: read_table(request, {}),
        "--print slurm": lambda: batch_script(["--print", "slurm"], request),
        "RANK_TABLE_FILE": lambda: read_environment({"RANK_TABLE_FILE": str(path), "RANK_ID": "0"}),
        "to-hostfile": lambda: run("to-hostfile", str(path)),
    }
    for text, message in tables.items():
        path.write_text(text)
        problems = [line for line in checked(path) if ": note: " not in line]
        assert bool(problems) == (message is not None), problems
        for name, way in ways.items():
            said = refused(way)
            assert (said is None) == (message is None), (name, said)
            assert message is None or (message in said and f"{path} is no rank table" in said), (name, said)


def test_check_says_everything_at_once():
    servers = [
        {"server_id": "a", "device": [{"device_id": 0, "device_ip": "1.2.3.4", "rank_id": 0},
                                      {"device_id": "0", "device_ip": "1.2.3.4", "rank_id": "2"}]},
        {"server_id": "a", "device": [{"device_id": "4", "device_ip": "1.2.3", "rank_id": "1"}]},
        {"server_id": "-x", "device": [{"device_id": True, "rank_id": -1}, 7]},
        {"device": []},
    ]  # fmt: skip
    Path(FOUR).write_text(json.dumps({"version": "2.0", "server_count": "3", "server_list": servers, "status": "init"}))
    said = checked(FOUR)
    assert [line.removeprefix(f"{FOUR}: ") for line in said] == [
        "version is '2.0', expected 1.0 or 1.2",
        "server_list[1].device[0].device_ip is '1.2.3', expected an IP address",
        "server_list[2].server_id is '-x', expected the name or address of a host",
        "server_list[2].device[0].device_id is True, expected a string",
        "server_list[2].device[0].rank_id is '-1', expected a whole number from 0 on",
        "server_list[2].device[1] is 7, expected an object in braces",
        "server_list[2].device[1].device_id is missing",
        "server_list[2].device[1].rank_id is missing",
        "device of server_list[3] is [], expected a list of at least one",
        "server_list[3].server_id is missing",
        "server_count is 3, but server_list has 4",
        "status is 'init', expected 'completed': the table is not ready",
        "device 0 of a is given to 2 ranks: 0, 2",
        "ranks 0 and 2 have one device_ip, 1.2.3.4",
    ]  # fmt: skip


def changed(**entries):
    table = json.loads((REFERENCE / FOUR).read_text())
    for key, value in entries.items():
        if value is None:
            del table[key]
        else:
            table[key] = value
    return json.dumps(table)


def devices(*ids, server="a", first=0):
    return {"server_id": server, "device": [{"device_id": d, "rank_id": first + i} for i, d in enumerate(ids)]}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("[1", ["it is no JSON"]),
        ("[" * 100_000, ["it is no JSON"]),
        ('{"a": ' + "9" * 5000 + "}", ["it is no JSON"]),
        ("[]", ["the table is [], expected an object", "server_list of the table is missing"]),
        (changed(version=None, status=None), ["note: version is missing", "note: status is missing"]),
        (changed(server_list=[devices(0, 4)]), ['(other servers: "product": "any" in the table)']),
        (changed(server_list=[devices(0, 4)]), ["0-3 and 4-7 are two networks", "named hccl_4p_4567"]),
        (
            changed(server_list=[devices(4, 5, 6, 7, first=1)]),
            ["it has the ranks [1, 2, 3, 4]; expected each of 0 to 3"],
        ),
        (
            changed(server_list=[devices(4), devices(5, first=1)], server_count="2"),
            ["server_id a comes 2 times", "a uses 1 device (4); of several 8-device servers each uses all 8"],
        ),
        (changed(version="1.2"), ["note: rank 3 has no super_device_id"]),
        (
            changed(super_pod_list=[{"super_pod_id": "0", "server_list": [{"server_id": "b"}]}]),
            ["super_pod_list has the servers ['b']; expected each of server_list once: ['127.0.0.1']"],
        ),
    ],
)
def test_check_names_the_rule(text, messages):
    Path(FOUR).write_text(text)
    said = checked(FOUR)
    for message in messages:
        assert any(message in line for line in said), said


def test_reading_names_the_first_problem_and_how_to_see_the_rest():
    Path("t.json").write_text(changed(server_count="2", status="init"))
    assert refusal("to-hostfile", "t.json") == (
        "t.json is no rank table: server_count is 2, but server_list has 1 (and 1 more: type "
        "`shardwright ranktable check t.json`)"
    )
    assert "the rank table nothere cannot be read: No such file" in refusal("to-hostfile", "nothere")


@st.composite
def hosts_with_devices(draw):
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=5, unique=True))
    ids = st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True).map(tuple)
    return Hosts(tuple(Host(name, len(chosen), devices=chosen) for name in names for chosen in [draw(ids)]))


@settings(deadline=None, max_examples=40)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["server_list", "device", "device_id", "rank_id", "server_id", "version", "super_pod_list",
                         "product"]),
        inner, max_size=4),
    max_leaves=20,
))  # fmt: skip
def test_any_json_is_read_or_its_problems_are_listed(value):
    table, problems, _ = parse_rank_table(json.dumps(value))
    assert problems or table.size > 0
    assert all(isinstance(problem, str) for problem in problems)


def test_hostfiles_and_back():
    Path("hosts").write_text("bob@b slots=8\na slots=8\n")
    done = CliRunner().invoke(cli, ["ranktable", "from-hostfile", "hosts"])
    assert done.stdout == "hccl_2s_16p.json\n"
    assert "a rank table has no users: bob@b lost theirs" in done.stderr
    assert run("to-hostfile", "hccl_2s_16p.json") == "b slots=8\na slots=8\n"
    assert run("to-hostfile", "hccl_2s_16p.json", "--out", "back") == "back\n"
    assert Path("back").read_text() == "b slots=8\na slots=8\n"
    Path("hosts").write_text("a\n")
    assert "how many devices a has is not known; write `a slots=N`" in refusal("from-hostfile", "hosts")
    Path("hosts").write_text("a slots=3\n")
    assert "a uses 3 devices" in refusal("from-hostfile", "hosts")


def test_the_options_of_hccl_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = ["ranktable", "make"]
    done = CliRunner().invoke(cli, [*make, "--device_num", "[4,8)", "--server_ip", "10.0.0.1"])
    assert (done.exit_code, (tmp_path / "hccl_4p_4567_10.0.0.1.json").exists()) == (0, True)
    for words in ([], ["[0,8)", "--device-num", "[0,4)"]):
        refused = CliRunner().invoke(cli, [*make, *words])
        assert (refused.exit_code, "which devices? type them once" in refused.output) == (2, True)
