"""What doctor prints: at 80 columns, as JSON, as a script; and what comes from hosts does nothing there."""

import io
from dataclasses import replace

from recorded_hosts import GPUS, altered, recorded
from rich.console import Console

from shardwright.cluster.doctor import probe
from shardwright.cluster.doctor.command import find, fix_script, show
from shardwright.cluster.doctor.reach import Cluster
from shardwright.launch.hosts.hosts import Hosts

OLD = {GPUS: "0, NVIDIA A100-SXM4-80GB, 470.57.02, Disabled, 0\n"}


def cluster(**readings):
    return Cluster(Hosts.from_list(",".join(readings)), readings)


def named(name):
    return replace(altered(recorded("dgx"), facts={"name": name}), name=name)


def shown(found, *names):
    out = io.StringIO()
    show(found, names, Console(file=out, width=80))
    return out.getvalue()


def test_the_table_has_the_worst_first_and_fits_80_columns():
    table = shown(find(cluster(dgx=altered(recorded("dgx"), commands=OLD))), "dgx")
    assert table.startswith(
        "dgx: 1 problem, 1 warning, 1 note, 28 ok\n"
        "\n"
        "GPUs\n"
        "  PROBLEM  CUDA           driver 470.57.02 has CUDA 11.4, and runs no torch that\n"
        "                          shardwright takes: 2.11 and newer are built for CUDA\n"
        "                          12.6 at least, which needs driver 525.60.13 or newer\n"
        "           sudo apt-get update\n"
        "           sudo apt-get install -y nvidia-headless-570-server nvidia-utils-570-server\n"
    ), table
    lines = table.splitlines()
    assert lines.index("           sudo nvidia-smi -pm 1") < lines.index("software")
    assert all(len(line) <= 80 or line.startswith(" " * 11) for line in lines)


def test_the_script_does_nothing_that_a_person_has_not_read():
    reading = altered(named("a"), commands={GPUS: "0, A100, 535.129.03, Enabled, 3\n"})
    reading = altered(reading, facts={"environment": {"NCCL_IB_DISABLE": "1"}}, commands={"mpirun --version": None})
    found = find(Cluster(Hosts.from_list("a,b"), {"a": reading}, {"b": "it did not answer"}))
    script = fix_script(found, {"a": reading})
    assert "\n# Not reached: b\n" in script
    for line in (
        "# when no job runs here: sudo nvidia-smi -i 0 --gpu-reset",
        "# in the shell from which you launch: unset NCCL_IB_DISABLE",
        "# if you want it: sudo apt-get install -y openmpi-bin libopenmpi-dev",
    ):
        assert f"\n  {line}\n" in script


def test_what_a_host_says_reaches_no_shell_and_no_terminal():
    evil = "eth0\x1b]0;owned\x07`reboot`\n"
    reading = altered(
        recorded("dgx"),
        commands={
            GPUS: "0, A100 \x1b[2J\x9b1m, 470.1\x1b[H, Disabled, 0\n",
            "mpirun --version": f"\x1b[31m 4.1 {evil}",
        },
        facts={"addresses": [[evil, "10.0.0.1", 0]], "name": evil, "own_name": None, "user": evil, "executable": evil},
    )
    hosts = cluster(dgx=altered(reading, facts={"packages": {"numpy": evil}}))
    found = find(hosts)
    for text in (shown(found, "dgx"), fix_script(found, hosts.readings)):
        assert all(c == "\n" or c.isprintable() for c in text)
        code = [line for line in text.splitlines() if ("`reboot`" in line and "echo" in line) or "pip" in line]
        assert code
        assert all("'" in line.partition("`reboot`")[0] for line in code if "`reboot`" in line)
    assert r"A100 \x1b[2J\x9b1m" in shown(found, "dgx")


def test_a_host_that_says_nonsense_has_no_good_word():
    """Whatever a host answers, each check says that it is unknown; none fails."""
    for nonsense in ({}, dict.fromkeys(probe.look()["facts"], 3), {name: [[]] for name in probe.look()["facts"]}):
        found = find(cluster(x=altered(recorded("dgx"), facts=dict.fromkeys(recorded("dgx").facts) | nonsense)))
        unknown = [one.name for one in found if one.finding.severity.name == "UNKNOWN"]
        assert {"Python", "torch", "variables", "disks"} <= set(unknown)
