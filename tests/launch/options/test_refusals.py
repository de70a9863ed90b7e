"""What cannot be served is said before anything starts, and leaves no folder."""

import socket
import sys
from pathlib import Path

import pytest

from shardwright.errors import UsageError
from shardwright.launch.host.program import Program, check_program
from shardwright.launch.hosts import port
from shardwright.launch.hosts.port import lease_port
from shardwright.launch.options import launch_options, variables

REFUSED = [
    ([], "nothing to launch; type one of"),
    (["-n", "0", "train.py"], "-n 0 is no number of ranks; type a whole number from 1 on"),
    (["-n", "x", "train.py"], "-n x is no number of ranks"),
    (["-n", "-2", "train.py"], "-n -2 is no number of ranks"),
    (["tarin.py"], "the script tarin.py does not exist (looked in {folder}); near it: train.py"),
    (
        ["tarin"],
        "the script tarin does not exist (looked in {folder}), and no program of that name is on the PATH; near",
    ),
    (["trian"], "did you mean `train`, a command of shardwright?"),
    (["-m", "nothere.at.all"], "no module named nothere in this directory"),
    (["-m", "train.py"], "-m takes a module's name, not a file; type train.py without -m, or -m train"),
    (["--", "nothere"], "no program nothere on the PATH"),
    (["--", "./train.py"], "./train.py is not a program that may be run; type `chmod +x ./train.py`"),
    (["-n", "2", "--tee", "2", "train.py"], "--tee 2: the 2 ranks of this job are 0 to 1"),
    (["--tee", "some", "train.py"], "--tee some names no ranks; type all, none, or ranks as 0,3 or 0-3"),
    (["--job", "a/b", "train.py"], "--job 'a/b' cannot name a folder"),
    (["--job", "..", "train.py"], "--job '..' cannot name a folder"),
    (["--job", "taken", "train.py"], "a job named taken has its logs in log_output/taken; type another --job name"),
    (["--log-dir", "train.py", "train.py"], "the logs cannot be written to train.py: "),
    (["--log-dir", "/proc/logs", "train.py"], "type --log-dir DIR with a folder that may be written"),
    (["--port", "0", "train.py"], "--port 0 is no TCP port; type one from 1 to 65535"),
    (["--devices", "4,4", "train.py"], "--devices 4,4 names no GPUs; type their numbers once each, as 4,5"),
    (["--devices", "1", "train.py"], "--devices 1: CUDA_VISIBLE_DEVICES=4,5 leaves no device 1"),
    (["-x", "A-B=1", "train.py"], "-x A-B=1 names no variable; type -x NAME=value"),
    (["-x", "NOT_SET_HERE", "train.py"], "NOT_SET_HERE is not set here; type -x NOT_SET_HERE=value"),
    (["-x", "MASTER_PORT=1", "train.py"], "sets MASTER_PORT for each rank itself; type --port"),
    (["--grace", "-1", "train.py"], "--grace -1.0 is no time"),
    (["--save-graphs", "graphs:3", "train.py"], "save_graphs has level 3; 1 dumps the strategies, 2 the program of"),
    (["--save-graphs", ":1", "train.py"], "names no folder; type --save-graphs DIR, or DIR:1 for the strategies"),
    (["-x", "GLOO_SOCKET_IFNAME=no0", "train.py"], "GLOO_SOCKET_IFNAME=no0 names none of its devices, which are "),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(words) or "nothing" for words, _ in REFUSED])
def test_refusal(refused, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "train.py").write_text("print('must not run')")
    (tmp_path / "log_output/taken").mkdir(parents=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert message.format(folder=tmp_path) in refused(*arguments)
    assert [path.name for path in (tmp_path / "log_output").iterdir()] == ["taken"]


def test_a_bare_name_is_a_file_here_or_our_command_or_a_program_on_the_path(tmp_path, monkeypatch):
    here, programs = tmp_path / "here", tmp_path / "bin"
    for folder in (here, programs, here / "train"):
        folder.mkdir()
    python, elsewhere = Path(sys.executable), programs / "python3"
    elsewhere.symlink_to("/bin/true")
    lines = {
        "installed": f"#!{python}", "linked": f"#!{python.with_name('python3')}", "found": "#!/usr/bin/env python3",
        "others": f"#!{elsewhere}", "shell": "#!/bin/sh", "isolated": f"#!{python} -I", "both": f"#!{python}",
    }  # fmt: skip
    for name, line in lines.items():
        (programs / name).write_text(line + "\n")
        (programs / name).chmod(0o755)
    (here / "both").write_text("print('here')")
    monkeypatch.chdir(here)

    def kind(name, path=str(programs)):
        program = check_program("script", [name, "-n", "1"], {"PATH": path})
        assert program.arguments[-2:] == ("-n", "1")
        return program.kind, program.arguments[:-2]

    assert kind("installed") == ("script", (str(programs / "installed"),))
    assert kind("linked") == ("script", (str(programs / "linked"),))
    assert kind("found") == ("program", (str(programs / "found"),))
    assert kind("found", f"{python.parent}:{programs}") == ("script", (str(programs / "found"),))
    assert [kind(name) for name in ("others", "shell", "isolated")] == [
        ("program", (str(programs / name),)) for name in ("others", "shell", "isolated")
    ]
    assert kind("both") == ("script", ("both",))
    assert kind("shardwright") == ("script", (str(python.with_name("shardwright")),))  # beside python, not on the PATH
    assert kind("train") == ("module", ("shardwright", "train"))
    (here / "train" / "__main__.py").write_text("")
    assert kind("train") == ("script", ("train",))
    with pytest.raises(UsageError, match="no program nothere on the PATH"):
        check_program("program", ["nothere"], {"PATH": str(programs)})
    assert check_program("program", ["both"], {"PATH": str(programs)}) == Program("program", ("both",))


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "-m pip install torch`"),
        ("raise ImportError('libcudart.so.12: cannot open')", "`pip install torch` may mend it\nTraceback"),
        ("import os; os.kill(os.getpid(), 11)", "the supervisor of the ranks was killed by SIGSEGV while it imported"),
    ],
)
def test_torch_that_cannot_be_imported_is_told_and_what_never_ran_is_not_restarted(launching, torch, message):
    launching.write("torch.py", torch)
    script = launching.write("train.py", "print('must not run')")
    ended = launching.run("-n", "1", "--max-restarts", "3", script, env={"PYTHONPATH": str(launching.folder)})
    assert message in ended.stderr
    assert "restart" not in ended.stderr
    assert ended.code == 2
    assert not (launching.folder / "log_output").exists()


def test_a_port_that_is_taken_is_refused_where_given(refused, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        said = refused("-n", "1", "--port", str(taken), "--", "true")
    assert f"--port {taken} cannot be had: Address already in use" in said
    assert not (tmp_path / "log_output").exists()


def test_a_port_that_is_taken_is_passed_over_where_chosen(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(port, "_candidates", lambda: range(taken, taken + 10))
        for _ in range(20):
            lease = lease_port(None)
            assert lease.port != taken
            lease.close()


def test_two_jobs_at_once_never_share_a_port(refused, monkeypatch):
    leases = [lease_port(None) for _ in range(4)]
    ports = [lease.port for lease in leases]
    assert len(set(ports)) == 4
    monkeypatch.setattr(port, "_candidates", lambda: ports)
    with pytest.raises(Exception, match="no free TCP port"):
        lease_port(None)
    assert f"--port {ports[1]} cannot be had" in refused("-n", "1", "--port", str(ports[1]), "--", "true")
    leases[0].close()
    again = lease_port(None)
    assert again.port == leases[0].port
    for lease in [*leases[1:], again]:
        lease.close()


@pytest.mark.slow
def test_two_jobs_started_together_have_their_own_folders(launching):
    together = "touch up.$$; until [ $(ls -d up.* | wc -l) = 4 ]; do sleep 0.05; done; echo $MASTER_PORT"
    launchers = [launching.start("-n", "1", "--", "sh", "-c", together) for _ in range(4)]
    ended = [launching.finish(launcher) for launcher in launchers]
    assert [end.code for end in ended] == [0] * 4
    assert len({end.stdout for end in ended}) == 4
    assert sorted(path.name for path in (launching.folder / "log_output").iterdir()) == ["1", "2", "3", "4"]


def test_the_number_of_ranks_follows_the_visible_gpus():
    assert launch_options.read_ranks(None, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == 3
    assert launch_options.read_ranks("auto", {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert launch_options.read_ranks("5", {"CUDA_VISIBLE_DEVICES": "4"}) == 5


def test_variables_by_prefix():
    assert variables.read_variables(["NCCL_*"], {"NCCL_DEBUG": "INFO", "HOME": "/"}) == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(UsageError, match="names no variable"):
        variables.read_variables(["*"[:0]], {})
