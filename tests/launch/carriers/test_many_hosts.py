"""Jobs on several hosts do what they do on one: placement, environment, output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launching import COMMAND, wait_until

SHOW = (
    'echo "$RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME '
    '$NCCL_SOCKET_IFNAME $OMP_NUM_THREADS $(hostname)"'
)


def logs(job, ranks, name="1"):
    return [job.log(rank, job=name) for rank in range(ranks)]


def test_ranks_are_placed_by_slot_or_cpu_and_told_where_they_are(job, network):
    job.write("hosts", "host1 slots=1\nhost2  # as many as it has CPUs\n")
    ended = job.run("--hostfile", "hosts", "--", "sh", "-c", SHOW)
    first, cpus = network.hosts["host1"].address, len(os.sched_getaffinity(0))
    ranks = 1 + cpus
    assert ended.code == 0, ended.stderr
    assert logs(job, ranks) == [
        f"0 0 0 {ranks} 1 {first} nic1 =nic1 {cpus} host1\n",
        *(f"{1 + i} {i} 1 {ranks} {cpus} {first} nic2 =nic2 1 host2\n" for i in range(cpus)),
    ]
    assert ended.stdout == logs(job, 1)[0]
    assert [(h["name"], h["ranks"], h["interface"]) for h in job.told("run.json")["hosts"]] == [
        ("host1", [0], "nic1"), ("host2", [*range(1, ranks)], "nic2"),
    ]  # fmt: skip


def test_the_environment_passes_through_the_stream_alone(job):
    """No variable is on a command line, where every user of the machine could read it, or in the report."""
    script = job.write(
        "show.py",
        """
    import os, time
    names = "SECRET PLAIN PREFIX_A PREFIX_B ABSENT SSH_CONNECTION TERM_OF_MINE".split()
    print({name: os.environ.get(name) for name in names}, os.getcwd(), flush=True)
    while not os.path.exists("go"): time.sleep(0.01)
    """,
    )
    given = {"SECRET": "hush-hush", "PREFIX_A": "1", "PREFIX_B": "2", "SSH_CONNECTION": "mine"}
    words = ["-x", "SECRET", "-x", "PLAIN=with 'quotes' and $x", "-x", "PREFIX_*"]
    launcher = job.start("-H", "host1:1,host2:1", *words, "--", sys.executable, script, env=given)
    wait_until(lambda: (job.folder / "log_output/1/rank.1/stdout").exists() and all(logs(job, 2)), 60, "the ranks run")
    lines = job.survivors().values()
    assert len(lines) >= 6
    job.write("go", "go")
    assert job.finish(launcher).code == 0
    assert not [line for line in lines if "hush" in line]
    assert "hush" not in (job.folder / "log_output/1/run.json").read_text()
    for text in logs(job, 2):
        assert text.startswith("{'SECRET': 'hush-hush', 'PLAIN': \"with 'quotes' and $x\", 'PREFIX_A': '1', ")
        assert "'SSH_CONNECTION': 'mine'" not in text
        assert text.endswith(f" {job.folder}\n")


def test_a_noisy_shell_and_a_host_without_this_package(job):
    """What a shell's start file prints is no harm; the interpreter below the virtual environment has no shardwright."""
    python = Path(sys.base_prefix) / "bin" / Path(sys.executable).name
    probe = "import importlib.util as u; print(u.find_spec('shardwright'))"
    isolated = {"PYTHONPATH": ""}
    words = ["-H", "host1:1,noisy:1", "--python", str(python), "--", str(python), "-c", probe]
    ended = job.run(*words, env=isolated)
    assert ended.code == 0, ended.stderr
    assert logs(job, 2) == ["None\n"] * 2


@pytest.mark.slow
def test_this_machine_beside_another_meets_where_the_other_one_reaches_it(job, network):
    """Of this machine's addresses the host knows a way to one alone."""
    ended = job.run("-H", "localhost:1,host2:1", "--", "sh", "-c", "echo $RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME")
    assert ended.code == 0, ended.stderr
    assert logs(job, 2) == [f"0 {network.address} {network.bridge}\n", f"1 {network.address} nic2\n"]


@pytest.mark.slow
def test_an_address_that_each_host_has_for_itself_is_not_where_they_meet(job, network):
    """As that of a bridge for containers."""
    for host in network.hosts.values():
        for words in (
            ["link", "add", "ctr0", "type", "bridge"], ["address", "add", "172.30.0.1/16", "dev", "ctr0"],
            ["link", "set", "ctr0", "up"],
        ):  # fmt: skip
            subprocess.run(["ip", "-netns", host.namespace, *words], check=True, timeout=20)
    try:
        ended = job.run("-H", "host1:1,host2:1", "--", "sh", "-c", "echo $MASTER_ADDR")
        refused = job.run("-H", "host1:1,host2:1", "--interface", "ctr0", "--", "true")
        given = job.run("-H", "host1:1,host2:1", "--interface", "nic1", "--", "true")
    finally:
        for host in network.hosts.values():
            subprocess.run(["ip", "-netns", host.namespace, "link", "delete", "ctr0"], check=True, timeout=20)
    assert (ended.code, logs(job, 1)) == (0, [f"{network.hosts['host1'].address}\n"])
    assert (refused.code, given.code) == (2, 0)
    assert "the hosts do not reach host1 over TCP, where the ranks are to meet; tried in vain" in refused.stderr
    assert "from host2: 172.30.0.1 (ctr0)" in refused.stderr


AGAIN = """
    import os
    from dataclasses import replace
    from shardwright.launch.options.request import HostRequest
    from shardwright.launch.joblog.job import create_job_folder
    from shardwright.launch.attempt import Attempt
    from shardwright.launch.console import Console
    from shardwright.launch.launcher import Launcher
    from shardwright.launch.options.launch_options import read_options
    from shardwright.launch.options.request import LaunchRequest
    from shardwright.launch.carriers.ssh import SshCarrier
    os.makedirs("log_output")
    options = read_options(LaunchRequest(
        kind="program", arguments=["sh", "-c", "ls ${SHARDWRIGHT_FAILED_MARK%/*}; sleep $RANK; exit $RANK"],
        preload=False, tee="none", grace_s=2.0, where=HostRequest(hosts="host1:1,host2:1", lease_s=0.6),
    ))
    carrier = SshCarrier(options, options.remote)
    carrier.prepare()
    known = replace(options, ranks=carrier.ranks)
    for _ in range(2):
        folder = create_job_folder(options.log_dir, None)
        attempt = Attempt.first(known, folder, Console(known.shown))
        print(Launcher(attempt, carrier, lambda: None).run().outcome.exit_code, flush=True)
        attempt.console.close()
    carrier.close()
"""


@pytest.mark.slow
def test_a_carrier_can_start_again_on_the_same_hosts(job):
    """Also where the ranks of one host ended long before those of the other, and without what the first run left."""
    done = subprocess.run(
        [sys.executable, job.write("again.py", AGAIN)], cwd=job.folder, env=os.environ | {"PATH": job.path},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "1\n1\n", done.stderr
    assert done.stderr.count("rank 1 on host2 failed first: exit code 1") == 2
    assert [logs(job, 2, name) for name in ("1", "2")] == [["", ""]] * 2


# --- with torch


@pytest.mark.slow
def test_a_host_needs_torch_and_nothing_of_ours(job):
    """The package that came with the agent starts the ranks, and is not there for what they run."""
    folder = job.folder / "packages"
    folder.mkdir()
    site = Path(__import__("torch").__file__).parents[1]
    for path in site.iterdir():
        if not path.name.startswith(("shardwright", "_shardwright", "__editable__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    script = job.write(
        "train.py",
        """
    import importlib.util, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    print(total.item(), importlib.util.find_spec("shardwright"), "shardwright" in sys.modules, sys.argv)
    dist.destroy_process_group()
    """,
    )
    python = str(Path(sys.base_prefix) / "bin" / Path(sys.executable).name)
    words = ["-H", "host1:2,host2:1", "--python", python, script, "word"]
    ended = job.run(*words, env={"PYTHONPATH": str(folder)}, timeout_s=60)
    assert ended.code == 0, ended.stderr
    assert logs(job, 3) == ["3.0 None False ['train.py', 'word']\n"] * 3
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_two_tables_of_8_devices_merged_launch_16_ranks(job, network):
    for name, host in network.hosts.items():
        made = ["ranktable", "make", "[0,8)", "--server-id", host.address, "--out", str(job.folder / f"{name}.json")]
        subprocess.run([COMMAND, *made], check=True, timeout=60, capture_output=True)
    merged = [COMMAND, "ranktable", "merge", "host1.json", "host2.json", "--out", "both.json"]
    subprocess.run(merged, cwd=job.folder, check=True, timeout=60, capture_output=True)
    show = "echo $RANK $LOCAL_RANK $WORLD_SIZE $RANK_ID $DEVICE_ID $DEVICE_NUM $(hostname)"
    ended = job.run("--rank-table", "both.json", "--", "sh", "-c", show, timeout_s=60)
    assert ended.code == 0, ended.stderr
    assert logs(job, 16) == [f"{r} {r % 8} 16 {r} {r % 8} 8 host{1 + r // 8}\n" for r in range(16)]
