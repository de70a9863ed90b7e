"""trust on three hosts from nothing to all pairs, twice, and back."""

import os
import pty
import subprocess
import sys
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
