"""Data behind a URL are copied once per host, and never half."""

import os
import time

import fsspec
import numpy as np
import pytest

import shardwright as sw
from ranks import run_ranks
from shardwright.data import remote
from shardwright.data.cifar import PYTHON, cifar_files
from shardwright.data.remote import local_copy
from shardwright.errors import DataError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source" / "set"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "deep" / "b.txt").write_text("second")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardwright" / "data"


def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_folders_and_files_are_copied_under_their_names(source, cache):
    copy = local_copy(source.as_uri())
    assert copy.name == "set"
    assert copy.is_relative_to(cache)
    assert contents(copy) == {"a.txt": "first", "deep/b.txt": "second"}
    one = local_copy((source / "a.txt").as_uri())
    assert (one.name, one.read_text()) == ("a.txt", "first")
    assert local_copy(f"{source.as_uri()}/") != one


def test_what_is_there_is_not_copied_again(source, monkeypatch):
    copy = local_copy(source.as_uri())
    monkeypatch.setattr(remote, "_fetch", lambda *_: pytest.fail("copied again"))
    assert local_copy(source.as_uri()) == copy


def test_what_has_changed_is_copied_anew(source):
    before = local_copy(source.as_uri())
    (source / "a.txt").write_text("FIRST")  # as long as it was
    os.utime(source / "a.txt", (time.time() + 5,) * 2)
    after = local_copy(source.as_uri())
    assert after != before
    assert contents(after)["a.txt"] == "FIRST"
    assert contents(before)["a.txt"] == "first"


def slowly(url, log):
    fetch = remote._fetch

    def logged(files, origin, target):
        with open(log, "a") as file:
            file.write(f"{origin}\n")
        time.sleep(0.05)
        fetch(files, origin, target)

    remote._fetch = logged
    try:
        return str(local_copy(url)), contents(local_copy(url))
    finally:
        remote._fetch = fetch


def test_one_rank_copies_and_the_others_wait(source, tmp_path):
    results = run_ranks(4, slowly, source.as_uri(), str(tmp_path / "log"))
    assert results == [results[0]] * 4
    assert results[0][1] == {"a.txt": "first", "deep/b.txt": "second"}
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_copy_that_fails_leaves_nothing(source, cache, monkeypatch):
    real = remote._fetch

    def fails(files, origin, target):
        if origin.endswith("b.txt"):
            raise ConnectionError("the line is dead")
        real(files, origin, target)

    monkeypatch.setattr(remote, "_fetch", fails)
    with pytest.raises(DataError, match=rf"{source.as_uri()}: cannot be copied to .*: ConnectionError: the line is"):
        local_copy(source.as_uri())
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    monkeypatch.setattr(remote, "_fetch", real)
    assert len(contents(local_copy(source.as_uri()))) == 2


def test_what_a_killed_copy_left_is_replaced(source, cache):
    copy = local_copy(source.as_uri())
    copy.parent.rename(copy.parent.with_suffix(".part"))
    (copy.parent.with_suffix(".part") / "set" / "a.txt").write_text("fi")
    assert contents(local_copy(source.as_uri()))["a.txt"] == "first"
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


def test_a_file_that_is_cut_off_on_the_way(source, monkeypatch):
    monkeypatch.setattr(remote, "_fetch", lambda files, origin, target: target.write_text("x"))
    with pytest.raises(DataError, match=r"a.txt changed while it was copied: expected 5 bytes, got 1; start again"):
        local_copy(source.as_uri())


def test_cifar_from_memory():
    images = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(10, dtype=np.uint8)
    memory = fsspec.filesystem("memory")
    for name, data in cifar_files(PYTHON, (images, labels), (images[:3], labels[:3])).items():
        memory.pipe(f"/bucket/{name}", data)
    try:
        for url in ("memory://bucket", "memory://bucket/cifar-10-batches-py"):
            assert [len(sw.CIFAR10(url)), len(sw.CIFAR10(url, train=False))] == [10, 3]
        with pytest.raises(DataError, match="found neither train-images-idx3-ubyte"):
            sw.MNIST("memory://bucket")
    finally:
        memory.rm("/bucket", recursive=True)


def test_nothing_there(tmp_path):
    url = (tmp_path / "nothing").as_uri()
    with pytest.raises(DataError, match=f"{url}: there is no such file, and no folder with files in it"):
        local_copy(url)
