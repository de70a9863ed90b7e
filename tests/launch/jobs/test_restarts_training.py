"""Training that is disturbed: ranks killed, hosts lost. It ends with the losses of a run that nobody disturbs."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from hosts import host_network
from launching import Launching, wait_until
from many_hosts import ManyHosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOSS = re.compile(r"epoch: (\d+) step: (\d+), loss is (\S+)")
LEASE_S = 2.0


def train(folder, epochs, *more):
    """The quick start in float64, with a checkpoint after every fifth step: 4 steps an epoch."""
    settings = [
        "system.dtype=float64", f"train.epochs={epochs}", "train.checkpoint_every_steps=5", "train.resume=auto",
        "train.checkpoint_every_epochs=null", f"train.output_dir={folder}", "train.log_every=1",
        "train.progress_bar=false", "eval.enabled=false", *more,
    ]  # fmt: skip
    return ["train", "--config", "quickstart", *(word for setting in settings for word in ("-o", setting))]


def losses(text):
    """Of each epoch and step. A step that was done again, after a restart, has the loss that it had at first."""
    found = {}
    for epoch, step, loss in LOSS.findall(text):
        assert found.setdefault((int(epoch), int(step)), loss) == loss
    return {step: float(loss) for step, loss in found.items()}


def final_loss(folder):
    """Of the last step, with all digits; the console has those of float32."""
    last = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    info = json.loads((last / "checkpoint.json").read_text())["info"]
    return info["step"], info["metrics"]["train_loss"]


def assert_same_losses(job, name, undisturbed):
    (step, loss), (last, expected) = (final_loss(job.folder / folder) for folder in (name, undisturbed))
    assert step == last
    assert loss == pytest.approx(expected, rel=0, abs=1e-10)
    printed, all_losses = losses(job.log(0, job=name)), losses(job.log(0, job=undisturbed))
    assert len(all_losses) == last
    assert printed == pytest.approx(all_losses, rel=0, abs=1e-6)


def newest(folder):
    """The step of the newest checkpoint, 0 without any."""
    steps = [
        int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdigit()
    ]
    return max(steps, default=0)


def ranks_of(job):
    """The forked ranks: supervisors below a supervisor."""
    supervisors = {pid for pid, command in job.survivors().items() if "launch.supervisor" in command}
    return [pid for pid in supervisors if parent(pid) in supervisors]


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def kill_ranks(job, launcher, folder, kills, ranks):
    """``kills`` times, a while after the job has got further than it had been, one of its ranks at random."""
    chance = random.Random(0)
    past = set()

    def living():
        assert launcher.poll() is None, launcher.stderr.read()
        found = set(ranks_of(job)) - past
        return len(found) == ranks and found

    for _ in range(kills):
        started = wait_until(living, 90, "the ranks have started")
        before = newest(folder)  # now that none of the last attempt can save any more
        wait_until(lambda before=before: living() and newest(folder) > before, 90, "they train")
        time.sleep(chance.uniform(0, 0.1))
        os.kill(chance.choice(sorted(started)), signal.SIGKILL)
        past |= started


def disturbed(job, where, epochs, kills, ranks, more=()):
    job.run(*where, "--job", "calm", *train("calm", epochs), timeout_s=600)
    words = [*where, "--job", "wild", "--max-restarts", str(kills), "--grace", "2", *train("wild", epochs, *more)]
    launcher = job.start(*words)
    kill_ranks(job, launcher, job.folder / "wild", kills, ranks)
    ended = job.finish(launcher, 900)
    assert ended.code == 0, ended.stderr
    report = job.told("run.json", "wild")
    assert (report["status"], report["restarts"]) == ("succeeded", kills)
    causes = [attempt["cause"] for attempt in report["attempts"]]
    # Within half a minute of an out-of-memory kill anywhere on this machine, ours may be taken for one.
    assert all(re.search(r"failed first: killed by .*SIGKILL", cause) for cause in causes[:-1]), causes
    assert causes[-1] is None
    assert_same_losses(job, "wild", "calm")


def test_twenty_kills_of_a_random_rank_change_no_loss(tmp_path):
    job = Launching(tmp_path)
    try:
        disturbed(job, ["-n", "2"], epochs=200, kills=20, ranks=2)
        job.assert_none_left()
    finally:
        job.close()


def test_kills_of_ranks_of_stages_change_no_loss(tmp_path):
    """Two stages of a pipeline, killed three times, have the losses of two ranks without stages."""
    job = Launching(tmp_path)
    try:
        more = ["parallel.mesh=pp=2", "parallel.mode=data", "parallel.save_graphs=graphs"]
        disturbed(job, ["-n", "2"], epochs=60, kills=3, ranks=2, more=more)
        assert "scheduled.send(" in (job.folder / "graphs" / "rank_0" / "program.py").read_text()
        job.assert_none_left()
    finally:
        job.close()


def test_kills_on_two_hosts_change_no_loss(tmp_path):
    (tmp_path / "network").mkdir()
    with host_network(2, tmp_path / "network") as network:
        job = ManyHosts(tmp_path, network)
        try:
            disturbed(job, ["-H", "host1:1,host2:1"], epochs=40, kills=3, ranks=2)
            job.assert_none_left()
        finally:
            job.close()


@pytest.mark.parametrize("elastic", [True, False])
def test_half_the_hosts_die(tmp_path, elastic):
    """One altogether, of the other the line."""
    epochs = 60
    (tmp_path / "network").mkdir()
    with host_network(4, tmp_path / "network") as network:
        job = ManyHosts(tmp_path, network)
        try:
            where = ["-H", "host1:1,host2:1,host3:1,host4:1", "--lease", str(LEASE_S), "--connect-timeout", "3"]
            words = ["--max-restarts", "5", *(["--elastic", "--min-ranks", "2"] if elastic else [])]
            launcher = job.start(*where, *words, "--grace", "2", "--job", "wild", *train("wild", epochs))
            wait_until(lambda: newest(job.folder / "wild") > 10, 90, "it trains")
            os.kill(network.hosts["host1"].pid, signal.SIGKILL)
            network.cut("host3")
            ended = job.finish(launcher, 900)
            network.mend("host3")
            report = job.told("run.json", "wild")
            if elastic:
                assert ended.code == 0, ended.stderr
                assert report["restarts"] in (1, 2)
                assert [host["name"] for host in report["hosts"]] == ["host2", "host4"]
                assert "when the lease of the lost host has ended what may still run there" in ended.stderr
                assert "the job goes on with 2 ranks on host2, host4, without\n" in ended.stderr
                assert re.search(r"\n +host1: no sshd answers there", ended.stderr)
                assert re.search(r"\n +host3: it cannot be reached", ended.stderr)
                job.run("-n", "1", "--job", "calm", *train("calm", epochs), timeout_s=600)
                assert_same_losses(job, "wild", "calm")
            else:
                assert ended.code == 1
                assert "the job cannot be restarted: 2 of 4 hosts cannot be used:" in ended.stderr
                assert re.search(r"\n +host1: no sshd answers there", ended.stderr)
                assert re.search(r"\n +host3: it cannot be reached", ended.stderr)
                assert "with --elastic the job would go on without hosts that are lost" in ended.stderr
                assert (report["status"], report["exit_code"]) == ("failed", 1)
            job.assert_none_left(LEASE_S + 5)
        finally:
            job.close()
