"""Hosts behind a program named ssh that is none: how they are looked at, and what is said of those that are silent."""

import json
import sys

import pytest
from click.testing import CliRunner

from shardwright.cli import cli
from shardwright.cluster.doctor import probe
from shardwright.cluster.programs import connection

# The host is the word before the last one; the last one is the command, which `good` runs here after a greeting.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case "$1" in
    good) echo Welcome to this host; exec sh -c "$2";;
    denied) echo 'alice@denied: Permission denied (publickey).' >&2; exit 255;;
    garbage) exec sh -c "$2" | sed -u 's/^{.*/[7]/';;
    deaf) exec sleep 60 >&- 2>&-;;
    *) exec sleep 60;;
esac
"""


def with_own_time(init):
    """Who answers at all has a minute, who does not 3 s."""

    def probe(self, host, *arguments):
        init(self, host, *arguments)
        self.timeout_s = 3.0 if host.name in ("deaf", "still") else 60.0

    return probe


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(connection.Probe, "__init__", with_own_time(connection.Probe.__init__))


@pytest.mark.slow
def test_each_host_answers_or_is_told(ssh):
    words = ["doctor", "-H", "good,denied,garbage,deaf,still", "--connect-timeout", "1", "--json"]
    done = CliRunner().invoke(cli, [*words, "--python", sys.executable])
    assert done.exit_code == 2, done.output
    findings = json.loads(done.output)["findings"]
    silent = {row["hosts"][0]: row["finding"] for row in findings if row["check"] == "reached"}
    assert sorted(silent) == ["deaf", "denied", "garbage", "still"]
    assert silent["denied"].startswith("ssh may not log in (alice@denied: Permission denied (publickey).)")
    assert silent["garbage"] == "it answered something that is no answer"
    assert silent["still"].startswith("it did not answer within 3 s")
    [python] = [row for row in findings if row["check"] == "Python"]
    assert (python["hosts"], python["severity"]) == (["good"], "ok")


def test_a_command_that_hangs_is_left():
    ran = probe._run(("sleep", "600"), 0.2)
    assert ran == {"code": None, "out": "", "err": "it did not end within 0.2 s"}
    assert probe._run(("no-such-program",)) is None
