"""What devices count: on trees of files as sysfs has them, wraps included, and on a link with a known transfer."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from shardwright.cli import cli
from shardwright.cluster.traffic import DeviceSampler
from shardwright.errors import UsageError
from shardwright.launch.hosts.network import Device, moved, read_devices
from sysfs import Tree, write


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "sys")


def test_words_are_four_bytes_and_troubles_stand_beside(tree):
    tree.count({"rx_bytes": 500}, {"port_xmit_data": 1_000, "symbol_error": 2})
    looks = DeviceSampler(["mlx5_0/1", "eth0"], tree.root)
    tree.count(
        {"rx_bytes": 1_500, "tx_bytes": 700, "rx_dropped": 3, "tx_errors": 1},
        {"port_xmit_data": 251_000, "port_rcv_data": 50_000, "symbol_error": 7, "port_xmit_wait": 9},
    )
    port, eth0 = looks.look()
    assert (port.total.out_bytes, port.total.in_bytes) == (1_000_000, 200_000)
    assert port.total.troubles == {"symbol errors": 5, "link downs": 0, "waits": 9}
    assert (eth0.total.in_bytes, eth0.total.out_bytes) == (1_000, 700)
    assert eth0.total.troubles == {"errors in": 0, "errors out": 1, "drops in": 3, "drops out": 0}
    tree.count({"tx_bytes": 800}, {"port_xmit_data": 251_001})
    port, eth0 = looks.look()
    assert (port.last.out_bytes, port.total.out_bytes) == (4, 1_000_004)
    assert (eth0.last.out_bytes, eth0.total.out_bytes) == (100, 800)


@pytest.mark.parametrize(
    ("before_words", "after_words", "moved_bytes"),
    [
        (2**32 - 100, 150, 1_000),  # an old port
        (2**64 - 100, 150, 1_000),
        (2**32 + 5, 2**32 + 255, 1_000),
        (7_000_000, 250, 1_000),  # 17 GB in a second at 12.5: it was reset
        (2**63, 250, 1_000),
    ],
)
def test_counters_that_wrap_or_begin_anew(tree, before_words, after_words, moved_bytes):
    tree.count(port={"port_xmit_data": before_words, "port_rcv_data": before_words})
    before = read_devices(tree.root).devices["mlx5_0/1"]
    tree.count(port={"port_xmit_data": after_words, "port_rcv_data": after_words})
    after = read_devices(tree.root).devices["mlx5_0/1"]
    found = moved(before, after, 0.1)
    assert (found.out_bytes, found.in_bytes) == (moved_bytes, moved_bytes)


def test_ethernet_counters_of_32_bits_wrap_at_bytes():
    before = Device("eth0", "ethernet", True, 2**32 - 100, 0, in_packets=2**32 - 1)
    after = Device("eth0", "ethernet", True, 150, 0, in_packets=4)
    found = moved(before, after, 1.0)
    assert (found.in_bytes, found.in_packets) == (250, 5)


def test_a_full_counter_of_an_old_port_is_said(tree):
    tree.count(port={"port_xmit_data": 2**32 - 1})
    [row] = DeviceSampler(["mlx5_0/1"], tree.root).look()
    assert row.cells()[-1] == "a counter of 32 bits is full: reset it with perfquery -R"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["eth7"],
            "there is no network device 'eth7' under {root}; choose of: mlx5_0/1, mlx5_0/2, bond0, eth0, ib0, lo",
        ),
        (["mlx5_0/3"], "there is no network device 'mlx5_0/3' under {root}; choose of: mlx5_0/1, "),
        (["--every", "0"], "expected --every of more than 0 and at most 86400 seconds, got 0"),
        (["--every", "nan"], "expected --every of more than 0 and at most 86400 seconds, got nan"),
        (["--count", "0"], "expected --count of at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tree, arguments, message):
    result = CliRunner().invoke(cli, ["traffic", *arguments, "--sysfs", str(tree.root)])
    assert isinstance(result.exception, UsageError)
    assert message.format(root=tree.root) in str(result.exception)


def test_no_device_at_all_and_counters_that_cannot_be_read(tree, tmp_path):
    with pytest.raises(UsageError, match=r"no network device under .*empty is up; those there: none"):
        DeviceSampler([], tmp_path / "empty")
    write(tree.eth0 / "statistics", rx_bytes="so many")
    with pytest.raises(UsageError, match="the counters of eth0 cannot be read: ValueError"):
        DeviceSampler(["eth0"], tree.root)


def test_without_infiniband_it_says_so(tree):
    (tree.root / "class/infiniband").rename(tree.root / "hidden")
    result = CliRunner().invoke(cli, ["traffic", "--count", "1", "--every", "0.01", "--sysfs", str(tree.root)])
    assert result.exit_code == 0
    assert "no InfiniBand device here" in result.output.splitlines()


def test_ctrl_c_ends_with_totals(tree):
    command = [sys.executable, "-m", "shardwright", "traffic", "eth0", "--every", "0.05", "--sysfs", str(tree.root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as run:
        try:
            assert run.stdout.readline().startswith("eth0: ethernet")
            run.stdout.readline()
            run.stdout.readline()  # a look was shown
            tree.count({"rx_bytes": 12_345})
            time.sleep(0.2)
            run.send_signal(signal.SIGINT)
            rest, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 0
    assert re.fullmatch(r"eth0: 12\.35 kB in, 0 B out in \d+\.\d s; no errors or drops", rest.splitlines()[-1])
