"""The two halves of the table of carriers agree, and every part of the program that asks about a carrier asks them."""

import subprocess
import sys
from dataclasses import replace

import click
import pytest

from shardwright.cli import cli
from shardwright.errors import UsageError
from shardwright.launch.host.program import Program
from shardwright.launch.hosts.hosts import Hosts
from shardwright.launch.hosts.rank_table import RankTable
from shardwright.launch.options.carrier_facts import CARRIERS, UNSAID, carrier_facts, carrier_of_backend
from shardwright.launch.options.launch_options import LaunchOptions, read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.launch.start import STARTS


def test_every_carrier_has_facts_and_functions():
    assert list(STARTS) == list(CARRIERS)
    for name, row in CARRIERS.items():
        assert row.name == name
        assert (row.here, row.on_hosts) == (STARTS[name].here is not None, STARTS[name].on_hosts is not None)


def test_the_command_line_offers_the_carriers_of_the_table():
    options = {option.name: option for option in cli.get_command(None, "launch").params}
    assert isinstance(options["via"].type, click.Choice)
    assert list(options["via"].type.choices) == list(CARRIERS)


def test_the_hosts_decide_where_no_carrier_is_named():
    assert carrier_facts(None) is UNSAID
    with pytest.raises(UsageError, match="--via smtp is no carrier; choose one of local, ssh, mpirun, srun, torchrun"):
        carrier_facts("smtp")
    assert (UNSAID.settled(on_hosts=True).name, UNSAID.settled(on_hosts=False).name) == ("ssh", "local")
    assert all(row.settled(on_hosts) is row for row in CARRIERS.values() for on_hosts in (True, False))
    assert LaunchOptions(Program("program", ("true",)), 1).carrier.name == "local"


def test_the_backend_of_a_benchmark_decides_its_carrier():
    assert [carrier_of_backend(backend).name for backend in (None, "gloo", "nccl", "mpi")] == [
        "local", "local", "local", "mpirun",
    ]  # fmt: skip


def test_torchruns_take_no_rank_table_of_several_hosts(tmp_path):
    path = tmp_path / "table.json"
    table = replace(RankTable.from_hosts(Hosts.from_list("127.0.0.1:1,240.0.0.1:1")), product="any")
    path.write_text(table.to_json())
    request = LaunchRequest(kind="program", arguments=["true"], rank_table=str(path), via="torchrun")
    with pytest.raises(UsageError, match="--via torchrun numbers ranks by host, not as a rank table does; type -H or"):
        read_options(request)


ADDED = """
    import sys
    from shardwright.launch.options import carrier_facts
    from shardwright.launch.options.launch_options import read_options
    from shardwright.launch.options.request import LaunchRequest
    from shardwright.launch.carriers.local import LocalCarrier
    from shardwright.launch.start import STARTS, CarrierStart, launch

    class CountingCarrier(LocalCarrier):
        def start(self, *words):
            print(f"{self.ranks} ranks", flush=True)
            return super().start(*words)

    carrier_facts.CARRIERS["counting"] = carrier_facts.CarrierFacts(name="counting", here=True)
    STARTS["counting"] = CarrierStart(here=CountingCarrier)
    words = {"kind": "program", "arguments": ["sh", "-c", "echo $RANK"], "ranks": "2", "via": "counting"}
    sys.exit(launch(read_options(LaunchRequest(**words))))
"""


def test_two_rows_and_a_class_are_a_new_carrier(launching):
    command = [sys.executable, launching.write("added.py", ADDED)]
    done = subprocess.run(command, cwd=launching.folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2 ranks\n0\n"), done.stderr
    assert [launching.log(rank) for rank in range(2)] == ["0\n", "1\n"]
