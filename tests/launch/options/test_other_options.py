"""What users of torchrun, torch.distributed.launch, mpirun and msrun type, and what it means here."""

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from pages import DOCS
from shardwright.cli import cli
from shardwright.launch import start
from shardwright.launch.hosts.hosts import own_slots
from shardwright.launch.options.other_options import OTHER_OPTIONS


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What a command asks for, or with what it is refused, without starting anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    jobs = []
    monkeypatch.setattr(start, "launch", lambda job: jobs.append(job) or 0)

    def ask(line):
        ended = CliRunner().invoke(cli, ["launch", *line.split()])
        if ended.exit_code:
            return str(ended.exception)
        return jobs.pop()

    return ask


@pytest.mark.parametrize(
    "line",
    [
        "--nproc_per_node=4 train.py",
        "--nproc-per-node 4 --nnodes 1 --node_rank 0 --master_addr localhost train.py",
        "--standalone --nnodes=1 --nproc-per-node=4 train.py",
        "--rdzv_backend c10d --rdzv_endpoint localhost:0 --rdzv-id 7 --nproc_per_node 4 train.py",
        "-np 4 --allow-run-as-root train.py",
        "-n 4 --allow-run-as-root --max_restarts 0 train.py",
        "--worker_num=4 --local_worker_num=4 --master_addr=127.0.0.1 --join=True train.py",
    ],
)
def test_ranks_on_this_host(asked, line):
    job = asked(line)
    assert (job.ranks, job.remote, job.program.arguments) == (4, None, ("train.py",))


@pytest.mark.parametrize(
    ("line", "hosts", "ranks"),
    [
        ("-H a,b --nproc_per_node 8 --nnodes 2 --master_addr a --master_port 29511 train.py", "a:8,b:8", None),
        ("-hostfile hosts -npernode 2 -x PATH train.py", "a:2,b:2", None),
        ("-np 16 --hostfile hosts --allow-run-as-root train.py", "a:8,b:8", 16),
        ("--machinefile hosts -np 4 train.py", "a:8,b:8", 4),
        ("-host a:8,b:8 --worker_num 16 --local_worker_num 8 train.py", "a:8,b:8", 16),
        ("-H a:8,b:8 --nnodes 1:2 --nproc-per-node gpu train.py", "a:8,b:8", None),
    ],
)
def test_ranks_on_hosts_that_are_named(asked, line, hosts, ranks):
    job = asked(line)
    assert (job.remote.hosts.to_list(), job.remote.ranks) == (hosts, ranks)
    assert job.port == (29511 if "29511" in line else None)


ONE = "one command starts the ranks of all hosts; type once, on any of them"


@pytest.mark.parametrize(
    ("line", "said", "command"),
    [
        (
            "--nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=a --master_port=29500 train.py --lr 0.1",
            f"{ONE}, with the names of hosts for HOST2", "-H a:8,HOST2:8 --port 29500 train.py --lr 0.1",
        ),
        (
            "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 127.0.0.1 --log_dir x -m json.tool",
            f"{ONE}, with the names of hosts for HOST1, HOST2", "-H HOST1:4,HOST2:4 --log_dir x -m json.tool",
        ),
        (
            "--worker_num=16 --local_worker_num=8 --node_rank=0 --master_addr=a train.py",
            f"{ONE}, with the names of hosts for HOST2", "-H a:8,HOST2:8 train.py",
        ),
        (
            "--nnodes=1:3 --nproc_per_node=2 --rdzv_endpoint=a:8880 --max-restarts=3 -- train.py -x",
            f"{ONE}, with the names of hosts for HOST2, HOST3",
            "-H a:2,HOST2:2,HOST3:2 --elastic --min-ranks 2 --port 8880 --max-restarts=3 -- train.py -x",
        ),
        ("--nproc-per-node 2 --master-addr far train.py", ONE, "-H far:2 train.py"),
    ],
)  # fmt: skip
def test_a_command_for_each_host_is_answered_by_one_for_all(asked, monkeypatch, line, said, command):
    monkeypatch.setattr("shardwright.launch.options.other_options.is_this_host", lambda name: False)
    assert asked(line) == f"{said}:\n  shardwright launch {command}"


def test_options_that_are_ours_under_other_names(asked):
    job = asked("-np 2 --tag-output --output-filename logs -wdir /w -H a,b -bind-to none -oversubscribe train.py")
    assert (job.log_dir.name, job.remote.tee, job.remote.wdir.everywhere, job.bind) == ("logs", "all", "/w", False)
    assert asked("--no-python --nproc-per-node 2 true").program.kind == "program"
    job = asked("--worker_num 2 --join False --bind_core True --tail_worker_log 1 train.py")
    assert (job.detach, job.bind, job.shown, job.ranks) == (True, True, {1}, 2)
    assert asked("--use_env --nproc_per_node 2 train.py").program.tells_local_rank is False
    assert asked("--nproc-per-node cpu train.py").ranks == own_slots()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 2 -np 4 train.py", "-n 2 and -np 4 differ; type one of them"),
        ("--np 2 --worker-num 3 train.py", "-np 2 and --worker-num 3 differ; type one of them"),
        ("--nproc_per_node many train.py", "--nproc-per-node many: expected a whole number from 1 on"),
        ("-H a,b --nnodes 3 train.py", "--nnodes 3: these are 3 hosts, and 2 are named: 2 hosts, 2 slots: a:1, b:1"),
        ("-H a,b --node-rank 1 train.py", "--node-rank 1: type the command once, on any host"),
        ("-H a,b --master-addr b train.py", "ranks meet at the first host, which is a; leave it out, or name b first"),
        ("-H a:4,b:4 --nproc-per-node 8 train.py", "--nproc-per-node 8, but a has 4 slots"),
        ("--map-by slot -np 2 train.py", "--map-by is mpirun's: ranks fill one host after the other; leave it out"),
        ("-pernode train.py", "--pernode is mpirun's: type --nproc-per-node 1"),
        ("-np 2 -display-allocation train.py", "--display-allocation is mpirun's: run.json has the hosts of"),
        ("-np 2 -v train.py", "-v is mpirun's: run.json has the hosts of the ranks; leave it out"),
        ("-np 2 --report-bindings train.py", "--report-bindings is mpirun's: type `taskset -p PID`, or leave it out"),
        ("-np 2 -gmca pml ob1 train.py", "--gmca is mpirun's: type --mca NAME VALUE with --via mpirun"),
        ("-t 3 train.py", "-t is torchrun's: every rank's output is in its files below log_output; leave it out, or"),
        ("-H a,b -mca btl ^openib train.py", "--mca btl ^openib is a setting of mpirun, which starts no ranks here: not"
         " needed, leave it out"),
        ("-n 2 -mca pml ob1 train.py", "--mca pml ob1 is a setting of mpirun; leave it out, or type --via mpirun too"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said_with_what_to_type(asked, line, message):
    assert message in asked(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nproc-per-node 4 --tee 3", "--tee 3 shows what rank 3 writes; for torchrun's --tee 3 type --tee all"),
        ("-n 4 --tee 3", "--tee 3 shows what rank 3 writes; for torchrun's --tee 3 type --tee all"),
        ("--nproc-per-node 4 --tee 0", "--tee 0 shows what rank 0 writes; for torchrun's --tee 0 type --tee none"),
        (
            "-np 4 -bind-to socket",
            "-bind-to socket is taken for core: each rank has its share of the cores of its host",
        ),
        ("-np 4 -bind-to none --tee 1", None),
        ("--nproc-per-node 4 --tee all", None),
    ],
)
def test_a_word_with_another_meaning_is_said_once(asked, line, said):
    assert asked(f"{line} train.py").ranks == 4
    ended = CliRunner().invoke(cli, ["launch", *line.split(), "train.py"])
    assert ended.output == (f"shardwright: {said}\n" if said else "")


def test_a_word_that_nobody_knows_is_named_whole(asked, tmp_path):
    ended = CliRunner().invoke(cli, ["launch", "-display-nothing", "train.py"])
    assert (ended.exit_code, "No such option: -display-nothing; those of other launchers" in ended.output) == (2, True)


def test_every_option_of_torchrun_is_known():
    ours = {name for parameter in cli.get_command(None, "launch").params for name in parameter.opts}
    typed = [name for action in get_args_parser()._actions for name in action.option_strings]
    assert not {name for name in typed if name.replace("_", "-") not in {*ours, "-h", "--help"}}


def test_the_page_has_every_option_of_the_table():
    page = (DOCS / "launching/other_launchers.md").read_text().replace("_", "-")
    served = [option for option in OTHER_OPTIONS if not option.refusal]
    assert not [option.names[0] for option in served if f"`{option.names[0]}`" not in page]


TAKES = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
open(f"seen.{os.environ['RANK']}", "w").write(f"{args.local_rank} {args.lr}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--no-preload"]], ids=["forked", "started anew"])
def test_a_script_that_takes_its_local_rank_as_an_argument_is_given_it(launching, words):
    launching.write("train.py", TAKES)
    assert launching.run(*words, "--nproc_per_node=2", "train.py", "--lr", "0.1").code == 0
    assert [(launching.folder / f"seen.{rank}").read_text() for rank in (0, 1)] == ["0 0.1", "1 0.1"]


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("p.add_argument('--local-rank')", (), ("--local-rank=3",)),
        ("@click.option('--local_rank')\ndef f(): ...", ("a",), ("--local_rank=3", "a")),
        ("p.add_argument('--local_rank')", ("--local_rank", "7"), ("--local_rank", "7")),
        ("x = '--local_rank'", (), ()),
        ("p.add_argument('--local_rank'", (), ()),
    ],
)
def test_the_spelling_is_that_of_the_script(tmp_path, text, arguments, expected):
    from shardwright.launch.host.program import Program

    script = tmp_path / "train.py"
    script.write_text(text)
    program = Program("script", (str(script), *arguments))
    assert program.for_rank({"LOCAL_RANK": "3"}).arguments == (str(script), *expected)
    without = Program("script", (str(script), *arguments), tells_local_rank=False)
    assert without.for_rank({"LOCAL_RANK": "3"}) == without


def test_nccl_without_gpus_is_refused_before_the_start(asked, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no0")
    assert asked("-n 2 --backend nccl train.py") == (
        "--backend nccl needs GPUs, of which ranks see none; type --backend gloo"
    )
    assert asked("-n 2 train.py").ranks == 2, "what is meant for NCCL is read by nobody"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert asked("--backend nccl train.py").startswith("NCCL_SOCKET_IFNAME=no0 names none of its devices, which are ")
