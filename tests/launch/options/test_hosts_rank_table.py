"""`shardwright launch --rank-table` starts the ranks of a table, if all of them are this machine's."""

import json
from dataclasses import replace

import pytest

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Hosts
from shardwright.launch.hosts.rank_table import RankTable
from shardwright.launch.options.launch_options import table_gpus

SHOW = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE | $RANK_TABLE_FILE $RANK_ID $RANK_SIZE $DEVICE_ID $DEVICE_NUM"'


def write_table(folder, hosts):
    table = replace(RankTable.from_hosts(Hosts.from_list(hosts)), product="any")
    (folder / "table.json").write_text(table.to_json())
    return "table.json"


def test_every_rank_is_told_its_place_in_the_table(launching):
    # Two servers that are both this machine, and ids as numbers, as other tools write them.
    servers = [
        {"server_id": name, "device": [{"device_id": 4 + d, "rank_id": r} for d, r in devices]}
        for name, devices in (("localhost", [(0, 2)]), ("127.0.0.1", [(0, 1), (1, 0)]))
    ]
    (launching.folder / "table.json").write_text(
        json.dumps({"server_count": 2, "server_list": servers, "product": "any"})
    )
    stray = {"RANK_ID": "9", "DEVICE_ID": "9", "CUDA_VISIBLE_DEVICES": ""}
    ended = launching.run("--rank-table", "table.json", "--", "sh", "-c", SHOW, env=stray)
    assert ended.code == 0, ended.stderr
    path = launching.folder / "table.json"
    assert [launching.log(rank) for rank in range(3)] == [
        f"0 0 3 | {path} 0 3 5 2\n", f"1 1 3 | {path} 1 3 4 2\n", f"2 2 3 | {path} 2 3 4 1\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "arguments", "message"),
    [
        ("127.0.0.1:2", ["-n", "4"], "-n 4, but table.json has 2 ranks; leave -n out"),
        (
            "127.0.0.1:2",
            ["--devices", "0,1"],
            "--devices 0,1: the devices are those of table.json; leave --devices out",
        ),
        ("127.0.0.1:2", ["-x", "DEVICE_ID=3"], "-x DEVICE_ID: the launcher sets DEVICE_ID for each rank itself, from"),
        ("127.0.0.1:2", ["-H", "a:2"], "-H and --rank-table both name hosts; type one of them"),
        (
            "127.0.0.1:2,240.0.0.1:1",
            ["--via", "local"],
            "--via local starts ranks on this host alone, but --rank-table names 2 hosts, 3 slots: 127.0.0.1:2, 240.0",
        ),
        (None, [], "the rank table table.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_launched_is_said(refused, tmp_path, hosts, arguments, message):
    if hosts is not None:
        write_table(tmp_path, hosts)
    assert message in refused("--rank-table", "table.json", *arguments, "--", "true")
    assert not (tmp_path / "log_output").exists()


def test_the_devices_of_a_table_are_the_gpus_that_the_ranks_see(monkeypatch):
    by_rank = {0: {"DEVICE_ID": "5"}, 1: {"DEVICE_ID": "4"}}
    assert table_gpus(by_rank, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "5,4"
    assert table_gpus(by_rank, {"CUDA_VISIBLE_DEVICES": ""}) is None
    monkeypatch.setattr("shardwright.launch.options.launch_options.count_gpus", lambda _: 8)
    assert table_gpus(by_rank, {}) == "5,4"
    monkeypatch.setattr("shardwright.launch.options.launch_options.count_gpus", lambda _: 5)
    with pytest.raises(
        UsageError, match="gives out the devices 5, but this host has the GPUs 0 to 4; to run on its CPUs"
    ):
        table_gpus(by_rank, {})
