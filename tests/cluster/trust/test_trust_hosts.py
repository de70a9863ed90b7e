"""trust on three hosts from nothing to all pairs, twice, and back."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hosts import host_network

pytestmark = pytest.mark.slow
COMMAND = str(Path(sys.executable).with_name("shardwright"))
NAMES = ("host1", "host2", "host3")


@pytest.fixture
def network(tmp_path):
    with host_network(3, tmp_path, homes=True) as network:
        yield network


def hosts(network, *words, names=NAMES, **streams):
    return subprocess.run(
        [COMMAND, "hosts", words[0], "-H", ",".join(names), *words[1:]],
        env=os.environ | {"PATH": network.path},
        capture_output=True, text=True, timeout=200, **({"stdin": subprocess.DEVNULL} | streams),
    )  # fmt: skip


def homes(network):
    """What is in the ~/.ssh of each host."""
    folders = [network.folder / f"{name}_home" / ".ssh" for name in NAMES]
    paths = [path for folder in folders for path in (folder, *folder.glob("*")) if path.exists()]
    return {str(path): (path.is_file() and path.read_bytes(), path.stat().st_mode) for path in paths}


def test_from_nothing_to_all_pairs_and_back(network):
    own = network.folder / "host3_home" / ".ssh"
    own.mkdir(mode=0o700)
    (own / "authorized_keys").write_bytes(b"# of an admin")
    (own / "known_hosts").write_bytes(b"nobody ssh-rsa AAAA\n")
    nothing = homes(network)

    before = hosts(network, "check")
    assert before.returncode == 1
    assert "host1 → host2: Host key verification failed." in before.stdout
    assert "0 of 6 ways need no password" in before.stdout

    shown = hosts(network, "trust", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "host1 (root):\n  make a key without a passphrase: ~/.ssh/id_ed25519\n  let in host2, host3" in shown.stdout
    unasked = hosts(network, "trust")
    assert (unasked.returncode, homes(network)) == (1, nothing)
    assert "nobody is here to ask; type --yes" in unasked.stderr

    done = hosts(network, "trust", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 ways need no password" in done.stdout
    trusted = homes(network)
    assert len(trusted) == 3 * 6  # the folder, two parts of a key, authorized_keys, known_hosts, our record
    again = hosts(network, "trust")
    assert again.returncode == 0, again.stderr
    assert "host2 (root): nothing to do" in again.stdout
    assert homes(network) == trusted
    assert hosts(network, "check").returncode == 0

    undone = hosts(network, "trust", "--undo", "--yes")
    assert undone.returncode == 0, undone.stderr
    assert homes(network) == nothing


def test_a_person_is_asked(network):
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")
    said = hosts(network, "trust", stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert (said.returncode, "Go on? [y/N]" in said.stdout) == (1, True), said.stderr
    assert not homes(network)


def test_a_host_whose_key_nobody_knows_is_refused(network):
    known = network.folder / "known_hosts"
    known.write_text("".join(line for line in known.read_text().splitlines(True) if ".3 " not in line))
    refused = hosts(network, "trust", "--yes")
    assert refused.returncode == 2
    assert (
        "1 of 3 hosts cannot be used, and nothing was changed:\n  host3: its host key is not known here"
        in refused.stderr
    )
    assert not homes(network)


PASSWORD = "correct-horse-7"


def typed_at_a_terminal(words, answers, timeout_s=100):
    """Run a command that has a terminal, at which a person answers: each question is ended by its key's words."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(words[0], words, os.environ)
    said, asked, until_s = b"", 0, time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # it has ended
                break
            said += data
            if said[asked:].rstrip().endswith(tuple(answers)):
                [answer] = [answer for question, answer in answers.items() if said.rstrip().endswith(question)]
                os.write(terminal, answer)
                asked = len(said)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode()


def test_hosts_that_ask_for_a_password_are_asked_once_each_and_none_is_kept(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the hash of a password")
    with host_network(2, tmp_path, homes=True, password=PASSWORD) as network:
        monkeypatch.setenv("PATH", network.path)
        answers = {b"password:": PASSWORD.encode() + b"\n", b"Go on? [y/N]:": b"y\n"}
        code, said = typed_at_a_terminal([COMMAND, "hosts", "trust", "-H", "host1,host2"], answers)
        assert (code, "2 of 2 ways need no password" in said) == (0, True), said
        assert said.count("password:") == 2, said
        still = hosts(network, "check", names=NAMES[:2])
        assert (still.returncode, "Permission denied (publickey,password)" in still.stderr) == (2, True), (
            "not from here"
        )
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and "_home" in str(path)):
        assert PASSWORD.encode() not in path.read_bytes(), path
