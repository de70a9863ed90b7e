"""What --stage copies: which files, where to, with which modes; and the logs that stay on hosts, in one process."""

import os
import stat

import pytest

from shardwright.errors import UsageError
from shardwright.launch.host.agent_protocol import StageBegin, StageEntry, StageMore
from shardwright.launch.host.folders import remove_folder
from shardwright.launch.host.protocol import LogRetention
from shardwright.launch.host.stage import Stage, StagedFiles
from shardwright.launch.host.stream import Decoder
from shardwright.launch.joblog.logs import RetainedLogs


def deliver(stage, scratch, pieces=None):
    """As an agent takes it."""
    decoder, staged = Decoder(StageBegin, StageEntry, StageMore), None
    for piece in pieces or stage.orders():
        for order in decoder.feed(piece):
            if isinstance(order, StageBegin):
                staged = StagedFiles(order, scratch)
            else:
                staged.take(order)
    staged.finish()
    return staged


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    (folder / "pkg/deep/empty").mkdir(parents=True)
    (folder / "log_output/1").mkdir(parents=True)
    (folder / "log_output/1/job.json").write_text("{}")
    (folder / "train.py").write_text("print(1)")
    (folder / "pkg/run.sh").write_text("#!/bin/sh\n")
    (folder / "pkg/run.sh").chmod(0o750)
    (folder / "pkg/deep/big").write_bytes(os.urandom(700_000))
    (folder / "pkg/deep/none").touch()
    (folder / "pkg/link").symlink_to("deep/big")
    (folder / "pkg/locked").mkdir()
    (folder / "pkg/locked/x").write_text("x")
    (folder / "pkg/locked").chmod(0o555)
    monkeypatch.chdir(folder)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    yield folder, scratch
    (folder / "pkg/locked").chmod(0o755)


def tree(folder):
    return sorted(
        os.path.relpath(os.path.join(top, name), folder)
        for top, dirs, names in os.walk(folder)
        for name in [*dirs, *names]
    )


def read(*paths, keep=False):
    return Stage.read(paths, keep, without=os.path.abspath("log_output"))


def test_what_is_staged_is_what_is_here(here):
    folder, scratch = here
    staged = deliver(read("."), scratch)
    assert staged.problems == []
    assert tree(staged.folder) == [name for name in tree(folder) if not name.startswith("log_output")]
    for name in ("train.py", "pkg/run.sh", "pkg/deep/big", "pkg/deep/none", "pkg/locked"):
        mine, theirs = (folder / name).stat(), (staged.folder / name).stat()
        assert stat.S_IMODE(mine.st_mode) == stat.S_IMODE(theirs.st_mode), name
        if not stat.S_ISDIR(mine.st_mode):
            assert (staged.folder / name).read_bytes() == (folder / name).read_bytes()
            assert theirs.st_mtime == pytest.approx(mine.st_mtime)
    assert os.readlink(staged.folder / "pkg/link") == "deep/big"
    remove_folder(staged.folder)
    assert not staged.folder.exists()


def test_where_the_paths_go(here, tmp_path):
    _, scratch = here
    elsewhere = tmp_path / "else" / "data"
    elsewhere.mkdir(parents=True)
    (elsewhere / "a").write_text("a")
    (tmp_path / "there").symlink_to(elsewhere)
    staged = deliver(read("./pkg/../train.py", "pkg/deep/none", str(elsewhere), "../there", "pkg/deep"), scratch)
    assert tree(staged.folder) == [
        "data", "data/a", "pkg", "pkg/deep", "pkg/deep/big", "pkg/deep/empty", "pkg/deep/none", "there", "there/a",
        "train.py",
    ]  # fmt: skip


def test_what_cannot_be_staged_is_refused(here, tmp_path):
    (tmp_path / "train.py").write_text("another")
    os.mkfifo("pipe")
    for paths, message in (
        (["nothing"], "--stage nothing: .*/nothing cannot be read: No such file or directory"),
        (["train.py", "../train.py"], "--stage ../train.py: .* and .*here/train.py would both be train.py"),
        (["pipe"], "--stage pipe: .*/pipe is no file, folder or link"),
    ):
        with pytest.raises(UsageError, match=message):
            read(*paths)
    with pytest.raises(UsageError, match="--keep-stage is for what --stage copies"):
        read(keep=True)
    assert read() is None


def test_a_disk_without_room_is_a_problem_and_leaves_nothing(here):
    _, scratch = here
    pieces = list(read("pkg").orders())
    [first] = Decoder(StageBegin).feed(pieces[0])
    staged = StagedFiles(first._replace(size_bytes=1 << 60), scratch)
    assert "1152921504.6 GB in 9 files and folders are to be staged to " in staged.problems[0]
    assert "make room, or set TMPDIR" in staged.problems[0]
    staged.take(StageEntry("pkg", "folder", 0o755, 0.0))
    assert list(scratch.iterdir()) == []


def test_logs_that_stay_on_a_host(tmp_path):
    kept = RetainedLogs(LogRetention(str(tmp_path), (2,), ""), [2, 3])
    assert [kept.write(2, "stderr", b"a"), kept.write(3, "stderr", b"b" * 40_000), kept.write(3, "stdout", b"c")] == [
        True, False, False
    ]  # fmt: skip
    assert (kept.take_tails(2), kept.take_tails(3)) == ({}, {"stdout": b"c", "stderr": b"b" * (1 << 15)})
    assert kept.close() == []
    assert (tmp_path / "rank.3/stderr").read_bytes() == b"b" * 40_000
    with pytest.raises(FileExistsError):
        RetainedLogs(LogRetention(str(tmp_path), (), ""), [2])
    again = RetainedLogs(LogRetention(str(tmp_path), (), "[again]\n"), [2])
    again.close()
    assert (tmp_path / "rank.2/stderr").read_text() == "a\n[again]\n"
