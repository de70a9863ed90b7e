"""What a person waits for is shown once, where somebody looks, and is gone when it is done."""

import io
import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.common.step_lines import Steps
from shardwright.data.digits import write_digits
from shardwright.launch import progress_notes
from shardwright.launch.progress_notes import TaskDisplay, counted, waiting_for
from shardwright.training.callbacks import ProgressBar


def wait_until(holds):
    until_s = time.monotonic() + 60
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.005)
    assert holds()


def test_the_innermost_that_takes_long_is_shown_until_it_is_done():
    said = []
    wait = TaskDisplay(lambda: said.append, after_s=0.01)
    with wait("planning") as work:
        wait_until(lambda: any(line.startswith("planning: ") for line in said))
        with wait("pricing") as inner:
            inner.did(2, 5)
            wait_until(lambda: any(line.startswith("pricing: 2 of 5, ") for line in said))
            thread = threading.Thread(target=lambda: wait("beside").__enter__())
            thread.start()
            thread.join()
        work.stage("writing")
        wait_until(lambda: any(line.startswith("writing: ") for line in said))
    assert said[-1] == ""
    assert not any(line.startswith("beside") for line in said)


def test_what_is_soon_done_is_not_shown():
    said = []
    with TaskDisplay(lambda: said.append, after_s=60.0)("planning"):
        pass
    assert said == []


def read_all(screen, count):
    """A terminal gives what it has, which may come piece by piece."""
    found = b""
    while len(found) < count:
        found += screen.read(count + 1 - len(found))
    return found


def test_rank_0_says_it_on_its_terminal_and_others_do_not(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stderr, os.fdopen(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr("sys.stderr", stderr)
        show = progress_notes._find_show()
        show("saving: 3 s\x1b[2J")
        assert read_all(screen, 19) == b"\r\x1b[Ksaving: 3 s?[2J"
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        assert progress_notes._find_show() is None
        monkeypatch.setenv("RANK", "0")
        assert progress_notes._find_show() is not None


def test_a_log_has_nothing_and_a_launcher_is_told(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert progress_notes._find_show() is None
    lines = []
    monkeypatch.setattr(progress_notes, "own_steps", lambda: Steps(lines.append))
    progress_notes._find_show()("saving: 3 s")
    [line] = lines
    assert line.endswith(b'"doing":"saving: 3 s"}\n')


@contextmanager
def named():
    """The names of all that is waited for inside."""
    found = []

    class Noted(progress_notes.Task):
        def __init__(self, name):
            found.append(name)
            super().__init__(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(progress_notes, "Task", Noted)
        yield found


def _loss(model, batch):
    return model(batch[0]).square().mean()


def waited_for(folder):
    """What each rank waits for that trains, saves and loads."""
    sw.init()
    batch = (torch.randn(4, 3),)
    with named() as found:
        parallel = sw.parallelize(nn.Linear(3, 2), _loss, batch, batch="global")
        sw.checkpoint.save(folder, parallel, step=7)
        sw.checkpoint.load(folder, parallel)
    return found


def test_capturing_planning_saving_and_loading_are_said(tmp_path):
    folder = str(tmp_path / "run")
    both = ["placing the parameters of Linear", "saving step-00000007", f"loading {folder}"]
    assert run_ranks(2, waited_for, folder) == [["capturing Linear", "planning", *both], both]


@pytest.mark.slow
def test_making_data_is_said(tmp_path):
    with named() as found:
        write_digits(tmp_path, "mnist")
    assert found == ["making the digits"]


def test_what_is_counted_is_said():
    with named() as found:
        assert list(counted("drawing", range(3))) == [0, 1, 2]
    assert found == ["drawing"]


def test_a_bar_shows_it_in_its_own_line(monkeypatch):
    bar, run = ProgressBar(3), SimpleNamespace(world=SimpleNamespace(rank=0), epoch=1, step=0)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("shardwright.training.callbacks.Progress", Bars)
    bar.on_fit_begin(run)
    bar.on_epoch_begin(run)
    assert waiting_for.instead is not None
    waiting_for.instead("saving: 3 s")
    waiting_for.instead("")
    assert Bars.said == ["epoch 1, saving: 3 s", "epoch 1"]
    bar.close(run)
    assert waiting_for.instead is None


class Bars:
    """The bars of rich, without a terminal."""

    said: list[str] = []  # noqa: RUF012
    tasks = (0,)

    def __init__(self, transient):
        pass

    def start(self):
        pass

    def stop(self):
        pass

    def add_task(self, name, **_):
        return 0

    def update(self, _, description):
        self.said.append(description)
