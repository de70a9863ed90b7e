"""What a person types wrong, and what the system refuses: one message, exit code 2, and nothing is left behind."""

import os
import resource

import pytest

from shardwright.cli import main
from small_disk import mounted

LONG = "a" * 300
BUILD = "import torch\ndef build(): return torch.nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.zeros(4, 4)\n"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Calls the command in a folder of its own: exit code, and what it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "built.py").write_text(BUILD)
    (tmp_path / "three.yaml").write_text("3\n")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["shardwright", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "Missing argument 'FILE.py:build'"),
        (["train", "--config", "three.yaml"], "three.yaml: expected sections with keys, got something else"),
        (["train", "--config", f"{LONG}.yaml"], "aaa.yaml: File name too long; a name has 255 bytes at most"),
        (["launch", "-n", "2", f"{LONG}.py"], "aaa.py: File name too long; a name has 255 bytes at most"),
        (["launch", "-n", "2", "--job", LONG, "train.py"], "the name has 300 bytes; type one of at most 255"),
        (["launch", "-n", "2", "--log-dir", LONG, "train.py"], "the logs cannot be written to aaa"),
        (["plan", f"{LONG}.py:build"], "File name too long; a name has 255 bytes at most"),
        (["plan", "built.py:build", "--devices", "2", "--save", LONG], "cannot write the plan aaa"),
        (["data", "ocr", "--out", "/dev/null"], "/dev/null is a file and no folder; name another"),
        (["data", "digits", "--out", "/dev/null"], "/dev/null: File exists; a file of that name is there"),
        (["data", "digits", "--out", "train.py/below"], "train.py/below: Not a directory; a part of that path is a"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_message(command, tmp_path, words, message):
    before = sorted(tmp_path.iterdir())
    code, said = command(*words)
    assert code == 2, said
    assert message in said
    assert "Traceback" not in said
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


def test_a_full_disk_is_named_with_the_file_and_how_much_is_free(command, tmp_path):
    with mounted(tmp_path / "small", 64 << 10) as disk:
        for words in (["data", "digits"], ["data", "ocr", "--count", 9, "--words", 20]):
            code, said = command(*words, "--out", disk / "new" / "data")
            assert code == 2, said
            assert f"{disk}/new/data" in said
            assert "No space left on device (" in said
            assert " are free); free some, or name a folder of another disk" in said
            assert list(disk.iterdir()) == []
        (disk / "full").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        for words in (
            ["launch", "-n", 2, "--log-dir", disk / "logs" / "of jobs", "train.py"],
            ["plan", "built.py:build", "--devices", 2, "--save", disk / "plan.json"],
            ["plan", "built.py:build", "--devices", 2, "--html", disk / "plan.html"],
        ):
            code, said = command(*words)
            assert code == 2, said
            assert f"{words[-2] if words[-1] == 'train.py' else words[-1]}" in said
            assert "No space left on device (0 B are free); free some" in said
            assert [path.name for path in disk.iterdir()] == ["full"]


@pytest.mark.slow
def test_a_limit_of_files_is_named_with_what_to_type(command, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        code, said = command("data", "digits", "--out", tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2, said
    assert "File too large; files of this process may not be larger: type `ulimit -f unlimited`" in said
    assert not (tmp_path / "new").exists()
