"""What devices count: on trees of files as sysfs has them, wraps included, and on a link with a known transfer."""

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from ranks import run_ranks
from shardwright.cli import cli
from shardwright.cluster.traffic import DeviceSampler, show
from shardwright.errors import UsageError
from shardwright.launch.hosts.network import Device, counted_once, moved, read_devices
from sysfs import Tree, write
from veth import ADDRESSES, DEVICE, enter, namespaces


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


def test_what_a_port_and_a_network_device_are(tree):
    devices = read_devices(tree.root).devices
    assert list(devices) == ["mlx5_0/1", "mlx5_0/2", "bond0", "eth0", "ib0", "lo"]
    port = devices["mlx5_0/1"]
    assert (port.up, port.speed, port.network_device) == (True, "100 Gb/sec (4X EDR)", "ib0")
    assert not devices["mlx5_0/2"].up
    assert (devices["eth0"].speed, devices["eth0"].mtu, devices["bond0"].parts) == ("25 Gb/s", 1500, ("eth0",))
    assert [d.name for d in counted_once(read_devices(tree.root))] == ["mlx5_0/1", "mlx5_0/2", "eth0"]


def test_without_names_all_that_are_up_and_with_a_device_all_its_ports(tree):
    assert DeviceSampler([], tree.root).names == ["mlx5_0/1", "bond0", "eth0", "ib0"]
    assert DeviceSampler(["mlx5_0", "lo", "mlx5_0/1"], tree.root).names == ["mlx5_0/1", "mlx5_0/2", "lo"]


def test_a_device_that_goes_and_comes_back_keeps_its_total(tree):
    looks = DeviceSampler(["eth0"], tree.root)
    tree.count({"rx_bytes": 100})
    looks.look()
    hidden = tree.eth0.rename(tree.root / "eth0")
    [row] = looks.look()
    assert (row.gone, row.total.in_bytes) == (True, 100)
    hidden.rename(tree.eth0)
    tree.count({"rx_bytes": 130})
    [row] = looks.look()
    assert (row.gone, row.total.in_bytes, row.last.in_bytes) == (False, 130, 30)


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


def test_lines_and_totals_on_no_terminal(tree):
    out = io.StringIO()
    show(["mlx5_0/1", "eth0"], 0.02, 2, False, tree.root, Console(file=out))
    lines = out.getvalue().splitlines()
    assert lines[0] == "mlx5_0/1: infiniband, 100 Gb/sec (4X EDR), up, network device ib0"
    assert lines[1] == "eth0: ethernet, 25 Gb/s, up, MTU 1500"
    assert (
        lines[2:6:2]
        == [
            "mlx5_0/1: in 0 B/s, out 0 B/s, total in 0 B, total out 0 B; no errors or drops",
        ]
        * 2
    )
    assert re.fullmatch(r"eth0: 0 B in, 0 B out in \d+\.\d s; no errors or drops", lines[-1])
    assert len(lines) == 8


def test_a_terminal_gets_a_table_that_stays_in_place(tree):
    out = io.StringIO()
    show(["eth0"], 0.02, 2, False, tree.root, Console(file=out, force_terminal=True, width=120))
    assert "errors and drops" in out.getvalue()
    assert "\x1b[2K" in out.getvalue()  # the line before is erased
    assert out.getvalue().rstrip().splitlines()[-1].endswith("no errors or drops")


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


SENT_BYTES = 10_000_000
# struct tcp_info of linux/tcp.h, since Linux 4.19: tcpi_bytes_sent and tcpi_bytes_retrans, 64 bits each, at byte 200
BYTES_SENT = struct.Struct("200x2Q")


def bytes_sent(connection):
    """What TCP has sent of this end's data: all of it, and how much of that for a second time."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT.size)
    assert len(info) == BYTES_SENT.size, f"this kernel tells {len(info)} bytes of it, {BYTES_SENT.size} are needed"
    return BYTES_SENT.unpack(info)


def one_side(names):
    """One end of a plain TCP connection: rank 0 sends, rank 1 receives.

    What the device moved, what `traffic --json` said in its last line, and how many bytes rank 0 sent again.
    """
    rank = int(os.environ["RANK"])
    enter(names[rank])
    out, again = io.StringIO(), 0
    looks = DeviceSampler([DEVICE])
    if rank == 1:
        with socket.create_server((ADDRESSES[1], 7000)) as listening:
            connection, _ = listening.accept()
            with connection:
                received = 0
                while received < SENT_BYTES and (chunk := connection.recv(1 << 20)):
                    received += len(chunk)
        assert received == SENT_BYTES
    else:
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = socket.create_connection((ADDRESSES[1], 7000), timeout=60)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with connection:
            connection.sendall(bytes(SENT_BYTES))
            assert connection.recv(1) == b""  # the other end has all of it
            everything, again = bytes_sent(connection)
            assert everything == SENT_BYTES + again
    time.sleep(0.3)  # the last acknowledgements
    [row] = looks.look()
    show([DEVICE], 0.01, 1, True, console=Console(file=out))
    return row.total, json.loads(out.getvalue()), again


def test_a_known_transfer_over_a_link_is_counted_right():
    with namespaces() as names:
        (sent, line, again), (received, *_) = run_ranks(2, one_side, names)
    # Every packet has a header of 14 bytes of Ethernet, and at most 20 of IP and 60 of TCP; but for handshakes and ARP
    # (under 10 packets) those of the sender hold the 10 MB and what was sent again, and those of the receiver nothing.
    for total, out_bytes, packets in (
        (sent, sent.out_bytes, sent.out_packets),
        (received, received.in_bytes, received.in_packets),
    ):
        assert SENT_BYTES + packets * (14 + 20 + 20) <= out_bytes + 10 * 66
        assert out_bytes <= SENT_BYTES + again + packets * (14 + 20 + 60)
        assert not any(total.troubles.values())
    assert sent.in_bytes <= sent.in_packets * (14 + 20 + 60)
    joined = abs(sent.out_packets - received.in_packets)  # on the way, each with one header for two
    assert abs(sent.out_bytes - received.in_bytes) <= 1_000 + joined * (14 + 20 + 60)
    assert line["device"] == DEVICE
    assert set(line) >= {"time", "seconds", "in_bytes", "out_bytes", "in_bytes_per_s", "out_bytes_per_s", "errors"}
