"""What is compiled is loaded from where nobody else can have written it, and as it was compiled."""

import ctypes
import os
import stat
from pathlib import Path

import pytest

from shardwright.common import native_code, private_folder

STRANGER = 12345
SOURCE = "int answer(void) { return 42; }\n"


def built():
    """The library of a small source beside the cache."""
    source = private_folder.TOP.with_name("answer.c")
    source.write_text(SOURCE)
    path = native_code.compiled(source, opens=ctypes.CDLL)
    assert path is None or ctypes.CDLL(str(path)).answer() == 42
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of this user, and a /tmp of its own for what cannot go there."""
    monkeypatch.setattr(private_folder, "TOP", tmp_path / "tmp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    if built() is None:
        pytest.skip("nothing compiles C here")
    return tmp_path / "cache" / "shardwright" / "native"


def test_a_library_is_compiled_once_and_private(cache):
    path = built()
    assert path.parent == cache
    assert built() == path
    assert [path] == list(cache.iterdir())
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def test_one_that_was_cut_or_altered_is_compiled_again(cache):
    """Mapping a file that is shorter than its header says ends the process by SIGBUS."""
    path = built()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1] + b"x"):
        path.unlink()
        path.write_bytes(damaged)
        built()
        assert [file.read_bytes() for file in cache.iterdir()] == [whole]


def plant(path, data):
    """A library as a stranger would leave it, under the name that its content gives it."""
    evil = path.with_name(f"{path.name.partition('-')[0]}-{native_code._hash(data)}.so")
    evil.write_bytes(data)
    return evil


@pytest.mark.parametrize("loosened", ["mode of the file", "owner of the file"])
def test_a_library_of_a_stranger_is_not_loaded(cache, loosened):
    if loosened.startswith("owner") and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = built()
    path.unlink()
    evil = plant(path, b"evil")
    evil.chmod(0o777 if loosened == "mode of the file" else 0o755)
    if loosened.startswith("owner"):
        os.chown(evil, STRANGER, STRANGER)
    assert built() == path
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("loosened", ["", "shardwright", "shardwright/native"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_folder_where_strangers_may_write_is_not_used(cache, tmp_path, loosened, how):
    if how == "owner" and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    evil = plant(built(), b"evil")
    folder = tmp_path / "cache" / loosened
    if how == "mode":
        folder.chmod(0o777)
    else:
        os.chown(folder, STRANGER, STRANGER)
    path = built()
    assert path.parent == tmp_path / "tmp" / f"shardwright-{os.getuid()}" / "native"
    assert path != evil
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_shared_folder_as_tmp_will_do(cache, tmp_path):
    (tmp_path / "cache").chmod(0o1777)
    assert built().parent == cache


def test_without_a_private_folder_nothing_is_loaded(cache, tmp_path):
    (tmp_path / "cache").chmod(0o777)
    own = tmp_path / "tmp" / f"shardwright-{os.getuid()}"
    own.symlink_to(Path("/"))
    assert built() is None
