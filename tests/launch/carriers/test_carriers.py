"""The two halves of the table of carriers agree, and every part of the program that asks about a carrier asks them."""

import click
import pytest

from shardwright.cli import cli
from shardwright.errors import UsageError
from shardwright.hosts.hosts import Hosts
from shardwright.hosts.rank_table import RankTable
from shardwright.launch.asked.carrier_facts import CARRIERS, UNSAID, carrier_facts, carrier_of_backend
from shardwright.launch.asked.options import LaunchOptions, read_options
from shardwright.launch.asked.request import LaunchRequest
from shardwright.launch.host.program import Program
from shardwright.launch.start import STARTS


def test_every_carrier_has_facts_and_functions():
    assert list(STARTS) == list(CARRIERS)
    for name, row in CARRIERS.items():
        assert row.name == name
        assert (row.here, row.on_hosts) == (STARTS[name].here is not None, STARTS[name].on_hosts is not None)


def test_the_command_line_offers_the_carriers_of_the_table():
    options = {option.name: option for option in cli.commands["launch"].params}
    assert isinstance(options["via"].type, click.Choice)
    assert list(options["via"].type.choices) == list(CARRIERS)


def test_the_hosts_decide_where_no_carrier_is_named():
    assert carrier_facts(None) is UNSAID
    assert (UNSAID.settled(on_hosts=True).name, UNSAID.settled(on_hosts=False).name) == ("ssh", "local")
    assert all(row.settled(on_hosts) is row for row in CARRIERS.values() for on_hosts in (True, False))
    assert LaunchOptions(Program("program", ("true",)), 1).carrier.name == "local"


def test_the_backend_of_a_benchmark_decides_its_carrier():
    assert [carrier_of_backend(backend).name for backend in (None, "gloo", "nccl", "mpi")] == [
        "local", "local", "local", "mpirun",
    ]  # fmt: skip


def test_torchruns_take_no_rank_table_of_several_hosts(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(RankTable.from_hosts(Hosts.from_list("127.0.0.1:1,240.0.0.1:1")).to_json())
    request = LaunchRequest(kind="program", arguments=["true"], rank_table=str(path), via="torchrun")
    with pytest.raises(UsageError, match="--via torchrun numbers ranks by host, not as a rank table does; type -H or"):
        read_options(request)


def test_torchruns_that_are_only_printed_look_for_no_hangs(launching):
    ended = launching.run("-n", "2", "--via", "torchrun", "--stall-timeout", "5", "--", "true")
    assert (ended.code, ended.stdout) == (2, "")
    assert "torchrun looks for no hangs; --stall-timeout needs --run, or another --via" in ended.stderr
