"""Every launcher's environment is understood, and what is missing or contradictory is named."""

import json

import pytest

from shardwright.errors import WorldError
from shardwright.launch.hosts.environment import (
    FileMeeting,
    LaunchEnvironment,
    MpiMeeting,
    TcpMeeting,
    read_environment,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{n}": v for n, v in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "4"))
}
SLURM = {f"SLURM_{n}": v for n, v in (
    ("PROCID", "5"), ("LOCALID", "1"), ("NODEID", "1"), ("NTASKS", "9"), ("JOB_ID", "77"),
    ("STEP_NODELIST", "gnode[10,20-21]"), ("TASKS_PER_NODE", "4(x2),1"))}  # fmt: skip
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_SCHED_HOST": "h0",
    "MS_SCHED_PORT": "8118",
    "MS_WORKER_NUM": "4",
    "MS_NODE_ID": "2",
}


def test_nobody_started_this_process():
    assert read_environment({"HOME": "/", "MASTER_ADDR": "h"}) == LaunchEnvironment("none", 0, 1, 0, 1)


def test_torchrun():
    told = read_environment(TORCHRUN | {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert told == LaunchEnvironment("torchrun", 3, 8, 1, 2, TcpMeeting("h0", 29500, 0), job="job/2")
    assert read_environment(TORCHRUN | {"SHARDWRIGHT_JOB": "a/0"}).launcher == "shardwright launch"  # not torchrun's
    agent = read_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.meeting == TcpMeeting("h0", 29500, None)


def test_the_pods_of_a_pytorchjob():
    """As the training operator 1.9 sets them: RANK is the number of the pod."""
    pod = {
        "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "t-master-0",
        "PET_MASTER_ADDR": "t-master-0", "WORLD_SIZE": "2", "RANK": "1", "PET_NODE_RANK": "1", "PET_NNODES": "2",
    }  # fmt: skip
    assert read_environment(pod) == LaunchEnvironment(
        "torchrun", 1, 2, meeting=TcpMeeting("t-master-0", 23456, 0), job="none/0"
    )
    assert read_environment(pod | {"PET_NPROC_PER_NODE": "auto"}).size == 2
    of_eight = pod | {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16"}
    with pytest.raises(
        WorldError, match=r"this pod of a PyTorchJob has 8 ranks, but LOCAL_RANK is not set: nobody has"
    ):
        read_environment(of_eight)
    by_torchrun = of_eight | {"RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert read_environment(by_torchrun).rank == 9


def test_ray_train():
    told = read_environment({
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "38211",
    })  # fmt: skip
    assert told == LaunchEnvironment("torchrun", 3, 4, 1, 2, TcpMeeting("10.0.0.1", 38211, 0), job="none/0")


def test_open_mpi_on_one_host_meets_by_a_file_of_its_job():
    one, other = (
        read_environment(OPEN_MPI | {"PMIX_NAMESPACE": f"prterun-h-{pid}@1", "PMIX_SERVER_URI2": "u"}) for pid in (1, 2)
    )
    assert isinstance(one.meeting, FileMeeting)
    assert one.meeting.one_host
    assert one.meeting.path != other.meeting.path
    assert (one.rank, one.size, one.local_rank, one.local_size) == (1, 4, 1, 4)


def test_open_mpi_across_hosts_meets_by_mpi_unless_told_where():
    across = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "x"}
    assert read_environment(across).meeting == MpiMeeting()
    assert read_environment(across | {"MASTER_ADDR": "h", "MASTER_PORT": "1"}).meeting == TcpMeeting("h", 1)


def test_mpich():
    told = read_environment({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    assert told == LaunchEnvironment("MPICH", 1, 2, 0, 1, MpiMeeting())


def test_slurm_meets_on_the_first_host_at_a_port_of_its_job():
    told = read_environment(SLURM)
    assert (told.rank, told.size, told.local_rank, told.local_size, told.host) == (5, 9, 1, 4, "gnode20")
    assert isinstance(told.meeting, TcpMeeting)
    assert told.meeting.address == "gnode10"
    assert 20000 <= told.meeting.port < 32000
    assert read_environment(SLURM | {"SLURM_JOB_ID": "78"}).meeting.port != told.meeting.port


def test_a_batch_script_is_one_process():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert read_environment(batch).size == 1


def test_msrun_worker_and_scheduler():
    worker = read_environment(MSRUN | {"DEVICE_ID": "2"})
    assert (worker.rank, worker.size, worker.device_id) == (2, 4, 2)
    assert worker.meeting == TcpMeeting("h0", 8118, None)
    scheduler = read_environment(MSRUN | {"MS_ROLE": "MS_SCHED"})
    assert (scheduler.rank, scheduler.size) == (None, 4)


def write_table(path, kind=str, ranks=(0, 1, 2, 3)):
    devices = [
        {"device_id": kind(d), "device_ip": f"1.2.3.{r}", "rank_id": kind(r)}
        for d, r in zip((4, 5, 4, 5), ranks, strict=True)
    ]
    servers = [{"server_id": "10.0.0.1", "device": devices[:2]}, {"server_id": "10.0.0.2", "device": devices[2:]}]
    table = {"version": "1.0", "server_count": kind(2), "server_list": servers, "status": "completed"}
    path.write_text(json.dumps(table | {"product": "any"}))
    return {"RANK_TABLE_FILE": str(path)}


@pytest.mark.parametrize("kind", [str, int])
def test_a_rank_table_meets_at_its_first_server(tmp_path, kind):
    env = write_table(tmp_path / "table.json", kind)
    told = read_environment(env | {"RANK_ID": "3", "RANK_SIZE": "4", "DEVICE_ID": "5"})
    assert (told.rank, told.size, told.local_rank, told.local_size) == (3, 4, 1, 2)
    assert (told.host, told.device_id) == ("10.0.0.2", 5)
    assert (told.meeting.address, told.meeting.server_rank) == ("10.0.0.1", 0)


def test_a_single_server_meets_on_the_loopback_and_may_have_more_devices_than_ranks(tmp_path):
    """As shell loops set them: DEVICE_NUM counts what the server has."""
    devices = [{"device_id": str(4 + i), "rank_id": str(i)} for i in range(4)]
    (tmp_path / "table.json").write_text(json.dumps({"server_list": [{"server_id": "192.0.2.7", "device": devices}]}))
    loop = {"RANK_TABLE_FILE": str(tmp_path / "table.json"), "RANK_SIZE": "4", "DEVICE_NUM": "8"}
    told = read_environment(loop | {"RANK_ID": "2", "DEVICE_ID": "6"})
    assert (told.rank, told.size, told.local_rank, told.local_size, told.device_id) == (2, 4, 2, 4, 6)
    assert (told.host, told.meeting.address, told.meeting.server_rank) == ("192.0.2.7", "127.0.0.1", 0)


def test_version_1_2_meets_at_the_address_of_its_first_server(tmp_path):
    servers = [
        {"server_id": f"node_{s}", "host_ip": f"10.0.0.{s}", "device": [{"device_id": 0, "rank_id": s}]} for s in (0, 1)
    ]
    (tmp_path / "table.json").write_text(json.dumps({"version": "1.2", "server_list": servers}))
    told = read_environment({"RANK_TABLE_FILE": str(tmp_path / "table.json"), "RANK_ID": "1"})
    assert (told.host, told.meeting.address) == ("node_1", "10.0.0.0")


def test_one_of_several_ranks_without_a_table_is_no_world_of_one():
    with pytest.raises(WorldError, match=r"RANK_ID=1 and RANK_SIZE=4 say .* but RANK_TABLE_FILE is not set; set it"):
        read_environment({"RANK_ID": "1", "RANK_SIZE": "4", "DEVICE_ID": "1"})
    assert read_environment({"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "3"}).size == 1


def test_the_lowest_rank_on_the_first_server_serves(tmp_path):
    env = write_table(tmp_path / "table.json", ranks=(2, 3, 0, 1))
    assert read_environment(env | {"RANK_ID": "0"}).meeting.server_rank == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK_ID": "4"}, "RANK_ID=4 is not in .*which has the ranks 0 to 3"),
        ({"RANK_ID": "1", "RANK_SIZE": "8"}, "RANK_SIZE=8, but .* has 4 ranks"),
        ({"RANK_ID": "1", "DEVICE_ID": "7"}, "DEVICE_ID=7, but .* gives rank 1 device 5 of 10.0.0.1; set DEVICE_ID=5"),
        ({}, "says that a rank table started this process, but RANK_ID is not set"),
    ],
)
def test_a_rank_table_is_checked_against_the_variables(tmp_path, variables, message):
    with pytest.raises(WorldError, match=message):
        read_environment(write_table(tmp_path / "table.json") | variables)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("{}", "is no rank table: server_list .* is missing"),
    ],
)
def test_a_broken_rank_table_is_named(tmp_path, text, message):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WorldError, match=message):
        read_environment({"RANK_TABLE_FILE": str(path), "RANK_ID": "0"})


def test_ranks_that_a_table_gives_twice(tmp_path):
    env = write_table(tmp_path / "table.json", ranks=(0, 1, 1, 2))
    with pytest.raises(WorldError, match=r"has the ranks \[0, 1, 1, 2\]; expected each of 0 to 3 once"):
        read_environment(env | {"RANK_ID": "0"})


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN | SLURM, "torchrun"),
        (TORCHRUN | OPEN_MPI, "torchrun"),
        (OPEN_MPI | SLURM, "OpenMPI"),
        (MSRUN | SLURM, "msrun"),
        (SLURM | {"WORLD_SIZE": "9", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "Slurm"),  # what many job scripts export
    ],
)
def test_the_innermost_complete_launcher_wins(env, launcher):
    assert read_environment(env).launcher == launcher


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0", "MASTER_ADDR": "h"}, "RANK=0 says that torchrun .*, but WORLD_SIZE, MASTER_PORT is not set"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0 says that MPICH started this process, but PMI_SIZE is not set"),
        ({k: v for k, v in MSRUN.items() if k != "MS_NODE_ID"}, "MS_NODE_ID is not set; start msrun with --node_rank"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (TORCHRUN | {"RANK": "8"}, "says rank 8 of 8; ranks go from 0"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "says local rank 2 of 2 on a host"),
        (SLURM | {"SLURM_NTASKS": "8"}, "Slurm's variables contradict each other"),
        (SLURM | {"SLURM_STEP_NODELIST": "gnode[1-"}, "the Slurm node list 'gnode\\[1-' cannot be read"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4x2"}, "SLURM_TASKS_PER_NODE='4x2' cannot be read; expected something like"),
    ],
)
def test_what_is_missing_or_contradictory_is_named(env, message):
    with pytest.raises(WorldError, match=message):
        read_environment(env)
