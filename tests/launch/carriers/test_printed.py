"""--print: what runs the job elsewhere is of the form that is published there, and has all that was typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ranks import given_port
from shardwright.cli import cli
from shardwright.errors import ShardwrightError, UsageError, WorldError
from shardwright.launch.hosts.environment import read_environment
from shardwright.launch.joblog.job import create_job_folder
from shardwright.launch.options.request import LaunchRequest

SCHEMA = json.loads((Path(__file__).with_name("pytorchjob.schema.json")).read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int}


def check(value, schema, where=""):
    """Unlike JSON schemas in general, fields that are not listed are wrong: Kubernetes would drop them in silence."""
    schema = SCHEMA["definitions"][schema["$ref"]] if "$ref" in schema else schema
    assert isinstance(value, TYPES[schema["type"]]), f"{where}: {value!r} is no {schema['type']}"
    assert value in schema.get("enum", [value]), f"{where}: {value!r}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            check(item, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), f"{where} lacks some of {schema['required']}"
        for name, inner in value.items():
            assert name in schema.get("properties", {}) or "others" in schema, f"{where}.{name} is not known"
            check(inner, schema.get("properties", {}).get(name) or schema["others"], f"{where}.{name}")


def pods_of(text):
    job = yaml.safe_load(text)
    check(job, SCHEMA, "job")
    return job, {kind: replica["template"]["spec"] for kind, replica in job["spec"]["pytorchReplicaSpecs"].items()}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Calls the command in this process: what it prints, and what it says beside that or is refused with."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    def run(*words):
        done = CliRunner().invoke(cli, ["launch", *words])
        refused = isinstance(done.exception, ShardwrightError)
        assert done.exit_code == 0 or refused or done.exit_code == 2, done.exception
        return done.stdout, str(done.exception) if refused else done.stderr

    return run


def test_a_job_on_hosts_is_printed_for_kubernetes(launched):
    words = ["-H", "a:8,b:8", "-x", "A=it's $(x): $$ü", "--wdir", "/work", "--port", "2222", "--grace", "30"]
    tried = ["--max-restarts", "3", "--job", "night-1", "--image", "registry/train:1", "--tee", "all"]
    text, said = launched(*words, *tried, "--print", "k8s", "train.py", "--lr", "0.1", "a b")
    assert said == "shardwright: left out, as this launcher alone has it: --tee\n"
    job, pods = pods_of(text)
    assert job["metadata"]["name"] == "night-1"
    assert (job["spec"]["nprocPerNode"], job["spec"]["runPolicy"]) == ("8", {"backoffLimit": 3})
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: (one["replicas"], one["restartPolicy"]) for kind, one in replicas.items()} == {
        "Master": (1, "OnFailure"), "Worker": (1, "OnFailure"),
    }  # fmt: skip
    assert pods["Master"] == pods["Worker"]
    assert pods["Master"]["terminationGracePeriodSeconds"] == 30
    [container] = pods["Master"]["containers"]
    assert container["command"] == [
        "python", "-m", "torch.distributed.run", "train.py", "--lr", "0.1", "a b"
    ]  # fmt: skip
    assert container["env"] == [{"name": "A", "value": "it's $$(x): $$$$ü"}]
    assert (container["image"], container["workingDir"]) == ("registry/train:1", "/work")
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert not Path("log_output").exists()


def test_a_job_on_one_host_is_one_pod_of_any_program(launched):
    text, said = launched("-n", "2", "--backend", "gloo", "--print", "k8s", "train", "--config", "9.yaml")
    assert "put the image in place of IMAGE, or type --image NAME" in said
    job, pods = pods_of(text)
    assert set(pods) == {"Master"}
    assert job["metadata"]["name"] == "train"
    [container] = pods["Master"]["containers"]
    assert container["command"][3:] == ["-m", "shardwright", "train", "--config", "9.yaml"]
    assert "resources" not in container
    assert container["env"] == [{"name": "SHARDWRIGHT_BACKEND", "value": "gloo"}]


REFUSED = [
    (["--print", "k8s", "train.py"], "--print k8s: how many ranks? type -n 8 for one pod, or -H a:8,b:8 for two"),
    (["--print", "k8s", "-H", "a:2,b:1", "train.py"], "are alike, but those of a:2,b:1 have 2 and 1 ranks"),
    (["--print", "k8s", "-n", "2", "--job", "My_Job", "train.py"], "cannot name a PyTorchJob; type --job my-job"),
    (["--print", "k8s", "-n", "2", "--grace", "nan", "train.py"], "--grace nan is no time; type the seconds"),
    (["--print", "k8s", "-n", "2", "--grace", "inf", "train.py"], "--grace inf: the pods of a PyTorchJob end"),
    (["--print", "k8s", "-n", "2", "--port", "70000", "train.py"], "--port 70000 is no TCP port"),
    (["--print", "k8s", "-n", "2", "--backend", "mpi", "train.py"], "--backend mpi needs ranks that mpirun starts"),
    (["--print", "k8s", "-n", "2", "--stage", "x", "train.py"], "--stage: a PyTorchJob has nothing like it"),
    (["--print", "k8s", "-H", "a:1,b:1", "--wdir", "a=/w", "train.py"], "--wdir a=/w: a PyTorchJob has one for all"),
    (["--print", "k8s", "-n", "2", "--via", "ssh", "train.py"], "--print k8s and --via ssh are two ways to start"),
    (["--print", "mpirun", "-H", "me@a:1,b:1", "train.py"], "me@: mpirun logs in as ~/.ssh/config says"),
    (["--print", "mpirun", "-n", "2", "--elastic", "--max-restarts", "1", "no.py"], "the script no.py does not exist"),
    (["--print", "slurm", "--image", "x", "train.py"], "--image x is for --print k8s; leave it out"),
    (["--print", "slurm", "-n", "2", "--grace", "nan", "train.py"], "--grace nan is no time; type the seconds"),
    (["--print", "slurm", "-n", "2", "--grace", "inf", "train.py"], "--grace inf: Slurm tells a job at most 65535 s"),
    (["--image", "x", "train.py"], "--image is for --print k8s"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_cannot_be_printed_is_refused(launched, words, message):
    text, said = launched(*words)
    assert text == ""
    assert message in said


def test_a_script_for_sbatch_has_what_was_typed(launched):
    printed, _ = launched("-n", "4", "--print=slurm", "--tee", "all", "train.py", "--print", "x")
    assert printed == launched("-n", "4", "--print-sbatch", "--tee", "all", "train.py", "--print", "x")[0]
    assert printed.endswith("launch --via srun -n 4 --tee all train.py --print x\n")
    subprocess.run(["bash", "-n"], input=printed, text=True, check=True)


def test_torchruns_commands_are_those_of_via(launched):
    words = ["-H", "a:2,b:2", "train.py"]
    assert launched("--print", "torchrun", *words) == launched("--via", "torchrun", *words)


def test_the_hosts_of_mpirun_and_its_variables_are_printed(launched):
    words = ["-H", "a:2,b:1", "-x", "A=x y", "--port", "2222", "--wdir", "/w", "--python", "/p/python"]
    text, _ = launched(*words, "--print", "mpirun", "train.py", "--lr", "1 2")
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    assert text.startswith("#!/bin/sh\ncd /w || exit\nexec mpirun ")
    assert " --host a:2,b:1 -n 3 --bind-to none " in text
    assert "-x 'A=x y' -x MASTER_ADDR=a -x MASTER_PORT=2222 " in text
    assert text.endswith("/p/python train.py --lr '1 2'\n")


SUM = """
    import torch, torch.distributed as dist
    import shardwright as sw
    dist.init_process_group("gloo", init_method="env://")
    world, total = sw.init(), torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    open(f"seen.{world.rank}", "w").write(f"{world.local_rank} of {world.local_size}: {total.item():g}")
"""


@pytest.mark.slow
def test_what_is_printed_for_mpirun_runs_scripts_of_torch(launching):
    text = launching.run("-n", "2", "--print", "mpirun", launching.write("train.py", SUM)).stdout
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if subprocess.run(["sh", "-c", "command -v mpirun"], env=environment, capture_output=True).returncode:
        pytest.skip("no mpirun here")
    done = subprocess.run(["sh"], input=text, text=True, env=environment, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [(launching.folder / f"seen.{rank}").read_text() for rank in (0, 1)] == ["0 of 2: 3", "1 of 2: 3"]


@pytest.mark.slow
def test_what_is_printed_for_kubernetes_runs_with_the_variables_of_its_operator(launching):
    """Two pods of two ranks each: the command of the container, with what the training operator 1.9 sets."""
    script = launching.write("train.py", SUM)
    text = launching.run("-H", "a:2,b:2", "--python", sys.executable, "--print", "k8s", script).stdout
    [container] = pods_of(text)[1]["Master"]["containers"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(given_port())}
    pods = []
    for pod in ("0", "1"):
        of_pod = {"RANK": pod, "WORLD_SIZE": "4", "PET_NODE_RANK": pod, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}
        variables = os.environ | meeting | {f"PET_{name}": value for name, value in meeting.items()} | of_pod
        pods.append(subprocess.Popen(container["command"], cwd=launching.folder, env=variables))
    assert [pod.wait(100) for pod in pods] == [0, 0]
    assert [(launching.folder / f"seen.{rank}").read_text()[-2:] for rank in range(4)] == ["10"] * 4


NASTY = [
    "a\ntouch evil\n.py",
    "a\n#SBATCH --x.py",
    "it's $(touch evil) `touch evil` \\ \".py",
    "a\u2028- b\x85c: d.py",
    " #.py",
]


def words_of(line):
    """The arguments that the program of a printed shell command gets, by that shell."""
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True, cwd="/").stdout
    return said.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("to", "nasty"), [("torchrun", NASTY[2]), ("mpirun", NASTY[2]), *(("slurm", nasty) for nasty in NASTY)]
)
def test_whatever_is_typed_is_quoted_in_a_script(launched, to, nasty, tmp_path):
    """File names, arguments and values of variables reach the program as they are, and nothing else is run."""
    Path(nasty).touch()
    shown = tmp_path / "shows"
    shown.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    shown.chmod(0o755)
    text, _ = launched("-n", "2", "-x", f"A={nasty}", "--print", to, nasty, nasty)
    command = text[text.index("exec ") :] if to != "torchrun" else text.partition(" && ")[2]
    start = {"slurm": sys.executable, "mpirun": "mpirun", "torchrun": "env"}[to]
    assert start in command
    words = words_of(command.replace(start, str(shown), 1))
    assert words[-2:] == [nasty, nasty]
    assert f"A={nasty}" in words
    before = text[: text.index("\ncd ")] if to == "slurm" else ""
    assert all(line.startswith("#") for line in before.splitlines())
    assert before.count("--job-name=") == (to == "slurm")
    assert not Path("evil").exists()


@pytest.mark.parametrize("nasty", NASTY)
def test_whatever_is_typed_is_quoted_in_a_manifest(launched, nasty):
    text, _ = launched("-n", "2", "-x", f"A={nasty}", "--image", nasty, "--print", "k8s", nasty, nasty)
    _, pods = pods_of(text)
    [container] = pods["Master"]["containers"]
    wanted = nasty.replace("$", "$$")
    assert container["command"][-2:] == [wanted, wanted]
    assert (container["env"], container["image"]) == ([{"name": "A", "value": wanted}], nasty)


def test_what_is_not_utf8_is_printed_as_it_is_or_refused(launched):
    name = os.fsdecode(b"a\xff.py")
    text, said = launched("-n", "2", "--print", "k8s", name)
    assert (text, "is not UTF-8, which a manifest has to be" in said) == ("", True)
    printed = subprocess.run(
        [sys.executable, "-m", "shardwright", "launch", "-n", "2", "--print", "slurm", name],
        capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
    ).stdout  # fmt: skip
    assert b"'a\xff.py'" in printed


def sbatch_words(line):
    """The arguments in a line as sbatch reads them: a backslash quotes the next letter, also within quotes."""
    words, quote, letters = [""], "", iter(line)
    for letter in letters:
        if letter == "\\":
            words[-1] += next(letters)
        elif quote:
            words[-1], quote = (words[-1], "") if letter == quote else (words[-1] + letter, quote)
        elif letter in "'\"":
            quote = letter
        elif letter in " #":
            words += [""]
        else:
            words[-1] += letter
    return words


@pytest.mark.parametrize("job", ["night-1", "a b", "it's", 'say "a"', "a\\b", "#1"])
def test_the_name_of_a_job_is_one_word_for_sbatch(launched, job):
    text, _ = launched("-n", "2", "--print", "slurm", "--job", job, "train.py")
    line = text.splitlines()[2].removeprefix("#SBATCH ")
    assert sbatch_words(line) == [f"--job-name={job}"]


NO_NAMES = ["a\ntouch evil", "\x1b[2J", "a\x00b", "a\u2028b", "", "..", ".a", "a/b", "a" * 256]


@pytest.mark.parametrize("job", NO_NAMES, ids=ascii)
def test_what_cannot_name_a_job_is_refused_on_every_way_in(launched, job, tmp_path):
    for to in ("k8s", "slurm", "torchrun", "mpirun", None):
        text, said = launched("-n", "2", "--job", job, *(["--print", to] if to else []), "train.py")
        assert text == ""
        assert "--job" in said
        assert "\n" not in said.rstrip()
    with pytest.raises(UsageError, match="--job"):
        LaunchRequest(arguments=("train.py",), job=job)
    with pytest.raises(UsageError, match="--job"):
        create_job_folder(tmp_path / "logs", job)
    assert not Path("log_output").exists()
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("job", ["a\ntouch evil", "\x1b[2J"])
def test_a_job_named_by_a_variable_has_no_control_characters(job):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": job}
    with pytest.raises(WorldError, match=r"the job of torchrun .* has the control character"):
        read_environment(place)
